"""On a host of ``lockstep run --hosts``: pass everything between the ssh connection and this host's launcher.

The process that ssh starts greets the other end, waits for its order, and forks the launcher. Then it passes on signals
for the launcher, from standard input, and the output to show, to standard output in frames. When the connection ends,
or nothing has come for some time, it has the launcher stop as by SIGTERM: the ranks save. When it is killed itself, the
launcher is killed with it, and nothing of the job stays (Note [No orphans] in ``processes.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch import console, processes
from lockstep.launch.output import open_pty
from lockstep.launch.ports import free_port
from lockstep.launch.processes import SAVE, STOPPING, SignalQueue
from lockstep.remote.frames import BEAT, SILENT, FrameKind, frame, greet

#: Seconds that an order may take, including the wait for the other hosts.
_ORDER = 120.0
#: Seconds that a launcher has beyond --grace before it is killed, once the connection is gone.
_PATIENCE = 20.0
#: Seconds for the last output to come once the launcher has ended, and then for the connection to take it.
_DRAIN, _READER = 5.0, 600.0
#: Bytes that may wait for a slow connection before the ranks have to wait as well.
_FULL = 1 << 20
#: The most bytes that a pipe holds, unless root has raised it (/proc/sys/fs/pipe-max-size).
_HELD = 1 << 20
_CHUNK = 65536


# What goes over the connection ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """The part of a host's instructions that its command line must not show, or that was not known when that line was
    written."""

    #: The job's key, as hexadecimal digits.
    key: str
    nnodes: int
    #: The address at which the launchers meet.
    endpoint: str
    #: The identity of the job.
    job: str
    #: True if standard output and error are shown in one place, so that they have to stay in order.
    one_stream: bool
    #: Rows and columns of the terminal that shows the output; None if there is none.
    terminal: tuple[int, int] | None
    #: The seconds of --grace.
    grace: float

    def encode(self) -> bytes:
        """Return the line that a guard reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Order:
        """Return the order in a line that :meth:`encode` has made."""
        fields: dict[str, Any] = json.loads(line)
        size = fields.pop("terminal")
        return cls(**fields, terminal=None if size is None else (size[0], size[1]))


# The guard -----------------------------------------------------------------------------------------------------------


def obey() -> Order:
    """Greet the process that started this one by ssh, wait for its order, and fork the launcher.

    Returns in the launcher alone. This process becomes the guard, and ends with the launcher's exit code.

    Raises:
        LaunchError: no order came.
    """
    greet(free_port())
    order = _read_order()
    output = os.pipe() if order.terminal is None else open_pty(struct.pack("4H", *order.terminal, 0, 0))
    error = None if order.one_stream else os.pipe()
    said = os.pipe()
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        processes.die_with_parent(guard)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output[1], 1)
        os.dup2(output[1] if error is None else error[1], 2)
        for fd in (nothing, *output, *(error or ()), said[0]):
            os.close(fd)
        console.say_to(said[1])
        return order
    for pair in (output, error, said):
        if pair is not None:
            os.close(pair[1])
    readers = {said[0]: FrameKind.SAID, output[0]: FrameKind.OUTPUT}
    if error is not None:
        readers[error[0]] = FrameKind.ERROR
    os._exit(_Guard(pid, readers, grace=order.grace).serve())


def _read_order() -> Order:
    line, limit = b"", time.monotonic() + _ORDER
    while not line.endswith(b"\n"):
        if not select.select([0], [], [], max(0.0, limit - time.monotonic()))[0]:
            raise LaunchError(f"no order came within {_ORDER:g} s: --hosts starts this, not a user")
        data = os.read(0, 1)  # what follows the line are signals
        if not data:
            raise LaunchError("the connection has ended before an order came")
        line = (line + data).lstrip()  # signs of life may come before
    return Order.decode(line)


