"""Riders, which travel with the gradients: objects that each own a few flags in the buckets.

A rider that is off is in no list, so a step without it costs nothing. The slot of its flags in a bucket is laid out
once, behind the flags of used parameters; see Note [Bucket layout] in ``bucket.py``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.ddp.bucket import Bucket
from lockstep.errors import LockstepError
from lockstep.step.share import BatchId


class Standing(Protocol):
    """How far a rank is in a backward."""

    #: Number of averaged backwards begun on this rank, this one included.
    number: int
    #: Number of forwards since the last averaged backward that had none; see Note [Left-out backwards].
    left_out: int
    #: ``number``, plus the sum of all ``left_out`` so far.
    progress: int
    #: The batch that the gradients are of; see Note [Batches compared].
    batch: BatchId | None

    def whoami(self) -> str:
        """Return a description of this rank and its step."""
        ...


class BackwardState(Standing, Protocol):
    """The backward as its riders see it."""

    #: True if a comm hook reduces the gradients instead of the backend.
    is_hooked: bool
    #: True if all ranks leave this step out. A rider may set it, on all ranks.
    skipped: bool

    def name_of(self, bucket: Bucket, slot: int) -> str:
        """Return the name of a parameter."""
        ...

    def leave(self, rider: Rider) -> None:
        """Let ``rider`` travel no more, from the next backward on; the same on all ranks. Its flags stay 0."""
        ...


class Rider(Protocol):
    """An object that sends flags to the other ranks with the gradients."""

    def width(self, parameters: int, *, is_last: bool) -> int:
        """Return the number of flags that it needs in a bucket of ``parameters`` parameters."""
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

        No gradient has been handed out by then. All ranks must come to the same decision.

        Returns:
            The error to raise on all ranks once the gradients are handed out.

        Raises:
            LockstepError: on all ranks; no gradient is handed out.
        """
        ...

    def alone(self, sending: BackwardState) -> LockstepError | None:
        """**Collective** if it sends anything. Do its work without a bucket; return as :meth:`read` does."""
        ...
