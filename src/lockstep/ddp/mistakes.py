"""Mistakes that one rank can see at the end of a backward, and that would make the replicas differ.

Note [Taken gradients]
~~~~~~~~~~~~~~~~~~~~~~
A user's hook that runs the optimizer inside backward steps with this rank's gradient, before there is an average, and
sets ``grad`` to None. That can be seen, and it is an error: an event, but no gradient, and the parameter was changed in
place since the backward began. (An event without a gradient alone is none: a function may have had none to give.) A
hook that zeroes ``grad`` in place is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import Parameter

from lockstep.ddp.arrivals import Arrivals
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.cycle import Cycle
from lockstep.errors import CollectiveMismatch, LockstepError

_LEFT_OUT = "without a backward"


class TakenGradients:
    """See Note [Taken gradients]."""

    def __init__(self, params: Sequence[Parameter], names: Sequence[str]) -> None:
        self._params, self._names = list(params), list(names)
        self._versions: list[int] = []

    def begin(self, *, looks: bool) -> None:
        """**Local.** A backward starts; ``looks``: whether :meth:`find` is to find anything."""
        # Private, and the only count of in-place changes.
        self._versions = [param._version for param in self._params] if looks else []

    def find(self, arrivals: Arrivals, whoami: Callable[[], str]) -> LockstepError | None:
        """**Local.** What to raise, if a gradient was taken."""
        if not self._versions:
            return None
        for position in arrivals.everyone():
            param = self._params[position]
            if param.grad is None and param._version != self._versions[position]:
                return LockstepError(
                    f"{whoami()}: the gradient of parameter '{self._names[position]}' was gone before the ranks had "
                    "averaged it. If a hook on the parameter runs the optimizer inside backward, it stepped with this "
                    "rank's own gradient, and the replicas differ from now on: go back to a checkpoint, and let the "
                    "optimizer step after backward"
                )
        return None


def find_late_portion(
    arrivals: Arrivals, cycle: Cycle, buckets: Sequence[Bucket], names: Sequence[str], whoami: Callable[[], str]
) -> LockstepError | None:
    """**Local.** What to raise if a gradient changed after it was sent; see Note [More than one event]."""
    late: list[int] = []
    for bucket, arrived in zip(buckets, arrivals.by_bucket, strict=True):
        if bucket.index < cycle.next:
            late += arrived[cycle.counted[bucket.index] :]
        if bucket.packed and len(set(arrived)) < len(arrived):
            packed = {bucket.positions[slot] for slot in bucket.packed}
            late += [position for position in packed if arrived.count(position) > 1]
    if not late:
        return None
    return LockstepError(
        f"{whoami()}: parameter '{names[late[0]]}' received more of its gradient after its bucket was sent or filled, "
        "so the average is wrong. The graph changed since the first step (re-entrant checkpointing of a parameter that "
        "is used several times): pass overlap=False to lockstep.replicate or DistributedDataParallel, or checkpoint "
        "with use_reentrant=False"
    )


def count_left_out(number: int) -> str:
    """**Local.** Forwards that had no backward, in the words that :func:`explained` looks for."""
    return f"{number} forward{'' if number == 1 else 's'} {_LEFT_OUT}"


def explained(error: CollectiveMismatch) -> CollectiveMismatch:
    """**Local.** With what to do about it, if some rank said that it left a backward out; else the error itself."""
    if _LEFT_OUT not in str(error):
        return error
    return CollectiveMismatch(
        f"{error}. A rank that runs a forward for training and leaves its backward out (a `continue` before it) would "
        "be averaged with the others' next batch from then on. Decide that on all ranks together, for instance with "
        "world.all_reduce(int(bad), 'max'). If its loss only has no use for an output, let it count nothing: "
        "loss + 0 * out.sum(). A forward that is not for training belongs under torch.no_grad()"
    )
