"""Where the ranks' output goes: the terminal, a log for each rank, or both through a relay.

A machine's first rank (with ``--hosts``, rank 0 alone) has the terminal and the others write to their logs, directly.
The relay is only used where the launcher must see the output: with ``--all-output``, and for the first rank with an
explicit ``--log-dir``. It passes lines on without losing or mixing a byte.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import selectors
import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep._files import describe as describe_error
from lockstep.job import terminal
from lockstep.job.notes import unwritten
from lockstep.launch.console import say
from lockstep.launch.logs import LogFolder
from lockstep.launch.spec import JobSpec, Output

# Which stream leads where --------------------------------------------------------------------------------------------


class Streams:
    """Opens the streams of a node's ranks, and remembers the pseudo-terminal if there is one."""

    def __init__(self, spec: JobSpec, logs: LogFolder, relay: Relay) -> None:
        self._spec = spec
        self._logs = logs
        self._relay = relay
        self._pty: int | None = None
        #: Local rank -> rank, in the attempt that was started last.
        self._ranks: dict[int, int] = {}

    def open(self, local_rank: int, rank: int) -> list[int]:
        """Open standard input, output and error for one rank; the caller passes them on and closes them.

        Returns an empty list if the rank shares the launcher's own.

        Raises:
            LaunchError: a log can't be opened.
        """
        spec = self._spec
        self._ranks[local_rank] = rank
        if self._is_first(local_rank):
            if spec.log_dir is None and spec.output is not Output.ALL:
                return []
            return self._relayed(rank)
        nothing = os.open(os.devnull, os.O_RDONLY)
        if spec.output is Output.SHARED and spec.log_dir is None:
            return [nothing, os.dup(1), os.dup(2)]
        log = self._logs.open(rank)
        if spec.output is Output.FIRST:
            return [nothing, log, os.dup(log)]  # one open file: what goes to both streams stays in order
        prefix = f"[{rank}] ".encode()
        reading, output = os.pipe()
        self._relay.add(reading, rank=rank, sink=1, log=log, prefix=prefix)
        if error_sink() == 1:
            return [nothing, output, os.dup(output)]  # one pipe: what goes to both streams stays in order
        reading, error = os.pipe()
        self._relay.add(reading, rank=rank, sink=2, log=os.dup(log), prefix=prefix)
        return [nothing, output, error]

    def log(self, local_rank: int) -> Path | None:
        """Return this rank's log, or None if it has none, or was not started."""
        if local_rank not in self._ranks or not self._logged(local_rank):
            return None
        return self._logs.log(self._ranks[local_rank])

    def shown(self, local_rank: int) -> bool:
        """Return whether the user sees this rank's standard error."""
        return self._is_first(local_rank) or self._spec.output is not Output.FIRST

    def unseen(self) -> list[int]:
        """Return the ranks that have written only to a log in a folder that the user did not choose."""
        return self._logs.unseen() if self._spec.output is Output.FIRST else []

    def unrelayed(self) -> list[int]:
        """Return the ranks that write where the launcher does, past the relay."""
        if self._spec.log_dir is not None or self._spec.output is Output.ALL:
            return []
        shared = self._spec.output is Output.SHARED
        return [rank for local_rank, rank in self._ranks.items() if shared or self._is_first(local_rank)]

    def resize(self) -> None:
        """Give the first rank's pseudo-terminal the size that the user's terminal has now."""
        if self._pty is not None and os.isatty(1):  # the user's terminal may have gone
            _resize(self._pty, window_size(1))

    def _is_first(self, local_rank: int) -> bool:
        """Return whether the terminal is this rank's."""
        return local_rank == 0 and (not self._spec.one_terminal or self._ranks.get(0) == 0)

    def _logged(self, local_rank: int) -> bool:
        if self._is_first(local_rank) or self._spec.output is Output.SHARED:
            return self._spec.log_dir is not None
        return True

    def _relayed(self, rank: int) -> list[int]:
        """Open the first rank's streams through the relay: a pseudo-terminal if the user has a terminal, else pipes."""
        log = self._logs.open(rank) if self._spec.log_dir is not None else None
        if os.isatty(1):
            reading, output = open_pty(window_size(1))
            self._pty = reading
        else:
            reading, output = os.pipe()
        self._relay.add(reading, rank=rank, sink=1, log=log)
        if error_sink() == 1:
            return [os.dup(0), output, os.dup(output)]
        reading, error = open_pty(window_size(1 if os.isatty(1) else 2)) if os.isatty(2) else os.pipe()
        self._relay.add(reading, rank=rank, sink=2, log=None if log is None else os.dup(log))
        return [os.dup(0), output, error]


def error_sink() -> int:
    """Return the descriptor for standard error: that of standard output where both are the same file, so that a line
    of one rank ends before that of another begins."""
    return 1 if os.path.sameopenfile(1, 2) else 2


def open_pty(size: bytes) -> tuple[int, int]:
    """Return both ends of a pseudo-terminal that passes every byte on as it is.

    Args:
        size: the window's size, as :func:`window_size` returns it.
    """
    import pty
    import termios

    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # the user's own terminal turns \n into \r\n; this must not be done twice
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    _resize(ours, size)
    return ours, theirs


