"""Take steps in which rank 1 is slower than the others in one phase, or no rank is; run by ``lockstep run``.

``stragglers.py PHASE PART SECONDS [STEPS]``: in ``data``, ``forward`` or ``own``, by this part of the others' work in a
step. The clock is looked at every 50 steps, or STEPS; while there is a file ``go-on``, it does not stop.
Each rank prints, by its own clock, the seconds of a step and those of its work in it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep

#: Seconds of work in each of the three phases, on each rank.
WORK = float(os.environ.get("STRAGGLERS_WORK", "0.01"))
#: Steps at the beginning that the summary leaves out, and so do the figures that are printed.
_FIRST = 2


class Worker:
    """Takes its time, and adds up how much that was."""

    def __init__(self, slow: str, longer: float) -> None:
        self._slow, self._longer = slow, longer
        self.spent = 0.0

    def work(self, phase: str) -> None:
        begun = time.perf_counter()
        time.sleep(WORK + (self._longer if phase == self._slow else 0.0))
        self.spent += time.perf_counter() - begun


class Net(nn.Module):
    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._worker = worker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._worker.work("forward")
        return self.linear(x)  # type: ignore[no-any-return]


class Data(Dataset[torch.Tensor]):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self._worker.work("data")
        return [torch.ones(4) for _ in indices]

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("batches are fetched whole")


def main() -> None:
    phase, part, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    between = int(sys.argv[4]) if len(sys.argv) > 4 else 50
    torch.set_num_threads(1)
    world = lockstep.init()
    worker = Worker(phase, 3 * WORK * part if world.rank == 1 else 0.0)
    model = lockstep.replicate(Net(worker))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = lockstep.shard(DataLoader(Data(worker), batch_size=4 * world.world_size), seed_samples=False)
    begun = since = world.all_reduce(time.monotonic(), "max")  # so that all ranks end after the same step
    for steps, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if steps == _FIRST:
            since, worker.spent = time.monotonic(), 0.0
        worker.work("own")
        now = 0.0 if Path("go-on").exists() else time.monotonic()
        if steps % between == 0 and world.all_reduce(now, "max") > begun + seconds:
            print(world.rank, (time.monotonic() - since) / (steps - _FIRST), worker.spent / (steps - _FIRST))
            break


if __name__ == "__main__":
    main()
