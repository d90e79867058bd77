"""Comparisons whose flags are read a backward later, since on an accelerator a read waits for the device.

Note [Read a backward later]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a CPU the flags of a comparison are read where they have come, and a difference is an error before any gradient is
handed out. On an accelerator they have not come when the host gets there: to read them would wait for all queued work.
So they are copied to host memory behind that work, and read at the end of the next averaged backward, when they have
long come. A difference is told one step late on all ranks alike, in the words of the step in which it was; the
parameters have taken that step. What is of the last backward of a program is never read.

Nothing is read while a graph is captured. What a captured backward has written is repeated with the graph, by all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep import _torch, accelerator
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.rider import BackwardState, Standing
from lockstep.step.share import BatchId

_foreach_copy = _torch.foreach_copy()


class RankComparison(Protocol):
    """A rider that compares what ranks do, and needs no bucket to tell that they differ."""

    def width(self, parameters: int, *, is_last: bool) -> int:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        ...

    def row(self, sending: Standing) -> Tensor | None:
        """Return this rank's flags: 1-D, on the device of the buckets. None: they are all 0."""
        ...

    def read(self, bucket: Bucket, flags: Tensor, sending: Standing) -> None:
        """**Collective** if the ranks differ. Read the sums of all ranks' flags, on any device.

        Raises:
            LockstepError: the ranks differ; on all ranks.
        """
        ...


class ReadLater:
    """A rider in whose flags several comparisons travel; see Note [Read a backward later].

    Args:
        comparisons: in the order of their flags.
        device: an accelerator, where the flags are.
    """

    def __init__(self, comparisons: Sequence[RankComparison], device: torch.device) -> None:
        self._comparisons = comparisons
        self._captures = accelerator.capture_test([device])
        self._unread: _Unread | None = None

    def width(self, parameters: int, *, is_last: bool) -> int:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        return sum(self._widths(parameters, is_last=is_last))

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        rows = [comparison.row(sending) for comparison in self._comparisons]
        pairs = [(part, row) for part, row in zip(self._parts(bucket, flags), rows, strict=True) if row is not None]
        _foreach_copy([part for part, _ in pairs], [row for _, row in pairs])  # in one launch

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`. Reads what the backward before this one has sent.

        Raises:
            LockstepError: as the comparisons.
        """
        if self._captures is not None and self._captures():
            return
        unread, self._unread = self._unread, _Unread(flags, sending)
        if unread is None:
            return
        sums = unread.sums.read()
        for comparison, part in zip(self._comparisons, self._parts(bucket, sums), strict=True):
            comparison.read(bucket, part, unread.standing)

    def alone(self, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`: nothing is told without a bucket."""

    def _widths(self, parameters: int, *, is_last: bool) -> list[int]:
        return [comparison.width(parameters, is_last=is_last) for comparison in self._comparisons]

    def _parts(self, bucket: Bucket, flags: Tensor) -> Sequence[Tensor]:
        return flags.split_with_sizes(self._widths(len(bucket), is_last=bucket.is_last))


@dataclass
class _Stood:
    """How far a rank was in an earlier backward; a :class:`~lockstep.ddp.rider.Standing`."""

    number: int
    left_out: int
    progress: int
    batch: BatchId | None
    description: str

    def whoami(self) -> str:
        """Return a description of this rank and the step of that backward."""
        return self.description


class _Unread:
    """The summed flags of one backward, on their way to the host, and how far this rank was in it."""

    def __init__(self, flags: Tensor, sending: BackwardState) -> None:
        self.sums = accelerator.HostCopy(flags)
        self.standing = _Stood(
            sending.number, sending.left_out, sending.progress, sending.batch, description=sending.whoami()
        )
