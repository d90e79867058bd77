"""Look at the ranks' pages, many times a second, and say so when a rank holds up the others.

It only reports. A job that hangs is ended by the wait itself, at its time limit; the wait's error then repeats the
report, which it finds in the job's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep import _proc, knobs
from lockstep.job.account import Ledger, Progress
from lockstep.job.files import JobFiles
from lockstep.job.hang import (
    HALTS,
    STEPS,
    WARM,
    WARMING_UP,
    Doing,
    HangKind,
    HangVerdict,
    Looker,
    Seen,
    Standstill,
    StepTimes,
    compare,
    settle,
)
from lockstep.job.page import STACK_SIGNAL, Cell, Look, Mark, Pages, Phase, Text
from lockstep.job.summary import Summary
from lockstep.launch import evidence, lateness
from lockstep.launch.evidence import Answers, ProcessFacts, Stillness
from lockstep.launch.lateness import Known
from lockstep.launch.policy import RankState
from lockstep.launch.ras import RasAddress, RasQuestion

#: Processor seconds per second above which a rank in a backward works rather than waits.
_WORKS = 0.2
#: The cells of a rank's page that launchers send each other.
_COUNTS = (
    Cell.STEPS, Cell.SAMPLES, Cell.TOKENS, Cell.RUN_STEPS, Cell.DEVICE_MEMORY, Cell.DEVICE_SIZE, Cell.COLLECTED,
    Cell.COLLECTIONS, Cell.FLOPS, Cell.FLOPS_SAMPLES, Cell.FLOPS_AT_PEAK, Cell.ON_DEVICE, Cell.DEBUGGER,
)  # fmt: skip
#: Seconds before ranks that were suspected, and turned out not to be late, are asked for their stacks again.
_PAUSE = 60.0
#: The most readings of the ranks' counts for one moment, and the seconds in which one must be done to be the last.
_READINGS, _AT_ONCE = 3, 0.01


@dataclass(frozen=True)
class _Suspicion:
    """A suspicion, and the ranks' answers to come."""

    verdict: HangVerdict
    at: float
    answers: Answers
    #: Rank -> the kernel's facts when it was asked.
    facts: dict[int, ProcessFacts | None]


@dataclass(frozen=True, eq=False)
class ReportedHang:
    """A report that stands: the late ranks have not moved since."""

    verdict: HangVerdict
    #: The time at which it was made, on the monotonic clock.
    at: float
    #: The report's text.
    text: str
    #: Rank -> where its stacks of that time begin in its file; of this machine's ranks.
    stacks: Mapping[int, int]


@dataclass(frozen=True)
class _Heard:
    """What another machine's launcher has told of one of its ranks."""

    look: Look
    progress: Progress
    #: The times since which the page is unchanged, and at which that was heard, in seconds on the monotonic clock.
    moved: float
    at: float
    #: The reason why the rank can't continue, found by its launcher; None: none is known.
    standstill: Standstill | None


