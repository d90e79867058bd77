"""Optimizers that step apart: the ranks share each batch, and each of them trains a model of its own.

Note [Steps apart]
~~~~~~~~~~~~~~~~~~
A replica checks what its averaged backwards bring. Some programs have no such backward, run to the end, and have
trained as many models as there are ranks:

- ``lockstep.replicate`` was forgotten, or given one of two models;
- the gradients are put into ``grad`` by hand (``torch.autograd.grad``, ``torch.func.grad``), which no replica sees.

So the parameters of each optimizer are compared at two of its first steps. (At one alone a schedule that begins with a
learning rate of 0 would hide the difference.) As at the end of a job, no rank waits: each leaves digests in the process
group's store, and the rank that finds those of all others compares. Only optimizers whose parameters should be equal
are looked at: those of replicas that are compared, and those that step while a batch of a sharded loader is in hand.

Other means than a replica average the gradients of a third kind of program (torch's DDP, FSDP, a script's own
``all_reduce``). They count every rank once. The last batch of an epoch is often cut into unequal shares, of which one
may be empty: the mean is not exact then, or NaN for good. It is warned of where it would happen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import accelerator, callsite
from lockstep.bits import hexdigest
from lockstep.comm.ending import left_by_all
from lockstep.step import slicing
from lockstep.step.share import BatchesInHand
from lockstep.step.stepping import alert, params_of, quiet, watch_steps
from lockstep.text import counted, which_ranks

#: The steps of an optimizer in front of which its parameters are compared.
_COMPARED = (2, 10)
#: The steps, of all optimizers together, after which no other one is looked for.
_LOOKED_FOR = 32
#: The most comparisons: some programs have an optimizer for each parameter.
_MOST_COMPARED = 16
#: Bytes of each parameter that are compared: a step moves all of them.
_MOST_BYTES = 4096

#: The modules of this process's replicas, and whether each is to be equal on all ranks of the world.
_replicas: list[tuple[weakref.ref[nn.Module], bool]] = []
#: Optimizers that lockstep steps itself.
_own: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_current: Apart | None = None


def watch(in_hand: BatchesInHand, *, rank: int, world_size: int) -> None:
    """Look out for optimizers that step apart from now on.

    Args:
        in_hand: the batches that this rank's loops hold.
        rank: this rank.
        world_size: the number of ranks.
    """
    global _current
    end()
    if world_size > 1:
        _current = Apart(in_hand, rank=rank, world_size=world_size)


def end() -> None:
    """Stop looking out."""
    global _current
    if _current is not None:
        quiet(_current)
    _current = None


def leave_alone(optimizer: Optimizer) -> None:
    """Look at no step of an optimizer that lockstep steps itself, on all ranks alike."""
    _own.add(optimizer)


def note_replica(module: nn.Module, *, is_equal: bool) -> None:
    """Note that ``module`` has a replica on this rank, and whether it is to be equal on all ranks of the world."""
    _replicas[:] = [each for each in _replicas if each[0]() is not None and each[0]() is not module]
    _replicas.append((weakref.ref(module), is_equal))


def _of_replicas() -> list[tuple[frozenset[int], bool]]:
    """Return the ids of each replica's parameters, and whether it is to be equal on all ranks."""
    living = [(ref(), is_equal) for ref, is_equal in _replicas]
    return [(frozenset(map(id, module.parameters())), equal) for module, equal in living if module is not None]


@dataclass
class _FirstSteps:
    """What is known of an optimizer."""

    #: Ids of its parameters.
    held: frozenset[int]
    #: True if replicas have some of its parameters.
    is_replicated: bool
    #: True if its parameters should be equal on all ranks.
    is_compared: bool
    #: The steps that were begun.
    steps: int = 0


