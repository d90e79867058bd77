"""What real jobs leave in their records for ``lockstep runs explain``: failures, restarts, ranks that were late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.cli.terminal import as_json
from lockstep.runs import history
from lockstep.tools.explanation import Explanation
from tests.launching import run
from tests.schemas import holds

_TRAINING = """
import os, signal, sys, time
from pathlib import Path
import torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 5 and world.rank == 1 and not Path("done").exists():
        Path("done").touch()
        {act}
    loss = model(torch.ones(8, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def _explained(tmp_path: Path, act: str, *options: str, code: int = 0, **env: str) -> Any:
    (tmp_path / "train.py").write_text(_TRAINING.format(act=act))
    command = ["lockstep", "run", "-n", "2", "--log-dir", str(tmp_path / "logs"), *options, "train.py"]
    done = run(command, tmp_path, torch=True, **env)
    assert done.code == code, done
    told = Explanation.of(history.read(tmp_path / "logs")).to_json()
    return holds(as_json("runs.explain", told), "lockstep.runs.explain/1")


def test_an_error_of_a_rank_is_recorded_with_its_step_and_code(tmp_path: Path) -> None:
    told = _explained(tmp_path, "raise lockstep.CheckpointCorrupt('no such\\nbytes')", code=1)
    assert (told["end"]["code"], told["end"]["exit_code"]) == ("run-failed", 1)
    (failure,) = told["failures"]
    assert (failure["code"], failure["rank"], failure["step"], failure["exit_code"]) == ("rank-raised", 1, 5, 1)
    assert failure["error"] == {
        "type": "lockstep.CheckpointCorrupt",
        "message": "no such\nbytes",
        "code": "checkpoint-corrupt",
    }
    assert Path(failure["log"]).name == "rank1.log"
    assert failure["restarted"] is False


def test_a_rank_that_is_killed_and_a_restart_are_recorded(tmp_path: Path) -> None:
    told = _explained(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "--max-restarts", "1")
    assert told["end"]["code"] == "run-done"
    (failure,) = told["failures"]
    assert (failure["code"], failure["signal"], failure["step"]) == ("rank-killed", "SIGKILL", 5)
    assert failure["restarted"] is True
    assert [start["steps"] for start in told["starts"]] == [5, 8]
    assert told["steps"] == 13


def test_a_rank_that_was_late_and_that_it_is_over_are_recorded(tmp_path: Path) -> None:
    told = _explained(tmp_path, "time.sleep(4)", LOCKSTEP_TIMES="late=1,heartbeat=0.2,unmoved=0.2")
    (late,) = told["late"]
    assert (late["code"], late["ranks"], late["waiting"], late["over"]) == ("rank-late", [1], [0], True)
    assert late["until_seconds"] > late["at_seconds"]
    about = json.loads((tmp_path / "logs" / "run.json").read_text())
    assert about["end"] == {"code": "run-done", "text": ""}
