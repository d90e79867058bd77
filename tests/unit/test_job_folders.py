"""What a job that was killed with all its processes has left is removed by the next one, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lockstep.errors import LaunchError
from lockstep.job.workers import AtWork, processes
from lockstep.launch.folders import JobFolder

_WORKER = "import sys; from lockstep.job.workers import AtWork; AtWork(sys.argv[1], rank=0, name='0-1').note(7)"


def _piece(pid: int, *, count: int = 1) -> Path:
    piece = Path(f"/dev/shm/torch_{pid}_{os.getpid()}_{count}")
    piece.touch(0o600)
    return piece


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the jobs' folders are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _left_by_a_dead_job(home: Path) -> tuple[Path, int]:
    """A folder that nobody holds, and a dead worker that has its record in it."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-job-"))
    assert folder.parent == home
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, str(folder)])
    assert worker.wait(30) == 0
    return folder, worker.pid


def test_a_dead_jobs_folder_goes_with_what_its_workers_left_in_shared_memory(home: Path) -> None:
    folder, dead = _left_by_a_dead_job(home)
    (folder / "worker-1-0-0").touch()  # its worker was killed while it made this file
    AtWork(str(folder), rank=0, name="0-0")  # this process: somebody who has a dead worker's number now
    pieces = [_piece(pid) for pid in (dead, os.getpid(), dead + 1_000_000)]
    try:
        made = JobFolder()
        assert not folder.exists()
        assert [piece.exists() for piece in pieces] == [False, True, True], "others' memory is not touched"
        made.remove()
        assert list(home.iterdir()) == []
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)


def test_another_process_with_the_number_of_a_dead_worker_keeps_what_is_its_own(home: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lockstep-job-", dir=home))
    with subprocess.Popen(["sleep", "60"]) as other:  # as if it had got the number of a worker that ended long before
        try:
            AtWork(str(folder), rank=0, name="0-1")
            record = next(path for path in folder.rglob("*") if path.is_file())
            record.write_bytes(struct.pack("=qq", other.pid, 7))
            assert processes(folder) == {other.pid}
            its_own, the_workers = _piece(other.pid), _piece(other.pid, count=2)
            os.utime(the_workers, (time.time() - 60,) * 2)
            JobFolder().remove()
            assert (its_own.exists(), the_workers.exists(), folder.exists()) == (True, False, False)
        finally:
            other.kill()
            its_own.unlink()


def test_what_that_process_opens_and_closes_meanwhile_keeps_nothing(home: Path) -> None:
    """Its descriptors go while they are looked at."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-job-", dir=home))
    AtWork(str(folder), rank=0, name="0-1")
    (record,) = (path for path in folder.rglob("*") if path.is_file())
    busy = "import os\nprint(flush=True)\nwhile True: os.close(os.open('/dev/null', os.O_RDONLY))"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        pieces = [_piece(other.pid, count=count) for count in range(100)]
        try:
            assert other.stdout is not None
            other.stdout.readline()
            record.write_bytes(struct.pack("=qq", other.pid, 7))
            for piece in pieces:
                os.utime(piece, (time.time() - 60,) * 2)
            JobFolder().remove()
            assert [piece.name for piece in pieces if piece.exists()] == []
        finally:
            other.kill()
            for piece in pieces:
                piece.unlink(missing_ok=True)


def test_a_folder_that_is_held_stays(home: Path) -> None:
    folder, dead = _left_by_a_dead_job(home)
    piece, held = _piece(dead), os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        made = JobFolder()
        assert folder.exists()
        assert piece.exists()
        made.remove()
    finally:
        os.close(held)
        piece.unlink()


def test_folders_that_other_jobs_remove_meanwhile(home: Path) -> None:
    """Jobs begin and end beside each other: what was there a moment ago may be gone, and is nobody's failure."""
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            shutil.rmtree(tempfile.mkdtemp(prefix="lockstep-job-"), ignore_errors=True)

    others = [threading.Thread(target=come_and_go) for _ in range(2)]
    for each in others:
        each.start()
    try:
        for _ in range(500):
            JobFolder().remove()
    finally:
        over.set()
        for each in others:
            each.join()
    assert list(home.iterdir()) == []


def test_a_place_where_no_folder_can_be_made_or_locked_is_an_error_that_names_another(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tempfile, "tempdir", "/proc")
        with pytest.raises(LaunchError, match=r"no folder for the job's files: No such file .*; name .* with TMPDIR"):
            JobFolder()

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", without_locks)
        with pytest.raises(LaunchError, match=r"no folder for the job's files: No locks available; .* with TMPDIR"):
            JobFolder()
    assert list(home.iterdir()) == []
