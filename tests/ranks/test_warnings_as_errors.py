"""Where warnings are errors, what is done stays done, and no rank waits for the one that warns."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.checkpoint.disk_folder import DiskFolder
from tests.harness import run_ranks


def _bench(folder: str, **options: Any) -> tuple[nn.Linear, lockstep.Checkpointer]:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    return model, lockstep.Checkpointer(folder, model=model, **options)


def _saves(folder: str) -> list[str]:
    """Rank 0 warns of a checkpoint that is not finite, of replicas that differ, and of old ones that stay."""

    def remove(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    world = lockstep.init()
    warnings.simplefilter("error")
    said = []
    model, saved = _bench(folder, keep=1)
    for kind in ("finite", "drift", "old", "background"):
        for parameter in model.parameters():
            parameter.data.fill_(math.nan if kind in ("finite", "background") else 1.0 + world.rank * (kind == "drift"))
        if kind == "old":
            DiskFolder.remove = remove  # type: ignore[method-assign,assignment]
        step = saved.step
        try:
            saved.save() if kind != "background" else saved.async_save()
            saved.wait()
        except RuntimeWarning as warning:
            said.append(f"{kind}: {warning}")
        assert saved.step == step + (kind != "finite")
        assert world.mean(float(saved.step)) == saved.step, "all are here"
    return said


def test_a_save_that_warns_has_saved(tmp_path: Path) -> None:
    said, others = run_ranks(_saves, 2, str(tmp_path))
    assert others == []
    assert [each.partition(":")[0] for each in said] == ["finite", "drift", "old"]
    assert "the checkpoint step-00000000 holds values that are NaN" in said[0]
    assert "the replicas have drifted apart" in said[1]
    assert "could not remove the old checkpoint" in said[2]
    assert (tmp_path / "step-00000003" / "manifest.json").exists()


def _logs(folder: str) -> list[str]:
    world = lockstep.init()
    warnings.simplefilter("error")
    said = []
    _, saved = _bench(folder)
    log = lockstep.Log(saved, every=1)
    for number in range(4):
        saved.step += 1
        try:
            log(loss=math.nan if number == 1 else 1.0, other=math.nan if number == 3 else 1.0)
            if number == 2:
                saved.save()
        except RuntimeWarning as warning:
            said.append(str(warning))
        assert world.mean(float(number)) == number
    log.close()
    return said


def test_a_line_that_warns_is_written(tmp_path: Path) -> None:
    said, others = run_ranks(_logs, 2, str(tmp_path))
    assert others == []
    assert [each.partition(":")[0] for each in said] == ["loss", "other"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def _save_warns_of_a_line(folder: str) -> list[str]:
    """A line that is written for a save warns at the call after it."""
    world = lockstep.init()
    warnings.simplefilter("error")
    said = []
    _, saved = _bench(folder)
    log = lockstep.Log(saved, every=100)
    log(loss=1.0)
    log(loss=torch.tensor(math.nan))
    for act in (saved.save, lambda: log(loss=1.0)):
        try:
            act()
        except RuntimeWarning as warning:
            said.append(f"{act}: {warning}")
        assert world.mean(1.0) == 1.0
    log.close()
    return said


def test_a_line_for_a_save_warns_after_it(tmp_path: Path) -> None:
    said, others = run_ranks(_save_warns_of_a_line, 2, str(tmp_path))
    assert others == []
    (words,) = said
    assert "<lambda>" in words
    assert "infinite or NaN" in words
