"""The batch that each rank's gradients come from, compared in every averaged backward.

Note [Batches compared]
~~~~~~~~~~~~~~~~~~~~~~~
A rank that leaves its loop before the others (``break`` on a clock or on its own loss, an exception that it catches),
or that skips, repeats or reorders batches, goes on as if nothing had happened: its next backward meets the others',
and gradients of different batches, even of different epochs, make one average. If the numbers of steps are equal in
the end, nothing ever reveals it. But the loader knows the epoch and the number of the batch in hand, which are the
same on all ranks, and so a training forward that takes its share (Note [Batches in hand] in ``step/share.py``) takes
these too. Where loaders are read side by side, it takes those of a batch of each. With them goes the length of the
epoch's order, where each rank makes that for itself: a dataset to which each rank adds what it finds would have another
order on each, at equal numbers of batches.

A digest of them travels in the flags of the last bucket (``bit_flags.py``), so that a difference shows on every rank,
whatever the dtype. Two batches have the same digest by accident once in 2¹² pairs, and the next pair has another. A
rank that can't tell which batch it is in sets no flag, and differs from no other:

- the batch was handed out to another thread, which fetches ahead for the one that computes, as far as it gets;
- the loop goes over a list of batches, and the model is given none of their tensors;
- inside ``join``, where ranks rightly run out of data;
- no forward belongs to the gradients, or the replicas are not the whole world's.

"No batch in hand" is a batch like others: a rank that has left the loop for good differs from those that have not. On
an accelerator the flags are read a backward later: Note [Read a backward later] in ``later.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.accelerator import CPU
from lockstep.comm.exchange import all_gather_records
from lockstep.ddp.bit_flags import BITS, FLAGS, flags_of_numbers
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.rider import BackwardState, Standing
from lockstep.errors import CollectiveMismatch
from lockstep.step import lengths
from lockstep.step.share import BatchId

#: Odd factors; the first is 2⁶⁴ divided by the golden ratio, whose multiples' upper bits differ for numbers in a row.
_GOLDEN, _OF_EPOCHS, _OF_LOADERS, _OF_LENGTHS = 0x9E3779B97F4A7C15, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F

_LEFT = (
    "A rank has left its loop before the others, or skipped, repeated or reordered batches; from there on its steps "
    "are averaged with other batches' steps. Decide this on all ranks together: `if world.any(stop): break`. If a "
    "batch of one rank must not count: world.weigh(0), or loss * 0"
)


class BatchFlags:
    """A rider that compares the ranks' batches; see Note [Batches compared].

    Args:
        group: the ranks.
        dtype: of the flags.
        device: of the flags.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._group = group
        #: Row d: the flags of digest d.
        self._rows = flags_of_numbers(dtype, device)

    def width(self, parameters: int, *, is_last: bool) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.ddp.rider.Rider`."""
        return FLAGS if is_last else 0

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if sending.batch is not None:
            flags.copy_(self._rows[_digest(sending.batch)])

    def row(self, sending: Standing) -> Tensor | None:
        """See :class:`~lockstep.ddp.later.RankComparison`."""
        return None if sending.batch is None else self._rows[_digest(sending.batch)]

    def read(self, bucket: Bucket, flags: Tensor, sending: Standing) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`.

        Raises:
            CollectiveMismatch: the ranks' batches differ; on all ranks.
        """
        read = flags.tolist()
        if not any(map(mul, read[::2], read[1::2])):
            return
        told = all_gather_records(sending.batch, self._group)
        is_apart = lengths.differ(((each[0], each[1]), each[3]) for identity in told for each in identity or ())
        raise CollectiveMismatch(
            f"{sending.whoami()}: the ranks averaged the gradients of different batches: "
            f"{_words(told, with_lengths=is_apart)}. {lengths.OTHER_LENGTHS if is_apart else _LEFT}"
        )

    def alone(self, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`: nothing is told without a bucket."""


def _digest(identity: BatchId) -> int:
    """Return a number of BITS bits for a batch, the same on all ranks, whatever their machines and Pythons."""
    number = 0
    for loader, epoch, batch, length in identity:
        key = 1 + batch + epoch * _OF_EPOCHS + loader * _OF_LOADERS + length * _OF_LENGTHS
        number = (number + key) * _GOLDEN & 0xFFFFFFFFFFFFFFFF
    return number >> (64 - BITS)


def _words(told: Sequence[Sequence[Sequence[int]] | None], *, with_lengths: bool) -> str:
    several = len({each[0] for identity in told for each in identity or ()}) > 1
    words = []
    for rank, identity in enumerate(told):
        if identity is None:
            said = "can't tell"
        elif not identity:
            said = "no batch in hand"
        else:
            said = " and ".join(
                f"epoch {epoch}"
                + (f" of {length:,} samples" if with_lengths else "")
                + f", batch {batch}"
                + (f" of sharded loader {loader}" if several else "")
                for loader, epoch, batch, length in identity
            )
        words.append(f"rank {rank}: {said}")
    return "; ".join(words) + (" (loaders in the order in which they were made)" if several else "")
