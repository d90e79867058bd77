"""Train without an end, for who stops ranks from outside at any moment: run by ``lockstep run``.

``stopped_anywhere.py FOLDER``: each rank leaves its process id there, and rank 0 the job's private folder. The model
has a million parameters, so that a good part of a step is spent in collectives.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import lockstep


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    world = lockstep.init()
    model = lockstep.replicate(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 768)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    if world.is_main:
        (folder / "job").write_text(os.environ["LOCKSTEP_JOB_DIR"])
    batch = torch.ones(4, 256)
    while True:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        world.all_reduce(1.0)


if __name__ == "__main__":
    main()
