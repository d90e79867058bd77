"""A run on a file system of 16 MB that fills up: ``lockstep run … -m tests.faults.small_disk FOLDER REPORTS``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep

#: Elements: with the momentum 7 MB a checkpoint.
_WIDTH = 900_000


def train(folder: str) -> dict[str, Any]:
    """Save, fill the disk, fail to save, go on, make room, save."""
    world = lockstep.init()
    warnings.simplefilter("error")
    model = lockstep.replicate(nn.Linear(_WIDTH, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, keep=1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, _WIDTH)).sum().backward()
        optimizer.step()

    filler = Path(folder).parent / "filler"
    there, errors = [], []
    for number in range(5):
        step()
        if number == 2 and world.is_main:
            filler.write_bytes(bytes(5 * 2**20))
        if number == 4 and world.is_main:
            filler.unlink()
        world.barrier()
        try:
            saved.save()
        except lockstep.CheckpointError as error:
            errors.append(str(error))
        there.append(sorted(path.name for path in Path(folder).iterdir() if path.is_dir()))
        world.barrier()
    other = nn.Linear(_WIDTH, 1, bias=False)
    lockstep.load_weights(folder, other)
    return {"errors": errors, "there": there, "same": torch.equal(other.weight, model.weight), "step": saved.step}


def main() -> None:
    folder, reports = Path(sys.argv[1]), Path(sys.argv[2])
    report = train(str(folder / "run"))
    (reports / f"rank-{lockstep.world().rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
