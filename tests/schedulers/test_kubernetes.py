"""What ``lockstep submit kubernetes`` prints, started in pods of this machine with what the controller would set."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from tests.faults import jobs
from tests.launching import PATIENT, environment, python_path, wait_for
from tests.namespaces import skip_unless
from tests.schedulers.pods import NEEDS, Container, Pods

pytestmark = pytest.mark.timeout(600)

_ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    skip_unless(NEEDS, "a pod")


def _containers(controller: str, folder: Path, *more: str) -> tuple[Container, Container]:
    """Print a manifest for the training over ``folder``, and read from it what the two pods run."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate, which is not installed")
    options = [
        "--controller",
        controller,
        "--image",
        "train",
        "--nodes",
        "2",
        "-n",
        "1",
        "--name",
        "digits",
        "--env",
        "A=$B",
        *more,
    ]
    done = CliRunner().invoke(main, ["submit", "kubernetes", *options, str(jobs.SCRIPT), str(folder), "--slow", "0.05"])
    assert done.exit_code == 0, done.output
    documents = {document["kind"]: document["spec"] for document in yaml.safe_load_all(done.stdout)}
    return _container(controller, documents, 0), _container(controller, documents, 1)


def _container(controller: str, documents: dict[str, Any], index: int) -> Container:
    """Return a pod's container, with what the controllers add to it."""
    if controller == "job":
        pod = documents["Job"]["template"]["spec"]
        described = pod["containers"][0]
        host, subdomain = f"digits-{index}", pod["subdomain"]
    elif controller == "jobset":
        (job,) = documents["JobSet"]["replicatedJobs"]
        described = job["template"]["spec"]["template"]["spec"]["containers"][0]
        host, subdomain = f"digits-{job['name']}-0-{index}", documents["JobSet"]["network"]["subdomain"]
    else:
        (job,) = documents["TrainingRuntime"]["template"]["spec"]["replicatedJobs"]
        described = documents["TrainJob"]["trainer"]
        host, subdomain = f"digits-{job['name']}-0-{index}", "digits"
    env = {each["name"]: each["value"].replace("$$", "$") for each in described["env"]}
    env |= {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    if controller == "trainjob":
        env |= {"PET_NNODES": str(described["numNodes"]), "PET_NPROC_PER_NODE": str(described["numProcPerNode"])}
        env |= {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": f"digits-{job['name']}-0-0.digits"}
        env |= {"PET_MASTER_PORT": "29400"}
    return Container(host, subdomain, described["command"], env)


@pytest.mark.campaign  # every run of the tests starts what is printed for one controller, in the next test
@pytest.mark.parametrize("controller", ["jobset", "job", "trainjob"])
def test_pods_train_and_new_ones_resume_after_one_is_evicted(controller: str, tmp_path: Path, calm: jobs.Calm) -> None:
    folder = tmp_path / "a $(HOME) $$ b"
    folder.mkdir()
    containers = _containers(controller, folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(tmp_path, torch=True, PATH=path, PYTHONPATH=python_path(_ROOT))

    def said() -> str:
        return "\n".join(f"{output.name}: {output.read_text()}" for output in pods.outputs)

    pods = Pods(containers, tmp_path, env)
    try:
        wait_for(lambda: len(jobs.lines(folder, 0)) > 4 or not pods.running, "training")
        pods.terminate(1)
        assert pods.wait(200.0) == [75, 75], said()
    finally:
        pods.close()
    before = len(jobs.lines(folder, 0))
    pods = Pods(containers, tmp_path, env)
    try:
        assert pods.wait(200.0) == [0, 0], said()
    finally:
        pods.close()
    assert len(jobs.lines(folder, 0)) > before
    assert jobs.final(folder) == calm(jobs.EPOCHS)
    jobs.check_audit(folder)


def test_launchers_in_pods_find_each_other_and_restart_their_ranks(tmp_path: Path, calm: jobs.Calm) -> None:
    containers = _containers("job", tmp_path, "--rdzv", "service")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(tmp_path, torch=True, PATH=path, PYTHONPATH=python_path(_ROOT), LOCKSTEP_TIMES=PATIENT)
    pods = Pods(containers, tmp_path, env)
    try:
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 4 or not pods.running, "training")
        pods.kill_rank(1)
        assert pods.wait(200.0) == [0, 0], "\n".join(output.read_text() for output in pods.outputs)
    finally:
        pods.close()
    assert jobs.lives(tmp_path) == 2
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    jobs.check_audit(tmp_path)
    for output in pods.outputs:
        assert "restart 1 of 10: all ranks start again" in output.read_text()
