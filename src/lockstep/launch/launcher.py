"""The loop that watches ranks, whoever asked for them: a command (supervisor.py) or a program (spawn.py)."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable

from lockstep.job.files import EXIT_SAVED
from lockstep.launch.attempt import Attempt
from lockstep.launch.channel import Answer, Broken, Exited, Started
from lockstep.launch.farewell import say
from lockstep.launch.handle import ZygoteHandle
from lockstep.launch.policy import Order, Policy
from lockstep.launch.spec import JobSpec

#: Seconds between two comparisons of the ranks, and two looks for one that left a failure record but does not end.
_HEARTBEAT = 1.0


class Launcher:
    """The zygote and its ranks on this machine: hears of them, applies the policy, and says who holds up the others.

    Args:
        spec: the job.
        home: its private folder.
    """

    def __init__(self, spec: JobSpec, *, home: str) -> None:
        self.spec = spec
        self.home = home
        self.attempt = Attempt(spec, home=home, restart=0)
        #: The traceback of the zygote's imports, if they failed.
        self.broken: str | None = None
        self.selector = selectors.PollSelector()  # epoll refuses regular files, which standard output may be
        #: Whether this attempt's ranks were told that one of them failed.
        self._marked = False
        self._next_look = 0.0
        try:
            self.zygote = ZygoteHandle(home, ranks=spec.nproc, restarts=spec.max_restarts > 0)
        except BaseException:
            self.selector.close()
            self.attempt.close()
            raise
        self.selector.register(self.zygote, selectors.EVENT_READ)

    @property
    def policy(self) -> Policy:
        """The state of the ranks, and the rules by which they end."""
        return self.attempt.policy

    @property
    def lives(self) -> bool:
        """Whether the zygote is there, and with it what it started."""
        return self.zygote in self.selector.get_map()

    def turn(self, deadline: float | None = None) -> None:
        """Wait for something to happen, or until ``deadline`` on the monotonic clock, and see to it."""
        ready = self._wait(deadline)
        now = time.monotonic()
        self._see_to(ready, now)
        self._look(now)
        self.apply(self.policy.tick(now))

    def apply(self, orders: Iterable[Order]) -> None:
        """Have the zygote carry out what the policy says."""
        if self.policy.failing and not self._marked:
            self._marked = True
            self.attempt.mark_failed()
        for order in orders:
            self.zygote.signal(order.ranks, order.signum)

    def renew(self, attempt: Attempt) -> None:
        """Go on with another attempt; the one before has ended."""
        self.attempt.close()
        self.attempt = attempt
        self._marked = False

    def close(self) -> None:
        """End the zygote and everything below it, and give back what was held."""
        self.selector.close()
        self.zygote.close()
        self.attempt.close()

    def _wait(self, deadline: float | None) -> set[object]:
        """What is ready to be read, once something is or the time has come to act; meanwhile watch the ranks' pages."""
        hangs, select, clock = self.attempt.hangs, self.selector.select, time.monotonic
        end = min(self._due(clock()) if deadline is None else [deadline, *self._due(clock())])
        while True:
            ready = select(max(0.0, min(end, hangs.due) - clock()))
            now = clock()
            if now >= hangs.due:
                hangs.glance(now)
            if ready or now >= end:
                return {key.fileobj for key, _ in ready}

    def _due(self, now: float) -> list[float]:  # noqa: ARG002  (for those that know seconds, not moments)
        """When there is something to do, whatever happens until then."""
        return [self._next_look, *([self.policy.deadline] if self.policy.deadline is not None else [])]

    def _see_to(self, ready: set[object], now: float) -> None:  # noqa: ARG002  (for those that look at more)
        """Read what has come."""
        if self.zygote not in ready:
            return
        try:
            answers = self.zygote.receive()
        except EOFError:
            self.selector.unregister(self.zygote)
            return
        for answer in answers:
            self._hear(answer)

    def _hear(self, answer: Answer) -> None:
        match answer:
            case Started(rank, pid):
                self.policy.started(rank, pid)
            case Exited(rank, code, at, peak):
                agreed = code == EXIT_SAVED and self.attempt.stop_note() is not None
                self.apply(self.policy.exited(rank, code, at, peak=peak, agreed=agreed))
            case Broken(error):
                self.broken = error

    def _look(self, now: float) -> None:
        """A rank whose exception was recorded but that can't get out, in a thread or a collective, holds up the job;
        so does one that is late, which is only said."""
        if now < self._next_look:
            return
        self._next_look = now + _HEARTBEAT
        if not (self.policy.stopping or self.policy.done):
            for text in self.attempt.hangs.look(self.policy.states, now, ask=self.zygote.signal):
                say(text)
        for rank in self.policy.alive:
            record = self.attempt.record(rank)
            if record is not None and now - record.at > self.spec.grace:
                self.apply(self.policy.failed(now))
