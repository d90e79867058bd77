"""A real Slurm, two nodes on this machine: its tasks are ranks of one job, and a job that it stops resumes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.launch.ports import free_port
from tests.faults import jobs
from tests.launching import python_path, wait_for
from tests.schedulers.slurm import Cluster, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"not installed here: {', '.join(missing())} (slurmctld, slurmd, srun)"),
    pytest.mark.timeout(600),
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


def test_a_port_in_use_is_named_and_another_jobs_ranks_there_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    """The port belongs to the ranks of a step that waits; the next step has been given the same one."""
    (tmp_path / "world.py").write_text(_WORLD)
    (tmp_path / "waits.py").write_text(f"{_WORLD}open('there', 'w')\nimport sys\nsys.stdin.read()\n")
    port, path = str(free_port()), python_path(_ROOT)
    tasks = ["srun", "-N2", "-n2", sys.executable]
    with cluster.start(*tasks, "waits.py", cwd=tmp_path, PYTHONPATH=path, MASTER_PORT=port) as first:
        wait_for(lambda: (tmp_path / "there").exists(), "the first step's world")
        done = cluster.run(*tasks, "world.py", cwd=tmp_path, PYTHONPATH=path, MASTER_PORT=port)
        told, _ = first.communicate("")
    assert sorted(told.splitlines()) == ["[0, 2, 0, 1, 0] 0.5", "[1, 2, 0, 1, 1] 0.5"], "the first step has not noticed"
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"Port {port} is taken by another process. Set MASTER_PORT" in done.stderr, done
    assert re.search(
        r"rank 1 of 2 belongs to Slurm's job \d+, step 0 of the cluster lockstep-\d+, and found", done.stderr
    )


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


@pytest.mark.parametrize("requeue", [pytest.param("script", marks=pytest.mark.campaign), "slurm"])
def test_a_printed_script_saves_is_queued_again_and_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, calm: jobs.Calm, requeue: str
) -> None:
    """One rank on each of two nodes; SIGTERM as before the time limit; then scontrol requeue, or RequeueExit=75."""
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    options = ["--nodes", "2", "-n", "1", "--time", "10", "--name", "job", "--log-dir", "the logs"]
    options += ["--requeue", requeue]
    done = CliRunner().invoke(main, ["submit", "slurm", *options, str(jobs.SCRIPT), str(folder), "--slow", "0.05"])
    assert done.exit_code == 0, done.output
    (folder / "job.sh").write_text(done.stdout)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    submitted = cluster.run("sbatch", "--parsable", "job.sh", cwd=folder, PATH=path, PYTHONPATH=python_path(_ROOT))
    job = submitted.stdout.strip()
    output = folder / f"job-{job}.out"

    def state() -> str:
        return cluster.run("scontrol", "-o", "show", "job", job, cwd=folder).stdout

    wait_for(lambda: len(jobs.lines(folder, 0)) > 4, "training")
    cluster.run("scancel", "--signal=TERM", job, cwd=folder)
    wait_for(lambda: "Restarts=1" in state(), "the end of the first life")

    # A job that was queued again waits for two minutes unless it is told not to, and a node does not start it in the
    # second in which it ended there.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3", cwd=folder)
    wait_for(lambda: re.search("JobState=(COMPLETED|FAILED|CANCELLED)", state()), "the end")
    assert "JobState=COMPLETED" in state(), output.read_text()
    assert jobs.lives(folder) == 2, output.read_text()
    assert jobs.final(folder) == calm(jobs.EPOCHS)
    steps = jobs.check_audit(folder)
    resumed = [line["resumed"] for line in jobs.lines(folder, 0) if "resumed" in line]
    assert 0 < resumed[-1] < steps, json.dumps(resumed)
    assert output.read_text().count("saved at step") == 2, "said once on each node"
    logs = {str(path.relative_to(folder)) for path in folder.glob("the logs/*/*/*.log")}
    assert logs == {f"the logs/{job}/start-{start}/rank{rank}.log" for start in (0, 1) for rank in (0, 1)}


def test_a_printed_script_ends_with_the_code_of_a_program_that_fails(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import lockstep\nlockstep.init()\nraise SystemExit(3)\n")
    done = CliRunner().invoke(main, ["submit", "slurm", "--nodes", "2", "-n", "1", "--time", "10", "fails.py"])
    (tmp_path / "job.sh").write_text(done.stdout)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = cluster.run("sbatch", "--wait", "job.sh", cwd=tmp_path, PATH=path, PYTHONPATH=python_path(_ROOT))
    assert ended.returncode == 3, (ended, [path.read_text() for path in tmp_path.glob("*.out")])