def window_size(terminal: int) -> bytes:
    """Return the size of a terminal's window: four unsigned shorts, the first two its rows and columns."""
    import termios

    return fcntl.ioctl(terminal, termios.TIOCGWINSZ, b"\0" * 8)


def _resize(terminal: int, size: bytes) -> None:
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


# The relay -----------------------------------------------------------------------------------------------------------

#: Seconds that an unfinished line may keep other ranks' lines waiting, or stay unseen itself.
PATIENCE = 0.2
_CHUNK = 65536
#: A pipe that poll calls writable takes this much without blocking (PIPE_BUF).
_WRITE = 4096
#: Bytes waiting for a slow terminal before the ranks have to wait as well.
_FULL = 1 << 20
#: The most bytes that a pipe holds, unless root has raised it (/proc/sys/fs/pipe-max-size).
_HELD = 1 << 20


@dataclass(eq=False)
class OutputSink:
    """The launcher's standard output or error. Bytes wait here until poll says that they can be written."""

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
        """Write as much as is possible without waiting."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self.backlog and poll.poll(0):
            try:
                del self.backlog[: os.write(self.fd, self.backlog[:_WRITE])]
            except BlockingIOError:
                return  # another program has made it one that does not block, and there is room for less than that
            except (BrokenPipeError, OSError) as error:
                if error.errno == errno.EIO and terminal.let_go():
                    continue
                self.broken = True
                self.backlog.clear()
                if not isinstance(error, BrokenPipeError):  # as after `| head`: the rest goes to the logs alone
                    say(f"output can't be shown any more: {error}")


@dataclass(eq=False)
class OutputSource:
    """The reading end of a rank's pipe or pseudo-terminal."""

    fd: int
    rank: int
    sink: OutputSink
    #: The descriptor of the log that gets every byte; None: there is none.
    log: int | None
    #: The ranks whose logs can't be written any more, shared by the relay's sources: a rank has two.
    unwritten: set[int]
    #: The prefix of each of its lines on the terminal; empty: bytes are passed on as they come.
    prefix: bytes = b""
    #: Output that was not handed to the sink yet, and the time since which it waits.
    held: bytearray = field(default_factory=bytearray)
    since: float = 0.0

    def read(self, now: float) -> int:
        """Take the bytes that have come, and return how many; 0: this is the end."""
        try:
            data = os.read(self.fd, _CHUNK)
        except OSError:
            data = b""  # a pseudo-terminal reports its end as an error
        self._write_log(data)
        if not self.held:
            self.since = now
        self.held += data
        return len(data)

    def settle(self, now: float) -> None:
        """Hand over the output that may be shown: whole lines if no other rank's line is open; anything that has waited
        long."""
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
                if self.rank not in self.unwritten:
                    self.unwritten.add(self.rank)
                    say(unwritten(self.rank, describe_error(error)))
                os.close(self.log)
                self.log = None


class Relay:
    """All sources and sinks of a job. It registers in ``selector`` the descriptors that it can use now."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sources: dict[int, OutputSource] = {}
        self._sinks: dict[int, OutputSink] = {}
        self._watched: dict[int, int] = {}
        self._unwritten: set[int] = set()

    def add(self, fd: int, *, rank: int, sink: int, log: int | None, prefix: bytes = b"") -> None:
        """Relay from ``fd`` to the launcher's own ``sink`` and to ``log``; the relay closes ``fd`` and ``log``."""
        self._sources[fd] = OutputSource(
            fd, rank, self._sinks.setdefault(sink, OutputSink(sink)), log, self._unwritten, prefix
        )
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

    def sink(self, fd: int) -> OutputSink | None:
        """Return the sink of the launcher's own ``fd``; None: nothing is relayed there."""
        return self._sinks.get(fd)

    def finish_sources(self) -> None:
        """Take the output that is left in the pipes of processes that have all ended, before others write to new
        ones: at most what a pipe holds, since a process that has outlived them may write on without end."""
        for fd in list(self._sources):
            taken = 0
            while fd in self._sources and taken < _HELD and _readable(fd):  # at the end it is readable, too
                taken += self._take(fd, time.monotonic())
        self._watch()

    @property
    def due(self) -> float | None:
        """Seconds after which output that is held back must be looked at again, or None if none is held back."""
        return PATIENCE / 2 if any(source.held for source in self._sources.values()) else None

    def close(self) -> None:
        """Close everything, relayed or not."""
        for fd in self._watched:
            self._selector.unregister(fd)
        for source in self._sources.values():
            source.close()
        self._watched.clear()
        self._sources.clear()

    def _take(self, fd: int, now: float) -> int:
        """Read once from a source, and return how many bytes; at its end close it."""
        source = self._sources[fd]
        if count := source.read(now):
            return count
        if self._watched.pop(fd, None) is not None:
            self._selector.unregister(fd)
        del self._sources[fd]
        source.close()
        return 0

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
