"""Write down a rank's events, with a clock, while its steps are traced, in a file that others read.

Note [Events outlive their rank]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Events go to a mapped file of the job's private folder, each as a record of a fixed size: its rank may be killed at any
instruction, and what it had written is there. A record is filled before it counts: its time is what makes it one, and
a place that was never written has none. Names are lines of a second file, written when a name is first used; a record
has its number. The file has room for a number of events that follows from the number of steps, so a window of any kind
of steps costs a known amount of memory; what does not fit is counted.

All times are those of CLOCK_MONOTONIC, which the processes of a machine share. A rank on a GPU runs ahead of it, so a
record also says when the GPU came to what the rank had queued by then: Note [Two clocks] in device.py.
"""

from __future__ import annotations

import enum
import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import get_ident
from time import monotonic_ns, time_ns
from typing import Any

from lockstep.job.device import Device, DeviceClock
from lockstep.job.files import JobFiles

#: Time, kind, thread, name, two numbers that depend on the kind, and the time at which the GPU reached the event.
_RECORD = struct.Struct("=7q")
_ON_DEVICE, _ON_DEVICE_AT = struct.Struct("=q"), 6 * 8
_HEAD = 8 * 8
_VERSION = 2
#: Room for events: the number for each step, then the bounds on the total.
_EVENTS_PER_STEP, _LEAST, _MOST = 512, 1 << 14, 1 << 18
#: The most names that are kept apart, and the most characters of each.
_NAMES, _LONGEST = 4096, 400


class EventKind(enum.IntEnum):
    """What an event says."""

    #: A phase begins, ``number``; the one before ends.
    PHASE = 1
    #: An optimizer step was taken: the ``number``-th since the ranks were started.
    STEP = 2
    #: A span begins on this thread, inside the spans that have begun there and not ended.
    BEGIN = 3
    END = 4
    #: The thread is called by the name from now on.
    THREAD = 5
    #: An event happens on this thread, or has happened.
    MARK = 6


class Head(enum.IntEnum):
    """The numbers at the beginning of the file."""

    VERSION = 0
    PID = 1
    #: The times at which the window was opened and closed; 0: it was not.
    OPENED = 2
    CLOSED = 3
    #: The number of events for which there was no room.
    LOST = 4
    #: Nanoseconds by which the wall clock was ahead of CLOCK_MONOTONIC when the window was opened.
    WALL = 5
    #: Optimizer steps taken when the window was opened.
    STEPS = 6