class Apart:
    """Looks at the first steps of a process's optimizers; see Note [Steps apart].

    Args:
        in_hand: the batches that this rank's loops hold.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, in_hand: BatchesInHand, *, rank: int, world_size: int) -> None:
        self._in_hand, self._rank, self._world_size = in_hand, rank, world_size
        self._seen: weakref.WeakKeyDictionary[Optimizer, _FirstSteps] = weakref.WeakKeyDictionary()
        #: The comparisons so far.
        self._count = 0
        #: True once a difference was told of: a program that makes optimizers again and again is told once.
        self._has_said = False
        #: The steps so far.
        self._steps = 0
        #: True until a batch with unequal shares was warned of.
        self._asks_shares = rank == 0
        watch_steps()
        alert(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at the parameters in front of a step. No rank waits for another."""
        self._steps += 1
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = self._look_at(optimizer)
        seen.steps += 1
        if seen.is_compared and seen.steps in _COMPARED and self._count < _MOST_COMPARED and not self._has_said:
            self._compare(optimizer, seen)
        if self._asks_shares and seen.is_compared and not seen.is_replicated:
            self._look_at_share(optimizer)
        is_needed = self._asks_shares and not all(each.is_replicated for each in self._seen.values())
        if self._steps >= _LOOKED_FOR and not is_needed:
            quiet(self)

    def _look_at(self, optimizer: Optimizer) -> _FirstSteps:
        held = frozenset(map(id, params_of(optimizer)))
        if optimizer in _own:
            return _FirstSteps(held, is_replicated=True, is_compared=False)
        of_replicas = [is_equal for params, is_equal in _of_replicas() if params & held]
        is_compared = all(of_replicas) if of_replicas else self._in_hand.share is not None
        if any(held <= each.held for each in self._seen.values()):
            is_compared = False  # it has a part of another one's (ZeroRedundancyOptimizer), which steps it
        return _FirstSteps(held, bool(of_replicas), is_compared)

    def _compare(self, optimizer: Optimizer, seen: _FirstSteps) -> None:
        params = params_of(optimizer)
        if not dist.is_initialized():
            return  # the program has closed the group, and goes on with what it has
        if not all(type(param) in (Tensor, nn.Parameter) and param.layout == torch.strided for param in params):
            return  # parts of parameters, as DTensor has them
        devices = {param.device for param in params if not param.is_cpu}
        is_capturing = accelerator.capture_test(devices) if devices else None
        if is_capturing is not None and is_capturing():
            return
        told = [[[*param.shape], str(param.dtype), hexdigest(param, _MOST_BYTES)] for param in params]
        key = f"lockstep/apart/{self._count}"
        self._count += 1
        everyones = left_by_all(key, told)
        if everyones is not None:
            self._warn_of_difference(optimizer, seen.steps - 1, everyones)

    def _warn_of_difference(
        self, optimizer: Optimizer, steps: int, everyones: Sequence[list[tuple[list[int], str, str]]]
    ) -> None:
        if any([each[:2] for each in told] != [each[:2] for each in everyones[0]] for told in everyones):
            return  # the ranks have different models on purpose, or parts of one
        others = [rank for rank, told in enumerate(everyones) if told != everyones[0]]
        if not others:
            return
        self._has_said = True
        index, shape = next(
            (index, one[0])
            for index, (one, two) in enumerate(zip(everyones[0], everyones[others[0]], strict=True))
            if one != two
        )
        differing = id(params_of(optimizer)[index])
        if any(differing in params for params, _ in _of_replicas()):
            cure = (
                "Only gradients that loss.backward() brings are averaged, not those that torch.autograd.grad or "
                "torch.func.grad return: call backward(), or average them by param.grad = world.mean(grad). If they "
                "come from backward(), look for what else the ranks do differently, such as a learning rate"
            )
        else:
            cure = (
                "No replica has that parameter, so each rank trains a model of its own: wrap it by "
                "lockstep.replicate(model) before the first step. If the ranks' models are meant to differ, all is well"
            )
        callsite.warn(
            f"the parameters that {type(optimizer).__name__} steps are not the same on all ranks after "
            f"{counted(steps, 'step')} of it: rank 0 differs from {which_ranks(others)}, in its parameter "
            f"{index} of shape {tuple(shape)} for example. {cure}"
        )

    def _look_at_share(self, optimizer: Optimizer) -> None:
        """Warn, once, of a step with a batch that is shared unequally and that no replica weighs."""
        share = self._in_hand.share
        if share is None or slicing.current is not None or share.is_even(self._world_size):
            return
        self._asks_shares = False  # warn only once
        callsite.warn(
            f"{type(optimizer).__name__} steps with a batch that the ranks have unequal shares of (rank 0 has "
            f"{share.words()}), and no replica of lockstep has its parameters: what averages their gradients "
            "(torch's DistributedDataParallel, all_reduce) counts every rank once, so the mean is not exact, and NaN "
            "if a rank has no sample. Use lockstep.replicate(model) in its place, or a DataLoader with drop_last=True. "
            "If the script multiplies each loss by its rank's share, all is well"
        )
