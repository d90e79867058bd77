"""The launcher's own messages, among the ranks' output."""

from __future__ import annotations

import contextlib
import os
import select
import stat

from lockstep.launch.console import show
from lockstep.launch.launcher import Launcher
from lockstep.launch.output import Relay, Streams, error_sink

#: The number of the launcher among the writers of shown lines.
_LAUNCHER = -1


class RunScreen:
    """Shows the launcher's messages among the output of this machine's ranks; see Note [Begun lines] in
    job/terminal.py.

    Args:
        launcher: knows the ranks' pages.
        streams: knows which ranks write past the relay.
        relay: passes on the output of the other ranks.
    """

    def __init__(self, launcher: Launcher, streams: Streams, relay: Relay) -> None:
        self._launcher, self._streams, self._relay = launcher, streams, relay
        #: (Start, rank) -> the rank's note on its lines when the launcher last wrote.
        self._ended: dict[tuple[int, int], int] = {}
        #: Messages that wait until no rank is at a prompt.
        self._kept: list[str] = []

    def show(self, text: str) -> None:
        """Show a message on lines of its own, but while a rank prompts in a debugger: then after it."""
        if self._launcher.attempt.lender.prompting:
            self._kept.append(text)
        else:
            self.release()
            self._show(text)

    def release(self) -> None:
        """Show the messages that have waited for a prompt, if it is over."""
        if self._kept and not self._launcher.attempt.lender.prompting:
            kept, self._kept = self._kept, []
            for text in kept:
                self._show(text)

    def _show(self, text: str) -> None:
        sink = self._relay.sink(error_sink())
        if sink is not None and not sink.broken:
            sink.push(_LAUNCHER, b"", f"{text}\n".encode(errors="backslashreplace"))
            sink.write()
            return
        is_begun = self._is_begun()
        self._note_end()
        show(f"\n{text}" if is_begun else text)

    def show_cursor(self) -> None:
        """Show the terminal's cursor, which a rank that a signal ends in the middle of a progress bar leaves hidden."""
        for fd in (2, 1):
            if os.isatty(fd):
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                if poll.poll(0):  # else it was stopped: see Note [Nobody reads] in console.py
                    with contextlib.suppress(OSError):
                        os.write(fd, b"\x1b[?25h\n")
                sink = self._relay.sink(fd if fd == 1 else error_sink())
                if sink is not None:
                    sink.owner = None
                self._note_end()
                return

    def _is_begun(self) -> bool:
        last = _last_byte(2)
        if last is not None:
            return last != b"\n"
        return any(count % 2 and self._ended.get(place) != count for place, count in self._counts().items())

    def _note_end(self) -> None:
        self._ended = self._counts()

    def _counts(self) -> dict[tuple[int, int], int]:
        attempt = self._launcher.attempt
        return {(attempt.number, rank): attempt.lines(rank) for rank in self._streams.unrelayed()}


def _last_byte(fd: int) -> bytes | None:
    """Return the last byte of a file, or a newline if it is empty; None if it is not a file, or can't be read."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        place = os.lseek(fd, 0, os.SEEK_CUR)
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(reading, 1, place - 1) if place else b"\n"
        finally:
            os.close(reading)
    except OSError:  # no permission to read, or a file system that fails at this moment
        return None
