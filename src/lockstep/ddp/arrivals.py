"""Which parameters have got their gradient in the backward under way, as hooks on the parameters tell it.

Note [A hook for every parameter]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where everything is reduced at the end (Note [One reduction]) a look at every ``grad`` would tell what came, and cost
less than a hook that runs a microsecond of Python for each parameter. But only hooks tell of a backward that does not
come through the module's outputs: a gradient penalty's, which differentiates a gradient, another method's, a term of
the parameters alone. Without them its gradients would stay on their rank, and the replicas would part without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from lockstep.ddp.bucket import Bucket


class Arrivals:
    """Positions of parameters, in order of arrival."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        #: One list per bucket; a position is there more than once if its gradient came in portions.
        self.by_bucket: list[list[int]] = [[] for _ in buckets]
        #: The parameters with sparse gradients.
        self.sparse: list[int] = []
        self._home = {position: bucket.index for bucket in buckets for position in bucket.positions}

    def list_of(self, position: int) -> list[int]:
        """**Local.** The list, always the same object, that the arrivals of parameter ``position`` are added to."""
        index = self._home.get(position)
        return self.sparse if index is None else self.by_bucket[index]

    def everyone(self) -> Iterable[int]:
        """**Local.** All arrivals."""
        return chain(*self.by_bucket, self.sparse)

    def clear(self) -> None:
        """**Local.** Forget the backward."""
        for arrived in (*self.by_bucket, self.sparse):
            arrived.clear()
