"""Print lockstep's own messages, after everything that the ranks wrote, or send them to where they are shown.

Note [Nobody reads]
~~~~~~~~~~~~~~~~~~~
The reader of a pipe may take nothing for hours: a pager, a terminal that was stopped, a process that hangs. Who prints
waits then, which is as it should be for a rank; but the launcher has signals to pass on, limits to keep and other
machines to answer. So its messages wait here until there is room for them (:func:`push`, at each turn of its loop), and
it waits for the reader only when nothing else is left to do (:func:`flush`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import json
import os
import select
import sys
import threading
import time
from typing import Protocol

from lockstep.job import terminal


class Screen(Protocol):
    """Shows messages where ranks write as well."""

    def show(self, text: str) -> None:
        """Show a message on lines of its own."""
        ...


#: The message that only says that the launchers have found each other.
MET = b'{"met": true}'
#: A pipe that poll calls writable takes this much without blocking (PIPE_BUF).
_WRITE = 4096
#: Bytes that may wait for a reader; further messages are lost.
_FULL = 1 << 20
#: Seconds that the end of a program waits for a reader, and between two attempts where poll has promised too much.
_READER, _PAUSE = 600.0, 0.01


class _Outlet:
    """A descriptor, and the messages that wait for room in it; see Note [Nobody reads]."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.reset()

    def reset(self) -> None:
        """Begin anew in a forked process: what waits is another's to show."""
        self.waiting = bytearray()
        self._lock = threading.Lock()  # a program may call functions on ranks from several threads

    def add(self, data: bytes) -> None:
        """Write, or keep for later, a whole message, unless too much waits already."""
        with self._lock:
            if len(self.waiting) < _FULL:
                self.waiting += data
        self.push()

    def push(self) -> None:
        """Write as much as is possible without waiting."""
        with self._lock:
            while self.waiting and self.has_room(0.0):
                try:
                    del self.waiting[: os.write(self.fd, self.waiting[:_WRITE])]
                except BlockingIOError:
                    return  # another program has made it one that does not block, and there is room for less than that
                except OSError as error:
                    if error.errno != errno.EIO or not terminal.let_go():
                        self._lead_to_nowhere()

    def has_room(self, seconds: float) -> bool:
        """Return whether there is room within some seconds."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def _lead_to_nowhere(self) -> None:
        """Print nothing from now on, and nor does Python, which would end with an exit code of its own for it."""
        self.waiting.clear()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fd)
        os.close(nothing)


#: Standard error.
_shown = _Outlet(2)
#: Where messages are written as JSON lines, to be shown elsewhere; None: standard error is used.
_reader: _Outlet | None = None
#: The screen that shows messages while ranks write; None: there are no ranks.
_screen: Screen | None = None


def say_on(screen: Screen | None) -> None:
    """Have ``screen`` show messages from now on; None: show them as if nothing else wrote there."""
    global _screen
    _screen = screen


def say_to(fd: int) -> None:
    """Write messages to ``fd`` as JSON lines from now on, for the process that shows several launchers' (hosts.py)."""
    global _reader
    _reader = _Outlet(fd)


def say(text: str, *, once: str = "", later: bool = False) -> None:
    """Print one of lockstep's own messages, after everything the ranks wrote. See Note [Nobody reads].

    Args:
        text: the message.
        once: a name under which the launchers of other machines print this message, too; it is shown once if the
            messages of all are shown in one place. Empty: it is about this machine.
        later: if another machine's launcher sends this message, which knows more, that one is shown instead.
    """
    if _reader is None:
        (show if _screen is None else _screen.show)(f"lockstep: {text}")
    else:
        _reader.add(json.dumps({"text": text, "once": once, "later": later}).encode() + b"\n")


def show(text: str) -> None:
    """Print a line on standard error; where that is closed, or its reader has gone, print nothing from then on.

    How a job ends must not depend on whether its messages are read. See Note [Nobody reads].
    """
    stream = sys.stderr
    if stream is None:  # closed when Python started; print would take standard output instead
        return
    if not isinstance(stream, io.TextIOWrapper) or stream.closed or _descriptor_of(stream) != _shown.fd:
        print(text, file=stream, flush=True)  # a notebook's, or the program's own
        return
    if not _shown.waiting and _shown.has_room(0.0):
        with contextlib.suppress(OSError):  # the message meets the same
            stream.flush()  # what the program has begun
    _shown.add(f"{text}\n".encode(stream.encoding, errors="backslashreplace"))


def _descriptor_of(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # it is in memory, as a test's
        return None


def met() -> None:
    """Tell the process that shows the messages of several launchers that the launchers have found each other."""
    if _reader is not None:
        _reader.add(MET + b"\n")


def waits() -> bool:
    """Return whether messages wait for their reader."""
    return any(outlet.waiting for outlet in _outlets())


def push() -> None:
    """Write the messages that wait, as far as there is room."""
    for outlet in _outlets():
        outlet.push()


def flush(seconds: float = _READER) -> None:
    """Write the messages that wait, and wait so long for room, since there is nothing else to do."""
    limit = time.monotonic() + seconds
    for outlet in _outlets():
        while outlet.waiting and (left := limit - time.monotonic()) > 0:
            if outlet.has_room(left):
                outlet.push()
                if outlet.waiting:
                    time.sleep(_PAUSE)


def drop() -> None:
    """Let go of the messages that wait, since nobody takes them."""
    for outlet in _outlets():
        outlet.waiting.clear()


def _begin_anew() -> None:
    for outlet in _outlets():
        outlet.reset()


def _outlets() -> list[_Outlet]:
    return [_shown] if _reader is None else [_shown, _reader]


atexit.register(flush)
os.register_at_fork(after_in_child=_begin_anew)
