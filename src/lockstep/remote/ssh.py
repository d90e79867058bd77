"""Reach a host by the system's ssh client, whose configuration and agent say how, and as which user."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep import knobs
from lockstep.errors import LaunchError
from lockstep.machine import is_loopback
from lockstep.remote.frames import BEAT, FrameKind, Frames
from lockstep.text import last_lines

#: Seconds that the client may take to read its configuration.
_CONFIGURATION = 10.0
#: Seconds that clients have to leave at the end.
_LEAVE = 5.0
#: The most lines and characters of ssh's own messages that are repeated.
_LINES, _WORDS = 12, 4000
_CHUNK = 65536

#: Starts lockstep without the current folder in sys.path: it may hold a random.py.
_BOOT = 'import sys; sys.path[:] = filter(None, sys.path); from lockstep.cli import main; main(prog_name="lockstep")'
#: The Python that starts lockstep on the hosts: each has one at the same path as this process.
PYTHON = sys.executable
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
#: No name begins with a dash, which ssh would take for an option.
_WORD = r"[^\s@,:\[\]-][^\s@,:\[\]]*"
_HOST = re.compile(rf"(?:(?P<user>{_WORD})@)?(?P<name>{_WORD}|\[[\w.%]*:[\w.%:]*\])(?::(?P<ranks>\d+))?")


@dataclass(frozen=True)
class Host:
    """One host of the job."""

    #: The host's name for the ssh client, with an optional user.
    name: str
    #: The value of -n for this host; None: that of all hosts.
    ranks: str | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts that ``--hosts`` names: ``a,b:4,user@c``, a number being the ranks of that host.

    Raises:
        ValueError: it names none, names one twice, or makes no sense.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        match = _HOST.fullmatch(part)
        if match is None or match["ranks"] == "0":
            raise ValueError(
                f"--hosts={text}: {part!r} is not a host; expected HOST, USER@HOST or HOST:RANKS, with commas between"
            )
        name = match["name"].strip("[]")
        host = Host(f"{match['user']}@{name}" if match["user"] else name, match["ranks"])
        if host.name in [other.name for other in hosts]:
            raise ValueError(f"--hosts={text}: {host.name} is named twice; write {host.name}:N for N ranks there")
        hosts.append(host)
    return tuple(hosts)


def lockstep_command(words: Sequence[str]) -> list[str]:
    """Return the command line of ``lockstep`` with these words, for this Python."""
    return [PYTHON, "-c", _BOOT, *words]


def command_line(words: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> str:
    """Return the line for a host's shell that starts ``lockstep`` there.

    Args:
        words: what follows ``lockstep``.
        cwd: the folder to start in.
        env: variables to set.
    """
    command = ["env", *(f"{name}={value}" for name, value in env.items()), *lockstep_command(words)]
    return f"cd {shlex.quote(cwd)} && exec {shlex.join(command)}"


def by_ssh(host: Host, line: str) -> list[str]:
    """Return the command line of the ssh client that has ``line`` run by the shell of ``host``."""
    return [*knobs.ssh(), *_OPTIONS, "--", host.name, line]


def passed_on(env: Mapping[str, str] = os.environ, *, terminal: bool) -> dict[str, str]:
    """Return the variables that the hosts' launchers get from here: those of lockstep, and Python's search path.

    Args:
        env: this process's environment.
        terminal: rank 0 writes to a terminal.
    """
    names = (*knobs.PASSED_ON, "PYTHONPATH", "OMP_NUM_THREADS", *(("TERM",) if terminal else ()))
    return {name: env[name] for name in names if name in env}


def meeting_place(hosts: Sequence[Host], addresses: Sequence[str], port: int) -> str:
    """Return where the launchers meet: the first host, as HOST:PORT.

    Args:
        hosts: all of them.
        addresses: their addresses, by the ssh client's configuration.
        port: a port that is free on the first host.

    Raises:
        LaunchError: the other hosts can't reach it under that name.
    """
    first = addresses[0]
    if is_loopback(first) and not all(map(is_loopback, addresses)):
        other = next(host.name for host, address in zip(hosts, addresses, strict=True) if not is_loopback(address))
        raise LaunchError(
            f"the hosts meet at the first of them, and {hosts[0].name} is {first}, which is {other} itself for "
            f"{other}: name it as {other} knows it, or put another host first"
        )
    return f"[{first}]:{port}" if ":" in first else f"{first}:{port}"


def address_of(host: Host) -> str:
    """Return a host's address by the ssh client's configuration, which knows aliases.

    Raises:
        LaunchError: there is no ssh client, or it does not know the host.
    """
    try:
        done = subprocess.run(
            [*knobs.ssh(), "-G", "--", host.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CONFIGURATION,
            check=False,
        )
    except FileNotFoundError as error:
        raise LaunchError(f"--hosts needs an ssh client, and there is no {error.filename}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{knobs.ssh()[0]} -G {host.name} gave no answer within {_CONFIGURATION:g} s") from None
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise LaunchError(f"{knobs.ssh()[0]} does not know how to reach {host.name}: {_last_words(done.stderr)}")
    return found[1]


def _last_words(text: str) -> str:
    return "\n".join(last_lines(text[-_WORDS:], _LINES)) or "it said nothing"


class Connection:
    """A connection to a host: the process that holds it, and what came from there.

    Args:
        host: which one.
        command: the command line of the ssh client; or of the program itself, for this host.
    """

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        # A session of its own: a Ctrl-C at the terminal is ours to pass on.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.output, self.error = _fileno(self.process.stdout), _fileno(self.process.stderr)
        for fd in (_fileno(self.process.stdin), self.output, self.error):
            os.set_blocking(fd, False)
        self.frames = Frames()
        #: True if its launcher has found the others.
        self.met = False
        #: Its launcher's exit code; None: it has not ended.
        self.code: int | None = None
        #: True while the client runs, and with it the connection.
        self.open = True
        self.heard, self._told = time.monotonic(), 0.0
        #: Name of a message -> the number of times that it came.
        self.said: Counter[str] = Counter()
        #: Output of ssh itself, or of the shell that it ran there.
        self.words = ""

    def send(self, data: bytes) -> None:
        """Write to the host; if it is gone, :meth:`read` finds that out."""
        assert self.process.stdin is not None
        if self.open:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                self.process.stdin.write(data)

    def keep_in_touch(self, now: float) -> None:
        """Give the host a sign of life, if it has answered and one is due."""
        if self.frames.greeting is not None and now - self._told > BEAT:
            self._told = now
            self.send(b"\n")

    @property
    def readable(self) -> list[int]:
        """The descriptors at which something may come."""
        return [fd for fd in (self.output, self.error) if self.open and fd >= 0]

    def read(self, fd: int, now: float) -> list[tuple[FrameKind, bytes]]:
        """Read once from one of its descriptors, and return the frames that are now complete."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return []
        if fd == self.error:
            self.words = (self.words + data.decode(errors="replace"))[-_WORDS:]
            self.error = self.error if data else -1
            return []
        if not data:
            self.open = False
            return []
        self.heard = now
        return list(self.frames.feed(data))

    def why(self) -> str:
        """Return ssh's own last words, once the connection is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVE)
        while self.error >= 0 and select.select([self.error], [], [], 0)[0]:
            self.read(self.error, 0.0)
        return _last_words(self.words)

    def close(self) -> None:
        """End the client, if it has not ended by itself."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_LEAVE)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _fileno(stream: Any) -> int:
    return int(stream.fileno())


def leave(connections: Sequence[Connection]) -> None:
    """Close the input of all connections, which ends them, and give the ssh clients time to leave."""
    for connection in connections:
        if connection.process.stdin is not None:
            connection.process.stdin.close()
    limit = time.monotonic() + _LEAVE
    for connection in connections:
        with contextlib.suppress(subprocess.TimeoutExpired):
            connection.process.wait(max(0.0, limit - time.monotonic()))
