"""Which sample each DataLoader worker has in hand: small mapped files in the job's folder, for when one dies of it."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("=qq")
_PREFIX = "worker-"


class AtWork:
    """One worker's record: its process, and the index of its sample. See Note [One writer a slot].

    Args:
        folder: the job's.
        rank: whose worker it is.
        name: one that no other worker of this rank has at the same time. The next to have it takes the record over.
    """

    def __init__(self, folder: str, *, rank: int, name: str) -> None:
        path = os.path.join(folder, f"{_PREFIX}{rank}-{name}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _RECORD.size)  # a full disk is an error here, not a SIGBUS later
            self._numbers = memoryview(mmap.mmap(fd, _RECORD.size)).cast("q")
        finally:
            os.close(fd)
        self._numbers[1] = -1
        self._numbers[0] = os.getpid()

    def note(self, index: int) -> None:
        """**Local.** The sample that is fetched now. Under 0.1 µs."""
        self._numbers[1] = index


@dataclass(frozen=True)
class Fetching:
    """What a worker was doing."""

    rank: int
    #: The index of its sample (for a stream: its number in the worker's part of it), or None before the first.
    index: int | None


def find(folder: str | Path, pid: int) -> Fetching | None:
    """**Local.** What the worker with this process id was doing last, or None if it left no record."""
    for path in Path(folder).glob(f"{_PREFIX}*"):
        owner, index = _RECORD.unpack(path.read_bytes())
        if owner == pid:
            rank = int(path.name.removeprefix(_PREFIX).partition("-")[0])
            return Fetching(rank, index if index >= 0 else None)
    return None