class EventWriter:
    """Writes the events of this process, as Note [Events outlive their rank] has it.

    Args:
        folder: the job's.
        rank: of this process.
        steps: that are to be traced.
    """

    def __init__(self, folder: str | Path, *, rank: int, steps: int) -> None:
        files = JobFiles(folder)
        self._capacity = min(max(_EVENTS_PER_STEP * steps, _LEAST), _MOST)
        size = _HEAD + self._capacity * _RECORD.size
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(files.trace(rank), flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk is an error here, not a SIGBUS later
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        #: The file of names, which stays open while names may come: opening it for each takes longer than an event.
        self._names_fd = os.open(files.trace_names(rank), flags, 0o600)
        self._names_end = 0
        self._close_names = weakref.finalize(self, os.close, self._names_fd)
        self._close_names.atexit = False  # names may come until the very end
        self._head = memoryview(self._memory)[:_HEAD].cast("q")
        self._head[Head.VERSION], self._head[Head.PID] = _VERSION, os.getpid()
        self._places = count()
        self._names: dict[str, int] = {}
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._clock: DeviceClock | None = None

    def follow(self, device: Device) -> None:
        """Record with each event from now on when the GPU came to it. Waits until the GPU has done all work so far."""
        self._clock = DeviceClock.begin(device)

    def open(self, *, steps: int) -> None:
        """Open the window; ``steps`` optimizer steps were taken before."""
        self._head[Head.WALL] = time_ns() - monotonic_ns()
        self._head[Head.STEPS] = steps
        self._head[Head.OPENED] = monotonic_ns()

    def close(self) -> None:
        """Close the window: what is recorded afterwards counts as outside of it. Waits for the GPU."""
        clock, self._clock = self._clock, None
        for place, at in () if clock is None else clock.read():
            _ON_DEVICE.pack_into(self._memory, _HEAD + place * _RECORD.size + _ON_DEVICE_AT, at)
        self._head[Head.CLOSED] = monotonic_ns()
        with self._lock:
            self._names_fd = -1  # another file may have this number from now on
            self._close_names()

    def name(self, name: str, category: str, **about: Any) -> int:
        """Return the number of a name with facts about it, in JSON's types; other facts make another name."""
        key = json.dumps({"name": name[:_LONGEST], "cat": category, **about})
        number = self._names.get(key)
        return self._add_name(key) if number is None else number

    def add(
        self, kind: EventKind | int, name: int = 0, number: int = 0, size: int = 0, *, at: int | None = None
    ) -> None:
        """Record an event that happens now, or happened ``at`` a time (nanoseconds, CLOCK_MONOTONIC)."""
        thread = get_ident()
        if thread not in self._threads:
            self._threads.add(thread)
            self.add(EventKind.THREAD, self.name(_name_of(thread), "thread"))
        place = next(self._places)
        if place < self._capacity:
            where = _HEAD + place * _RECORD.size
            _RECORD.pack_into(self._memory, where, at or monotonic_ns(), kind, thread, name, number, size, 0)
            if self._clock is not None and at is None:
                self._clock.mark(place)
        else:
            self._head[Head.LOST] += 1

    def begin(self, name: int, number: int = 0, size: int = 0) -> None:
        """Record that something begins on this thread; :meth:`end` must follow."""
        self.add(_BEGIN, name, number, size)

    def end(self) -> None:
        """Record that what began last on this thread is over."""
        self.add(_END)

    def _add_name(self, key: str) -> int:
        with self._lock:
            if len(self._names) >= _NAMES:
                return 0
            number = self._names.get(key)
            if number is None:
                line = key.encode() + b"\n"
                try:
                    written = os.pwrite(self._names_fd, line, self._names_end)
                except OSError:  # a full disk costs the trace a name, and the training nothing
                    return 0
                if written < len(line):  # it is full now; the next name is written over this part of one
                    return 0
                self._names_end += written
                number = self._names[key] = len(self._names) + 1
            return number


_BEGIN, _END = int(EventKind.BEGIN), int(EventKind.END)
_KINDS = frozenset(EventKind)


def _name_of(ident: int) -> str:
    # (threading.current_thread() would leave a stand-in behind for a thread that is not Python's own.)
    for thread in threading.enumerate():
        if thread.ident == ident:
            return "main" if thread is threading.main_thread() else thread.name
    return "a thread of torch's"


@dataclass(frozen=True)
class Event:
    """An event, read."""

    #: The time in nanoseconds on CLOCK_MONOTONIC.
    at: int
    kind: EventKind
    thread: int
    #: The name and its data, if the kind has one.
    about: dict[str, Any]
    number: int
    size: int
    #: The time at which the GPU reached the event, on the same clock; 0: unknown.
    device: int = 0


@dataclass(frozen=True)
class RankTrace:
    """What one rank has recorded."""

    rank: int
    pid: int
    #: The times at which the window was opened and closed; None: the rank did not get that far.
    opened: int
    closed: int | None
    #: Optimizer steps taken when the window was opened.
    steps: int
    lost: int
    #: Nanoseconds by which the wall clock was ahead of CLOCK_MONOTONIC.
    wall: int
    #: The events in order of time.
    events: list[Event]

    @classmethod
    def read(cls, folder: str | Path, rank: int) -> RankTrace | None:
        """Return what a rank has recorded so far; None: its window was not opened."""
        files = JobFiles(folder)
        head = read_head(folder, rank)
        if head is None or not head[Head.OPENED]:
            return None
        records = files.trace(rank).read_bytes()[_HEAD:]
        names: list[dict[str, Any]] = [{"name": "…", "cat": "other"}]
        lines = files.trace_names(rank).read_bytes().split(b"\n")
        names += [json.loads(line) for line in lines[:-1]]  # text behind the last line break is not a whole line
        whole = len(records) // _RECORD.size * _RECORD.size
        events = []
        for at, kind, thread, name, number, size, device in _RECORD.iter_unpack(records[:whole]):
            if at and kind in _KINDS:
                about = names[name if name < len(names) else 0]
                events.append(Event(at, EventKind(kind), thread, about, number, size, device))
        events.sort(key=lambda event: event.at)
        return cls(
            rank,
            head[Head.PID],
            head[Head.OPENED],
            head[Head.CLOSED] or None,
            head[Head.STEPS],
            head[Head.LOST],
            head[Head.WALL],
            events,
        )


def read_head(folder: str | Path, rank: int) -> tuple[int, ...] | None:
    """Return the numbers at the beginning of a rank's file, by :class:`Head`; None: there is no file yet.

    Raises:
        OSError: it can't be read.
    """
    try:
        with open(JobFiles(folder).trace(rank), "rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return None
    numbers = struct.unpack("=8q", head) if len(head) == _HEAD else (0,) * 8
    return numbers if numbers[Head.VERSION] == _VERSION else None


def is_over(folder: str | Path, rank: int) -> bool:
    """Return whether a rank's window was opened and closed, as far as that can be seen at this moment."""
    try:
        head = read_head(folder, rank)
    except OSError:
        return False  # it is asked again
    return head is not None and bool(head[Head.CLOSED])


def remove(folder: str | Path, ranks: Iterable[int]) -> None:
    """Remove what these ranks have recorded, which must not be read afterwards."""
    files = JobFiles(folder)
    for rank in ranks:
        for path in (files.trace(rank), files.trace_names(rank)):
            path.unlink(missing_ok=True)


# A loader's workers --------------------------------------------------------------------------------------------------

#: The begin and end of the making of a batch, the position of its first sample in the epoch, its number of samples.
_BATCH = struct.Struct("=4q")
#: The number of last batches of a worker that are kept.
_BATCHES = 4096


class BatchTimes:
    """Writes down when a loader's worker made which batch, until its rank's window is over.

    Args:
        folder: the job's.
        rank: the rank whose worker it is.
        name: as for :class:`~lockstep.job.workers.AtWork`.
    """

    def __init__(self, folder: str | Path, *, rank: int, name: str) -> None:
        self._folder, self._rank = folder, rank
        size = _BATCHES * _BATCH.size
        fd = os.open(
            JobFiles(folder).trace_worker(rank, name, os.getpid()), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._made = 0
        self._over = False

    def add(self, begun: int, position: int, samples: int) -> None:
        """Record a batch that was begun at ``begun`` (nanoseconds, CLOCK_MONOTONIC) and is made now."""
        if self._over or (self._made >= _BATCHES and is_over(self._folder, self._rank)):
            self._over = True  # further batches would overwrite those of the window
            return
        at = self._made % _BATCHES * _BATCH.size
        _BATCH.pack_into(self._memory, at, begun, monotonic_ns(), position, samples)
        self._made += 1


@dataclass(frozen=True)
class WorkerBatch:
    """A batch that a worker has made."""

    begun: int
    ended: int
    position: int
    samples: int


def batches(folder: str | Path, rank: int) -> dict[str, list[WorkerBatch]]:
    """Return what the workers of a rank have made, by their names, in order of time."""
    found: dict[str, list[WorkerBatch]] = {}
    for path in sorted(JobFiles(folder).trace_workers(rank)):
        records = path.read_bytes()
        whole = len(records) // _BATCH.size * _BATCH.size
        made = [WorkerBatch(*numbers) for numbers in _BATCH.iter_unpack(records[:whole]) if numbers[0]]
        _, _, loader, worker, pid = path.name.rsplit("-", 4)
        found[f"worker {worker} of loader {loader} ({pid})"] = sorted(made, key=lambda batch: batch.begun)
    return found
