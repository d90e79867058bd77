"""Run a job on several hosts from one terminal: ``lockstep run --hosts a,b:4``, by the system's ssh.

::

    this process  ──ssh──  guard on host a (hosted.py)  ──fork──  launcher  ──  zygote  ──  ranks
                  ──ssh──  guard on host b              ──fork──  launcher  ──  zygote  ──  ranks

Each host's launcher does what ``lockstep run --nnodes N --rdzv`` does there; this process starts them, passes signals
on, and shows their output. Nothing is started before all hosts have answered. The ssh client knows how to reach a host,
and as which user, from its configuration and its agent. The job's key goes over ssh's standard input, where no list of
processes shows it.

Note [One signal]
~~~~~~~~~~~~~~~~~
The first signal goes to one host, whose launcher lets the others know. A launcher that knew already would take it for a
second signal, which stops the ranks at once. A further signal is meant to do just that, and goes to all hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep import knobs
from lockstep.errors import LaunchError
from lockstep.job import terminal
from lockstep.job.stop_signals import one_request
from lockstep.launch import tracing
from lockstep.launch.closing import of_hosts
from lockstep.launch.hosted import Order
from lockstep.launch.output import PATIENCE, OutputSink, error_sink, window_size
from lockstep.launch.processes import SAVE, STOPPING, SignalQueue, ignored
from lockstep.remote.frames import SILENT, FrameKind
from lockstep.remote.ssh import Connection, Host, address_of, by_ssh, command_line, leave, meeting_place, passed_on
from lockstep.version import __version__

#: Seconds in which all hosts have to answer.
_REACH = 60.0
#: Seconds beyond --grace that the other hosts have to end once one has; and, after SIGTERM, what they have left to do
#: that has no limit of its own: end processes, and write down how the job has ended.
_PATIENCE, _LAST = 10.0, 25.0
#: Commands of --notify for which a host may be waiting then: one that runs, and that of the end.
_NOTICES = 2
#: Seconds that a message waits for another host's launcher, which knows more.
_LATER = 1.0
#: Bytes that may wait for a slow terminal before the hosts have to wait as well.
_FULL = 1 << 20


# What the user asks for ----------------------------------------------------------------------------------------------


def refuse_with_hosts(text: str, others: Mapping[str, object]) -> None:
    """Refuse options that contradict or repeat ``--hosts``.

    Raises:
        ValueError: one of ``others``, options with their values, was given.
    """
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{given[0]} with --hosts={text}: the hosts are counted and find each other; drop one of them")


@dataclass(frozen=True)
class Line:
    """The command line of each host's launcher."""

    #: The value of -n, for hosts that have no number of their own; None: not given.
    ranks: str | None
    #: The other options, as the user has given them, the program and its arguments.
    rest: tuple[str, ...]
    grace: float

    def command(self, host: Host, *, cwd: str, env: Mapping[str, str]) -> str:
        """Return the line for the host's shell.

        Args:
            host: the host.
            cwd: the folder to start in.
            env: variables to set.
        """
        ranks = host.ranks or self.ranks
        return command_line(["run", "--hosted", *(["-n", ranks] if ranks else []), *self.rest], cwd=cwd, env=env)


# The job -------------------------------------------------------------------------------------------------------------


def run_on_hosts(hosts: Sequence[Host], line: Line) -> int:
    """Run a job on ``hosts`` to its end, and return its exit code as :func:`lockstep.launch.run.run` does.

    Raises:
        LaunchError: a host can't be reached, or does not answer as it should. Nothing was started then.
    """
    addresses = [address_of(host) for host in hosts]
    size = _terminal_size()
    terminal.outlive()
    env = passed_on(terminal=size is not None)
    with contextlib.ExitStack() as undo:
        connections: list[Connection] = []
        for host in hosts:
            command = by_ssh(host, line.command(host, cwd=os.getcwd(), env=env))
            connections.append(Connection(host, command))
            undo.callback(connections[-1].close)
        undo.callback(leave, connections)
        job = _Job(connections, grace=line.grace)
        undo.callback(job.close)
        if not job.reach():
            return job.conclude()
        greeting = connections[0].frames.greeting
        assert greeting is not None, "it was reached"
        job.order(
            Order(
                key=knobs.key() or secrets.token_hex(32),
                nnodes=len(hosts),
                endpoint=meeting_place(hosts, addresses, greeting.port),
                job=f"hosts-{secrets.token_hex(8)}",
                one_stream=error_sink() == 1,
                terminal=size,
                grace=line.grace,
            )
        )
        return job.watch()


def _terminal_size() -> tuple[int, int] | None:
    if not os.isatty(1):
        return None
    rows, columns, _, _ = struct.unpack("4H", window_size(1))
    return rows, columns


