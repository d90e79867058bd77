"""What to do when a rank ends or a signal comes, which rank failed first, and whether a restart can help.

Decisions only: time comes in as an argument and orders go out as return values, so every path is tested without a
process.

Note [What only repeats]
~~~~~~~~~~~~~~~~~~~~~~~~
A restart helps against what happens to a job (a kill, a machine's hiccup), not against what the job does. So a failure
is final

- if it is a Python error (or an exit code) of a rank that had not taken a step since it was started: a wrong import, a
  wrong path, a checkpoint of another model. What other ranks' ends cause (a lost peer, a collective's timeout) is
  not counted as one.
- if it is the last one once more: the same rank, the same step, the same error. Numbers in a message are not compared:
  they are process ids and losses. A signal from outside (SIGKILL, SIGTERM) is not the job's error and never the same,
  unless the kernel sent it because memory ran out.

Note [Machines that can be spared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What is final for a machine need not be so for the job: one that joins a job which trains may lack a module, data or
room for processes. So where a failure would end the job in a round that has taken no step, and in which machines came
to others that had taken some, the job goes back to how it was: the machine leaves whose ranks have failed, if it is one
of those that came. If it is not, but its ranks have raised an error, that may be one of all ranks (seeds that differ),
of which chance decides who is first; then all leave that came. In either case the others must be enough. They meet
again and go on from what they saved. This is no restart, and no failure that the next one is compared with; where they
fail in the same way without those that came, the job ends.

If something starts such a machine again, it may join again, and each time the others stop for it. So the job counts
this, and once it has been more often than restarts are allowed, those of the last round let nobody in as long as they
are enough. Where no round has taken a step, the program may be broken for all, and the job ends.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep import knobs
from lockstep.codes import CodedEnum
from lockstep.job.files import FailureRecord
from lockstep.job.stop_signals import TIME_LIMIT, one_request
from lockstep.launch.processes import name

# How a job ends ------------------------------------------------------------------------------------------------------

#: Seconds that ranks have to leave by themselves once another rank failed.
FAILURE_GRACE = 0.5
#: Seconds between two looks whether ranks that were spared still tell of their own failure.
_PAUSE = 0.1
#: Seconds after SIGKILL before a rank counts as stuck in the kernel.
_UNKILLABLE = 10.0


@dataclass(frozen=True)
class Order:
    """Send a signal to some ranks."""

    signum: int
    ranks: tuple[int, ...]


class KilledFor(enum.Enum):
    """Why the launcher killed a rank that had been told to stop."""

    #: It did not leave within the time that ``--grace`` gives.
    GRACE = enum.auto()
    #: It did not leave within :data:`FAILURE_GRACE` of another rank's failure.
    FAILURE = enum.auto()
    #: A second signal, or SIGQUIT, left it no time.
    AT_ONCE = enum.auto()


#: The exit code of a job whose ranks were stopped because one held up the others, as ``timeout`` has it.
HUNG = 124


@dataclass
class RankState:
    """What is known of one rank."""

    rank: int
    pid: int | None = None
    #: The exit code, negative for a signal; None while the rank runs.
    exit_code: int | None = None
    #: The times at which it ended and was told to stop, in seconds on the monotonic clock; None: not yet.
    ended_at: float | None = None
    stopped_at: float | None = None
    #: Peak memory in bytes; None: not known yet.
    peak: int | None = None
    #: Why the launcher sent it SIGKILL; None: it did not.
    killed_for: KilledFor | None = None


@dataclass
class Policy:
    """The state of a job and the rules by which it ends."""

    ranks: Iterable[int]
    #: Seconds between asking the ranks to stop and killing them.
    grace: float
    states: dict[int, RankState] = field(init=False)
    #: The signal that ended the job, if one did.
    stopped_by: signal.Signals | None = None
    #: True if a rank failed before the job was asked to end.
    failing: bool = False
    #: The time of the next tick; None: none is due.
    deadline: float | None = None
    #: True if a user has ended the job from a debugger.
    has_quit: bool = False
    #: True when ranks did not even die of SIGKILL.
    gave_up: bool = False
    #: The time until which ranks that have failed themselves may print their tracebacks.
    _told_by: float = float("inf")
    _killed: bool = False
    #: Why ranks are killed that are still there at the deadline.
    _late_for: KilledFor = KilledFor.GRACE
    _last_signal: float = float("-inf")

    def __post_init__(self) -> None:
        self.states = {rank: RankState(rank) for rank in self.ranks}

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self.states.items() if state.exit_code is None)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.gave_up or not self.alive

    @property
    def stopping(self) -> bool:
        """Whether the ranks have been told to stop."""
        return self.deadline is not None or self._killed

    def started(self, rank: int, pid: int) -> None:
        """Note that a rank runs."""
        self.states[rank].pid = pid

    def exited(
        self, rank: int, exit_code: int, at: float, *, peak: int | None = None, agreed: bool = False
    ) -> list[Order]:
        """Note that a rank ended. The first that ends with an error stops the others; one that is done early does not.
        Where all have saved and are on their way out, no way to end is an error, and the others have time to follow.

        Args:
            rank: the rank that ended.
            exit_code: negative for a signal.
            at: when, on the monotonic clock, in seconds.
            peak: the most memory it ever had, in bytes.
            agreed: the ranks have agreed to leave, and have saved.
        """
        state = self.states[rank]
        state.exit_code, state.ended_at, state.peak = exit_code, at, peak
        if self.stopping:
            return []
        if agreed:
            self._give(self.grace, at)
            return []
        return [] if exit_code == 0 else self.failed(at)

    def failed(self, now: float) -> list[Order]:
        """Stop every rank that is alive, because one failed."""
        if self.stopping:
            return []
        self.failing, self._told_by = True, now + knobs.times().telling
        self._give(FAILURE_GRACE, now, late_for=KilledFor.FAILURE)
        return self._order(signal.SIGTERM, now)

    def quit(self, rank: int, now: float) -> list[Order]:
        """Stop the other ranks because a user has ended ``rank`` from its debugger: as by a Ctrl-C, but ranks do not
        save, since one of them takes no step any more."""
        if self.stopping:
            return []
        self.stopped_by, self.has_quit = signal.SIGINT, True
        self._give(self.grace, now)
        return self._order(signal.SIGTERM, now, spare=(rank,))

    def signalled(self, signum: signal.Signals, *, delivered: bool, now: float) -> list[Order]:
        """End the job for the user: politely the first time, at once the second. See Note [One request] in
        job/stop_signals.py.

        Args:
            signum: SIGINT, SIGTERM, SIGHUP, SIGQUIT (which is never polite) or ``TIME_LIMIT``.
            delivered: the ranks that run have it already, from the terminal.
            now: on the monotonic clock, in seconds.
        """
        after, self._last_signal = now - self._last_signal, now
        if self.stopped_by is None:
            self.stopped_by = signum
            if signum != signal.SIGQUIT:
                if not self.failing:  # else the ranks are ended already, and sooner
                    self._give(self.grace, now)
                orders = self._order(signal.SIGTERM if signum == TIME_LIMIT else signum, now)
                return self._to_those_not_yet_started(orders) if delivered else orders
        elif (one := one_request(self.stopped_by, signum, after=after)) is not None:
            self.stopped_by = one
            return []
        return self._kill(now, KilledFor.AT_ONCE)

    def leave(self, now: float) -> list[Order]:
        """Ask the ranks to save and leave, although the job does not end: it continues with other machines."""
        if self.stopping:
            return []
        self._give(self.grace, now)
        return self._order(signal.SIGTERM, now)

    def let_end(self, now: float) -> None:
        """Give the ranks time to end by themselves, since their programs are over, or have been left."""
        if not self.stopping:
            self._give(self.grace, now)

    def tick(self, now: float, *, telling: Iterable[int] = ()) -> list[Order]:
        """Kill the ranks that are still there when the deadline has passed.

        Args:
            now: on the monotonic clock, in seconds.
            telling: ranks that have failed themselves, and are printing their tracebacks. Another rank's failure does
                not end them for some seconds.
        """
        if self.deadline is None or now < self.deadline or not self.alive:
            return []
        if self._killed:
            self.gave_up = True
            return []
        waits = self._late_for is KilledFor.FAILURE and now < self._told_by
        return self._kill(now, self._late_for, spare=[*telling] if waits else ())

    def excuse(self, seconds: float) -> None:
        """Give the ranks so many seconds more: the launcher itself stood still, and so did most likely the ranks."""
        if self.deadline is not None:
            self.deadline += seconds
            self._told_by += seconds

    def _give(self, seconds: float, now: float, *, late_for: KilledFor = KilledFor.GRACE) -> None:
        self.deadline, self._late_for = now + seconds, late_for

    def _kill(self, now: float, why: KilledFor, *, spare: Collection[int] = ()) -> list[Order]:
        self._killed = not spare
        self.deadline = now + (_PAUSE if spare else _UNKILLABLE)
        orders = self._order(signal.SIGKILL, now, spare=spare)
        for rank in (rank for order in orders for rank in order.ranks):
            self.states[rank].killed_for = self.states[rank].killed_for or why
        return orders

    def _to_those_not_yet_started(self, orders: list[Order]) -> list[Order]:
        """Keep the orders for ranks that are being forked: when the terminal sent the signal, they were not there."""
        for_them = [(o.signum, tuple(r for r in o.ranks if self.states[r].pid is None)) for o in orders]
        return [Order(signum, ranks) for signum, ranks in for_them if ranks]

    def _order(self, signum: signal.Signals, now: float, *, spare: Collection[int] = ()) -> list[Order]:
        ranks = tuple(rank for rank in self.alive if rank not in spare)
        for rank in ranks:
            if self.states[rank].stopped_at is None:
                self.states[rank].stopped_at = now
        return [Order(signum, ranks)] if ranks else []


# How a rank ended ----------------------------------------------------------------------------------------------------

#: Characters of an error's message that the run's record keeps.
_TOLD = 2000
#: Seconds after which a death without a record is noticed, while a record carries the time of its exception.
_NOTICED_LATE = 0.1
#: How other ranks' exceptions read when a peer has gone or failed: consequences, not causes.
_ECHOES = (
    "PeerLost",
    "CollectiveTimeout",
    "DistNetworkError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "which reads the stream for this machine, failed",
)


class FailureKind(CodedEnum):
    """What ended a rank that failed."""

    RAISED = "an exception", "rank-raised"
    EXITED = "an exit code of its own", "rank-exited"
    KILLED = "a signal", "rank-killed"
    MEMORY = "the kernel, because memory ran out", "rank-out-of-memory"
    STUCK = "nothing: it could not be killed", "rank-unkillable"
    HUNG = "the launcher, since it held up the others", "rank-hung"


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    state: RankState
    record: FailureRecord | None
    #: The rank's log; None: its output went elsewhere.
    log: Path | None = None
    #: True if the user saw the rank's standard error.
    shown: bool = False
    #: The collective in which the rank waited at the end, with the line of the program; empty: it did not wait.
    waited_in: str = ""
    #: True if the watchdog of its process group ended it, and the record is the launcher's; see watchdog.py.
    was_aborted: bool = False
    #: The stacks that it left because of a crash in native code, in Python's words; empty: it has left none.
    crash: str = ""

    @property
    def rank(self) -> int:
        return self.state.rank

    @property
    def exit_code(self) -> int:
        """As a shell reports it; the record knows better than the signal by which we ended the rank afterwards."""
        if self.record is not None:
            return self.record.exit_code
        code = self.state.exit_code
        if code is None:
            return 1  # it could not even be killed
        return code if code >= 0 else 128 - code

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed before it was told to stop; also if its end was noticed together with the one for which it
        was to stop, since the order of those is chance."""
        if self.record is None and self.state.exit_code in (None, 0):
            return False
        at = self._seen if self.record is None else self.record.at
        return self.state.stopped_at is None or at <= self.state.stopped_at

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.state.exit_code == -signal.SIGKILL

    @property
    def order(self) -> tuple[bool, float]:
        """The order of failures is that of their times; but an echo of another's failure comes after all that are none,
        since a death may be noticed late."""
        return self.is_echo, self.record.at if self.record is not None else self._seen - _NOTICED_LATE

    @property
    def cause(self) -> str:
        """The cause in one phrase: an exit code, a signal's name, or the exception."""
        if self.record is not None and self.record.type != "SystemExit":
            return self.record.summary
        return self.status

    @property
    def status(self) -> str:
        """One phrase for how its process ended: an exit code, or the signal that killed it."""
        code = self.state.exit_code
        has_said = self.record is not None and not self.was_aborted
        if has_said or code is None or code >= 0:
            return f"exit code {self.exit_code}"
        return f"killed by signal {-code} ({name(-code)})"

    @property
    def is_echo(self) -> bool:
        """Whether its exception reads like the consequence of another rank's end."""
        return self.record is not None and is_echo(self.record.type, self.record.message)

    @property
    def _seen(self) -> float:
        return self.state.ended_at if self.state.ended_at is not None else float("inf")


