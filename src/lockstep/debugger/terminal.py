"""What a debugger on a rank reads from and writes to: the terminal that the launcher lends, or the rank's own input."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from lockstep.debugger.lender import from_the_background
from lockstep.job import terminal
from lockstep.job.page import REQUEST, Cell, Debugging, Pages, Text, encode

#: Seconds between two looks for the launcher's answer.
_PAUSE = 0.01
#: Seconds that the launcher has to hear of an end: it looks some dozen times a second, if its program lets it.
_HEARD = 3.0


class Console(Protocol):
    """Where a debugger prompts."""

    def take(self, place: str) -> bool:
        """Begin to prompt; returns when that is possible, and False if it will not be.

        Args:
            place: the line at which the rank is.
        """
        ...

    def give_back(self, *, runs_on: bool) -> None:
        """End prompting.

        Args:
            runs_on: the rank will prompt again soon; else it is done.
        """
        ...

    def says(self, state: Debugging) -> None:
        """Tell the other ranks and the launcher what this rank does in its debugger."""
        ...

    def quits(self, place: str) -> None:
        """Tell the launcher that the user has ended the job, before the other ranks can notice that this one leaves.

        Args:
            place: the line at which the rank is.
        """
        ...


class OwnInput:
    """The rank's standard input, as under ``python``, if it is not a terminal that could be lent: a pipe, a file.

    Args:
        pages: of all ranks.
        rank: this one.
    """

    def __init__(self, pages: Pages, rank: int) -> None:
        self._pages, self._rank = pages, rank

    def take(self, place: str) -> bool:
        """See :class:`Console`."""
        with self._pages.page(self._rank) as page:
            encode(page, Text.DEBUGGED_AT, place)
        self.says(Debugging.PROMPTS)
        return True

    def give_back(self, *, runs_on: bool) -> None:
        """See :class:`Console`."""
        self.says(Debugging.RUNS if runs_on else Debugging.NONE)

    def says(self, state: Debugging) -> None:
        """See :class:`Console`."""
        self._pages.set(self._rank, Cell.DEBUGGER, int(state))

    def quits(self, place: str) -> None:
        """See :class:`Console`."""
        _quit(self._pages, self._rank, 1, place)


class LentTerminal:
    """The job's terminal, one rank at a time; see Note [A turn at the terminal] in lender.py.

    Args:
        pages: of all ranks.
        rank: this one.
    """

    def __init__(self, pages: Pages, rank: int) -> None:
        self._pages, self._rank = pages, rank
        self._request = 0
        #: The terminal, and the job's process group; None: this rank is in it.
        self._terminal: int | None = None
        self._job = 0
        self._streams: _Streams | None = None
        self._on_interrupt: Any = None

    def take(self, place: str, *, failed: bool = False, unless: Callable[[], object] | None = None) -> bool:
        """See :class:`Console`.

        Args:
            place: the line at which the rank is.
            failed: an error would end the rank; else it is at a breakpoint.
            unless: returns whether to give up waiting; it is asked some hundred times a second.
        """
        self._request += 1
        with self._pages.page(self._rank) as page:
            encode(page, Text.DEBUGGED_AT, place)
        self.says(Debugging.FAILED if failed else Debugging.ASKS)
        try:
            while abs(answer := self._pages.get(self._rank, Cell.GRANTED)) != self._request:
                if unless is not None and unless():
                    answer = -self._request
                    break
                time.sleep(_PAUSE)
            if answer > 0:
                self._enter()
        except BaseException:  # a Ctrl-C while another rank has its turn
            self._pages.set(self._rank, Cell.DEBUGGER, 0)
            raise
        self.says(Debugging.PROMPTS if answer > 0 else Debugging.NONE)
        return answer > 0

    def give_back(self, *, runs_on: bool) -> None:
        """See :class:`Console`."""
        if self._streams is not None:
            self._streams.restore()
            self._streams = None
        if not runs_on:
            self._leave()
        self.says(Debugging.RUNS if runs_on else Debugging.NONE)

    def says(self, state: Debugging) -> None:
        """See :class:`Console`."""
        number = 0 if state is Debugging.NONE else self._request * REQUEST + state
        self._pages.set(self._rank, Cell.DEBUGGER, number)

    def quits(self, place: str) -> None:
        """See :class:`Console`."""
        self._request += 1
        _quit(self._pages, self._rank, self._request, place)

    def _enter(self) -> None:
        """Be the terminal's foreground process group, alone, and have it in the place of the standard streams."""
        if self._terminal is None:
            self._terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            self._job = os.getpgrp()
            os.setpgid(0, 0)
            if threading.current_thread() is threading.main_thread():
                self._on_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
        with from_the_background():
            os.tcsetpgrp(self._terminal, os.getpgrp())
        self._streams = _Streams(self._terminal)

    def _leave(self) -> None:
        """Return this process to the job's group, and the terminal to the job.

        In this order: what the launcher gives again to a group that is left, it takes back itself.
        """
        if self._terminal is None:
            return
        own = os.getpgrp()
        os.setpgid(0, self._job)
        with contextlib.suppress(OSError), from_the_background():  # (the terminal may be gone)
            if os.tcgetpgrp(self._terminal) == own:  # and not another rank's
                os.tcsetpgrp(self._terminal, self._job)
        os.close(self._terminal)
        self._terminal = None
        if self._on_interrupt is not None:
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._on_interrupt = None


def _quit(pages: Pages, rank: int, request: int, place: str) -> None:
    with pages.page(rank) as page:
        encode(page, Text.DEBUGGED_AT, place)
    pages.set(rank, Cell.DEBUGGER, request * REQUEST + Debugging.QUIT)
    limit = time.monotonic() + _HEARD
    while pages.get(rank, Cell.GRANTED) != -request and time.monotonic() < limit:
        time.sleep(_PAUSE)


class _Streams:
    """The terminal in the place of this process's standard streams, for Python and for readline, which knows the
    descriptors 0 and 1 alone."""

    def __init__(self, fd: int) -> None:
        self._before: tuple[TextIO, TextIO, TextIO] = (sys.stdin, sys.stdout, sys.stderr)
        for stream in self._before[1:]:
            with contextlib.suppress(AttributeError, ValueError):  # it may be None, closed, or the program's own
                stream.flush()
        self._saved = [os.dup(target) for target in range(3)]
        for target in range(3):
            os.dup2(fd, target, inheritable=True)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", errors="surrogateescape")
        sys.stdout = terminal.forgiving(1, errors="backslashreplace")
        sys.stderr = terminal.forgiving(2, errors="backslashreplace")

    def restore(self) -> None:
        """Put back what was there."""
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = self._before
        for target, fd in enumerate(self._saved):
            os.dup2(fd, target, inheritable=True)
            os.close(fd)


def reads_nothing() -> bool:
    """Return whether this process's standard input is closed, or /dev/null."""
    try:
        here, nothing = os.fstat(0), os.stat(os.devnull)
    except OSError:
        return True
    return stat.S_ISCHR(here.st_mode) and here.st_rdev == nothing.st_rdev
