"""Where each rank's standard streams lead: the terminal, a log, or the relay."""

from __future__ import annotations

import os

from lockstep.launch.logs import LogFolder
from lockstep.launch.output import Relay
from lockstep.launch.spec import JobSpec, Output


class Streams:
    """Opens the streams of a node's ranks, and remembers the pseudo-terminal if there is one."""

    def __init__(self, spec: JobSpec, logs: LogFolder, relay: Relay) -> None:
        self._spec = spec
        self._logs = logs
        self._relay = relay
        self._pty: int | None = None

    def open(self, local_rank: int) -> list[int]:
        """Standard input, output and error for one rank; the caller passes them on and closes them.

        An empty list: the rank shares the watcher's own.

        Raises:
            LaunchError: a log can't be opened.
        """
        spec = self._spec
        rank = spec.identity(local_rank).rank
        if local_rank == 0:
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
        if _error_sink() == 1:
            return [nothing, output, os.dup(output)]  # one pipe: what goes to both streams stays in order
        reading, error = os.pipe()
        self._relay.add(reading, rank=rank, sink=2, log=os.dup(log), prefix=prefix)
        return [nothing, output, error]

    def logged(self, local_rank: int) -> bool:
        """Whether this rank has a log."""
        if local_rank == 0 or self._spec.output is Output.SHARED:
            return self._spec.log_dir is not None
        return True

    def shown(self, local_rank: int) -> bool:
        """Whether the user sees this rank's standard error."""
        return local_rank == 0 or self._spec.output is not Output.FIRST

    def resize(self) -> None:
        """The terminal's size changed: so does that of rank 0's."""
        if self._pty is not None:
            _copy_window_size(1, self._pty)

    def _relayed(self, rank: int) -> list[int]:
        """Rank 0 through the relay: by a pseudo-terminal where the user has a terminal, else by pipes."""
        log = self._logs.open(rank) if self._spec.log_dir is not None else None
        if os.isatty(1):
            reading, output = _open_pty()
            self._pty = reading
        else:
            reading, output = os.pipe()
        self._relay.add(reading, rank=rank, sink=1, log=log)
        if _error_sink() == 1:
            return [os.dup(0), output, os.dup(output)]
        reading, error = _open_pty() if os.isatty(2) else os.pipe()
        self._relay.add(reading, rank=rank, sink=2, log=None if log is None else os.dup(log))
        return [os.dup(0), output, error]


def _error_sink() -> int:
    """Where standard error goes: with standard output where both are the same file, so that lines of one rank end
    before those of another begin."""
    return 1 if os.path.sameopenfile(1, 2) else 2


def _open_pty() -> tuple[int, int]:
    """Both ends of a pseudo-terminal that passes every byte on as it is."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # the user's own terminal turns \n into \r\n; twice is once too often
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    _copy_window_size(1 if os.isatty(1) else 2, ours)
    return ours, theirs


def _copy_window_size(source: int, target: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))
