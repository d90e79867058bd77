"""lockstep.Log where ranks train apart, and count different steps: lines are due on all ranks or on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from tests.harness import run_ranks


def _log_apart(folder: str, skips: int, options: dict[str, float]) -> list[dict[str, float]]:
    """A loop in which rank 1 leaves out its first steps, as a GradScaler does at its start."""
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(2, 1), sync=lockstep.LocalSteps(every=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, extra={"scaler": scaler})
    log = lockstep.Log(saved, **options)  # type: ignore[arg-type]
    for number in range(20):
        optimizer.zero_grad()
        loss = model(torch.ones(2)).sum()
        scaler.scale(loss * (float("inf") if world.rank and number < skips else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        log(calls=1.0, number=float(number))
        if number == 12:
            saved.save()
    log.close()
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("skips", [0, 3])
def test_a_line_is_due_on_all_ranks_though_they_count_different_steps(tmp_path: Path, skips: int) -> None:
    lines, others = run_ranks(_log_apart, 2, str(tmp_path), skips, {"every": 5})
    assert lines == others
    assert [line["step"] for line in lines] == [5, 10, 13, 15, 20]
    assert [line["number"] for line in lines] == [2.0, 7.0, 11.0, 13.5, 17.0]


def test_so_it_is_by_time(tmp_path: Path) -> None:
    lines, others = run_ranks(_log_apart, 2, str(tmp_path), 3, {"seconds": 1e-6})
    assert lines == others
    assert lines[-1]["step"] == 20
    steps = [line["step"] for line in lines]
    assert steps == sorted({*steps})
