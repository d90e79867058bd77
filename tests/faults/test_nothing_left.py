"""The launcher killed, or everything at once: no process, no shared memory, no port and no folder stays."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep import _proc
from tests.faults import jobs
from tests.launching import Running, gone_within, killed_afterwards, run, wait_for


def _training(folder: Path) -> bool:
    """Whether both ranks have taken a step, with batches from their workers."""
    return all(len(jobs.lines(folder, rank)) > 1 for rank in range(jobs.RANKS))


def _start(folder: Path, temporary: Path, *, cold: bool = False) -> Running:
    folder.mkdir()
    options = ["--workers", "2", "--slow", "0.005", "--epochs", "1000", "--save-every", "7"]
    return jobs.start_job(folder, *options, cold=cold, TMPDIR=str(temporary))


def _job_folders(temporary: Path) -> list[str]:
    return [path.name for path in temporary.iterdir() if path.name.startswith("lockstep-")]


def _listening(pids: set[int]) -> list[str]:
    """Ports that these processes listen at: lines of /proc/net/tcp whose socket is one of theirs."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            sockets.update(re.findall(r"socket:\[(\d+)\]", " ".join(_proc.open_files(pid))))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in sockets]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.campaign)])
def test_the_launcher_killed_with_workers_alive(tmp_path: Path, temporary: Path, kills: int) -> None:
    chance = random.Random(kills)
    workers = 0
    for number in range(kills):
        folder = tmp_path / f"run-{number}"
        with _start(folder, temporary) as job:
            wait_for(lambda: _training(folder), "training")  # noqa: B023  (called in this turn only)
            time.sleep(chance.uniform(0.0, 0.3))  # the moment is what is random here
            everyone = job.tree()
            workers += len(everyone) - 1 - jobs.RANKS
            assert _listening({*everyone, job.pid}) == [], "no port is opened on one machine"
            with killed_afterwards(everyone):
                os.kill(job.pid, signal.SIGKILL)
                assert gone_within(everyone, 2.0) == []
        assert _job_folders(temporary) == []
        assert jobs.left_in_shared_memory(everyone) == []
    assert workers >= kills, "DataLoader workers were alive when their launcher was killed"
    print(f"\n{kills} SIGKILLs of the launcher, {workers} DataLoader workers alive: nothing left")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.campaign)])
def test_everything_killed_at_once(tmp_path: Path, temporary: Path, kills: int) -> None:
    chance = random.Random(kills)
    killed: set[int] = set()
    abandoned = behind = 0
    for number in range(kills):
        folder = tmp_path / f"run-{number}"
        in_training = number % 2 == 1  # half of them; the others anywhere from the first moment on
        with _start(folder, temporary, cold=not in_training) as job:
            if in_training:
                wait_for(lambda: _training(folder), "training")  # noqa: B023
            time.sleep(chance.uniform(0.0, 1.0))
            everyone = [job.pid, *job.tree()]
            chance.shuffle(everyone)
            with killed_afterwards(everyone):
                for pid in everyone:
                    with suppress(ProcessLookupError):  # it died of another's end
                        os.kill(pid, signal.SIGKILL)
                assert gone_within(everyone, 2.0) == []
        killed.update(everyone)
        behind += len(jobs.left_in_shared_memory(everyone)) > 0
        abandoned += len(_job_folders(temporary)) > 0
        assert len(_job_folders(temporary)) <= 1, "each job removes what the one before could not"
    (tmp_path / "last.py").write_text("")
    assert run(["lockstep", "run", "-n", "1", "last.py"], tmp_path, TMPDIR=str(temporary)).code == 0
    assert _job_folders(temporary) == []
    assert jobs.left_in_shared_memory(killed) == []
    until = f"{abandoned} folders and {behind} pieces of workers' memory until the next job"
    print(f"\n{kills} jobs of {len(killed)} processes killed at once: nothing left ({until})")
