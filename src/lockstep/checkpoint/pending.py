"""Optimizer steps that the host has taken and the device has not begun: a run can still be saved as it was before.

Note [A host that is ahead of its device]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On an accelerator the host queues work and goes on. Where one rank is stuck in a step, the all-reduce of gradients holds
the other ranks' devices up, and not their hosts: these queue the optimizer's step behind it, count it, and come to rest
in the next forward or where a value is read. The rank that is stuck can't take that step, and the hosts can't take it
back. But as long as the device has not begun it, the parameters and the optimizer's tensors on the device are those of
before, and so are the copies of what forwards change, since new values are queued for them behind the step as well.
They can be read on a stream beside. So the points of rest before the step are kept with an event in front of it. While
that is not reached, the run can be saved as it was at these points; and if it is not reached either when all has been
read, that is what was read.

What changes on the host at once is kept besides: what the point itself has noted, the numbers of steps that optimizers
count there, and the tensors of the model and of extra modules that are on the host, if they are small. Where parameters
or much of an optimizer's state are on the host, where something has changed since the point that was not copied, and
where ranks train apart, no step is kept.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep import accelerator
from lockstep.checkpoint.rest_point import RestPoint
from lockstep.checkpoint.watched import Place
from lockstep.errors import CheckpointError

#: The type in C of a number of each kind.
_C_TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int32: ctypes.c_int32,
    torch.int64: ctypes.c_int64,
}
_value = operator.attrgetter("value")
#: The most bytes of an optimizer's state on the host that are copied before each step.
_MOST = 2**20


@dataclass(frozen=True)
class PendingStep:
    """An optimizer's step that the device may not have begun. See Note [A host that is ahead of its device]."""

    #: The points of rest before it, at least one, and how many there were before them that do not hold any more.
    points: Sequence[RestPoint]
    dropped: int
    #: The copies of what changes without an optimizer, and what is on the host, by its place.
    kept: dict[Place, torch.Tensor]
    #: What each of the run's optimizers keeps on the host.
    on_host: Sequence[HostValues]
    #: Reached when the device begins the step.
    begins: torch.Event

    @property
    def step(self) -> int:
        """The number of steps that were taken before it."""
        return self.points[-1].counts.step

    @property
    def is_pending(self) -> bool:
        """Whether the device has not begun it."""
        return not self.begins.query()

    def require(self) -> None:
        """Refuse to go on if the device has begun the step, so that what was read may be of after it.

        Raises:
            CheckpointError: it has.
        """
        if not self.is_pending:
            raise CheckpointError(f"the device has gone on to step {self.step + 1} while step {self.step} was read")


