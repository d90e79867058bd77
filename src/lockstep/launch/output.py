"""Relay ranks' output to the terminal and to their logs, line by line, without losing or mixing a byte.

Only used where the watcher must see the output: with ``--all-output``, and for rank 0 with an explicit ``--log-dir``.
Otherwise rank 0 writes to the terminal and the others write to their logs, with nobody in between.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import time
from dataclasses import dataclass, field

#: Seconds that an unfinished line may keep other ranks' lines waiting, or stay unseen itself.
PATIENCE = 0.2
_CHUNK = 65536
#: A pipe that poll calls writable takes this much without blocking (PIPE_BUF).
_WRITE = 4096
#: Bytes waiting for a slow terminal before the ranks have to wait as well.
_FULL = 1 << 20


@dataclass(eq=False)
class Sink:
    """The watcher's standard output or error. Bytes wait here until poll says that they can be written."""

    fd: int
    backlog: bytearray = field(default_factory=bytearray)
    #: The rank that wrote the last line, if that line is not finished.
    owner: int | None = None
    #: True once the reader left.
    broken: bool = False

    def push(self, rank: int, prefix: bytes, data: bytes) -> None:
        """Append a rank's output, each line after its prefix; another rank's unfinished line is ended first."""
        if not data or self.broken:
            return
        if self.owner is not None and self.owner != rank:
            self.backlog += b"\n"
        if self.owner != rank:
            self.backlog += prefix
        body, end = (data[:-1], b"\n") if data.endswith(b"\n") else (data, b"")
        self.backlog += body.replace(b"\n", b"\n" + prefix) + end
        self.owner = None if end else rank

    def write(self) -> None:
        """Write what can be written without waiting."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self.backlog and poll.poll(0):
            try:
                del self.backlog[: os.write(self.fd, self.backlog[:_WRITE])]
            except (BrokenPipeError, OSError) as error:
                self.broken = True
                self.backlog.clear()
                if not isinstance(error, BrokenPipeError):  # else it was `| head`: the rest goes to the logs alone
                    print(f"lockstep: output can't be shown any more: {error}", file=sys.stderr)


@dataclass(eq=False)
class Source:
    """The reading end of a rank's pipe or pseudo-terminal."""

    fd: int
    rank: int
    sink: Sink
    #: Where every byte also goes, or None.
    log: int | None
    #: What each of its lines on the terminal begins with; empty: bytes are passed on as they come.
    prefix: bytes = b""
    #: Output that was not handed to the sink yet, and since when.
    held: bytearray = field(default_factory=bytearray)
    since: float = 0.0

    def read(self, now: float) -> bool:
        """Take what came; False at the end."""
        try:
            data = os.read(self.fd, _CHUNK)
        except OSError:
            data = b""  # a pseudo-terminal reports its end as an error
        self._write_log(data)
        if not self.held:
            self.since = now
        self.held += data
        return bool(data)

    def settle(self, now: float) -> None:
        """Hand over what may be shown: whole lines when no other rank's line is open; anything once it waited long."""
        late = now - self.since >= PATIENCE
        if not self.prefix or late:
            end = len(self.held)
        elif self.sink.owner in (None, self.rank):
            end = self.held.rfind(b"\n") + 1
        else:
            return
        if end:
            self.sink.push(self.rank, self.prefix, bytes(self.held[:end]))
            del self.held[:end]
            self.since = now

    def close(self) -> None:
        """Hand over the rest."""
        self.sink.push(self.rank, self.prefix, bytes(self.held))
        os.close(self.fd)
        if self.log is not None:
            os.close(self.log)

    def _write_log(self, data: bytes) -> None:
        while self.log is not None and data:
            try:
                data = data[os.write(self.log, data) :]
            except OSError as error:
                print(f"lockstep: rank {self.rank}'s log can't be written any more: {error}", file=sys.stderr)
                os.close(self.log)
                self.log = None


class Relay:
    """All sources and sinks of a job. It keeps ``selector`` waiting for what it can make use of."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sources: dict[int, Source] = {}
        self._sinks: dict[int, Sink] = {}
        self._watched: dict[int, int] = {}

    def add(self, fd: int, *, rank: int, sink: int, log: int | None, prefix: bytes = b"") -> None:
        """Relay from ``fd`` to the watcher's own ``sink`` and to ``log``; the relay closes ``fd`` and ``log``."""
        self._sources[fd] = Source(fd, rank, self._sinks.setdefault(sink, Sink(sink)), log, prefix)
        self._watch()

    @property
    def open(self) -> bool:
        """Whether output may still come, or waits to be written."""
        return bool(self._sources) or any(sink.backlog for sink in self._sinks.values())

    def pump(self, ready: set[int], now: float) -> None:
        """Read from the descriptors in ``ready``, and write what can be written without waiting."""
        for fd in ready.intersection(self._sources):
            self._take(fd, now)
        for source in self._sources.values():
            source.settle(now)
        for sink in self._sinks.values():
            sink.write()
        self._watch()

    def finish_sources(self) -> None:
        """Take what is left in the pipes of processes that have all ended, before others write to new ones."""
        for fd in list(self._sources):
            while fd in self._sources and _readable(fd):  # at the end it is readable, too
                self._take(fd, time.monotonic())
        self._watch()

    @property
    def due(self) -> float | None:
        """Seconds until output that is held back must be shown, or None if there is none."""
        return PATIENCE / 2 if any(source.held for source in self._sources.values()) else None

    def close(self) -> None:
        """Let go of everything, relayed or not."""
        for fd in self._watched:
            self._selector.unregister(fd)
        for source in self._sources.values():
            source.close()
        self._watched.clear()
        self._sources.clear()

    def _take(self, fd: int, now: float) -> None:
        """Read once from a source; at its end let go of it."""
        source = self._sources[fd]
        if source.read(now):
            return
        if self._watched.pop(fd, None) is not None:
            self._selector.unregister(fd)
        del self._sources[fd]
        source.close()

    def _watch(self) -> None:
        """Wait for room where output waits, and for output where there is room."""
        full = {sink.fd for sink in self._sinks.values() if len(sink.backlog) > _FULL}
        wanted = {fd: selectors.EVENT_READ for fd, source in self._sources.items() if source.sink.fd not in full}
        wanted |= {sink.fd: selectors.EVENT_WRITE for sink in self._sinks.values() if sink.backlog}
        for fd in self._watched.keys() - wanted.keys():
            self._selector.unregister(fd)
        for fd in wanted.keys() - self._watched.keys():
            self._selector.register(fd, wanted[fd])
        self._watched = wanted


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
