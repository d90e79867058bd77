"""Visit hosts, or this machine, and bring back the findings there and between them. Every wait has a limit."""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch.spec import DEFAULT_MASTER_PORT
from lockstep.machine import is_loopback
from lockstep.remote.frames import FrameKind
from lockstep.remote.ssh import (
    Connection,
    Host,
    address_of,
    by_ssh,
    command_line,
    leave,
    lockstep_command,
    meeting_place,
    passed_on,
)
from lockstep.rendezvous.messages import DEFAULT_PORT
from lockstep.tools.doctor import between, child, trials
from lockstep.tools.doctor.findings import Finding, Level, Problem, warning, wrong
from lockstep.tools.doctor.hosted import CONNECT, logs_of
from lockstep.tools.doctor.variables import check_own
from lockstep.version import __version__

#: Seconds for a host to answer, for all checks of a host, and for one short question.
_REACH, _LOOK, _ASK = 30.0, trials.TORCH_LIMIT + trials.JOB_LIMIT + 90.0, 30.0
#: Number of times that a host is asked for its time.
_CLOCKS = 5
THIS = "this machine"


@dataclass(frozen=True)
class VisitOptions:
    """The user's options."""

    #: The value of -n, for hosts that have no number of their own.
    ranks: str | None = None
    #: The folder that the run goes to.
    folder: str = "."
    quick: bool = False


@dataclass
class Visited:
    """The findings on one host."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    #: The host's facts from ``facts.collect``; empty: they have not come.
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The findings on all hosts."""

    hosts: list[Visited]
    #: Findings about the connections between hosts.
    between: list[Finding] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """All findings, those of the hosts first."""
        return [*(finding for host in self.hosts for finding in host.findings), *self.between]


class _Visit:
    """One host, while it is connected."""

    def __init__(self, connection: Connection, visited: Visited, address: str) -> None:
        self.connection = connection
        self.visited = visited
        #: The address to which the ssh client resolves its name.
        self.address = address
        #: The check that the host is at.
        self.at = ""
        self.answer: dict[str, Any] | None = None
        self.heard = 0.0
        self.there = True

    @property
    def name(self) -> str:
        return self.visited.name

    @property
    def port(self) -> int:
        """A port that is free on the host."""
        assert self.connection.frames.greeting is not None, "it has answered"
        return self.connection.frames.greeting.port

    def ask(self, order: dict[str, Any]) -> None:
        self.answer = None
        self.connection.send(json.dumps(order).encode() + b"\n")

    def lose(self, finding: Finding) -> None:
        """Record why the host is lost, and continue without it."""
        self.there = self.connection.open = False
        self.visited.findings.append(finding)
        self.connection.close()

    def read(self, fd: int) -> None:
        now = time.monotonic()
        for kind, data in self.connection.read(fd, now):
            if kind is FrameKind.SAID:
                self._hear(json.loads(data))

    def _hear(self, said: dict[str, Any]) -> None:
        if "at" in said:
            self.at = said["at"]
        elif "found" in said:
            self.visited.findings.append(Finding.from_json(said["found"]))
        else:
            self.answer, self.heard = said, time.time()


def look_at(hosts: Sequence[Host], asked: VisitOptions) -> Report:
    """Check ``hosts``, or this machine if none is given."""
    several = len(hosts) > 1
    report = Report([Visited(host.name) for host in hosts] or [Visited(THIS)])
    with ExitStack() as undo:
        visits = list(_open(hosts, report, undo))
        undo.callback(leave, [visit.connection for visit in visits])
        party = _Party(visits)
        party.greet()
        folder = os.path.abspath(asked.folder)
        orders = {
            visit: {"do": "look", "ranks": visit.connection.host.ranks or asked.ranks, "folder": folder}
            | {"several": several, "quick": asked.quick}
            for visit in party.there
        }
        for visit, facts in party.ask(orders, limit=_LOOK).items():
            visit.visited.facts = facts
        if hosts:
            report.between += [replace(each, what=f"here: {each.what}") for each in check_own(os.environ)]
        if several and len(party.there) > 1:
            report.between += _look_between(party, folder=folder, quick=asked.quick)
        elif several:
            what = "too few hosts were reached to check the connections between them"
            report.between.append(
                warning(Problem.HOSTS_TOO_FEW, "ways", what, "fix what is wrong with the others first")
            )
    return report


def _open(hosts: Sequence[Host], report: Report, undo: ExitStack) -> Iterator[_Visit]:
    """Start a program on each host, or on this machine."""
    words = ["doctor", "--hosted"]
    if not hosts:
        connection = Connection(Host(THIS), lockstep_command(words))
        undo.callback(connection.close)
        yield _Visit(connection, report.hosts[0], "localhost")
        return
    line = command_line(words, cwd=os.getcwd(), env=passed_on(terminal=False))
    for host, visited in zip(hosts, report.hosts, strict=True):
        try:
            address = address_of(host)
        except LaunchError as error:
            visited.findings.append(wrong(Problem.HOST_NAME_UNKNOWN, "ssh", str(error), _ADVICE_NAME))
            continue
        connection = Connection(host, by_ssh(host, line))
        undo.callback(connection.close)
        yield _Visit(connection, visited, address)


