"""The lines of a log in a run that was saved from the side, as docs/checkpoints.md and docs/metrics.md have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.job.files import EXIT_SAVED
from tests.launching import start

_TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader

world = lockstep.init()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(torch.ones(16, 4), batch_size=4))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
log = lockstep.Log(saved, every=3)
fresh = not any(Path("run").glob("step-*"))

def stay():
    if fresh:
        if world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

for epoch in saved.epochs(1):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        log(number=float(saved.step))
    if sys.argv[1] == "evaluation":
        stay()
    log({"val/loss": 0.5})
    saved.save()
    if sys.argv[1] == "after the save":
        stay()
"""


def _lines(folder: Path, place: str, *, ranks: int = 1) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(_TRAIN)
    for code in (EXIT_SAVED, 0):
        argv = ["lockstep", "run", "-n", str(ranks), "train.py", place]
        with start(argv, folder, torch=True, LOCKSTEP_TIMES="0.5") as job:
            done = job.finish()
        assert done.code == code, done
        assert ("was saved from the side" in done.err) == (code == EXIT_SAVED), done
    found = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in found]


def test_numbers_since_the_last_line_are_lost_with_their_steps(tmp_path: Path) -> None:
    """A process alone writes them as it ends; several ranks can't."""
    assert _lines(tmp_path, "evaluation", ranks=2) == [{"step": 3, "number": 2.0}, {"step": 4, "val/loss": 0.5}]


def test_what_is_logged_after_the_pass_is_logged_again_after_a_save(tmp_path: Path) -> None:
    assert _lines(tmp_path, "after the save") == [
        {"step": 3, "number": 2.0},
        {"step": 4, "number": 4.0, "val/loss": 0.5},
        {"step": 4, "val/loss": 0.5},
    ]