def is_echo(kind: str, message: str) -> bool:
    """Return whether an exception of this type and message reads like the consequence of another rank's end."""
    return any(echo in kind or echo in message for echo in _ECHOES)


def failure_facts(
    ending: Ending, *, step: int | None, taken: int | None, out_of_memory: bool = False
) -> dict[str, Any]:
    """Return how the first rank to fail ended, for the run's record, in JSON's types.

    Args:
        ending: of that rank.
        step: the optimizer steps of the whole run; None: not counted.
        taken: those since this start.
        out_of_memory: whether the kernel killed it because memory ran out.
    """
    record, code = ending.record, ending.state.exit_code
    was_killed = (record is None or ending.was_aborted) and code is not None and code < 0
    if record is not None and not ending.was_aborted:
        kind = FailureKind.EXITED if record.type == "SystemExit" else FailureKind.RAISED
    elif out_of_memory:
        kind = FailureKind.MEMORY
    elif code is None:
        kind = FailureKind.STUCK
    else:
        kind = FailureKind.KILLED if was_killed else FailureKind.EXITED
    return {
        "code": kind.code,
        "rank": ending.rank,
        "step": step,
        "taken": taken,
        "exit_code": ending.exit_code,
        "signal": name(-code) if was_killed and code is not None else None,
        "error": None
        if record is None
        else {"type": record.type, "message": record.message.strip()[:_TOLD], "code": record.code},
        "log": None if ending.log is None else str(ending.log),
    }


