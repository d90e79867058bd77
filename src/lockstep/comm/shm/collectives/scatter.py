"""Scatter: each rank ends with its own one of the root's tensors.

The root's stage is divided among the ranks; per round each gets a piece of 1/W of a stage. Bytes: W n written by the
root, n read by each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.shm.rounds import Rounds


def scatter(rounds: Rounds, flat: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int) -> None:
    """Put the root's ``inputs[rank]`` into each rank's ``flat``; elsewhere ``inputs`` is empty."""
    step = rounds.capacity(flat.dtype) // rounds.size
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        length = chunk.numel()
        stage = rounds.stages(flat.dtype)[root]
        for rank, source in enumerate(inputs):
            stage[rank * step : rank * step + length].copy_(source[start : start + step])
        rounds.sync()
        own = rounds.rank * step
        chunk.copy_(stage[own : own + length])
