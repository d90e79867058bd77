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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.errors import LaunchError
from lockstep.job.workers import AtWork, processes
from lockstep.launch.folders import JobFolder, hold
from tests.launching import LIMIT

_WORKER = "import sys; from lockstep.job.workers import AtWork; AtWork(sys.argv[1], rank=0, name='0-1').note(7)"


#: Makes the files whose paths it reads, and keeps them mapped.
_MAPS = """
import mmap, sys
mapped = []
for line in sys.stdin:
    with open(line.rstrip("\\n"), "x+b") as file:
        file.truncate(1)
        mapped.append(mmap.mmap(file.fileno(), 1))
    print(flush=True)
"""


@pytest.fixture
def piece() -> Iterator[Callable[..., Path]]:
    """Makes shared memory as torch's workers do. A process has it mapped, or tests beside these take it for theirs."""
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([sys.executable, "-IS", "-c", _MAPS], stdin=pipe, stdout=pipe, text=True) as mapping,
        ExitStack() as undo,
    ):

        def make(pid: int, *, count: int = 1) -> Path:
            assert mapping.stdin is not None
            assert mapping.stdout is not None
            made = Path(f"/dev/shm/torch_{pid}_{os.getpid()}_{count}")
            undo.callback(made.unlink, missing_ok=True)
            print(made, file=mapping.stdin, flush=True)
            assert mapping.stdout.readline() == "\n"
            return made

        yield make


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
    assert worker.wait(LIMIT) == 0
    return folder, worker.pid


def test_a_dead_jobs_folder_goes_with_what_its_workers_left_in_shared_memory(
    home: Path, piece: Callable[..., Path]
) -> None:
    folder, dead = _left_by_a_dead_job(home)
    (folder / "worker-1-0-0").touch()  # its worker was killed while it made this file
    AtWork(str(folder), rank=0, name="0-0")  # this process: somebody who has a dead worker's number now
    pieces = [piece(pid) for pid in (dead, os.getpid(), dead + 1_000_000)]
    made = JobFolder()
    assert not folder.exists()
    assert [each.exists() for each in pieces] == [False, True, True], "others' memory is not touched"
    made.remove()
    assert list(home.iterdir()) == []


def test_another_process_with_the_number_of_a_dead_worker_keeps_what_is_its_own(
    home: Path, piece: Callable[..., Path]
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lockstep-job-", dir=home))
    with subprocess.Popen(["sleep", "60"]) as other:  # as if it had got the number of a worker that ended long before
        try:
            AtWork(str(folder), rank=0, name="0-1")
            record = next(path for path in folder.rglob("*") if path.is_file())
            record.write_bytes(struct.pack("=qq", other.pid, 7))
            assert processes(folder) == {other.pid}
            its_own, the_workers = piece(other.pid), piece(other.pid, count=2)
            os.utime(the_workers, (time.time() - 60,) * 2)
            JobFolder().remove()
            assert (its_own.exists(), the_workers.exists(), folder.exists()) == (True, False, False)
        finally:
            other.kill()


def test_what_that_process_opens_and_closes_meanwhile_keeps_nothing(home: Path, piece: Callable[..., Path]) -> None:
    """Its descriptors go while they are looked at."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-job-", dir=home))
    AtWork(str(folder), rank=0, name="0-1")
    (record,) = (path for path in folder.rglob("*") if path.is_file())
    busy = "import os\nprint(flush=True)\nwhile True: os.close(os.open('/dev/null', os.O_RDONLY))"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            pieces = [piece(other.pid, count=count) for count in range(100)]
            assert other.stdout is not None
            other.stdout.readline()
            record.write_bytes(struct.pack("=qq", other.pid, 7))
            for each in pieces:
                os.utime(each, (time.time() - 60,) * 2)
            JobFolder().remove()
            assert [each.name for each in pieces if each.exists()] == []
        finally:
            other.kill()


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX], ids=["by-its-job", "by-who-removes-it"])
def test_a_folder_that_is_held_stays(how: int, home: Path, piece: Callable[..., Path]) -> None:
    folder, dead = _left_by_a_dead_job(home)
    left, held = piece(dead), os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, how)
        made = JobFolder()
        assert folder.exists()
        assert left.exists()
        made.remove()
    finally:
        os.close(held)


def test_a_folder_is_held_by_its_maker_and_by_others_beside(home: Path) -> None:
    made = JobFolder()
    beside = hold(made.path, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as the zygote does
    assert beside is not None
    os.close(made._lock)  # the maker was killed
    JobFolder().remove()
    assert Path(made.path).is_dir()
    os.close(beside)
    JobFolder().remove()
    assert list(home.iterdir()) == []


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