def hang_facts(rank: int, *, step: int | None, taken: int | None) -> dict[str, Any]:
    """Return the same facts about a rank that was stopped, with all others, because it held them up.

    Args:
        rank: the first of those who did.
        step: the optimizer steps of the whole run; None: not counted.
        taken: those since this start.
    """
    return {
        "code": FailureKind.HUNG.code,
        "rank": rank,
        "step": step,
        "taken": taken,
        "exit_code": HUNG,
        "signal": None,
        "error": None,
        "log": None,
    }


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """Return how the rank ended that failed before the others, or None if none failed by itself."""
    return min((ending for ending in endings if ending.failed_by_itself), key=lambda ending: ending.order, default=None)


# Whether to start again ----------------------------------------------------------------------------------------------

#: Signals that come from another process; the process itself causes the others.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Failure:
    """The failure of one start of a job, as far as the next start is concerned."""

    rank: int
    #: The error's type and message with its numbers left out, the exit code or the signal.
    cause: str
    #: True if the rank ended by an exception or an exit code of its own.
    by_itself: bool
    #: True if the cause came from outside, or from another rank's end.
    from_outside: bool
    #: Optimizer steps of the whole run, and since this start; None: not counted.
    step: int | None
    taken: int | None

    @classmethod
    def of(cls, ending: Ending, *, step: int | None, taken: int | None, out_of_memory: bool = False) -> Failure:
        """Take from how the first rank to fail ended what the next failure is compared with."""
        code = ending.state.exit_code
        sent = ending.record is None and code is not None and -code in _SENT and not out_of_memory
        text = ending.cause if ending.record is None else f"{ending.record.type}: {ending.record.message}"
        return cls(
            rank=ending.rank,
            cause=re.sub(r"0x[0-9a-f]+|\d+", "#", text) if ending.record is not None else text,
            by_itself=ending.record is not None or (code is not None and code > 0),
            from_outside=sent or ending.is_echo,
            step=step,
            taken=taken,
        )

    @classmethod
    def of_hang(cls, rank: int, *, step: int | None, taken: int | None) -> Failure:
        """Return the failure of a start whose ranks were stopped because ``rank`` held up the others."""
        return cls(rank, "a hang", by_itself=False, from_outside=False, step=step, taken=taken)

    def repeats(self, other: Failure) -> bool:
        """Return whether it is the same failure as ``other``, and will be again."""
        if self.from_outside or other.from_outside:
            return False
        return (self.rank, self.step, self.cause) == (other.rank, other.step, other.cause)


