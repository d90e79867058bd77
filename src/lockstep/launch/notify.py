"""A command of the user's that is told what becomes of a job: ``--notify``.

The command runs in a shell, beside the job, and reads what happened as JSON from its standard input. It never holds the
job up: the launcher starts it, goes on, and looks after it in its loop. Commands run one after the other, in the order
of what they tell, and only at the job's end does the launcher wait for them. One that fails, or that is not done within
its time, is told of in a message, and changes nothing else.

Of several machines the one with the first ranks tells, so a job is told of once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from typing import IO, Any

from lockstep import knobs
from lockstep._files import describe
from lockstep.codes import CodedEnum
from lockstep.launch.processes import SAVE, STOPPING

#: The name of the JSON that a command reads.
SCHEMA = "lockstep.notify/1"
#: Bytes at the end of what a command has written that its failure is told with.
_LAST_BYTES = 300
#: Seconds between two looks for a command's end once nothing else is left to do.
_LOOK = 0.02


class Notice(CodedEnum):
    """What a command is told of."""

    HANG = "ranks hold up the others", "hang"
    MOVED_ON = "they have moved on", "moved-on"
    RESTART = "the ranks start again", "restart"
    FAILED = "the job has failed", "failed"
    ENDED = "the job has ended in another way", "ended"


class Notifier:
    """Runs a command for each thing that it is told, one after the other.

    Args:
        command: the shell command; None: there is none, and nothing is run.
    """

    def __init__(self, command: str | None) -> None:
        self._command = command
        self._waiting: deque[tuple[Notice, bytes]] = deque()
        self._running: _Running | None = None
        #: Messages about commands that could not be started.
        self._troubles: list[str] = []

    def tell(self, notice: Notice, text: str, **facts: Any) -> None:
        """Run the command as soon as those before it are done.

        Args:
            notice: what it is told of.
            text: for people.
            facts: for programs, in JSON's types.
        """
        if self._command is None:
            return
        told = {"schema": SCHEMA, "event": notice.code, "text": text, "host": socket.gethostname(), "at": time.time()}
        self._waiting.append((notice, json.dumps({**told, **facts}).encode() + b"\n"))
        self._start_next()

    def look(self, now: float) -> list[str]:
        """See whether the command has ended or taken too long, and start the next one; return what there is to say.

        Args:
            now: on the monotonic clock.
        """
        said, self._troubles = self._troubles, []
        if self._running is not None:
            outcome = self._running.look(now)
            if outcome is not None:
                said += [outcome] if outcome else []
                self._running = None
                self._start_next()
        return said

    def finish(self) -> list[str]:
        """Wait until all commands have ended, each within its time; return what there is to say."""
        said = self.look(time.monotonic())
        while self._running is not None:
            time.sleep(_LOOK)
            said += self.look(time.monotonic())
        return said + self.look(time.monotonic())

    def _start_next(self) -> None:
        while self._running is None and self._waiting:
            notice, told = self._waiting.popleft()
            try:
                self._running = _Running(self._command or "", notice, told)
            except OSError as error:
                self._troubles.append(f"the command of --notify can't be started: {describe(error)}")


class _Running:
    """A command that runs.

    Args:
        command: for a shell.
        notice: what it is told of.
        told: the JSON that it reads.
    """

    def __init__(self, command: str, notice: Notice, told: bytes) -> None:
        self._notice, self._limit = notice, knobs.times().notify
        self._output = _in_memory("output")
        with _in_memory("notice", told) as given:
            # A session of its own: a Ctrl-C is for the job. Signals that the launcher blocks are not blocked there.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=given,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                preexec_fn=_unblock,
            )
        self._until = time.monotonic() + self._limit

    def look(self, now: float) -> str | None:
        """Return the message about the command, which has ended, or is ended here; None: it still runs."""
        code = self._process.poll()
        if code is None and now < self._until:
            return None
        if code is None:
            what = f"did not end within {self._limit:g} s, and was killed"
            try:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            except PermissionError:  # it has become a program that sets its user, as sudo
                what = f"did not end within {self._limit:g} s, and belongs to another user: it was left to itself"
        elif code == 0:
            self._output.close()
            return ""
        else:
            what = f"failed with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        last = self._last_words()
        self._output.close()
        return f"the command of --notify {what}; the event was: {self._notice.value}{last}"

    def _last_words(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_BYTES))
        text = self._output.read().decode(errors="replace").strip()
        return f"\n  {text.splitlines()[-1]}" if text else ""


def _in_memory(name: str, content: bytes = b"") -> IO[bytes]:
    """Return a file without a name that holds ``content``, at its beginning."""
    file = os.fdopen(os.memfd_create(f"lockstep-{name}"), "w+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, SAVE, signal.SIGWINCH))
