"""Slices under real launchers: models on any number of ranks, and runs with a past, all with the same bits."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from lockstep.job.files import EXIT_SAVED
from tests.launching import Running, environment, python_path, wait_for

_SCRIPT = Path(__file__).with_name("sliced.py")
_ROOT = _SCRIPT.parents[2]


def _start(work: Path, model: str, slices: int, folder: str, ranks: int, *options: str, **env: str) -> Running:
    job_env = environment(work, torch=True, PYTHONPATH=python_path(_ROOT), **env)
    command = ["lockstep", "run", "-n", str(ranks), *options, str(_SCRIPT), model, str(slices), folder]
    return Running(command, cwd=work, env=job_env)


def _digest(work: Path, model: str, slices: int, ranks: int, backend: str) -> str:
    with _start(work, model, slices, "-", ranks, LOCKSTEP_BACKEND=backend) as job:
        done = job.finish(200)
    assert done.code == 0, done
    assert len(done.out.strip()) == 64, done
    return done.out.strip()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("slices", [4, 6, 8])
@pytest.mark.parametrize("model", ["mlp", "resnet18", "gpt", "crnn"])
def test_a_model_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path, model: str, slices: int) -> None:
    expected = _digest(tmp_path, model, slices, 1, "shm")
    for ranks in (2, 3, 4):
        for backend in ("shm", "gloo"):
            assert _digest(tmp_path, model, slices, ranks, backend) == expected, (ranks, backend)


@pytest.mark.parametrize("model", ["gpt", "crnn"])
def test_a_model_has_the_same_bits_on_two_ranks(tmp_path: Path, model: str) -> None:
    assert _digest(tmp_path, model, 4, 2, "shm") == _digest(tmp_path, model, 4, 1, "shm")


def _live(work: Path, history: int) -> str:
    """Train with a past: ranks and launchers are killed, jobs are stopped, and others go on with other ranks."""
    chance = random.Random(history)
    folder = work / "run"
    folder.mkdir()
    progress = folder / "steps-0.txt"
    backend = chance.choice(["shm", "gloo"])
    past = []
    for _ in range(chance.randrange(2, 5)):
        ranks, what = chance.randrange(1, 5), chance.choice(["rank", "launcher", "stop"])
        more = chance.randrange(1, 5)
        past.append((ranks, what, more))
        before = _taken(progress)
        restarts = ["--max-restarts", "2"] if what == "rank" else []
        with _start(work, "mlp", 8, str(folder), ranks, *restarts, LOCKSTEP_BACKEND=backend) as job:
            wait_for(
                lambda job=job, enough=before + more: (  # type: ignore[misc]
                    _taken(progress) >= enough or job.process.poll() is not None
                ),
                "some steps",
            )
            if job.process.poll() is not None:
                done = job.finish(60)
                assert done.code == 0, (past, done)
                return done.out.strip()
            if what == "rank":
                rank = chance.randrange(ranks)
                _kill(int((folder / f"steps-{rank}.txt").read_text().split()[-1]))
                done = job.finish(120)
                assert done.code == 0, (past, done)
                return done.out.strip()
            job.process.send_signal(signal.SIGKILL if what == "launcher" else signal.SIGTERM)
            done = job.finish(60)
            assert done.code in ((-signal.SIGKILL,) if what == "launcher" else (0, EXIT_SAVED)), (past, done)
            if done.code == 0:
                return done.out.strip()
    with _start(work, "mlp", 8, str(folder), chance.randrange(1, 5), LOCKSTEP_BACKEND=backend) as job:
        done = job.finish(120)
    assert done.code == 0, (past, done)
    return done.out.strip()


def _taken(progress: Path) -> int:
    return len(progress.read_text().splitlines()) if progress.exists() else 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it was through


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _digest(tmp_path_factory.mktemp("alone"), "mlp", 8, 1, "shm")


@pytest.mark.parametrize("history", [2])
def test_a_run_with_a_past_has_the_bits_of_one_rank(tmp_path: Path, undisturbed: str, history: int) -> None:
    assert _live(tmp_path, history) == undisturbed


@pytest.mark.campaign
@pytest.mark.parametrize("history", [1, *range(3, 53)])
def test_many_pasts(tmp_path: Path, undisturbed: str, history: int) -> None:
    assert _live(tmp_path, history) == undisturbed