class Refusal(enum.Enum):
    """Why a job is not started again. See Note [What only repeats]."""

    NOT_ASKED = enum.auto()
    BEFORE_FIRST_STEP = enum.auto()
    SAME_AGAIN = enum.auto()
    USED_UP = enum.auto()


class Restarts:
    """How often a job may still start again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        #: How often machines left without which the job went on.
        self.spared = 0
        self._last: Failure | None = None

    @property
    def history(self) -> dict[str, Any]:
        """What other launchers of the job need to know, in JSON's types."""
        return {"used": self.used, "spared": self.spared, "last": None if self._last is None else asdict(self._last)}

    @property
    def closed(self) -> bool:
        """Whether the job lets in no machine any more as long as it has enough."""
        return self.spared > self.limit

    def adopt(self, history: dict[str, Any]) -> None:
        """Take over what other launchers of the job know."""
        if history:
            self.spared = max(self.spared, history["spared"])
        if history and history["used"] >= self.used:
            self.used = history["used"]
            self._last = None if history["last"] is None else Failure(**history["last"])

    def refusal(self, failure: Failure) -> Refusal | None:
        """Return why the job is not started again after ``failure``, or None: then one more restart is used."""
        last, self._last = self._last, failure
        if self.limit == 0:
            return Refusal.NOT_ASKED
        if failure.by_itself and not failure.from_outside and failure.taken == 0:
            return Refusal.BEFORE_FIRST_STEP
        if last is not None and failure.repeats(last):
            return Refusal.SAME_AGAIN
        if self.used == self.limit:
            return Refusal.USED_UP
        self.used += 1
        return None
