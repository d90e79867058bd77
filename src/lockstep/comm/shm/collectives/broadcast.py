"""Broadcast: every rank ends with the root's elements.

In chunks of one stage: the root stages a chunk, one round, the others copy it. The root runs up to two chunks ahead of
the slowest rank. Bytes: n written by the root, n read by each other rank.
"""

from __future__ import annotations

import torch

from lockstep.comm.shm.rounds import Rounds


def broadcast(rounds: Rounds, flat: torch.Tensor, *, root: int) -> None:
    """Give every rank the elements of the root's ``flat``, in place."""
    step = rounds.capacity(flat.dtype)
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        stage = rounds.stages(flat.dtype)[root][: chunk.numel()]
        if rounds.rank == root:
            stage.copy_(chunk)
        rounds.sync()
        if rounds.rank != root:
            chunk.copy_(stage)