_ADVICE_NAME = "write the host into ~/.ssh/config, or name it by its address"
#: Words of ssh or a shell, and the advice for them; the first match counts.
_WORDS = (
    (
        "Permission denied",
        "install a key there that ssh can use without a password: ssh-copy-id HOST; try ssh -o BatchMode=yes HOST",
    ),
    ("Host key verification failed", "ssh HOST once by hand, and compare the key that it shows"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "find out why the host has another key; then ssh-keygen -R HOST"),
    ("Could not resolve hostname", _ADVICE_NAME),
    ("Connection refused", "start sshd there (systemctl start ssh), or name its port in ~/.ssh/config"),
    ("No route to host", "check whether the host is up, and whether its firewall lets ssh in"),
    ("timed out", "check whether the host is up, and whether its firewall lets ssh in"),
    ("can't cd", "create the folder in which this command is started on all hosts, or start it in one that they have"),
    (
        "No such file or directory",
        "install the same Python with lockstep at the same path, and have the same folder there",
    ),
    ("No module named", "install lockstep for that Python, or set PYTHONPATH, which goes along"),
    ("No such command", "install the same version of lockstep there"),
    ("not found", "install the same Python with lockstep at the same path on all hosts"),
)


def _advice(words: str, host: str) -> str:
    low = words.lower()
    advice = next((advice for part, advice in _WORDS if part.lower() in low), "try ssh HOST true by hand")
    return advice.replace("HOST", host)


