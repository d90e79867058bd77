"""What to do when a rank ends or a signal comes: decisions only, no process in sight.

Time comes in as an argument and orders go out as return values, so every path is tested without a process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Seconds that ranks have to leave by themselves once another rank failed.
FAILURE_GRACE = 0.5
#: Two signals closer than this are one: "timeout" signals its child and then the whole group.
_SAME_SIGNAL = 0.25
#: Seconds after SIGKILL before a rank counts as stuck in the kernel.
_UNKILLABLE = 10.0


@dataclass(frozen=True)
class Order:
    """Send a signal to some ranks."""

    signum: int
    ranks: tuple[int, ...]


@dataclass
class RankState:
    """What is known of one rank."""

    rank: int
    pid: int | None = None
    #: None while it lives; negative for a signal.
    exit_code: int | None = None
    #: When it ended and when it was told to stop, on the monotonic clock; None: not.
    ended_at: float | None = None
    stopped_at: float | None = None
    #: The most memory it ever had, in bytes; None: not known yet.
    peak: int | None = None


@dataclass
class Policy:
    """The state of a job and the rules by which it ends."""

    ranks: Iterable[int]
    grace: float
    states: dict[int, RankState] = field(init=False)
    #: The signal that ended the job, if one did.
    stopped_by: signal.Signals | None = None
    #: Whether a rank failed before anybody wanted the job to end.
    failing: bool = False
    #: When the next tick is due, or None.
    deadline: float | None = None
    #: True when ranks did not even die of SIGKILL.
    gave_up: bool = False
    _killed: bool = False
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
        """A rank runs."""
        self.states[rank].pid = pid

    def exited(
        self, rank: int, exit_code: int, at: float, *, peak: int | None = None, agreed: bool = False
    ) -> list[Order]:
        """A rank ended. The first that ends with an error stops the others; one that is done early stops nobody.

        Args:
            rank: which.
            exit_code: negative for a signal.
            at: when, on the monotonic clock, in seconds.
            peak: the most memory it ever had, in bytes.
            agreed: the ranks have agreed to leave, so the others are on their way out, too.
        """
        state = self.states[rank]
        state.exit_code, state.ended_at, state.peak = exit_code, at, peak
        if exit_code == 0 or self.stopping:
            return []
        if agreed:
            self.deadline = at + self.grace
            return []
        return self.failed(at)

    def failed(self, now: float) -> list[Order]:
        """Something went wrong: everyone still alive is to stop."""
        if self.stopping:
            return []
        self.failing = True
        self.deadline = now + FAILURE_GRACE
        return self._order(signal.SIGTERM, now)

    def signalled(self, signum: signal.Signals, *, delivered: bool, now: float) -> list[Order]:
        """The user wants the job to end: politely the first time, at once the second.

        Args:
            signum: SIGINT, SIGTERM, SIGHUP or SIGQUIT (which is never polite).
            delivered: the ranks that run have it already, from the terminal.
            now: on the monotonic clock, in seconds.
        """
        again, self._last_signal = now - self._last_signal, now
        if self.stopped_by is None:
            self.stopped_by = signum
            if signum != signal.SIGQUIT:
                self.deadline = now + self.grace
                orders = self._order(signum, now)
                return self._to_those_not_yet_started(orders) if delivered else orders
        elif again < _SAME_SIGNAL:
            return []
        return self._kill(now)

    def tick(self, now: float) -> list[Order]:
        """The deadline passed: whoever is still there is killed."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._killed:
            self.gave_up = True
            return []
        return self._kill(now)

    def _kill(self, now: float) -> list[Order]:
        self._killed = True
        self.deadline = now + _UNKILLABLE
        return self._order(signal.SIGKILL, now)

    def _to_those_not_yet_started(self, orders: list[Order]) -> list[Order]:
        """A rank that is being forked just now was no process yet when the terminal sent the signal."""
        for_them = [(o.signum, tuple(r for r in o.ranks if self.states[r].pid is None)) for o in orders]
        return [Order(signum, ranks) for signum, ranks in for_them if ranks]

    def _order(self, signum: signal.Signals, now: float) -> list[Order]:
        for rank in self.alive:
            if self.states[rank].stopped_at is None:
                self.states[rank].stopped_at = now
        return [Order(signum, self.alive)] if self.alive else []
