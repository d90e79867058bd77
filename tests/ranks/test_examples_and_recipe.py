"""The examples and the digits recipe, started as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open

from tests import warm
from tests.launching import python_path

ROOT = Path(__file__).parents[2]
LOCKSTEP = ["python", "-m", "lockstep"]
DIGITS = "examples.digits"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder`` to its end, whatever that is."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(
        [str(warm.server().commands / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )


def start(folder: Path, *command: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder`` and return what it printed."""
    done = run(folder, *command)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.campaign  # every run of the tests runs these commands, as blocks of the README
def test_the_twelve_line_script_runs_on_two_ranks_and_goes_on_alone(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "train.py")
    together = start(tmp_path, *LOCKSTEP, "run", "-n", "2", script)
    assert "epoch 2" in together.stderr
    steps = sorted(path.name for path in (tmp_path / "runs/train").glob("step-*"))
    again = start(tmp_path, "python", script)
    assert "nothing is left to train: this run was finished, 3 epochs" in again.stderr
    assert sorted(path.name for path in (tmp_path / "runs/train").glob("step-*")) == steps


@pytest.mark.campaign  # make demo, as it is
def test_the_demo_reads_over_97_percent(tmp_path: Path) -> None:
    assert accuracy(start(tmp_path, *LOCKSTEP, "run", "-n", "2", "-m", DIGITS).stdout) > 0.97


def test_launch_with_a_distributed_sampler_prints_the_documents_sizes(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "launch_and_sampler.py")
    done = start(tmp_path, "python", "-m", "lockstep.launch", "--nproc_per_node=2", script)
    # Found, not split into lines: where Python's output is unbuffered, lines of two ranks may end in each other.
    sizes = r"Model \d, input size: torch.Size\(\[\d+, 5\]\), output size: torch.Size\(\[\d+, 2\]\)"
    printed = sorted(re.findall(sizes, done.stdout))
    assert printed == [
        f"Model {rank}, input size: torch.Size([{n}, 5]), output size: torch.Size([{n}, 2])"
        for rank in (0, 1)
        for n in (15, 30)
    ]


def test_spawn_and_checkpoint(tmp_path: Path) -> None:
    done = start(tmp_path, "python", str(ROOT / "examples" / "spawn_and_checkpoint.py"))
    for rank in (0, 1):
        assert f"Running basic DDP example on rank {rank} of 2." in done.stdout
        assert f"Rank {rank} loaded what was saved." in done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with one finished run of the recipe on two ranks, of fewer epochs than it takes by itself, and what it
    printed."""
    folder = tmp_path_factory.mktemp("digits")
    return folder, start(folder, *LOCKSTEP, "run", "-n", "2", "-m", DIGITS, "--epochs", "12").stdout


def accuracy(text: str) -> float:
    found = re.search(r"test accuracy ([\d.]+)", text)
    assert found, text
    return float(found[1])


def test_the_recipe_reads_its_digits_and_its_checkpoint_loads_alone(trained: tuple[Path, str]) -> None:
    folder, text = trained
    assert accuracy(text) >= 0.95  # 0.969 and more: processors with other instructions round otherwise
    assert "on 360 pictures, over 2 ranks" in text
    assert f"loaded runs/digits/run-001 in one process: test accuracy {accuracy(text):.4f}" in text
    newest = max((folder / "runs/digits/run-001").glob("step-*"))
    with safe_open(newest / "model.safetensors", framework="pt") as weights:
        assert "features.0.weight" in weights.keys()  # noqa: SIM118  (a safetensors handle is no dict)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.campaign)])
def test_evaluate_gives_the_same_accuracy_on_any_number_of_ranks(trained: tuple[Path, str], ranks: int) -> None:
    folder, text = trained
    done = start(folder, *LOCKSTEP, "run", "-n", str(ranks), "-m", DIGITS, "--evaluate")
    assert accuracy(done.stdout) == accuracy(text)


@pytest.mark.campaign  # every run of the tests resumes the larger recipes, with the same Checkpointer
def test_resume_goes_on_and_a_new_run_leaves_the_old_one_alone(trained: tuple[Path, str], tmp_path: Path) -> None:
    first = start(tmp_path, *LOCKSTEP, "run", "-n", "2", "-m", DIGITS, "--epochs", "1")
    resumed = start(tmp_path, *LOCKSTEP, "run", "-n", "2", "-m", DIGITS, "--epochs", "2", "--resume")
    assert "epoch  1/1" in first.stderr
    assert "epoch  2/2" in resumed.stderr
    assert "epoch  1/2" not in resumed.stderr
    start(tmp_path, *LOCKSTEP, "run", "-n", "2", "-m", DIGITS, "--epochs", "2")
    one, two = (tmp_path / "runs/digits/run-001", tmp_path / "runs/digits/run-002")
    assert weights_of(one) == weights_of(two), "two epochs in one go or in two runs end with the same bits"
    del trained


def weights_of(run: Path) -> bytes:
    newest = max(run.glob("step-*"))
    return (newest / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(["--batch-size", "1"], "batch", marks=pytest.mark.campaign),
        (["--epochs", "0"], "--epochs 0: expected a positive number"),
        (["--evaluate"], "no run in runs/digits yet"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], text: str, tmp_path: Path) -> None:
    done = run(tmp_path, "lockstep", "run", "-n", "2", "-m", DIGITS, *arguments)
    assert done.returncode != 0
    assert text in done.stderr
