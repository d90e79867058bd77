"""A real Slurm, two nodes on this machine: its tasks are ranks of one job, and a job that it stops resumes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.slurm import Cluster, missing
from tests.faults import jobs
from tests.launching import python_path, wait_for

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"not installed here: {', '.join(missing())} (slurmctld, slurmd, srun)"),
    pytest.mark.timeout(180),
]

_ROOT = Path(__file__).parents[2]
_WORLD = """
import lockstep
world = lockstep.init()
place = [world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank]
print(place, world.mean(float(world.rank)), flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    opened = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("options", "placed"),
    [
        (["-n4"], ["0, 4, 0, 3, 0", "1, 4, 1, 3, 0", "2, 4, 2, 3, 0", "3, 4, 0, 1, 1"]),
        (["-n4", "-m", "cyclic"], ["0, 4, 0, 3, 0", "1, 4, 0, 1, 1", "2, 4, 1, 3, 0", "3, 4, 2, 3, 0"]),
        (["-n2", "--mpi=pmi2"], ["0, 2, 0, 1, 0", "1, 2, 0, 1, 1"]),
    ],
)
def test_tasks_of_srun_are_one_job(cluster: Cluster, tmp_path: Path, options: list[str], placed: list[str]) -> None:
    (tmp_path / "world.py").write_text(_WORLD)
    done = cluster.run("srun", "-N2", *options, sys.executable, "world.py", cwd=tmp_path, PYTHONPATH=python_path(_ROOT))
    mean = (len(placed) - 1) / 2
    assert sorted(done.stdout.splitlines()) == [f"[{place}] {mean}" for place in placed], done


def test_a_launcher_on_each_node_starts_one_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(_WORLD)
    launch = ["-m", "lockstep", "run", "-n", "2", "--all-output", "--log-dir", "logs-%n", "world.py"]
    command = ["srun", "-N2", "--ntasks-per-node=1", sys.executable, *launch]
    done = cluster.run(*command, cwd=tmp_path, PYTHONPATH=python_path(_ROOT))
    places = ["0, 4, 0, 2, 0", "1, 4, 1, 2, 0", "2, 4, 0, 2, 1", "3, 4, 1, 2, 1"]
    shown = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]  # whose line it is, but for rank 0's
    assert sorted(shown) == [f"[{place}] 1.5" for place in places], done


def test_several_launchers_on_a_node_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(_WORLD)
    command = ["srun", "-N1", "-n2", sys.executable, "-m", "lockstep", "run", "-n", "2", "world.py"]
    done = cluster.run(*command, cwd=tmp_path, PYTHONPATH=python_path(_ROOT))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("srun started 2 tasks, 2 of them on one machine") == 2, done


def test_a_job_that_slurm_stops_is_queued_again_and_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, calm: jobs.Calm
) -> None:
    """One rank on each of two nodes; SIGTERM as before the time limit; then RequeueExit=75."""
    launch = f"{sys.executable} -m lockstep run -n 1 --log-dir {tmp_path}/logs-$SLURM_RESTART_COUNT-$SLURM_PROCID"
    training = f"{jobs.SCRIPT} {tmp_path} --life ${{SLURM_RESTART_COUNT:-0}} --slow 0.05"
    (tmp_path / "job.sh").write_text(
        f"#!/bin/bash\nexec srun -K0 --ntasks-per-node=1 bash -c 'exec {launch} {training}'\n"
    )
    options = ["--parsable", "-N2", "--ntasks-per-node=1", "--open-mode=append", "-o", "out"]
    job = cluster.run(
        "sbatch", *options, "job.sh", cwd=tmp_path, PYTHONPATH=python_path(_ROOT)
    ).stdout.strip()  # fmt: skip

    def state() -> str:
        return cluster.run("scontrol", "-o", "show", "job", job, cwd=tmp_path).stdout

    wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 4, "training")
    cluster.run("scancel", "--signal=TERM", job, cwd=tmp_path)
    wait_for(lambda: "Restarts=1" in state(), "the end of the first life")

    # It would wait for two minutes; within a second of its end, slurmd refuses the credentials of that number.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3", cwd=tmp_path)
    wait_for(lambda: not re.search("JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", state()), "the end", limit=90)
    assert "JobState=COMPLETED" in state(), f"{state()}\n{(tmp_path / 'out').read_text()}"
    assert jobs.lives(tmp_path) == 2, (tmp_path / "out").read_text()
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    steps = jobs.check_audit(tmp_path)
    resumed = [line["resumed"] for line in jobs.lines(tmp_path, 0) if "resumed" in line]
    assert 0 < resumed[-1] < steps, json.dumps(resumed)
    assert (tmp_path / "out").read_text().count("saved at step") == 2, "said once on each node"
