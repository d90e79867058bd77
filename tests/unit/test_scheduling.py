"""The tests' workers: which files each takes, that all cases run once, and that a test that hangs ends them all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.scheduling import WAITING

_ROOT = Path(__file__).parents[2]

_CONFTEST = """
from tests.scheduling import Overlapping

def pytest_xdist_make_scheduler(config, log):
    return Overlapping(config, log, frozenset(f"test_w{number}.py" for number in range(4)))
"""
_FILE = """
import os, pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(3))
def test(number):
    with open(Path(os.environ["SEEN"], os.environ["PYTEST_XDIST_WORKER"]), "a") as seen:
        print(Path(__file__).name, number, file=seen)
"""


def _run(folder: Path, workers: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "seen").mkdir()
    env = {**os.environ, "SEEN": str(folder / "seen"), "PYTHONPATH": f"{_ROOT}/src:{_ROOT}"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(workers),
        "--max-worker-restart",
        "0",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("workers", [2, 4, *[pytest.param(workers, marks=pytest.mark.campaign) for workers in (1, 3)]])
def test_every_case_runs_once_and_where_it_belongs(tmp_path: Path, workers: int) -> None:
    for name in [f"{kind}{number}" for kind in "cw" for number in range(4)]:
        (tmp_path / f"test_{name}.py").write_text(_FILE)
    done = _run(tmp_path, workers)
    assert done.returncode == 0, done.stdout
    assert "24 passed" in done.stdout
    ran: dict[str, list[str]] = defaultdict(list)
    for worker in (tmp_path / "seen").iterdir():
        for line in worker.read_text().splitlines():
            ran[line].append(worker.name)
    assert len(ran) == 24
    assert all(len(where) == 1 for where in ran.values()), "once"
    for name in {line.split()[0] for line in ran}:
        assert len({ran[f"{name} {number}"][0] for number in range(3)}) == 1, "a file's cases in one process"
    if workers > 2:
        computed = {where[0] for line, where in ran.items() if line.startswith("test_c")}
        assert computed <= {f"gw{number}" for number in range((workers + 1) // 2)}, "no more at a time"


def test_only_files_that_wait_or_only_such_that_do_not(tmp_path: Path) -> None:
    for kind in "cw":
        folder = tmp_path / kind
        folder.mkdir()
        for number in range(4):
            (folder / f"test_{kind}{number}.py").write_text(_FILE)
        done = _run(folder, 3)
        assert done.returncode == 0, done.stdout
        assert "12 passed" in done.stdout


def test_a_test_that_hangs_ends_them_all(tmp_path: Path) -> None:
    (tmp_path / "test_c0.py").write_text("import time\ndef test(): time.sleep(1000)\n")
    (tmp_path / "test_w0.py").write_text("import time\ndef test(): time.sleep(1000)\n")
    for number in range(1, 4):
        (tmp_path / f"test_w{number}.py").write_text(_FILE)
    done = _run(tmp_path, 4, "--timeout", "5", "--timeout-method", "thread")
    assert done.returncode != 0
    assert "crashed" in done.stdout


def test_the_files_that_wait_are_there() -> None:
    assert [name for name in sorted(WAITING) if not (_ROOT / name).is_file()] == []
