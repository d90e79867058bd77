"""All-to-all: rank r ends with every rank's tensor number r; sizes may differ from pair to pair.

One round tells every rank all sizes, sent and expected; a pair that disagrees is an error on every rank. Then each
rank's stage is divided among the ranks, and per round every pair moves a piece of 1/W of a stage. Bytes per rank: what
it sends written, what it receives read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.shm.collectives.gather import all_gather_lengths
from lockstep.comm.shm.rounds import Rounds


def all_to_all(rounds: Rounds, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Put each rank's ``inputs[r]`` into ``outputs[rank]`` of rank r. All are of one dtype.

    Raises:
        CollectiveMismatch: some rank sends another size than its receiver expects.
    """
    size, rank = rounds.size, rounds.rank
    numbers = all_gather_lengths(rounds, [t.numel() for t in inputs] + [t.numel() for t in outputs])
    sent, expected = [n[:size] for n in numbers], [n[size:] for n in numbers]
    for source in range(size):
        for target in range(size):
            if sent[source][target] != expected[target][source]:
                raise rounds.disagree(
                    f"rank {source} sends {sent[source][target]} elements to rank {target}, "
                    f"which expects {expected[target][source]} from it"
                )
    step = rounds.capacity(inputs[0].dtype) // size
    for start in range(0, max(map(max, sent)), step):
        stages = rounds.stages(inputs[0].dtype)
        for target, tensor in enumerate(inputs):
            piece = tensor[start : start + step]
            stages[rank][target * step : target * step + piece.numel()].copy_(piece)
        rounds.sync()
        for source, tensor in enumerate(outputs):
            piece = tensor[start : start + step]
            piece.copy_(stages[source][rank * step : rank * step + piece.numel()])
