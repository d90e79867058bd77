"""Record the sample that each DataLoader worker fetches, in small mapped files, so that a crash can name it."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.job.files import JobFiles

_RECORD = struct.Struct("=qq")


class AtWork:
    """One worker's record: its process, and the index of its sample. See Note [One writer a page].

    Args:
        folder: the job's.
        rank: the rank whose worker it is.
        name: a name that no other worker of this rank has at the same time. The next to have it takes the record over.
    """

    def __init__(self, folder: str, *, rank: int, name: str) -> None:
        fd = os.open(JobFiles(folder).worker(rank, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _RECORD.size)  # a full disk is an error here, not a SIGBUS later
            self._numbers = memoryview(mmap.mmap(fd, _RECORD.size)).cast("q")
        finally:
            os.close(fd)
        self._numbers[1] = -1
        self._numbers[0] = os.getpid()

    def note(self, index: int) -> None:
        """Note the sample that is fetched now. Under 0.1 µs."""
        self._numbers[1] = index


@dataclass(frozen=True)
class Fetching:
    """What a worker was doing."""

    rank: int
    #: The index of its sample (for a stream: its number in the worker's part of it), or None before the first.
    index: int | None


def processes(home: str | Path) -> set[int]:
    """Return the process ids of a job's workers, of all of its starts; of workers that replaced one another, the last
    one's.

    Args:
        home: the job's private folder.

    Raises:
        OSError: the records can't be read; another process may be removing the folder.
    """
    starts = [Path(home), *Path(home).glob("[0-9]*")]
    return {owner for folder in starts for _, owner, _ in _records(folder)}


def find(folder: str | Path, pid: int) -> Fetching | None:
    """Return what the worker with this process id was doing last, or None if it left no record."""
    for rank, owner, index in _records(folder):
        if owner == pid:
            return Fetching(rank, index if index >= 0 else None)
    return None


def _records(folder: str | Path) -> Iterator[tuple[int, int, int]]:
    """Yield the rank, process and index of each record; a worker that was killed while it made its file has none."""
    for rank, path in JobFiles(folder).workers():
        content = path.read_bytes()
        if len(content) == _RECORD.size:
            yield (rank, *_RECORD.unpack(content))