class _Party:
    """All hosts that are visited, asked together."""

    def __init__(self, visits: Sequence[_Visit]) -> None:
        self._visits = visits

    @property
    def there(self) -> list[_Visit]:
        """The hosts that answer."""
        return [visit for visit in self._visits if visit.there]

    def greet(self) -> None:
        """Wait, for a limited time, until all hosts have answered, and continue without those that have not."""
        self._wait(lambda visit: visit.connection.frames.greeting is not None, _REACH)
        for visit in self.there:
            greeting = visit.connection.frames.greeting
            if greeting is None:
                finding = wrong(
                    Problem.HOST_NO_ANSWER, "ssh", f"no answer within {_REACH:g} s", _advice("timed out", visit.name)
                )
                visit.lose(finding)
            elif greeting.version != __version__:
                what = f"lockstep {greeting.version} is there, and {__version__} here"
                visit.lose(wrong(Problem.LOCKSTEP_DIFFERS, "versions", what, "install the same version"))

    def ask(self, orders: dict[_Visit, dict[str, Any]], *, limit: float = _ASK) -> dict[_Visit, Any]:
        """Give orders to some hosts, and return the answers of those that answer.

        Args:
            orders: host -> its order.
            limit: seconds for all of them.
        """
        for visit, order in orders.items():
            visit.at = order["do"]
            visit.ask(order)
        self._wait(lambda visit: visit not in orders or visit.answer is not None, limit)
        answers = {}
        for visit in orders:
            if visit.answer is None:
                if visit.there:
                    what = f"no answer within {limit:g} s, while it looked at {visit.at}"
                    visit.lose(
                        wrong(
                            Problem.CHECK_NO_ANSWER,
                            visit.at,
                            what,
                            "look there by hand: a disk, a driver or the network hangs",
                        )
                    )
            elif "error" in visit.answer:
                what = f"this could not be asked: {visit.answer['error']}"
                visit.visited.findings.append(
                    wrong(
                        Problem.CHECK_FAILED, visit.at, what, "report an issue with the output of lockstep doctor --env"
                    )
                )
            else:
                answers[visit] = visit.answer["is"]
        return answers

    def ask_all(self, order: dict[str, Any]) -> dict[_Visit, Any]:
        """Give all hosts the same order, and return their answers."""
        return self.ask(dict.fromkeys(self.there, order))

    def during(self, work: Callable[[], child.ChildResult]) -> child.ChildResult:
        """Run ``work`` in a thread and return its result; meanwhile give the hosts signs of life."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            try:
                while not future.done():
                    self._turn(0.2)
            except BaseException:
                child.end_all()
                raise
            return future.result()

    def _wait(self, done: Callable[[_Visit], bool], limit: float) -> None:
        end = time.monotonic() + limit
        while (left := [visit for visit in self.there if not done(visit)]) and time.monotonic() < end:
            self._turn(min(1.0, end - time.monotonic()))
            for visit in left:
                if not visit.connection.open and not done(visit):
                    self._note_end(visit)

    def _turn(self, seconds: float) -> None:
        now, poll = time.monotonic(), select.poll()
        for visit in self.there:
            visit.connection.keep_in_touch(now)
        owners = {fd: visit for visit in self.there for fd in visit.connection.readable}
        for fd in owners:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(seconds * 1000):
            owners[fd].read(fd)

    def _note_end(self, visit: _Visit) -> None:
        words, code = visit.connection.why(), visit.connection.process.poll()
        if visit.connection.frames.greeting is not None:
            what = f"it has ended while it looked at {visit.at}: {words}"
            visit.lose(
                wrong(
                    Problem.HOST_LOST, "ssh", what, "see what ended it there (dmesg: out of memory?), or the connection"
                )
            )
        elif code in (None, 255):
            visit.lose(wrong(Problem.SSH_FAILED, "ssh", f"it can't be reached: {words}", _advice(words, visit.name)))
        else:
            visit.lose(
                wrong(
                    Problem.LOCKSTEP_NOT_STARTED,
                    "ssh",
                    f"lockstep can't be started there: {words}",
                    _advice(words, visit.name),
                )
            )


# What lies between them ----------------------------------------------------------------------------------------------


def _look_between(party: _Party, *, folder: str, quick: bool) -> Iterator[Finding]:
    yield from between.compare_versions({visit.name: visit.visited.facts for visit in party.there})
    clocks = {visit.name: clock for visit in party.there if (clock := _clock(party, visit)) is not None}
    if len(party.there) < 2:  # the others were lost meanwhile, which has its own findings
        return
    yield from between.compare_clocks(clocks)
    yield from _look_at_folder(party, folder)
    reached = True
    for finding in _look_at_ways(party):
        reached = reached and finding.level is not Level.WRONG
        yield finding
    if quick:
        return
    if not reached:
        yield warning(
            Problem.JOB_NOT_TRIED, "a job", "not tried, since not all hosts reach each other", "fix that first"
        )
        return
    yield from _try_job(party)


def _clock(party: _Party, visit: _Visit) -> between.HostClock | None:
    """Ask a host for its time; None: it was lost meanwhile, which has its own finding."""
    looks = []
    for _ in range(_CLOCKS):
        asked = time.time()
        answer = party.ask({visit: {"do": "clock"}})
        if visit in answer:
            looks.append((asked, float(answer[visit]), visit.heard))
    return between.HostClock.of(looks) if looks else None


def _look_at_folder(party: _Party, folder: str) -> Iterator[Finding]:
    owner, *others = party.there
    token = secrets.token_hex(16)
    there = party.ask({owner: {"do": "mark", "folder": folder, "token": token}}).get(owner)
    if there is None:
        return
    seen = party.ask({visit: {"do": "see", "folder": there, "token": token} for visit in others})
    yield from between.judge_folder(there, owner.name, {visit.name: sees for visit, sees in seen.items()})


def _look_at_ways(party: _Party) -> Iterator[Finding]:
    """Have every host connect to every other: at its name, at its address for the other, at ports of each kind."""
    visits = party.there
    try:
        hosts = [visit.connection.host for visit in visits]
        meeting_place(hosts, [visit.address for visit in visits], visits[0].port)
    except LaunchError as error:
        yield wrong(Problem.NO_MEETING_PLACE, "ways", str(error), "see HostName in ~/.ssh/config, and /etc/hosts")
        return
    tokens = {visit: secrets.token_hex(16) for visit in visits}
    ports = party.ask(
        {
            visit: {"do": "listen", "ports": [0, visit.port, DEFAULT_PORT, DEFAULT_MASTER_PORT], "token": token}
            for visit, token in tokens.items()
        }
    )
    ways = party.ask({visit: {"do": "ways", "to": [other.address for other in visits]} for visit in ports})
    orders = {}
    for source in ways:
        targets = []
        for target in ways:
            if target is source:
                continue
            own = ways[target][visits.index(source)]
            addresses = [target.address] if is_loopback(visits[0].address) or not is_loopback(target.address) else []
            addresses += [own] if own and own != target.address and not is_loopback(own) else []
            targets += [
                {"to": target.name, "address": address, "port": port, "token": tokens[target]}
                for address in addresses
                for port in ports[target]["ports"]
            ]
        orders[source] = {"do": "connect", "targets": targets}
    answers = party.ask(orders, limit=_ASK + CONNECT * (1 + len(visits)))
    party.ask_all({"do": "deafen"})
    tries = [
        between.Try(
            source.name, each["to"], each["address"], each["resolved"], each["port"], each["how"], each["why"],
            each["seconds"],
        )
        for source, results in answers.items()
        for each in results
    ]  # fmt: skip
    yield from between.judge_ways(tries, first=visits[0].name, limit=CONNECT)


def _try_job(party: _Party) -> Iterator[Finding]:
    token = secrets.token_hex(16)
    visits, logs = party.there, logs_of(token)
    party.ask_all({"do": "logs", "path": logs})
    names = [f"[{visit.name}]:1" if ":" in visit.name else f"{visit.name}:1" for visit in visits]
    job = trials.read_job(party.during(lambda: trials.job_on_hosts(",".join(names), logs=logs)))
    if isinstance(job, str):
        what = f"a job of one rank on each host fails: {job}"
        yield wrong(
            Problem.JOB_FAILED,
            "a job",
            what,
            "fix what is wrong above; then try lockstep run --hosts with a small program",
        )
        return
    places = {visit.name: visit.visited.facts["place"] for visit in visits}
    yield from trials.judge_job(job, between.name_ranks(job["places"], places))
