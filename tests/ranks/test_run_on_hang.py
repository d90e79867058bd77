"""A job whose rank holds up the others: what is kept of that, and the restart that ends it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launching import run
from tests.schemas import holds

#: Times of a launcher that looks for a late rank sooner, and more often.
_SOON = "late=1,heartbeat=0.2,unmoved=0.2"

_TRAINING = """
import os, threading, torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def hang():
    threading.Event().wait()

for step in range(8):
    if step == 5 and world.rank == 1 and ({when}):
        hang()
    loss = model(torch.ones(8, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done after restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
_ONCE = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
pytestmark = pytest.mark.timeout(300)


def test_ranks_that_hang_start_again_and_what_tells_of_it_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINING.format(when=_ONCE))
    argv = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "--on-hang", "restart:1", "--max-restarts", "1"]
    argv += ["--notify", "cat >> told"]
    done = run([*argv, "train.py"], tmp_path, torch=True, LOCKSTEP_TIMES=_SOON)
    assert done.code == 0, done.err
    assert "done after restart 1" in done.out
    assert re.search(r"all Python stacks of this machine's ranks are in .*/hang-1; if nothing moves for 1 s", done.err)
    words = "lockstep: the ranks still waited 1 s after the report, so all were stopped (--on-hang restart):\n"
    assert words in done.err
    assert "  rank 1 of 2 has held up the others for" in done.err
    assert "restart 1 of 1: all ranks start again" in done.err
    (folder,) = (tmp_path / "logs").rglob("hang-1")
    assert (folder / "report.txt").read_text().startswith("rank 1 of 2 has held up the others for ")
    late, waits = ((folder / f"stacks-rank{rank}.txt").read_text() for rank in (1, 0))
    assert 'train.py", line 10 in hang' in late
    assert 'train.py", line 17 in <module>' in waits
    (record,) = (tmp_path / "logs").rglob("run.json")
    events = json.loads(record.read_text())["events"]
    assert [event["kind"] for event in events] == ["late", "hang", "failed"]
    assert events[-1]["failure"]["code"] == "rank-hung"
    assert (events[-1]["failure"]["rank"], events[-1]["failure"]["step"], events[-1]["again"]) == (1, 5, True)
    hang, restart, ended = [holds(line, "lockstep.notify/1") for line in (tmp_path / "told").read_text().splitlines()]
    assert (hang["event"], hang["code"], hang["step"], hang["exit_code"]) == ("hang", "rank-late", 5, None)
    assert hang["text"].startswith("rank 1 of 2 has held up the others for ")
    assert (restart["event"], restart["code"], restart["restarts"]) == ("restart", "rank-hung", 0)
    assert "restart 1 of 1: all ranks start again" in restart["text"]
    assert (ended["event"], ended["code"], ended["exit_code"], ended["restarts"]) == ("ended", "run-done", 0, 1)
    assert (ended["ranks"], ended["step"], ended["program"]) == (2, 8, ["train.py"])
    assert Path(ended["folder"]) == record.parent


def test_the_same_hang_again_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINING.format(when="True"))
    argv = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "--on-hang", "restart:0", "--max-restarts", "3"]
    done = run([*argv, "train.py"], tmp_path, torch=True, LOCKSTEP_TIMES=_SOON)
    assert done.code == 124, done.err
    assert "restart 1 of 3: all ranks start again" in done.err
    assert "not restarted: the same failure happened twice, on rank 1 at step 5, and would happen again" in done.err
    told = json.loads(run(["lockstep", "runs", "explain", "./logs", "--json"], tmp_path).out)
    assert told["end"]["exit_code"] == 124
    assert [each["code"] for each in told["failures"]] == ["rank-hung", "rank-hung"]


_FAILS = """
import torch, lockstep
lockstep.init()
if lockstep.world().rank == 1:
    raise ValueError("bad batch")
lockstep.world().barrier()
"""


def test_a_command_is_told_of_a_failure_and_its_own_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_FAILS)
    command = "cat >> told; echo no such host; exit 3"
    done = run(["lockstep", "run", "-n", "2", "--notify", command, "train.py"], tmp_path, torch=True)
    assert done.code == 1
    assert "lockstep: the command of --notify failed with exit code 3; the event was: the job has failed" in done.err
    assert "  no such host" in done.err.splitlines()
    (line,) = (tmp_path / "told").read_text().splitlines()
    failed = holds(line, "lockstep.notify/1")
    assert (failed["event"], failed["code"], failed["exit_code"], failed["step"]) == ("failed", "run-failed", 1, 0)
    assert "rank 1 of 2 failed: exit code 1" in failed["text"]
    assert "ValueError: bad batch" in failed["text"]