def to_end() -> float:
    """Return the seconds beyond --grace that a host's launcher may take to end after SIGTERM: it writes the trace, and
    waits for that of other machines and for commands of ``--notify``, each of which has a limit of its own."""
    return tracing.LIMIT + tracing.OTHERS + _NOTICES * knobs.times().notify + _LAST


@dataclass
class _Unfinished:
    """The beginning of a line that has not ended yet, and the time since which it waits."""

    data: bytes = b""
    since: float = 0.0


class _Job:
    """The hosts' launchers, and their output here."""

    def __init__(self, connections: Sequence[Connection], *, grace: float) -> None:
        self._connections = connections
        self._grace = grace
        self._signals = SignalQueue({*STOPPING, SAVE, signal.SIGTSTP} - ignored(STOPPING))
        self._sinks = {FrameKind.OUTPUT: OutputSink(1), FrameKind.ERROR: OutputSink(2)}
        if error_sink() == 1:
            self._sinks[FrameKind.ERROR] = self._sinks[FrameKind.OUTPUT]
        self._unfinished: dict[tuple[int, FrameKind], _Unfinished] = {}
        self._shown: Counter[str] = Counter()
        #: Messages that wait for a better one: the time limit, the count of messages of this name, the name, the text.
        self._later: list[tuple[float, int, str, str]] = []
        #: The signal that is to end the job.
        self._stopped_by: signal.Signals | None = None
        #: Exit codes of hosts, in the order of their ends, and of those that were told from here to end, since others
        #: had; None: the connection was lost.
        self._codes: list[int | None] = []
        self._pressed_codes: list[int] = []
        #: The time from which what comes from the hosts is read, and kept, though the output is stuck: their ends may
        #: be behind it.
        self._read_on_at = float("inf")
        #: The time of the last look whether something has come from the hosts.
        self._looked = time.monotonic()
        self._ended: set[str] = set()
        #: The time at which the remaining hosts are pressed further, and the number of times they were.
        self._press_at, self._pressed = float("inf"), 0

    def close(self) -> None:
        """Let signals interrupt this process again, as they did before."""
        self._signals.close(keep={SAVE})  # as in run()

    # From the first to the last --------------------------------------------------------------------------------------

    def reach(self) -> bool:
        """Wait until all hosts have answered; False: a signal came first.

        Raises:
            LaunchError: a host can't be reached, does not answer in time, or has another version of lockstep.
        """
        limit = time.monotonic() + _REACH
        while self._stopped_by is None:
            for each in self._connections:
                if each.frames.greeting is None and not each.open:
                    code = each.process.poll()
                    how = "can't be reached" if code in (None, 255) else "could not start lockstep"
                    raise LaunchError(f"{each.host.name} {how}: {each.why()}")
                if each.frames.greeting is not None and each.frames.greeting.version != __version__:
                    raise LaunchError(
                        f"{each.host.name} has lockstep {each.frames.greeting.version}, and this host {__version__}: "
                        "install the same version"
                    )
                if not each.open:
                    raise LaunchError(f"{each.host.name} has left before it was told what to do: {each.why()}")
            missing = [each.host.name for each in self._connections if each.frames.greeting is None]
            if not missing:
                return True
            if time.monotonic() > limit:
                raise LaunchError(f"no answer within {_REACH:g} s from {', '.join(missing)}")
            self._turn()
        return False

    def order(self, order: Order) -> None:
        """Have the hosts start their launchers."""
        for each in self._connections:
            each.send(order.encode())

    def watch(self) -> int:
        """Wait until all have ended, and return the job's exit code."""
        while any(each.open for each in self._connections):
            self._turn()
            now = time.monotonic()
            self._end_silent()
            self._note_ends(now)
            if now >= self._press_at:
                self._press(now)
        return self.conclude()

    def _end_silent(self) -> None:
        """End the connections to hosts of which nothing has come for too long, up to the last look whether something
        has: they give signs of life also while this process stands still, or its output waits for a slow terminal."""
        for each in self._connections:
            if each.open and self._looked - each.heard > SILENT:
                each.process.kill()
                each.open = False
                each.words += f"no sign of life for {SILENT:g} s"

    def conclude(self) -> int:
        """Show the rest and return the exit code of the job."""
        self._show_later(float("inf"))
        self._finish_lines(float("inf"))
        limit = time.monotonic() + _REACH
        while any(sink.backlog for sink in self._sinks.values()) and time.monotonic() < limit:
            self._write(0.1)
            if any(arrival.signum in STOPPING for arrival in self._signals.read()):
                break  # no reader takes the output, and the user wants an end
        return of_hosts(self._codes, pressed=self._pressed_codes, stopped_by=self._stopped_by)

    def _note_ends(self, now: float) -> None:
        """Note which hosts have ended, and make the others end as well."""
        for each in self._connections:
            if each.open or each.host.name in self._ended:
                continue
            self._ended.add(each.host.name)
            if each.code is None:
                self._codes.append(None)
                self._show(f"lost the connection to {each.host.name}: {each.why()}")
            else:
                (self._pressed_codes if self._pressed else self._codes).append(each.code)
            if self._press_at == float("inf"):
                self._press_at = now + self._grace + _PATIENCE
        left = [each for each in self._connections if each.open]
        if self._ended and any(not each.met for each in left) and not self._pressed:
            self._press_at = now  # it waits for a machine that will not come

    def _press(self, now: float) -> None:
        """End launchers that continue without the others: by SIGTERM, then by the end of their connections."""
        self._pressed += 1
        self._press_at = now + self._grace + to_end()
        for each in self._connections:
            if each.open and self._pressed == 1:
                each.send(f"{(self._stopped_by or signal.SIGTERM).name}\n".encode())
            elif each.open:
                each.words += "it did not end in time, and may have left processes there"
                each.process.kill()
                each.open = False

    # One thing after the other ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen, and act on it."""
        ready = self._write(0.05 if self._later or self._unfinished else 0.5)
        now = time.monotonic()
        for arrival in self._signals.read():
            terminal.let_go()
            self._on_signal(arrival.signum)
        for index, each in enumerate(self._connections):
            each.keep_in_touch(now)
            for fd in ready & {each.output, each.error}:
                for kind, data in each.read(fd, now):
                    self._on_frame(index, each, kind, data, now)
        self._show_later(now)
        self._finish_lines(now)

    def _write(self, seconds: float) -> set[int]:
        """Wait for room and write; meanwhile wait for input, where there is room for it. Return what can be read."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        waiting = {sink.fd: sink for sink in self._sinks.values() if sink.backlog}
        for fd in waiting:
            poll.register(fd, select.POLLOUT)
        now = time.monotonic()
        if now >= self._read_on_at or all(len(sink.backlog) < _FULL for sink in waiting.values()):
            self._looked = now
            for each in self._connections:
                for fd in each.readable:
                    poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(seconds * 1000)}
        for sink in waiting.values():
            sink.write()
        return ready

    def _on_signal(self, signum: signal.Signals) -> None:
        """Pass a signal on; see Note [One signal]."""
        if signum == signal.SIGTSTP:
            self._show("a job on several hosts can't be suspended")
            return
        if self._stopped_by is not None and signum != SAVE:
            # Whether one comes right after another is for the hosts' launchers to say.
            one = one_request(self._stopped_by, signum, after=float("inf"))
            if one is not None:
                self._stopped_by = one
                return
        left = [each for each in self._connections if each.open and each.code is None]
        first = signum == SAVE or self._stopped_by is None
        for each in left[:1] if first else left:
            each.send(f"{signum.name}\n".encode())
        if signum != SAVE:
            self._stopped_by = signum
            self._read_on_at = time.monotonic() + (self._grace + _PATIENCE if first else 0.0)

    def _on_frame(self, index: int, each: Connection, kind: FrameKind, data: bytes, now: float) -> None:
        match kind:
            case FrameKind.OUTPUT | FrameKind.ERROR:
                held = self._unfinished.setdefault((index, kind), _Unfinished(since=now))
                held.data += data
            case FrameKind.SAID:
                self._on_message(each, json.loads(data), now)
            case FrameKind.ENDED:
                each.code = int(data)
            case FrameKind.ALIVE:
                pass

    def _on_message(self, each: Connection, said: dict[str, Any], now: float) -> None:
        if "met" in said:
            each.met = True
            return
        text, once = said["text"], said["once"]
        if not once:
            self._show(f"on {each.host.name}: {text}")
            return
        each.said[once] += 1
        if said["later"]:
            self._later.append((now + _LATER, each.said[once], once, text))
        else:
            self._show_once(each.said[once], once, text)

    # What is shown ---------------------------------------------------------------------------------------------------

    def _show_once(self, number: int, once: str, text: str) -> None:
        if number > self._shown[once]:
            self._shown[once] = number
            self._show(text)

    def _show_later(self, now: float) -> None:
        due = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, number, once, text in due:
            self._show_once(number, once, text)

    def _show(self, text: str) -> None:
        self._finish_lines(float("inf"))  # output that came before the message is shown before it
        self._sinks[FrameKind.ERROR].push(-1, b"", f"lockstep: {text}\n".encode(errors="backslashreplace"))

    def _finish_lines(self, now: float) -> None:
        """Show whole lines, and the beginning of one if no other host can have begun a line, or after a moment."""
        for (index, kind), held in list(self._unfinished.items()):
            sink = self._sinks[kind]
            alone = len(self._connections) == 1 or sink.owner == index
            end = len(held.data) if alone or now - held.since >= PATIENCE else held.data.rfind(b"\n") + 1
            sink.push(index, b"", held.data[:end])
            if end == len(held.data):
                del self._unfinished[index, kind]
            elif end:
                held.data, held.since = held.data[end:], time.monotonic()
