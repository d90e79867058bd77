"""Looks at the ranks' pages once a second, and says so when a rank holds up the others.

It only reports. Who ends a job that hangs is the wait itself, at its time limit; its error then repeats the report,
which it finds in the job's folder (``recorder.writer.told``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch import kernel, lateness, stacks
from lockstep.launch.kernel import Facts
from lockstep.launch.lateness import Known
from lockstep.launch.policy import RankState
from lockstep.recorder.compare import STEPS, WARMING_UP, Doing, Kind, Seen, StepTimes, Verdict, compare, settle
from lockstep.recorder.laggards import Pace
from lockstep.recorder.layout import Look, Phase
from lockstep.recorder.reader import Pages
from lockstep.recorder.writer import REPORT, STACK_SIGNAL

#: Processor seconds per second above which a rank in a backward works rather than waits.
_WORKS = 0.2
#: Seconds between two looks after which the watcher itself did not run in between.
_ASLEEP = 4.0
#: Seconds before a question whose answer was "nobody is late" is asked again.
_PAUSE = 60.0


@dataclass(frozen=True)
class _Asked:
    """A suspicion, and the ranks' answers to come."""

    verdict: Verdict
    at: float
    #: Of each rank, where its new stack begins in its file, and what the kernel said then.
    begins: dict[int, int]
    facts: dict[int, Facts | None]


