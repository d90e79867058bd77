"""Reduce: one rank ends with the combination of all ranks' elements; the others keep theirs.

In chunks of one stage: each rank stages its elements, one round, the root combines. Bytes: n written per rank, W n
read by the root.
"""

from __future__ import annotations

import torch

from lockstep.comm.shm.reduction import Reduction
from lockstep.comm.shm.rounds import Rounds


def reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction, *, root: int) -> None:
    """Combine ``flat`` over all ranks into that of ``root``. Its dtype is ``reduction.dtype``."""
    step = rounds.capacity(reduction.dtype)
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        stages = rounds.stages(reduction.dtype)
        length = chunk.numel()
        reduction.load(chunk, stages[rounds.rank][:length])
        rounds.sync()
        if rounds.rank == root:
            reduction.over([stage[:length] for stage in stages], chunk)