class _Guard:
    """Passes on signals and output until the launcher has ended.

    Args:
        launcher: the launcher's process id; it is a child of this process.
        readers: descriptors of its messages and of its ranks' output; the launcher's messages come first.
        grace: seconds that it may take to stop.
    """

    def __init__(self, launcher: int, readers: dict[int, FrameKind], *, grace: float) -> None:
        self._launcher = launcher
        self._end = os.pidfd_open(launcher)
        self._code: int | None = None
        self._readers = readers
        self._grace = grace
        self._control = bytearray()
        self._connected = True
        self._heard = self._beat = time.monotonic()
        self._kill_at = float("inf")
        self._outgoing = bytearray()
        #: The beginning of a message, of which the rest has not come: one may be longer than a pipe holds.
        self._begun = b""
        #: Messages that wait for output; True if the machines have met.
        self._messages: list[bytes] = []
        self._has_met = False
        for fd in (0, 1, *readers):
            os.set_blocking(fd, False)

    def serve(self) -> int:
        """Return the launcher's exit code, as a shell has it, once everything is passed on."""
        signals = SignalQueue((*STOPPING, SAVE))
        limit = float("inf")
        told = False
        while True:
            now = time.monotonic()
            if self._code is not None and limit == float("inf"):
                limit = now + _DRAIN
            if self._code is not None and not told and (not self._readers or now >= limit):
                told, limit = True, now + _READER
                self._readers.clear()
                self._outgoing += frame(FrameKind.ENDED, str(self._code).encode())
            if told and (not self._outgoing or not self._connected or now >= limit):
                return self._code or 0
            ready = self._wait(signals.fileno())
            now = time.monotonic()
            for arrival in signals.read():
                self._signal(arrival.signum)
            if self._end in ready and self._code is None:
                status = os.waitstatus_to_exitcode(os.waitpid(self._launcher, 0)[1])
                self._code = status if status >= 0 else 128 - status
            self._read(ready)
            self._keep_in_touch(now)

    def _wait(self, signals: int) -> set[int]:
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        if self._code is None:
            poll.register(self._end, select.POLLIN)
        if self._connected:
            poll.register(0, select.POLLIN)
            if self._outgoing:
                poll.register(1, select.POLLOUT)
        if len(self._outgoing) < _FULL:
            for fd in self._readers:
                poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(500)}

    def _read(self, ready: set[int]) -> None:
        """Take the output of the launcher and its ranks. Messages are passed on after the output that they are about,
        which is written before them; only the message that the machines have met comes before any output."""
        said = any(self._readers.get(fd) is FrameKind.SAID for fd in ready)
        for fd, kind in list(self._readers.items()):
            if said or fd in ready:
                taken = count = self._take(fd, kind)
                while count and said and taken < _HELD:  # (who writes on without end comes after the message)
                    count = self._take(fd, kind)
                    taken += count
                if kind is FrameKind.SAID and not self._has_met and console.MET in self._messages:
                    self._has_met = True
                    self._pass_on_messages(self._messages.index(console.MET) + 1)
        self._pass_on_messages(len(self._messages))

    def _pass_on_messages(self, count: int) -> None:
        for line in self._messages[:count]:
            self._outgoing += frame(FrameKind.SAID, line)
        del self._messages[:count]

    def _take(self, fd: int, kind: FrameKind) -> int:
        """Read once, and return how many bytes there were."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # a pseudo-terminal reports its end as an error
        if not data:
            os.close(fd)
            del self._readers[fd]
            return 0
        if self._connected and kind is FrameKind.SAID:
            *lines, self._begun = (self._begun + data).split(b"\n")
            self._messages += lines
        elif self._connected:
            self._outgoing += frame(kind, data)
        return len(data)

    def _keep_in_touch(self, now: float) -> None:
        if self._connected:
            self._hear(now)  # whatever poll() said: it may have come while this process stood still
            if now - self._beat >= BEAT:
                self._beat = now
                self._outgoing += frame(FrameKind.ALIVE)
            with contextlib.suppress(BlockingIOError):
                try:
                    while self._outgoing:
                        del self._outgoing[: os.write(1, self._outgoing[:_CHUNK])]
                except BrokenPipeError:
                    self._hang_up(now)
            if now - self._heard > SILENT:
                self._hang_up(now)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._signal(signal.SIGKILL)

    def _hear(self, now: float) -> None:
        """Take signs of life, and signals: a line each."""
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(now)
            return
        self._heard = now
        *lines, rest = (self._control + data).split(b"\n")
        self._control = bytearray(rest)
        for line in lines:
            named = next((one for one in (*STOPPING, SAVE) if one.name.encode() == line), None)
            if named is not None:
                self._signal(named)

    def _hang_up(self, now: float) -> None:
        """Have the job stop: without a connection no user can stop it, or read its output."""
        if self._connected:
            self._connected = False
            self._outgoing.clear()
            self._signal(signal.SIGTERM)
            self._kill_at = now + self._grace + _PATIENCE

    def _signal(self, signum: signal.Signals) -> None:
        if self._code is None:  # it has not been waited for, so the number is still its own
            os.kill(self._launcher, signum)