class PendingSteps:
    """The latest steps that the device of a rank may not have begun.

    Args:
        optimizers: the run's, at least one.
        device: the rank's, an accelerator.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._device, self._host = device, [*map(_HostSide, optimizers)]
        self._captures = accelerator.capture_test([device])
        self._steps: list[PendingStep] = []

    def begin(
        self, points: Sequence[RestPoint], dropped: int, kept: Callable[[], dict[Place, torch.Tensor] | None]
    ) -> None:
        """Keep a step that the host is about to queue, if all is known of what was before it.

        Args:
            points: the points of rest before it; where there are none it is not kept.
            dropped: how many there were before them.
            kept: returns the copies of what changes without an optimizer. Those on the device may be overwritten in the
                order of its work. None: not all is known.
        """
        self._steps = [each for each in self._steps if each.is_pending]
        if not points or (self._captures is not None and self._captures()):
            return
        on_host = [found for each in self._host if (found := each.now()) is not None]
        copies = kept() if len(on_host) == len(self._host) else None
        if copies is not None:
            self._steps.append(PendingStep([*points], dropped, copies, on_host, accelerator.mark(self._device)))

    def least(self, step: int) -> int:
        """Return the least number of steps with which this rank can be saved, which has counted ``step``."""
        return min([step, *(each.step for each in self._steps if each.is_pending)])

    def before(self, step: int) -> PendingStep | None:
        """Return the pending step that follows ``step`` steps; None: the device has begun it, or it was not kept."""
        found = [each for each in self._steps if each.step == step and each.is_pending]
        return found[0] if found else None


@dataclass(frozen=True)
class HostValues:
    """What an optimizer kept on the host at one moment."""

    side: _HostSide
    #: Where each tensor and number was: the state of a parameter, the key, and for a tensor itself.
    tensors: Sequence[tuple[dict[str, Any], str, torch.Tensor]]
    numbers: Sequence[tuple[dict[str, Any], str]]
    #: The tensors without dimensions, in order, where they are in memory, and their values; the other tensors' values;
    #: and the numbers.
    cells: Sequence[Any]
    scalars: Sequence[Any]
    others: Sequence[torch.Tensor]
    values: Sequence[Any]

    def put_into(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the ``state_dict`` of the optimizer with these values.

        Raises:
            CheckpointError: it keeps something else on the host than it did then.
        """
        then: dict[tuple[int, str], Any] = {}
        cells, scalars, others = iter(self.cells), iter(self.scalars), iter(self.others)
        for entries, key, tensor in self.tensors:
            if entries.get(key) is not tensor:
                raise CheckpointError(f"optimizer: it has put another tensor in the place of {key!r} in its last step")
            is_scalar = tensor.dim() == 0
            if is_scalar and ctypes.addressof(next(cells)) != tensor.data_ptr():
                raise CheckpointError(f"optimizer: {key!r} has come to lie elsewhere in memory in its last step")
            then[id(entries), key] = (
                torch.tensor(next(scalars), dtype=tensor.dtype, device="cpu") if is_scalar else next(others)
            )
        then |= {(id(entries), key): value for (entries, key), value in zip(self.numbers, self.values, strict=True)}
        if not then:
            return state
        numbered = self.side.entries()
        changed = {
            number: {key: then.get((id(numbered.get(number)), key), value) for key, value in entries.items()}
            for number, entries in state["state"].items()
        }
        return {**state, "state": changed}


class _HostSide:
    """What an optimizer keeps on the host: numbers of steps, as a rule."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._of: tuple[object, int] = (None, -1)
        self._is_known = False
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._numbers: list[tuple[dict[str, Any], str]] = []
        #: The tensors without dimensions, where they are in memory, and the others. An operation of torch's on each
        #: would take as long as many an optimizer's step.
        self._scalars: list[Any] = []
        self._others: list[torch.Tensor] = []

    def now(self) -> HostValues | None:
        """Copy it; None: it is too much, or not all of it can be seen."""
        state = self._optimizer.state
        if self._of != (id(state), len(state)):
            self._look()
            self._of = (id(state), len(state))
        if not self._is_known:
            return None
        return HostValues(
            self,
            self._tensors,
            self._numbers,
            self._scalars,
            [*map(_value, self._scalars)],
            [tensor.clone() for tensor in self._others],
            [entries.get(key) for entries, key in self._numbers],
        )

    def entries(self) -> dict[int, Any]:
        """Return the state of each parameter by its number in the optimizer's ``state_dict``."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        return {number: self._optimizer.state.get(param) for number, param in enumerate(params)}

    def _look(self) -> None:
        """Find what is on the host."""
        self._tensors, self._numbers = [], []
        optimizer = self._optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        is_torchs = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        self._is_known = is_torchs and all(param.device.type != "cpu" for param in params)
        for entries in optimizer.state.values():
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    self._numbers.append((entries, key))
                    self._is_known &= value is None or isinstance(value, (int, float))
                elif value.device.type == "cpu":
                    self._tensors.append((entries, key, value))
        tensors = [tensor for _, _, tensor in self._tensors]
        scalars = [tensor for tensor in tensors if tensor.dim() == 0]
        self._others = [tensor for tensor in tensors if tensor.dim() > 0]
        fits = all(tensor.dtype in _C_TYPES for tensor in scalars)
        self._is_known &= fits and sum(tensor.nbytes for tensor in tensors) <= _MOST
        self._scalars = [_C_TYPES[tensor.dtype].from_address(tensor.data_ptr()) for tensor in scalars] if fits else []
