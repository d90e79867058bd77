"""Reduce-scatter: rank r ends with the combination of all ranks' tensor number r.

Each rank's stage is divided among the ranks; per round each rank combines its pieces of 1/W of a stage. Bytes per rank:
W n written, W n read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.shm.reduction import Reduction
from lockstep.comm.shm.rounds import Rounds


def reduce_scatter(rounds: Rounds, flat: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Combine every rank's ``inputs[r]`` into the ``flat`` of rank r. The dtype of all is ``reduction.dtype``."""
    step = rounds.capacity(reduction.dtype) // rounds.size
    own = rounds.rank * step
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        length = chunk.numel()
        stages = rounds.stages(reduction.dtype)
        for rank, source in enumerate(inputs):
            reduction.load(source[start : start + step], stages[rounds.rank][rank * step : rank * step + length])
        rounds.sync()
        reduction.over([stage[own : own + length] for stage in stages], chunk)
