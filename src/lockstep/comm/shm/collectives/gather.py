"""All-gather and gather: every rank, or one, ends with the elements of each.

In chunks of one stage: each rank stages a chunk, one round, whoever receives copies the others'. Bytes: n written per
rank, (W - 1) n read by each that receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.shm.rounds import Rounds


def all_gather(rounds: Rounds, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Put each rank's ``flat`` into ``outputs[rank]`` on every rank. All are of one size and dtype."""
    step = rounds.capacity(flat.dtype)
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        length = chunk.numel()
        stages = rounds.stages(flat.dtype)
        stages[rounds.rank][:length].copy_(chunk)
        rounds.sync()
        for output, stage in zip(outputs, stages, strict=True):
            output[start : start + step].copy_(stage[:length])


def gather(rounds: Rounds, outputs: Sequence[torch.Tensor], flat: torch.Tensor, *, root: int) -> None:
    """Put each rank's ``flat`` into ``outputs[rank]`` on the root; elsewhere ``outputs`` is empty."""
    step = rounds.capacity(flat.dtype)
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        length = chunk.numel()
        stages = rounds.stages(flat.dtype)
        stages[rounds.rank][:length].copy_(chunk)
        rounds.sync()
        if rounds.rank == root:
            for output, stage in zip(outputs, stages, strict=True):
                output[start : start + step].copy_(stage[:length])


def all_gather_lengths(rounds: Rounds, numbers: Sequence[int]) -> list[list[int]]:
    """A few whole numbers of every rank, by rank: what ranks must know of each other before uneven data can move."""
    mine = torch.tensor(list(numbers), dtype=torch.int64)
    outputs = [torch.empty_like(mine) for _ in range(rounds.size)]
    all_gather(rounds, outputs, mine)
    return [output.tolist() for output in outputs]


def all_gather_uneven(rounds: Rounds, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """As :func:`all_gather`, of a size that differs from rank to rank and that every rank knows (``outputs``)."""
    step = rounds.capacity(flat.dtype)
    longest = max(output.numel() for output in outputs)
    for start in range(0, max(1, longest), step):
        chunk = flat[start : start + step]
        stages = rounds.stages(flat.dtype)
        stages[rounds.rank][: chunk.numel()].copy_(chunk)
        rounds.sync()
        for output, stage in zip(outputs, stages, strict=True):
            target = output[start : start + step]
            target.copy_(stage[: target.numel()])
