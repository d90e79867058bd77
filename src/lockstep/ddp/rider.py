"""What travels with the gradients: a few flags in the buckets, each group of them the concern of one object.

A rider that is off is in no list, so a step without it asks nothing of it. Where its flags lie in a bucket is laid out
once, behind those that say which parameters were used; see Note [Bucket layout] in ``bucket.py``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.ddp.bucket import Bucket
from lockstep.errors import LockstepError
from lockstep.step.share import Place


class BackwardState(Protocol):
    """What riders know of the backward whose gradients they travel with."""

    #: How many averaged backwards have begun on this rank, this one included.
    number: int
    #: Forwards since the last one that had no backward; see Note [Left-out backwards].
    left_out: int
    #: How far this rank is: the former, and all of the latter so far.
    place: int
    #: Which batch the gradients are of; see Note [Batches compared].
    batch: Place | None
    #: Whether a comm hook reduces the gradients, and not the backend.
    is_hooked: bool
    #: Whether all ranks leave this step out. A rider may set it, on all ranks.
    skipped: bool

    def name_of(self, bucket: Bucket, slot: int) -> str:
        """Return the name of a parameter."""
        ...

    def whoami(self) -> str:
        """Say which rank this is, and how far it has come."""
        ...


class Rider(Protocol):
    """Something that the ranks tell each other with the gradients."""

    def width(self, parameters: int, *, is_last: bool) -> int:
        """Return how many flags it needs in a bucket of so many parameters, the last one or another."""
        ...

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """Write this rank's flags, which are 0, before ``bucket`` is sent.

        Args:
            bucket: holds this rank's gradients.
            flags: 1-D, as many as :meth:`width` said, of the bucket's dtype and device.
            sending: the backward.
        """
        ...

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> LockstepError | None:
        """**Collective** where something is wrong. Read the sums of all ranks' flags: bucket by bucket, in order.

        No gradient has been handed out then. What is decided is decided alike on all ranks.

        Returns:
            What to raise on all ranks once the gradients are handed out.

        Raises:
            LockstepError: on all ranks; no gradient is handed out.
        """
        ...

    def alone(self, sending: BackwardState) -> LockstepError | None:
        """**Collective** if it sends anything. Do what is to be done without a bucket; return as :meth:`read` does."""
        ...