class HangWatch:
    """The watcher's eyes on one start of the ranks of this machine.

    Args:
        folder: the private folder of this start.
        local_ranks: the ranks of this machine, and each one's local rank.
        world_size: of the whole job.
        shortest: seconds that a rank may hold up the others before it is reported, however short the steps are.
    """

    def __init__(self, folder: Path, local_ranks: Mapping[int, int], *, world_size: int, shortest: float) -> None:
        self._shortest = shortest
        self._folder = folder
        self._local_ranks = dict(local_ranks)
        self._world_size = world_size
        self._pages: Pages | None = Pages(folder, len(self._local_ranks))
        self._looks: dict[int, Look] = {}
        self._moved: dict[int, float] = {}
        self._times = StepTimes()
        self._pace = Pace()
        #: When this watcher looked last, and since when it has looked without a break.
        self._looked = self._awake = time.monotonic()
        self._asked: _Asked | None = None
        #: When to ask again, where the answers were that nobody is late.
        self._quiet_until: dict[Kind, float] = {}
        self._verdict: Verdict | None = None
        #: How many events the ranks had seen when they were reported.
        self._events: dict[int, int] = {}
        #: Whether they waited then, by their own account.
        self._waited: dict[int, bool] = {}
        #: What was said of the ranks that hold up the others now; empty: nobody does.
        self.text = ""

    def look(
        self, states: Mapping[int, RankState], now: float, *, ask: Callable[[Iterable[int], int], None]
    ) -> list[str]:
        """**Local.** To be called about once a second; what to tell the user.

        Args:
            states: the ranks' processes.
            now: on the monotonic clock.
            ask: sends a signal to ranks.
        """
        if now - self._looked > _ASLEEP:  # a Ctrl-Z, most likely: the ranks did not run either
            self._awake = now
            self._moved.clear()
        self._looked = now
        self._read_pages(now)
        self._pace.add(self._looks if all(state.exit_code is None for state in states.values()) else {})
        if self._verdict is not None:
            return self._see_whether_over(states, now)
        if self._asked is not None:
            return self._answered(states, now)
        verdict = self._compare(states, now)
        if verdict is not None and now >= self._quiet_until.get(verdict.kind, now):
            self._ask(verdict, states, now, ask)
        return []

    def ended(self, states: Mapping[int, RankState]) -> list[str]:
        """**Local.** What is left to say when all ranks have ended: who was late has gone on, if all is well."""
        if self._verdict is None or any(state.exit_code != 0 for state in states.values()):
            return []
        verdict, self._verdict, self.text = self._verdict, None, ""
        return [lateness.over(verdict, now=time.monotonic())]

    def laggard(self) -> str:
        """**Local.** A sentence on the rank that was steadily slower than the others, or an empty text."""
        found = self._pace.laggard()
        return "" if found is None else found.describe()

    def close(self) -> None:
        """**Local.** Let go of the pages; what was said stays. A second call does nothing."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def _read_pages(self, now: float) -> None:
        assert self._pages is not None, "not closed yet"
        for rank, local_rank in self._local_ranks.items():
            look = self._pages.look(local_rank)
            before = self._looks.get(rank)
            if look is None:
                continue
            if before is None or look.events != before.events:
                self._moved[rank] = now
            self._looks[rank] = look
        if len(self._looks) == len(self._local_ranks):
            slowest = min(self._looks.values(), key=lambda look: look.steps)
            self._times.add(slowest.steps, slowest.since)  # not now: a rank that is stuck took its step a while ago

    def _compare(self, states: Mapping[int, RankState], now: float) -> Verdict | None:
        return compare(
            [self._seen(state, now) for state in states.values()],
            now=now,
            usual=self._usual,
            whole=len(states) == self._world_size,
        )

    @property
    def _usual(self) -> float:
        return max(self._shortest, STEPS * self._times.median)

    def _seen(self, state: RankState, now: float) -> Seen:
        moved = self._moved.setdefault(state.rank, now)
        return Seen(state.rank, self._looks.get(state.rank), moved, state.exit_code, since=self._awake)

    def _ask(
        self, verdict: Verdict, states: Mapping[int, RankState], now: float, ask: Callable[[Iterable[int], int], None]
    ) -> None:
        alive = {rank: state.pid for rank, state in states.items() if state.pid is not None and state.exit_code is None}
        self._asked = _Asked(
            verdict,
            now,
            begins={rank: stacks.size(self._folder, rank) for rank in states},
            facts={rank: kernel.facts(pid) for rank, pid in alive.items()},
        )
        ask([rank for rank, pid in alive.items() if kernel.catches(pid, STACK_SIGNAL)], STACK_SIGNAL)

    def _answered(self, states: Mapping[int, RankState], now: float) -> list[str]:
        asked, self._asked = self._asked, None
        assert asked is not None
        if self._has_gone_on(asked.verdict, states, now):
            return []
        known = {rank: self._known(state, asked) for rank, state in states.items()}
        verdict = settle(asked.verdict, {rank: _doing(each, asked, now - asked.at) for rank, each in known.items()})
        if verdict is None:
            self._quiet_until[asked.verdict.kind] = now + _PAUSE
            return []
        if any(_is_excused(known[rank], asked, held=now - verdict.since, now=now) for rank in verdict.late):
            self._quiet_until[asked.verdict.kind] = now + self._usual
            return []
        self._verdict = verdict
        self._events = {rank: look.events for rank, look in self._looks.items()}
        self._waited = {rank: look.waiting for rank, look in self._looks.items()}
        self.text = lateness.describe(verdict, known, now=now, world_size=self._world_size)
        _leave(self._folder / REPORT, self.text)
        return [self.text]

    def _has_gone_on(self, verdict: Verdict, states: Mapping[int, RankState], now: float) -> bool:
        """Whether what was suspected is over before it was reported."""
        again = self._compare(states, now)
        return again is None or (again.kind, again.late) != (verdict.kind, verdict.late)

    def _known(self, state: RankState, asked: _Asked) -> Known:
        rank, alive = state.rank, state.exit_code is None and state.pid is not None
        facts = kernel.facts(state.pid) if alive and state.pid is not None else None
        stack = stacks.read(self._folder, rank, start=asked.begins[rank]) if alive else None
        return Known(rank, state.pid, state.exit_code, self._looks.get(rank), facts, stack)

    def _see_whether_over(self, states: Mapping[int, RankState], now: float) -> list[str]:
        verdict = self._verdict
        assert verdict is not None
        concerned = [rank for rank in verdict.waiting if self._waited.get(rank)] or verdict.late
        moved = any(rank in self._looks and self._looks[rank].events != self._events.get(rank, 0) for rank in concerned)
        if not moved or any(state.exit_code for state in states.values()):
            return []  # what was said stands, also as the reason of an end
        self._verdict, self.text = None, ""
        (self._folder / REPORT).unlink(missing_ok=True)
        return [lateness.over(verdict, now=now)]


def _is_excused(known: Known, asked: _Asked, *, held: float, now: float) -> bool:
    """Whether a late rank is at what may take long, by its stack; see Note [Late or slow]."""
    stack, facts = known.stack, known.facts
    if stack is None or facts is None:
        return False
    evaluates = stack.in_model and (known.look is None or known.look.phase is Phase.OWN)
    return stack.in_debugger or (evaluates and held < WARMING_UP and _works(known, asked, now - asked.at))


def _works(known: Known, asked: _Asked, seconds: float) -> bool:
    now, before = known.facts, asked.facts.get(known.rank)
    if now is None or before is None:
        return False
    return (now.processor - before.processor) / max(seconds, 0.1) > _WORKS


def _doing(known: Known, asked: _Asked, seconds: float) -> Doing:
    if known.look is not None and known.look.waiting:
        return Doing.WAITS
    stack, facts = known.stack, known.facts
    if stack is None or facts is None or not facts.sleeps:
        return Doing.WORKS
    waits = stack.in_collective or (stack.in_engine and not _works(known, asked, seconds))
    return Doing.WAITS if waits else Doing.WORKS


def _leave(path: Path, text: str) -> None:
    """For the ranks to find, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    temporary.rename(path)
