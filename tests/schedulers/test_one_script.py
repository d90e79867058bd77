"""The README's script as it stands, under every scheduler: it trains, a rank is killed in mid-epoch, and it resumes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.launch.ports import free_port
from tests.launching import PATIENT, Running, environment, python_path
from tests.schedulers import strike
from tests.schedulers.slurm import Cluster, missing
from tests.sshd import sshd

pytestmark = pytest.mark.timeout(450)

_ROOT = Path(__file__).parents[2]
_SCRIPT = str(_ROOT / "examples" / "train.py")
#: 1,797 pictures in batches of 64.
_BATCHES = 29
_LIMIT = 200.0


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """What the program's processes find in their environment, so that rank 1 dies once."""
    (tmp_path / "strike").mkdir()
    shutil.copy(strike.__file__, tmp_path / "strike" / "sitecustomize.py")
    return {
        "PYTHONPATH": python_path(tmp_path / "strike", _ROOT),
        "LOCKSTEP_BACKEND": "gloo",  # schedulers that run on one machine could share memory
        "LOCKSTEP_TIMES": PATIENT,
    }


@pytest.fixture(autouse=True, scope="module")
def scikit_learn() -> None:
    """Import it before the look for leaks begins: it sets variables of OpenMP where it is first imported."""
    importlib.import_module("sklearn.datasets")


def _has_resumed(folder: Path) -> None:
    """Epoch 0 was saved before rank 1 died in epoch 1, which began anew."""
    from sklearn.datasets import load_digits  # here: all that collect tests would import it for seconds

    assert (folder / "strike" / "struck").exists(), "rank 1 was killed"
    assert _BATCHES < strike.STEP < 2 * _BATCHES
    saved = sorted((folder / "runs" / "train").glob("step-*"))
    manifests = [json.loads((each / "manifest.json").read_text()) for each in saved]
    assert manifests[-1]["step"] == 3 * _BATCHES, saved
    assert manifests[-1]["world_size"] == 2
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    lockstep.load_weights(folder / "runs" / "train", model)
    pixels, digits = load_digits(return_X_y=True)
    found = model(torch.from_numpy(pixels).float() / 16).argmax(1)
    assert (found == torch.from_numpy(digits)).float().mean() > 0.8, "three epochs have been learned"


def _run(argv: list[str], folder: Path, variables: dict[str, str], expected: int | None = 0) -> str:
    """Run a command to its end and return what it printed. ``expected``: its exit code; None: any but 0."""
    env = environment(folder, torch=True, **variables)
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=_LIMIT, check=False)
    assert done.returncode == expected if expected is not None else done.returncode != 0, done
    return done.stdout + done.stderr


@pytest.mark.campaign  # every run of the tests has machines whose ranks die in tests/ranks/test_rendezvous.py
def test_by_hand(tmp_path: Path, variables: dict[str, str]) -> None:
    """The same line on two machines, which restart by themselves."""
    run = ["lockstep", "run", "--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}", "-n", "1", "--max-restarts", "1"]
    env = environment(tmp_path, torch=True, **variables)
    with (
        Running([*run, _SCRIPT], cwd=tmp_path, env=env, cold=True) as one,
        Running([*run, _SCRIPT], cwd=tmp_path, env=env, cold=True) as two,
    ):
        done = [each.finish(_LIMIT) for each in (one, two)]
    assert [each.code for each in done] == [0, 0], done
    assert all("restart 1 of 1" in each.err for each in done)
    _has_resumed(tmp_path)


@pytest.mark.campaign
def test_over_ssh(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "sshd").mkdir()
    with sshd(tmp_path / "sshd") as server:
        variables["LOCKSTEP_SSH"] = server.client
        run = ["-m", "lockstep", "run", "--hosts", "one,two", "-n", "1", "--max-restarts", "1", _SCRIPT]
        said = _run([sys.executable, *run], tmp_path, variables)
    assert "restart 1 of 1" in said
    _has_resumed(tmp_path)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing():
        pytest.skip(f"not installed here: {', '.join(missing())}")
    opened = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2)
    yield opened
    opened.close()


@pytest.mark.campaign
@pytest.mark.parametrize("launcher", [["-m", "lockstep", "run", "-n", "1"], []], ids=["launchers", "ranks"])
def test_under_slurm(cluster: Cluster, tmp_path: Path, variables: dict[str, str], launcher: list[str]) -> None:
    """The job fails with its rank, and the same command resumes it."""
    command = ["srun", "-N2", "--ntasks-per-node=1", sys.executable, *launcher, _SCRIPT]
    variables |= {"XDG_STATE_HOME": str(tmp_path / "state")}
    failed = cluster.run(*command, cwd=tmp_path, limit=_LIMIT, **variables)
    assert failed.returncode != 0
    done = cluster.run(*command, cwd=tmp_path, limit=_LIMIT, **variables)
    assert done.returncode == 0, done
    _has_resumed(tmp_path)


@pytest.mark.campaign
def test_under_mpirun(tmp_path: Path, variables: dict[str, str]) -> None:
    """mpirun ends the job of which a rank dies, and the same command resumes it."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun (pip install mpich)")
    _run([mpirun, "-n", "2", sys.executable, _SCRIPT], tmp_path, variables, expected=None)
    _run([mpirun, "-n", "2", sys.executable, _SCRIPT], tmp_path, variables)
    _has_resumed(tmp_path)


@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make schedulers")
def test_under_ray(tmp_path: Path, variables: dict[str, str]) -> None:
    variables["PYTHONPATH"] = python_path(_ROOT)  # of Ray's many processes only the workers need torch
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_METRICS_EXPORT_ENABLED": "0"}
    _run([sys.executable, "-m", "tests.schedulers.ray_programs", "script", str(tmp_path)], tmp_path, variables)
    _has_resumed(tmp_path)
