"""Wake a thread when a signal comes, also while the main thread runs no Python.

Note [Woken by signals]
~~~~~~~~~~~~~~~~~~~~~~~
Python calls handlers of signals on the main thread, between two instructions of the program. While that thread is in
compiled code, in a collective or a long kernel, no handler is called. But Python's own handler in C writes the signal's
number to a descriptor (``signal.set_wakeup_fd``) at once. A thread reads it there. What is a request to this process
and what is not, is still said by the handlers that are installed.

A process has one such descriptor. One that somebody has set before gets all numbers passed on, and is put back at the
end, unless it has been closed meanwhile. A forked child would write into its parent's, so it sets none.

Only the main thread may set the descriptor. Where another one closes ours, as a finalizer does, it stays open: its
number could be that of another file next, into which signals would be written. The next that is made takes its place.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from contextlib import suppress


class Wakeup:
    """The descriptor to which signals are written, for one thread that waits. Made on the main thread."""

    def __init__(self) -> None:
        global _current, _left
        self._reads, self._writes = socket.socketpair()
        for end in (self._reads, self._writes):
            end.setblocking(False)
        # Not select(), which takes no descriptor beyond 1023: loaders with many files have thousands.
        self._poll = select.poll()
        self._poll.register(self._reads, select.POLLIN)
        self._before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        if _left is not None:
            if self._before == _left._writes.fileno():
                self._before = _left._before
            _left._close_ends()
            _left = None
        _current = self
        _watch_forks()

    def wait(self, seconds: float) -> list[int]:
        """Wait until a signal has come, or :meth:`wake` was called, for so long at most. Return the signals."""
        if not self._poll.poll(1000 * seconds):
            return []
        with suppress(BlockingIOError):
            numbers = self._reads.recv(4096)
            signals = bytes(number for number in numbers if number)
            if signals and self._before >= 0:
                with suppress(OSError):  # full, or closed meanwhile
                    os.write(self._before, signals)
            return list(signals)
        return []

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""
        with suppress(BlockingIOError):
            self._writes.send(b"\0")

    def close(self) -> None:
        """Put back what was there before; on another thread than the main one, leave that to the next Wakeup."""
        global _current, _left
        if _current is self:
            _current = None
        if threading.current_thread() is not threading.main_thread():
            _left = self
            return
        mine = self._writes.fileno()
        now = signal.set_wakeup_fd(-1)
        with suppress(OSError, ValueError):  # closed meanwhile, and perhaps another file by now
            # Where somebody has set another since, that one stays.
            signal.set_wakeup_fd(self._before if now == mine else now)
        self._close_ends()

    def _close_ends(self) -> None:
        self._reads.close()
        self._writes.close()


_current: Wakeup | None = None
#: One that was closed on another thread than the main one, and to which signals may still be written.
_left: Wakeup | None = None
_watched = False


def _watch_forks() -> None:
    global _watched
    if not _watched:
        _watched = True
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Set no descriptor in a forked child, whose signals are not its parent's."""
    global _current
    if _current is not None:
        with suppress(ValueError):  # forked by another thread than the main one
            signal.set_wakeup_fd(-1)
        _current = None
