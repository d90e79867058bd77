"""The check that ranks are in the same backward, over a backend without labels; see Note [Left-out backwards].

How far each rank has come travels in the flags of the last bucket (``bit_flags.py``), modulo 4096: a rank that is
behind by a multiple of that goes unnoticed.
"""

from __future__ import annotations

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
from lockstep.text import counted, sentence

#: Backwards are numbered modulo this; see Note [Labels] in backward.py.
LABELS = 16
_LEFT_OUT = "without a backward"


class LeftOut:
    """A rider that compares the ranks' progress.

    Args:
        group: the ranks that hold replicas.
        dtype: of the flags.
        device: of the flags.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._group, self._rows = group, flags_of_numbers(dtype, device)

    def width(self, parameters: int, *, is_last: bool) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.ddp.rider.Rider`."""
        return FLAGS if is_last else 0

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        flags.copy_(self._rows[sending.progress % (1 << BITS)])

    def row(self, sending: Standing) -> Tensor:
        """See :class:`~lockstep.ddp.later.RankComparison`."""
        return self._rows[sending.progress % (1 << BITS)]

    def read(self, bucket: Bucket, flags: Tensor, sending: Standing) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`.

        Raises:
            CollectiveMismatch: the ranks are in different backwards; on all ranks.
        """
        read = flags.tolist()
        if not any(map(mul, read[::2], read[1::2])):
            return
        told = [
            f"rank {rank} in backward {backward} of each {LABELS}"
            + (f", after {count_left_out(left_out)}" if left_out else "")
            for rank, (backward, left_out) in enumerate(
                all_gather_records([sending.number % LABELS, sending.left_out], self._group)
            )
        ]
        raise CollectiveMismatch(
            f"{sending.whoami()}: the ranks averaged the gradients of different backwards: {'; '.join(told)}"
        )

    def alone(self, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`: nothing is told without a bucket."""


def count_left_out(number: int) -> str:
    """Return the number of forwards without a backward, in the words that :func:`explain_left_out` looks for."""
    return f"{counted(number, 'forward')} {_LEFT_OUT}"


def explain_left_out(error: CollectiveMismatch) -> CollectiveMismatch:
    """Return ``error`` with a remedy, if some rank said that it left a backward out; else ``error`` itself."""
    if _LEFT_OUT not in str(error):
        return error
    return CollectiveMismatch(
        f"{sentence(str(error))} A rank that runs a forward for training and leaves its backward out (a `continue` "
        "before it) would be averaged with the others' next batch from then on. Decide that on all ranks together, for "
        "instance with world.any(bad). If its loss merely does not use an output, add that output "
        "with weight 0: loss + 0 * out.sum(). A forward that is not for training belongs under torch.no_grad()"
    )
