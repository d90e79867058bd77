"""Gradients that were accumulated without an average, in front of an optimizer that is about to step with them.

Note [Steps without an average]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Gradients accumulated inside ``no_sync`` are each rank's own until a backward outside of it averages them all. The last
window of an epoch is often shorter, its last backward is inside ``no_sync`` like the others, and the step that follows
takes each rank's own gradients: the replicas diverge silently. So a step with such gradients is an error.

A script may have averaged them by itself (``all_reduce`` on each ``grad``). Then they are the same on all ranks, so the
ranks compare their digests before raising the error: only where the last backward was inside ``no_sync`` and the
optimizer holds parameters of its replica, which never happens in a loop that lets ``backward`` average. This condition
is the same on all ranks; the accumulated gradients are not: a rank without a sample in the last batch has none.

Scripts whose ranks train apart on purpose and average parameters by other means (local SGD inside ``no_sync``) say so:
with ``compare_every=None`` replicas need not be equal, and this is not checked either. torch's own PostLocalSGD does
it by a comm hook, ``post_localSGD_hook``, with which replicas are not compared: Note [A rank's own] in ``drift.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.bits import hexdigest
from lockstep.comm.exchange import all_gather_records
from lockstep.ddp.reducer import Reducer
from lockstep.errors import LockstepError
from lockstep.step.stepping import alert, params_of, quiet, watch_steps
from lockstep.text import listed


class Unaveraged:
    """Looks out for one replica's steps without an average; see Note [Steps without an average].

    Args:
        group: the ranks that hold replicas.
        reducer: returns the replica's current reducer.
    """

    def __init__(self, group: dist.ProcessGroup, reducer: Callable[[], Reducer]) -> None:
        watch_steps()
        self._group, self._reducer = group, reducer
        self._is_off = False
        #: True once a backward has ended without an average: its gradients may reach the parameters, if only by hand.
        self.has_seen = False
        #: Ids of parameters whose gradients the ranks have compared since the last backward.
        self._compared: set[int] = set()

    def stop(self) -> None:
        """Stop looking."""
        self._is_off = True
        quiet(self)

    def backward_ended(self, *, is_averaged: bool) -> None:
        """Note the end of a backward outside of slices."""
        if is_averaged:
            quiet(self)
        elif not self._is_off:
            self.has_seen = True
            self._compared.clear()
            alert(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """**Collective** if the optimizer holds parameters of this replica. Compare their accumulated gradients.

        Raises:
            LockstepError: the ranks have accumulated different gradients; on all ranks.
        """
        reducer, held = self._reducer(), {id(param) for param in params_of(optimizer)} - self._compared
        if not any(id(param) in held for param in reducer.params):
            return
        self._compared |= held  # an optimizer may step another one inside its own step, with some of its parameters
        waiting = [(name, param.grad) for name, param in reducer.accumulated() if id(param) in held]
        mine = [[name, hexdigest(grad)] for name, grad in waiting if grad is not None]
        told = all_gather_records(mine, self._group)
        if all(each == told[0] for each in told):
            return  # the script has averaged them, or cleared them
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        names = listed([repr(name) for name in dict.fromkeys(name for each in told for name, _ in each)], most=5)
        raise LockstepError(
            f"rank {rank} of {world_size}, after {self._reducer().step} averaged backwards: {type(optimizer).__name__} "
            "is about to step with gradients that were accumulated inside no_sync and never averaged, so that the "
            f"replicas would differ from now on: those of {names}. Run the last backward before each step outside of "
            "no_sync, also where the last window of an epoch has fewer batches: `is_last = (i + 1) % window == 0 or "
            "i + 1 == len(loader)`, and `with nullcontext() if is_last else lockstep.no_sync(model): ...`. Ranks that "
            "are to train apart: lockstep.replicate(model, sync=lockstep.LocalSteps()); a script that averages "
            "parameters by itself passes compare_every=None"
        )
