"""Sixty-four ranks on one machine: the one that fails is named, and so is the one that gets stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hangs import Case, hear, wrong
from tests.launching import gone_within, start

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(400)]

_RANKS, _VICTIM = 64, 37

_RAISING = f"""
import torch
import lockstep
torch.set_num_threads(1)
world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(2, 1))
for step in range(20):
    model(torch.ones(1, 2)).sum().backward()
    if step == 10 and world.rank == {_VICTIM}:
        raise RuntimeError("the wrong turn")
"""


def test_one_of_many_ranks_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RAISING)
    with start(["lockstep", "run", "-n", str(_RANKS), str(script)], tmp_path, torch=True) as job:
        line = job.process.stderr.readline() if job.process.stderr is not None else ""
        everyone = job.tree()
        done = job.finish(limit=120)
    assert done.code == 1, done
    assert gone_within(everyone, 2.0) == []
    report = (line + done.err).partition("lockstep: ")[2]
    assert f"rank {_VICTIM} of {_RANKS} failed: exit code 1" in report, report
    assert 'train.py", line 10, in <module>' in report
    assert "RuntimeError: the wrong turn" in report
    assert "PeerLost" not in report, "and no echo of it"


@pytest.mark.timed
@pytest.mark.parametrize("kind", ["stop", "lock"])
def test_one_of_many_ranks_gets_stuck(tmp_path: Path, kind: str) -> None:
    case = Case(kind, _VICTIM, 9, "own", ranks=_RANKS)
    heard = hear(case, tmp_path)
    assert wrong(case, heard) == ""
    print(f"{case}: named after {heard.seconds:.1f} s")
