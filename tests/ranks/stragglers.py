"""Take steps in which rank 1 is slower than the others in one phase, or no rank is; run by ``lockstep run``.

``stragglers.py PHASE PART SECONDS``: in ``data``, ``forward`` or ``own``, by this part of the others' work in a step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep

#: Seconds of work in each of the three phases, on each rank.
WORK = 0.01


class Net(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return self.linear(x)


class Data(Dataset[torch.Tensor]):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self._seconds)
        return [torch.ones(4) for _ in indices]

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("batches are fetched whole")


def main() -> None:
    phase, part, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    world = lockstep.init()
    slow = 3 * WORK * part if world.rank == 1 else 0.0

    def of(name: str) -> float:
        return WORK + (slow if name == phase else 0.0)

    model = lockstep.replicate(Net(of("forward")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = lockstep.shard(DataLoader(Data(of("data")), batch_size=4 * world.world_size), seed_samples=False)
    end = time.monotonic() + seconds
    for steps, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        time.sleep(of("own"))
        if steps % 50 == 0 and world.all_reduce(time.monotonic(), "max") > end:
            break


if __name__ == "__main__":
    main()
