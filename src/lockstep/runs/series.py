"""How far the ranks have come, second by second, in a file that is readable whenever it was cut off.

Note [A series]
~~~~~~~~~~~~~~~
A line of JSON says what the rows are, and rows of equal size follow, float32, little-endian: the seconds since the run
began, then :data:`COLUMNS` for each rank. All but the memory is counted from the start of the ranks, so any selection
of the rows is a series as well: where there are :data:`MOST` of them, every other one goes, and from then on rows come
half as often. A run of a year is as large as one of two hours. What is left of a row at the end of the file, where a
launcher was killed as it wrote, is no row.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep._files import append_whole, write_whole
from lockstep.job.page import Phase

#: What there is of each rank, in this order: optimizer steps, samples, bytes of memory, seconds by phase, seconds for
#: which others waited while it worked, seconds of pauses of Python's garbage collector, tokens. Readers go by the
#: names in the file: earlier ones lack some of the last ones.
COLUMNS = ("steps", "samples", "memory", *(phase.name.lower() for phase in Phase), "held", "collected", "tokens")
#: The maximum number of rows in a file.
MOST = 4096
#: The part of the time between two rows that one may come early: the caller's are not exact.
_SLACK = 0.1
#: The format's own version, for readers to come.
VERSION = 1


class SeriesWriter:
    """Writes the series of one start of a machine's ranks.

    Args:
        path: of the file (0600); what is there is replaced.
        ranks: of this machine.
        interval: seconds between two rows at first.
    """

    def __init__(self, path: Path, ranks: Sequence[int], *, interval: float = 1.0) -> None:
        self._path = path
        self._head = json.dumps({"series": VERSION, "ranks": list(ranks), "columns": COLUMNS}).encode() + b"\n"
        self._size = 4 * (1 + len(ranks) * len(COLUMNS))
        self._interval, self._slack, self._due, self._count = interval, _SLACK * interval, 0.0, 0
        #: The last row, if it was not written; None: it was.
        self._last: bytes | None = None
        write_whole(path, self._head)

    def add(self, seconds: float, ranks: Sequence[Sequence[float]]) -> None:
        """Add a row, if it is time for one.

        Args:
            seconds: since the run began.
            ranks: :data:`COLUMNS` of each rank.
        """
        row = array("f", [seconds])
        for values in ranks:
            row.extend(values)
        self._last = _little(row).tobytes()
        if seconds < self._due:
            return
        self._due = seconds + self._interval - self._slack
        self.end()
        if self._count >= MOST:
            self._halve()

    def end(self) -> None:
        """Write what was added last, if it was too early for a row: nothing comes after it."""
        if self._last is None:
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            append_whole(fd, self._last, end=len(self._head) + self._count * self._size)
        finally:
            os.close(fd)
        self._last = None
        self._count += 1

    def _halve(self) -> None:
        rows = self._path.read_bytes()[len(self._head) :]
        kept = [rows[start : start + self._size] for start in range(0, len(rows), 2 * self._size)]
        write_whole(self._path, self._head + b"".join(kept))
        self._count, self._interval = len(kept), 2 * self._interval


@dataclass(frozen=True)
class Series:
    """A series, read."""

    ranks: tuple[int, ...]
    #: Seconds since the run began, of each row.
    times: tuple[float, ...]
    #: Column -> float [rows][ranks].
    columns: dict[str, list[tuple[float, ...]]]

    @classmethod
    def read(cls, path: Path, *, most: int | None = None) -> Series:
        """Read a file.

        Args:
            path: the file.
            most: rows to read at most, evenly chosen, and always the last one; 2 or more. None: all.

        Raises:
            ValueError: it is not a series, or of a later version.
        """
        with open(path, "rb") as file:
            head = file.readline()
            ranks, names = _parse(path, head)
            size = 4 * (1 + len(ranks) * len(names))
            count = (os.fstat(file.fileno()).st_size - len(head)) // size
            data = b"".join(_chosen(file, len(head), size, count, most))
        values = array("f")
        values.frombytes(data)
        rows, size = _little(values), size // 4
        places = [slice(1 + place, None, len(names)) for place in range(len(names))]
        starts = range(0, len(rows), size)
        columns = {
            name: [tuple(rows[start : start + size][place]) for start in starts]
            for name, place in zip(names, places, strict=True)
        }
        return cls(ranks, tuple(rows[start] for start in starts), columns)


def _parse(path: Path, head: bytes) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks and the columns that the first line of a file names."""
    try:
        about = json.loads(head)
        version, ranks, names = about["series"], tuple(map(int, about["ranks"])), tuple(map(str, about["columns"]))
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not a series of a run") from None
    if not ranks:
        raise ValueError(f"{path}: a series of no rank")
    if version != VERSION or not head.endswith(b"\n"):
        raise ValueError(f"{path}: a series of version {version}, and this lockstep reads version {VERSION}")
    return ranks, names


def _chosen(file: BinaryIO, start: int, size: int, count: int, most: int | None) -> Iterator[bytes]:
    """Yield ``most`` of the ``count`` rows, or all of them."""
    if most is None or count <= most:
        yield file.read(count * size)
        return
    for place in range(most):
        file.seek(start + size * (place * (count - 1) // (most - 1)))
        yield file.read(size)


def _little(values: array[float]) -> array[float]:
    """Return the values as a little-endian machine has them."""
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return values
