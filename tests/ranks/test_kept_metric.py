"""The metric of a checkpoint that is saved once more before the next step, at a stop for instance, is not lost."""

from __future__ import annotations

import json
from pathlib import Path, PurePath

import pytest
import torch
from torch import nn

import lockstep
from lockstep.job.files import EXIT_SAVED
from tests.harness import run_ranks
from tests.launching import start


def _metrics(folder: Path) -> dict[str, float | None]:
    return {path.name: json.loads((path / "manifest.json").read_text())["metric"] for path in folder.glob("step-*")}


def _take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def _saves(folder: str) -> list[float | None]:
    lockstep.init()
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))

    def checkpointer() -> lockstep.Checkpointer:
        return lockstep.Checkpointer(folder, model=model, optimizer=optimizer, extra={"second": second})

    found = []

    def note(path: PurePath | None) -> None:
        assert path is not None
        found.append(_metrics(Path(folder))[path.name])

    saved = checkpointer()
    _take(model, optimizer)
    note(saved.save(metric=0.1))
    note(saved.save())  # measured, as the one before
    _take(model, optimizer)
    saved.async_save(metric=0.2)
    _take(other, second)
    note(saved.save())  # another model
    _take(model, optimizer)
    note(saved.save(metric=0.3))
    saved = checkpointer()
    saved.restore()
    saved.async_save()
    note(saved.wait())
    note(saved.save(metric=float("nan")))  # measured anew
    _take(model, optimizer)
    note(saved.save())
    return found


def test_a_second_save_of_the_same_parameters_has_the_metric_of_the_first(tmp_path: Path) -> None:
    assert run_ranks(_saves, 1, str(tmp_path)) == [[0.1, 0.1, None, 0.3, 0.3, None, None]]


#: Saves with a metric, is stopped or saved once more right after it, and has worse ones after that.
_TRAIN = """
import os, signal, sys, time
from pathlib import Path, PurePath
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader

where, counted = sys.argv[1], sys.argv[2] == "counted"
world = lockstep.init()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(torch.ones(8, 4), batch_size=4))
saved = lockstep.Checkpointer(
    "run", model=model, optimizer=optimizer if counted else None, loader=loader,
    keep=lockstep.Retention(last=1, best=1),
)
fresh = not any(Path("run").glob("step-*"))
for epoch in saved.epochs(4):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        saved.step += not counted
    saved.save(metric=[0.1, 0.5, 0.4, 0.3][epoch])
    if fresh and epoch == 0:
        os.kill(os.getpid(), signal.SIGTERM if where == "boundary" else signal.SIGUSR1)
        while where == "side" and saved._boundary._requests.wanted is not None:
            time.sleep(0.02)
            if not counted:
                saved.between_steps(evaluating=True)
"""


@pytest.mark.parametrize(("where", "counted"), [("boundary", True), ("side", True), ("side", False)])
def test_the_best_stays_though_the_run_is_saved_once_more_after_it(tmp_path: Path, where: str, counted: bool) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    argv = ["lockstep", "run", "-n", "1", "--grace", "60", "train.py", where, "counted" if counted else "not"]
    for code in (EXIT_SAVED, 0) if where == "boundary" else (0,):
        with start(argv, tmp_path, torch=True, LOCKSTEP_TIMES="0.5") as job:
            done = job.finish()
        assert done.code == code, done
        assert ("from the side" in done.err) == (where == "side"), done
    kept = _metrics(tmp_path / "run")
    assert 0.1 in kept.values(), kept
    assert kept[max(kept)] == 0.3
