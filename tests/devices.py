"""A GPU whose clock the test holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.job import flight
from lockstep.job.device import Event
from lockstep.job.page import Pages


class Passed:
    """An event: where it lies in the stream, in milliseconds of work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at = -1.0

    def query(self) -> bool:
        return self._stream.done >= self.at >= 0

    def elapsed_time(self, end_event: Event) -> float:
        assert isinstance(end_event, Passed)
        assert self.query()
        assert end_event.query(), "nothing is read that has not passed"
        return end_event.at - self.at

    def synchronize(self) -> None:
        self._stream.done = max(self._stream.done, self.at)


@contextmanager
def own_page(folder: Path) -> Iterator[Pages]:
    """Let this process be rank 1 of 2, and write a page; yield the pages of both."""
    before = flight.current
    pages = Pages(folder, 2)
    with pages.page(1) as page:
        own = flight.use(flight.Flight(page, rank=1, pages=pages))
        yield pages
        flight.use(before)
        own._cells.release()
    pages.close()


class Stream:
    """A device that works off what it is given when the test says so."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0
        self.made = self.recorded = 0
        self.captures = False

    def event(self) -> Event:
        self.made += 1
        return Passed(self)

    def record(self, event: Event) -> None:
        assert isinstance(event, Passed)
        event.at = self.queued
        self.recorded += 1

    def can_record(self) -> bool:
        return not self.captures

    def memory(self) -> tuple[int, int]:
        return 3 << 30, 80 << 30