class HangWatch:
    """Watches one start of this machine's ranks for one that holds up the others. See Note [The launcher's clock].

    Args:
        files: the private folder of this start.
        pages: the ranks' pages in it.
        ranks: the ranks of this machine, which are consecutive.
        shortest: seconds that a rank may hold up the others before it is reported, however short the steps are.
        warming_up: the least of them for a rank that has taken fewer than two steps.
        ras: the address at which NCCL can be asked about the ranks; None if there is none.
    """

    def __init__(
        self,
        files: JobFiles,
        pages: Pages,
        ranks: range,
        *,
        world_size: int,
        shortest: float,
        warming_up: float = WARMING_UP,
        ras: RasAddress | None = None,
    ) -> None:
        self._shortest, self._warming_up, self._ras = shortest, warming_up, ras
        #: The question to NCCL about the ranks that were reported; None: there is none.
        self._question: RasQuestion | None = None
        self._files = files
        self._pages = pages
        self._ranks = ranks
        self._world_size = world_size
        self._looker = Looker(len(ranks), time.monotonic())
        self._looks: dict[int, Look] = {}
        self._still = {rank: Stillness() for rank in ranks}
        self._standstills: dict[int, Standstill | None] = {}
        self._times = StepTimes()
        self._ledger = Ledger()
        self._asked: _Suspicion | None = None
        #: Kind -> the time of the next question, after answers that no rank is late.
        self._quiet_until: dict[HangKind, float] = {}
        self._verdict: HangVerdict | None = None
        #: The ranks' marks when they were reported.
        self._reported: dict[int, Mark] = {}
        #: The report that stands; None: no rank holds up the others.
        self.reported: ReportedHang | None = None
        #: The words about the ranks that hold up the others now; empty: no rank does.
        self.text = ""
        #: The same for who ends the ranks because of it.
        self.finding = ""
        #: Rank -> the last report of its launcher, for ranks of other machines.
        self._others: dict[int, _Heard] = {}
        #: Rank -> its resident bytes, and those of them that are its own.
        self._memory = dict.fromkeys(ranks, (0, 0, 0))

    @property
    def due(self) -> float:
        """When the next :meth:`glance` is due, on the monotonic clock."""
        return self._looker.due

    def glance(self, now: float) -> None:
        """See which of the ranks have moved. It takes some microseconds; call it when it is due."""
        ranks = self._ranks
        self._looker.look(self._pages.all(Cell.MARK)[ranks.start : ranks.stop], now, debugging=self._pages.debugging)
        if self._asked is not None:
            self._asked.answers.look(now)
        if self._ledger.is_due(now) and min(self._pages.all(Cell.STEPS)[ranks.start : ranks.stop]) > WARM:
            self._record()

    def told(self) -> list[list[Any]]:
        """Return the state of this machine's ranks, in JSON's types, for :meth:`hear` of the other machines'
        launchers."""
        progress, marks = self.progress(), self._looker.marks
        return [
            [
                rank,
                marks[rank - self._ranks.start],
                {cell.name: self._pages.get(rank, cell) for cell in _COUNTS},
                {
                    Text.WAITS_IN.name: look.waits_in,
                    Text.REASON.name: look.reason,
                    Text.DEBUGGED_AT.name: look.debugged_at,
                },
                [round(seconds, 3) for seconds in progress[rank].seconds],
                round(progress[rank].held, 3),
                progress[rank].memory,
                [round(seconds, 3) for seconds in progress[rank].device],
                "" if (why := self._standstills.get(rank)) is None else why.value,
            ]
            for rank, look in self._looks.items()  # none at first
        ]

    def hear(self, ranks: Iterable[list[Any]], now: float) -> None:
        """Take the states that other launchers send of their ranks, and note them in this machine's pages, where every
        reader finds them."""
        for rank, mark, counts, texts, seconds, held, memory, device, still in ranks:
            cells = {Cell[name]: value for name, value in counts.items()}
            self._pages.copy(rank, mark, cells, {Text[name]: text for name, text in texts.items()})
            self._pages.note(rank, memory, seconds)
            steps, had = max(0, cells[Cell.STEPS] - 1), (cells[Cell.DEVICE_MEMORY], cells[Cell.DEVICE_SIZE])
            progress = Progress(
                steps,
                tuple(seconds),
                cells[Cell.SAMPLES],
                held,
                memory,
                tuple(device),
                had,
                cells[Cell.COLLECTED] / 1e6,
                cells[Cell.COLLECTIONS],
                tokens=cells[Cell.TOKENS],
                flops=self._pages.step_flops(rank),
            )
            before, look = self._others.get(rank), self._pages.look(rank)
            stays = before is not None and before.look.mark == look.mark and not self._pages.debugging
            moved = before.moved if before is not None and stays else now
            self._others[rank] = _Heard(look, progress, moved, now, Standstill(still) if still else None)

    def look(
        self, states: Mapping[int, RankState], now: float, *, ask: Callable[[Iterable[int], int], None]
    ) -> list[str]:
        """Compare the ranks, and return what to tell the user. To be called about once a second.

        Args:
            states: the ranks' processes.
            now: on the monotonic clock.
            ask: sends a signal to ranks.
        """
        for rank, heard in self._others.items():
            if now - heard.at >= knobs.times().heard:  # what its debugger does is not known any more
                self._pages.set(rank, Cell.DEBUGGER, 0)
        self.glance(now)
        self._looks = {rank: self._pages.look(rank) for rank in self._ranks}
        pids = {rank: states[rank].pid for rank in self._ranks}
        self._memory = {rank: (*_proc.resident(pid), _proc.shared(pid)) for rank, pid in pids.items()}
        for rank, progress in self.progress().items():
            self._pages.note(rank, progress.memory, progress.seconds)
        self._times.add(min(look.steps or 0 for look in self._looks.values()), now)
        self._record()
        if self._verdict is not None:
            return self._see_whether_over(states, now) or self._hear_of_nccl()
        if self._asked is not None:
            return self._answered(self._asked, states, now) if self._asked.answers.are_in(now) else []
        self._look_at_processes(states, now)
        verdict = self._compare(states, now)
        if verdict is not None and now >= self._quiet_until.get(verdict.kind, now):
            self._ask(verdict, states, now, ask)
        return []

    def facts(self) -> dict[str, Any]:
        """Return which ranks hold up which others now, for the run's record, in JSON's types; ``over``: no rank does
        any more."""
        verdict = self._verdict
        if verdict is None:
            return {"over": True}
        return {"code": verdict.kind.code, "ranks": list(verdict.late), "waiting": list(verdict.waiting), "over": False}

    def ended(self, states: Mapping[int, RankState]) -> list[str]:
        """Return the last message when all ranks have ended: that late ranks have moved on, if all is well."""
        if self._verdict is None or any(state.exit_code != 0 for state in states.values()):
            return []
        text = lateness.over(self._verdict, now=time.monotonic())
        self._verdict, self.reported, self.text, self.finding = None, None, "", ""
        return [text]

    def summary(
        self, *, number: int, begin: float, machines: Sequence[tuple[str, int]], restarts: int, before: int | None
    ) -> Summary | None:
        """Return what the ranks' time went to, once they have ended; None: they took no step.

        Args:
            number: the number of starts before this one.
            begin: when this one began, on the monotonic clock.
            machines: those of the job, and how many ranks each has.
            restarts: those of the job before this start.
            before: the steps that the run had before this start; None: not known.
        """
        now = self._record()
        return Summary.of_start(
            self._ledger,
            number=number,
            begin=begin,
            end=now,
            taken=self.taken,
            here=self._ranks,
            world_size=self._world_size,
            machines=machines,
            restarts=restarts,
            before=before,
        )

    def _record(self) -> float:
        """Add how far the ranks have come to the ledger, and return when that was, on the monotonic clock.

        This process may lose its turn at any line: the clock is read right before the ranks' counts, and both once more
        if too much time passed meanwhile.
        """
        for _ in range(_READINGS):
            now = time.monotonic()
            known = self.known(now)
            if time.monotonic() - now < _AT_ONCE:
                break
        self._ledger.add(known, now=now, looks=self._looker.looks)
        return now

    @property
    def taken(self) -> int:
        """The optimizer steps that each rank has taken, by its own count. (Those of other machines take the same.)"""
        return max(0, min(self._pages.all(Cell.STEPS)[self._ranks.start : self._ranks.stop]) - 1)

    def known(self, now: float) -> dict[int, Progress]:
        """Return how far the ranks have come: all of the job's, if all are known, else those of this machine."""
        others = {rank: heard.progress for rank, heard in self._others.items() if now - heard.at < knobs.times().heard}
        known = self.progress()
        return dict(sorted((known | others).items())) if len(known) + len(others) == self._world_size else known

    def progress(self) -> dict[int, Progress]:
        """Return how far each rank of this machine has come."""
        shares, ranks = self._looker.shares, self._ranks
        steps, samples = (self._pages.all(cell)[ranks.start : ranks.stop] for cell in (Cell.STEPS, Cell.SAMPLES))
        return {
            rank: Progress(
                max(0, steps[place] - 1),
                tuple(shares.seconds[place]),
                samples[place],
                shares.held[place],
                self._memory[rank][0],
                tuple(self._pages.device_spent(rank)) if self._pages.get(rank, Cell.DEVICE_SIZE) else (),
                (self._pages.get(rank, Cell.DEVICE_MEMORY), self._pages.get(rank, Cell.DEVICE_SIZE)),
                self._pages.get(rank, Cell.COLLECTED) / 1e6,
                self._pages.get(rank, Cell.COLLECTIONS),
                *self._memory[rank][1:],
                tokens=self._pages.get(rank, Cell.TOKENS),
                flops=self._pages.step_flops(rank),
            )
            for place, rank in enumerate(ranks)
        }

    def _marks(self) -> dict[int, Mark]:
        here = {rank: Mark.of(mark) for rank, mark in zip(self._ranks, self._looker.marks, strict=True)}
        return {**here, **{rank: heard.look.mark for rank, heard in self._others.items()}}

    def _moved(self, rank: int) -> float:
        return self._looker.moved[rank - self._ranks.start]

    def _look_at_processes(self, states: Mapping[int, RankState], now: float) -> None:
        """Find out whether those that give no sign of life can continue by themselves, whatever their pages say."""
        for rank, state in states.items():
            look = self._looks[rank]
            quiet = state.exit_code is None and now - self._moved(rank) >= knobs.times().unmoved
            if not quiet or state.pid is None:
                self._still[rank], self._standstills[rank] = Stillness(), None
            elif self._asked is None or self._standstills[rank] is not Standstill.LOCKED:  # (the question wakes it up)
                self._standstills[rank] = self._still[rank].look(
                    state.pid, now, announced=bool(look.reason), waits=look.waits
                )
        self._looker.still = frozenset(
            rank - self._ranks.start for rank, why in self._standstills.items() if why is not None
        )

    def _compare(self, states: Mapping[int, RankState], now: float) -> HangVerdict | None:
        elsewhere = [
            Seen(rank, heard.look, heard.moved, standstill=heard.standstill)
            for rank, heard in self._others.items()
            if now - heard.at < knobs.times().heard
        ]
        seen = [*(self._seen(state) for state in states.values()), *elsewhere]
        whole = len(seen) == self._world_size
        return compare(
            seen,
            now=now,
            usual=self._usual,
            shortest=self._shortest,
            whole=whole,
            warming_up=self._warming_up,
        )

    @property
    def _usual(self) -> float:
        return max(self._shortest, STEPS * self._times.median)

    def _seen(self, state: RankState) -> Seen:
        rank = state.rank
        return Seen(rank, self._looks[rank], self._moved(rank), state.exit_code, self._standstills.get(rank))

    def _ask(
        self,
        verdict: HangVerdict,
        states: Mapping[int, RankState],
        now: float,
        ask: Callable[[Iterable[int], int], None],
    ) -> None:
        alive = {rank: state.pid for rank, state in states.items() if state.pid is not None and state.exit_code is None}
        facts = {rank: evidence.facts(pid) for rank, pid in alive.items()}
        asked = {rank: pid for rank, pid in alive.items() if self._looks[rank].mark.phase is not Phase.LEAVING}
        awaited = {rank: pid for rank, pid in asked.items() if self._standstills[rank] is not Standstill.UNREACHABLE}
        self._asked = _Suspicion(verdict, now, Answers(self._files.folder, states, asked=awaited, now=now), facts)
        # (The zygote leaves out those that have no handler for it: Note [Asked while leaving] in processes.py.)
        ask(asked, STACK_SIGNAL)

    def _answered(self, asked: _Suspicion, states: Mapping[int, RankState], now: float) -> list[str]:
        self._look_at_processes(states, now)
        self._asked = None
        if self._has_gone_on(asked.verdict, states, now):
            return []
        known = {rank: self._known(state, asked) for rank, state in states.items()}
        doing = {rank: _doing(each, asked, now - asked.at, self._standstills[rank]) for rank, each in known.items()}
        for rank, heard in self._others.items():
            known[rank] = Known(rank, None, None, heard.look, heard.moved, None, None)
            if (
                asked.verdict.kind is HangKind.STILL and heard.standstill is None
            ):  # only its own launcher can read its stack
                doing[rank] = Doing.WAITS
        verdict = settle(asked.verdict, doing)
        if verdict is not None and self._others and asked.verdict.kind is HangKind.STILL and not verdict.late:
            verdict = None
        if verdict is None:
            # A rank at a standstill is suspected again soon, since the others may only now come to wait for it; and so
            # is one of which nothing is known, since it did not answer in time.
            halted = any(self._standstills.get(rank) is not None for rank in asked.verdict.late)
            soon = halted or bool(asked.answers.missing())
            self._quiet_until[asked.verdict.kind] = now + (self._shortest if soon else _PAUSE)
            return []
        excused = [r for r in verdict.late if _is_excused(known[r], asked, held=now - verdict.since, now=now)]
        if excused:
            late = tuple(r for r in verdict.late if r not in excused and self._standstills.get(r) in HALTS)
            if not late:
                self._quiet_until[asked.verdict.kind] = now + self._usual
                return []
            verdict = replace(verdict, late=late)
        self._verdict = verdict
        self._reported = self._marks()
        self.finding = lateness.describe_hang(verdict, known, now=now, world_size=self._world_size)
        self.text = lateness.describe_late(verdict, known, now=now, world_size=self._world_size)
        self.reported = ReportedHang(verdict, now, self.text, asked.answers.begins)
        self._files.mark_late(self.text)
        if self._ras is not None and any(known[rank].look.on_device for rank in verdict.waiting):
            self._question = RasQuestion(self._ras)
        return [self.text]

    def _hear_of_nccl(self) -> list[str]:
        """Return NCCL's answer about the ranks that were reported, once, and add it to the report."""
        said = None if self._question is None else self._question.answer()
        if said is None:
            return []
        self._question = None
        if not said:
            return []
        self.text = f"{self.text}\n{said}"
        self._files.mark_late(self.text)
        return [said]

    def has_waited(self, rank: int) -> bool:
        """Return whether a rank waited for those that hold up the others, as the report says that still stands."""
        return self._verdict is not None and rank in self._verdict.waiting

    def close(self) -> None:
        """Stop asking NCCL."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _has_gone_on(self, verdict: HangVerdict, states: Mapping[int, RankState], now: float) -> bool:
        """Return whether what was suspected is over before it was reported."""
        again = self._compare(states, now)
        return again is None or (again.kind, again.late) != (verdict.kind, verdict.late)

    def _known(self, state: RankState, asked: _Suspicion) -> Known:
        rank, alive = state.rank, state.exit_code is None and state.pid is not None
        facts = evidence.facts(state.pid) if alive and state.pid is not None else None
        if facts is not None:
            facts = replace(facts, standstill=self._standstills.get(rank))
        stack = evidence.read_stack(self._files.folder, rank, start=asked.answers.begins[rank]) if alive else None
        return Known(rank, state.pid, state.exit_code, self._looks[rank], self._moved(rank), facts, stack)

    def _see_whether_over(self, states: Mapping[int, RankState], now: float) -> list[str]:
        verdict = self._verdict
        assert verdict is not None
        marks = self._marks()
        waited = [rank for rank in verdict.waiting if self._reported[rank].waiting]  # by their own account
        moved = any(marks[rank] != self._reported[rank] for rank in waited or verdict.late)
        moved = moved or self._pages.debugging  # to a breakpoint, where a person looks after it
        if not moved or any(state.exit_code for state in states.values()):
            return []  # the report stays true, also as the reason why the job ends
        self._verdict, self.reported, self.text, self.finding = None, None, "", ""
        self._files.mark_late("")
        self.close()
        return [lateness.over(verdict, now=now)]


def _is_excused(known: Known, asked: _Suspicion, *, held: float, now: float) -> bool:
    """Return whether a late rank is at what may take long, by its stack; see Note [Late or slow]."""
    stack, facts = known.stack, known.facts
    if stack is None or facts is None:
        return False
    evaluates = stack.in_model and known.look.mark.phase is Phase.OWN
    return stack.in_debugger or (evaluates and held < WARMING_UP and _works(known, asked, now - asked.at))


def _works(known: Known, asked: _Suspicion, seconds: float) -> bool:
    now, before = known.facts, asked.facts.get(known.rank)
    if now is None or before is None:
        return False
    return (now.processor - before.processor) / max(seconds, 0.1) > _WORKS


def _doing(known: Known, asked: _Suspicion, seconds: float, standstill: Standstill | None) -> Doing:
    stack, facts = known.stack, known.facts
    if standstill not in (None, Standstill.LOCKED):  # of a locked one, all threads sleep, as they may in a collective
        return Doing.WORKS
    if known.look.waits:
        return Doing.WAITS
    if stack is None or facts is None or not facts.sleeps:
        return Doing.WORKS
    waits = stack.in_collective or (stack.in_engine and not _works(known, asked, seconds))
    return Doing.WAITS if waits else Doing.WORKS
