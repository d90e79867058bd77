"""All-reduce: every rank ends with the combination of all ranks' elements.

Small (one stage, and little enough that combining costs less than a second round): each rank stages its elements; one
round; each combines all ranks' stages for itself. Bytes per rank: n written, W n read.

Two ranks, sums and products: the same in chunks of one stage, one round each. (To combine one's own part only would
save half a read, and cost a copy and more rounds. IEEE sums and products are the same bits in whatever loop they are
computed; a minimum of zeros of either sign is not, so that goes the way below.) Bytes per rank: n written, 2 n read and
n written to combine.

Large otherwise: in chunks of one stage. Of each chunk every rank combines the part that it owns, into rank 0's stage,
and the next round's tokens hand over the result; so one round per chunk, and one more. Chunk k is copied out in the
round that brings chunk k + 1 in (Note [Rounds] says why the stages allow it). Bytes per rank: n copied in, n read and
n/W written to combine (in the cache), n copied out.
"""

from __future__ import annotations

import torch

from lockstep.comm.shm.layout import part
from lockstep.comm.shm.reduction import Reduction
from lockstep.comm.shm.rounds import Rounds

#: Bytes (of all ranks together) that each rank combines for itself. Below torch's grain for threads, so that every rank
#: runs one and the same loop over the elements and gets the same bits.
DIRECT_BYTES = 64 * 1024


def all_reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> None:
    """Combine ``flat`` over all ranks, in place. Its dtype is ``reduction.dtype``."""
    count = flat.numel()
    dtype = reduction.dtype
    if count * dtype.itemsize * rounds.size <= DIRECT_BYTES and count <= rounds.capacity(dtype):
        stages = rounds.slices(dtype, count)
        reduction.load(flat, stages[rounds.rank])
        rounds.sync()
        reduction.over(stages, flat)
        return
    if rounds.size == 2 and reduction.exact:
        _each_for_itself(rounds, flat, reduction)
    else:
        _by_parts(rounds, flat, reduction)


def _each_for_itself(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> None:
    step = rounds.capacity(reduction.dtype)
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        stages = rounds.slices(reduction.dtype, chunk.numel())
        reduction.load(chunk, stages[rounds.rank])
        rounds.sync()
        reduction.over(stages, chunk)


def _by_parts(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> None:
    count = flat.numel()
    dtype = reduction.dtype
    step = rounds.capacity(dtype)
    result: tuple[torch.Tensor, torch.Tensor] | None = None
    for start in range(0, count, step):
        chunk = flat[start : start + step]
        stages = rounds.stages(dtype)
        length = chunk.numel()
        reduction.load(chunk, stages[rounds.rank][:length])
        rounds.sync()
        first, end = part(length, rounds.rank, rounds.size)
        if first < end:
            own = [stage[first:end] for stage in stages]
            reduction.over(own, own[0])
        if result is not None:
            result[0].copy_(result[1])
        result = chunk, stages[0][:length]
    rounds.sync()
    if result is not None:
        result[0].copy_(result[1])
