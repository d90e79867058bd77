"""Check the folder that a run writes to: space, permissions, and how long the disk takes until data is durable."""

from __future__ import annotations

import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep import _proc
from lockstep.text import as_duration, as_size
from lockstep.tools.doctor.checks import CheckTask
from lockstep.tools.doctor.findings import Finding, Problem, ok, warning, wrong

_MIB = 1 << 20
#: Free bytes below which no checkpoint fits, and below which one soon won't.
_NONE, _LITTLE = 64 * _MIB, 1 << 30
_FEW_FILES = 1000
#: Seconds that a megabyte may take.
_SLOW = 0.25
_REPEATS = 5


def check_folder(task: CheckTask) -> Iterator[Finding]:
    """Check the folder that a run writes to, or in which it would be made. The test file has no name."""
    folder = task.folder.absolute()
    there = nearest(folder)
    name = str(folder) if there == folder else f"{there}, where {folder.relative_to(there)} would be made,"
    if not there.is_dir():
        yield wrong(Problem.NOT_A_FOLDER, "folder", f"{there} is not a folder", "name another with --folder")
        return
    try:
        durations = _write(there)
        locks = _locks(there)
    except OSError as error:
        yield wrong(
            Problem.FOLDER_NOT_WRITABLE,
            "folder",
            f"nothing can be written to {name} ({error.strerror})",
            "name another with --folder, free space, or get write permission there",
        )
        return
    fs, kind = os.statvfs(there), file_system(there)
    free = fs.f_bavail * fs.f_frsize
    if free < _NONE:
        yield wrong(
            Problem.FOLDER_FULL, "folder", f"{name} has {as_size(free)} left", "free space: no checkpoint fits there"
        )
    elif free < _LITTLE:
        yield warning(
            Problem.FOLDER_NEARLY_FULL,
            "folder",
            f"{name} has {as_size(free)} left",
            "free space: a save writes the new checkpoint before it removes an old one",
        )
    else:
        yield ok("folder", f"{as_size(free)} free in {name.rstrip(',')}" + (f"; {kind}" if kind else ""))
    if fs.f_files > 0 and fs.f_favail < _FEW_FILES:
        yield warning(
            Problem.FOLDER_FEW_FILES_LEFT,
            "folder",
            f"{name} has room for {fs.f_favail} more files (df -i)",
            "remove files there",
        )
    if kind in ("tmpfs", "ramfs"):
        yield warning(
            Problem.FOLDER_IN_MEMORY, "folder",
            f"{name} is in memory ({kind}): what is saved there is lost when the machine restarts",
            "name a folder on a disk with --folder",
        )  # fmt: skip
    if not locks:
        yield warning(
            Problem.FOLDER_WITHOUT_LOCKS, "folder",
            f"{name} is on a file system without locks (flock): a second job there is not refused",
            "use another file system, or one job at a time",
        )  # fmt: skip
    took = statistics.median(durations)
    what = f"a megabyte is on the disk after {as_duration(took)} (fsync)"
    if took > _SLOW:
        yield warning(
            Problem.DISK_SLOW, "disk", what, "save with async_save (docs/checkpoints.md), or to a faster disk"
        )
    else:
        yield ok("disk", what)


def nearest(folder: Path) -> Path:
    """Return a folder, or if it does not exist yet the one in which it would be made."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on; empty if the kernel does not say."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _proc.text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""


def _write(folder: Path) -> list[float]:
    """Write a megabyte to a file without a name some times, and return the seconds until it was on the disk."""
    durations = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_REPEATS):
            file.seek(0)
            start = time.perf_counter()
            data = memoryview(os.urandom(_MIB))
            while data:  # where only a part has room, the next write raises the error
                data = data[os.write(file.fileno(), data) :]
            os.fsync(file.fileno())
            durations.append(time.perf_counter() - start)
    return durations


def _locks(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # another process holds it
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
