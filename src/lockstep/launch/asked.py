"""Signals that ask a program to end while it waits for ranks that it has called: they wait until the ranks have saved.

Note [Asked while waiting]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Such a program may be what others wait for: the first process of a container, a step of a scheduler, the command in a
terminal. If it ended at once, they would end its ranks with it. So while it waits, Ctrl-C, SIGTERM and SIGHUP leave a
note, and the ranks are asked to stop, as under ``lockstep run``. Once they have ended the signal is sent again, and
does what it would have done. Signals that the program handles itself, or ignores, are left alone.

If the program ends all the same (by SIGKILL, by what a handler of its own raises, or because it was not waiting), the
zygote asks the ranks: ``LetSave`` in channel.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

#: The signals, and the handlers to which the program has left them.
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PYTHONS_OWN = (signal.SIG_DFL, signal.default_int_handler)


class AskedMeanwhile:
    """The signals that have asked this program to end. Its owner waits for its descriptor, and closes it."""

    def __init__(self) -> None:
        #: The first one that has not been passed on; None: none has come.
        self.first: signal.Signals | None = None
        self._unread: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._fd

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which signals leave a note. They do not on other threads than the main one, which gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signum: signal.getsignal(signum) for signum in _ASKING}
        self._before = {signum: handler for signum, handler in handlers.items() if handler in _PYTHONS_OWN}
        try:
            for signum in self._before:
                signal.signal(signum, self._note)
            yield
        finally:
            for signum, handler in self._before.items():
                signal.signal(signum, handler)

    def read(self) -> list[signal.Signals]:
        """Return those that have come since the last call."""
        with suppress(BlockingIOError):  # none has
            if self._fd >= 0:
                os.eventfd_read(self._fd)
        signums, self._unread = self._unread, []
        return signums

    def pass_on(self) -> None:
        """Have the first one do what it would have done: mostly it ends this program, or raises KeyboardInterrupt."""
        signum, self.first = self.first, None
        if signum is not None:
            signal.raise_signal(signum)

    def close(self) -> None:
        """Close the descriptor. Does nothing the second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        came = signal.Signals(signum)
        if os.getpid() != self._process:  # forked by another thread meanwhile: it waits for no ranks
            signal.signal(came, self._before[came])
            os.kill(os.getpid(), came)
            return
        self.first = self.first or came
        self._unread.append(came)
        if self._fd >= 0:  # else there is nobody left to ask, and it is passed on
            os.eventfd_write(self._fd, 1)
