"""Ray Train on several raylets of this machine: its workers are ranks, resume, and save before a node goes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import jobs
from tests.launching import environment, python_path

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make schedulers"),
    pytest.mark.timeout(300),
]

_ROOT = Path(__file__).parents[2]


def _run(name: str, folder: Path, limit: float = 240.0) -> dict[str, Any]:
    """Run one of ray_programs.py in a session of its own, and end all of that session afterwards."""
    env = environment(folder, torch=True, PYTHONPATH=python_path(_ROOT), RAY_USAGE_STATS_ENABLED="0")
    env |= {"RAY_METRICS_EXPORT_ENABLED": "0", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
    with (folder / "output").open("w+") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.schedulers.ray_programs", name, str(folder)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = program.wait(limit)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
        text = (folder / "output").read_text()
    assert code == 0, text
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_workers_are_ranks_of_one_job_also_on_uneven_nodes(tmp_path: Path) -> None:
    found = _run("places", tmp_path)
    places = [each[:5] for each in found["uneven"]]
    assert [place[:2] for place in places] == [[0, 3], [1, 3], [2, 3]]
    assert sorted(place[2:] for place in places) == [[0, 1, 1], [0, 2, 0], [1, 2, 0]] or sorted(
        place[2:] for place in places
    ) == [[0, 1, 0], [0, 2, 1], [1, 2, 1]], "the node of one may come first"
    assert {each[6] for each in found["uneven"]} == {1.0}
    assert [each[:6] for each in found["packed"]] == [[0, 2, 0, 2, 0, "shm"], [1, 2, 1, 2, 0, "shm"]]


def test_a_killed_workers_job_resumes_where_it_saved(tmp_path: Path, calm: jobs.Calm) -> None:
    """With each sample once an epoch, and the bits of a run under ``lockstep run`` that nobody disturbed."""
    found = _run("killed", tmp_path)
    assert found["error"] is None
    assert len(found["resumed"]) == 2
    assert found["resumed"][1] >= 5
    assert jobs.check_audit(tmp_path) == 36
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)


def test_a_node_that_is_taken_away_costs_no_step_that_was_saved(tmp_path: Path) -> None:
    found = _run("preempted", tmp_path)
    assert found["error"] is None
    step, folder = found["saved"]
    assert step % 10 == 0, "agreed on by all ranks"
    assert Path(folder).name == f"step-{step:08}"
    steps = found["steps"]
    begun_again = [later for earlier, later in itertools.pairwise(steps) if later != earlier + 1]
    assert begun_again == [step + 1], "from the checkpoint of that moment, without FailureConfig(max_failures=…)"
    assert steps[-1] == 200
    assert found["metrics"]["step"] == 200
    assert found["checkpoint"] == str(tmp_path / "ray" / "run" / "checkpoints" / "step-00000200"), (
        "where the Checkpointer has written it"
    )
