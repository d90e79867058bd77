"""Decide from looks at the ranks' pages which rank holds up which, and add up where their time goes. Pure.

Note [Late or slow]
~~~~~~~~~~~~~~~~~~~
A rank is late when others wait for it in a collective and it does not wait itself. It is reported once the last of the
others has waited for the rank's *patience* and the rank's own page has not changed for as long:

- five seconds (``LOCKSTEP_LATE``), or ten median steps where these are longer: what is *usual*;
- a minute, while the rank has taken fewer than two steps (start-up, the first compilation), and while it evaluates: its
  last forward was one in eval mode;
- five minutes, while lockstep saves or restores a checkpoint there, or torch.compile compiles;
- for ever inside ``lockstep.expect_slow``.

A rank that can't continue by itself has five seconds whatever it does, and inside ``expect_slow`` as well: one that is
stopped by a signal, frozen or dead, one that has slept for 6.5 seconds where no signal reaches it, and one that is
dead-locked (see :class:`Standstill`). Work may look like that for a moment, but not for so long: computing takes
processor time, and writing or waiting for a network are system calls of their own.

What the kernel says of a process comes before what its page says. A rank may be stopped between any two instructions,
so also in a collective, and its page keeps saying that it waits for others, while they wait for it. So a rank counts as
waiting only if its page says so and it could continue. One at a standstill does not, nor does one that a debugger
holds, or that is ready to run and gets no processor.

While a rank is at a breakpoint no rank is late, and all waits count anew when it continues.

A rank that is leaving has a minute: on a busy machine it takes time until many interpreters have ended.

These are seconds without a sign of life, so work that goes through lockstep (a loader's batches, a model's forwards)
raises no alarm as long as it moves, for a minute (or a hundred median steps, or its patience where that is longer): a
rank whose page does change is at work, not stuck, and is reported only after that.

Before the report the stacks of all ranks are looked at, once they have written them. A late rank that sits in a
debugger is left alone; one that computes in a model outside of a step (an average of weights on rank 0, say) evaluates,
and has its minute.

A rank whose device is still in the latest backward waits, too: Note [Waiting for a device] in device_wait.py. It may
have a long kernel of its own. So where all wait in this way no rank is late, and where some do, the ranks have a minute
before they count as waiting in different collectives.

If all ranks stand still, all are named. If all ranks wait, none is late: they wait in different collectives, or for
another machine (reported after a minute). Where these are all ranks of the job, the longer times of saving, evaluating
and compiling do not apply, since none of them is at work. If none is known to wait and none moves, their stacks tell
which of them wait; see :func:`settle`.

Note [The launcher's clock]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that read the clock at every event would pay for it in the middle of a training step. So it writes only what it
does, and the launcher, which looks from outside, knows since when, to the time between two looks. The shares of a
rank's time follow from many looks, each of which stands for the time since the one before. They come at irregular
moments, since regular ones might always find the same part of a step. A look costs about a tenth of a millisecond, most
of it to wake up, so there are sixty a second at first and, as each stands for less and less of the whole, half as many
in the end. The share of a phase is right to three percentage points within five seconds where steps are longer than
the time between two looks, and within half a minute where they are shorter and looks fall anywhere in them.
"""

from __future__ import annotations

import enum
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.codes import CodedEnum
from lockstep.job.page import ENTERED, SERIAL, WAITS, Look, Phase

#: Seconds without a sign of life; see Note [Late or slow].
STEPS = 10
WARMING_UP = 60.0
LONG = 300.0
#: Steps that a rank has taken before its time to start is over.
WARM = 2
#: The number of step times from which the median is taken.
_REMEMBERED = 101
#: The pause between two looks is the time that has passed divided by this number, within these bounds (seconds).
_LOOKS, _SHORTEST_PAUSE, _LONGEST_PAUSE = 300, 0.016, 0.03
#: Seconds between two looks from which on the launcher itself did not run in between, mostly because of a Ctrl-Z.
ASLEEP = 4.0
#: The last bits of a mark -> the phase, as a number, that its time counts for.
_SPENDS = [int(Phase.WAIT) if mark & WAITS else min(mark % ENTERED, int(Phase.WAIT)) for mark in range(SERIAL)]


class Shares:
    """The seconds of each rank by phase; waiting counts as a phase. See Note [The launcher's clock].

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        #: float [ranks][len(Phase)].
        self.seconds = [[0.0] * len(Phase) for _ in range(ranks)]
        #: float [ranks]: seconds for which others waited while the rank worked. See ``Progress.held`` in account.py.
        self.held = [0.0] * ranks
        self._spent = [int(Phase.START)] * ranks

    def add(self, marks: Sequence[int], passed: float, *, still: Iterable[int] = ()) -> None:
        """Add a look that found these marks, one of each rank, ``passed`` seconds after the last look. Each of the two
        looks' phases gets half of that time.

        Args:
            marks: the ranks' marks.
            passed: seconds.
            still: the places of ranks that do not wait, whatever their marks say.
        """
        if still:
            marks = list(marks)
            for place in still:
                marks[place] &= ~WAITS
        half, wait, works = passed / 2, int(Phase.WAIT), []
        for rank, mark in enumerate(marks):
            spends, seconds = _SPENDS[mark % SERIAL], self.seconds[rank]
            seconds[self._spent[rank]] += half
            seconds[spends] += half
            self._spent[rank] = spends
            if spends != wait:
                works.append(rank)
        if len(works) < len(marks):
            for rank in works:
                self.held[rank] += passed * (len(marks) - len(works)) / len(works)

    def of(self, rank: int, phases: Iterable[Phase] = tuple(Phase)) -> dict[Phase, float]:
        """Return the part of a rank's time in ``phases`` that went to each; the parts add up to 1, or to 0."""
        spent = {phase: self.seconds[rank][phase] for phase in phases}
        whole = sum(spent.values()) or 1.0
        return {phase: seconds / whole for phase, seconds in spent.items()}


class Looker:
    """Looks at the marks of all ranks of a machine again and again, and knows when each was last seen to change.

    Args:
        ranks: how many.
        now: seconds on the monotonic clock, as everywhere here.
    """

    def __init__(self, ranks: int, now: float) -> None:
        self.shares = Shares(ranks)
        #: The number of looks so far.
        self.looks = 0
        #: For each rank, its mark at the last look, and the time at which that mark was first found (after a break in
        #: which this process did not look, the time of the first look after the break).
        self.marks = [0] * ranks
        self.moved = [now] * ranks
        #: Indices of ranks that the kernel keeps from running: they do not wait, whatever their marks say.
        self.still: frozenset[int] = frozenset()
        #: The time at which the next look is due.
        self.due = now
        self._looked = now
        #: The time at which a rank was first seen to do anything.
        self._begun: float | None = None
        self._draw = random.Random(0)

    def look(self, marks: Sequence[int], now: float, *, debugging: bool = False) -> None:
        """Record all ranks' marks of this moment.

        Args:
            marks: one of each rank.
            now: this moment.
            debugging: a rank is in a debugger, and the time that a person takes counts for no rank.
        """
        passed, self._looked = now - self._looked, now
        if passed > ASLEEP or debugging:
            self.moved = [now] * len(marks)
        else:
            self.shares.add(marks, passed, still=self.still)
            self.looks += 1
        for rank, mark in enumerate(marks):
            if mark != self.marks[rank]:
                self.marks[rank], self.moved[rank] = mark, now
        if self._begun is None and any(marks):
            self._begun = now
        pause = _LONGEST_PAUSE
        if self._begun is not None:
            pause = min(max((now - self._begun) / _LOOKS, _SHORTEST_PAUSE), pause)
        self.due = now + pause * self._draw.uniform(0.5, 1.5)


class HangKind(CodedEnum):
    """What is wrong."""

    #: Some ranks are late, the others wait for them.
    LATE = "late", "rank-late"
    #: All ranks wait, in different collectives or one that does not end.
    APART = "apart", "all-ranks-wait"
    #: No rank moves, and the pages do not say which rank waits for which.
    STILL = "still", "no-rank-moves"


class Standstill(enum.Enum):
    """Why a process can't continue by itself, as the kernel sees it."""

    #: A signal has stopped it (not a debugger).
    STOPPED = "stopped"
    #: It is dead, and its parent has not asked for its exit code.
    DEAD = "dead"
    #: Its cgroup is frozen.
    FROZEN = "frozen"
    #: It has slept for seconds in the kernel, where no signal reaches it.
    UNREACHABLE = "unreachable"
    #: Its threads wait for each other: each sleeps on a lock that only another thread of the process can release.
    LOCKED = "locked"
    #: A debugger holds it.
    TRACED = "traced"
    #: It is ready to run, but other processes have the processor.
    STARVED = "starved"


#: The kinds that last until a person acts; the other two end when a debugger, or other work, releases the process.
HALTS = frozenset(Standstill) - {Standstill.TRACED, Standstill.STARVED}


@dataclass(frozen=True)
class Seen:
    """One rank as the launcher has seen it."""

    rank: int
    #: The rank's page at this look.
    look: Look
    #: The later of the last change of its mark and the beginning of the launcher's uninterrupted looks.
    moved: float
    #: The exit code; None while the rank runs.
    exit_code: int | None = None
    standstill: Standstill | None = None

    @property
    def waiting_since(self) -> float | None:
        """When it began to wait for others; None: it does not wait, or could not notice that they have come."""
        waits = self.look.waits and self.exit_code is None and self.standstill is None
        return self.moved if waits else None

    @property
    def halted(self) -> bool:
        """Whether it lives and stays where it is until somebody acts."""
        return self.exit_code is None and self.standstill in HALTS


@dataclass(frozen=True)
class HangVerdict:
    """Which ranks hold up which."""

    kind: HangKind
    #: The late ranks, then the ranks that wait for them.
    late: tuple[int, ...]
    waiting: tuple[int, ...]
    #: The time since which all waiting ranks have waited.
    since: float


class StepTimes:
    """How long a step takes, from the count of steps at each look. The first ones, which warm up, are left out."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._steps = 0
        self._at: float | None = None

    def add(self, steps: int, at: float) -> None:
        """Record that the slowest rank has taken ``steps`` by ``at``."""
        if steps < WARM or steps <= self._steps:
            return
        if self._at is not None:
            self._times.append((at - self._at) / (steps - self._steps))
        self._steps, self._at = steps, at

    @property
    def median(self) -> float:
        """Seconds of the median step; 0 while no two steps were seen."""
        return statistics.median(self._times) if self._times else 0.0


def patience(seen: Seen, *, usual: float, shortest: float, works: bool = True, warming_up: float = WARMING_UP) -> float:
    """Return the seconds that a rank may hold up others without a sign of life; see Note [Late or slow].

    ``works`` is False where all ranks of the job wait: none of them writes, evaluates or compiles meanwhile.
    """
    look, phase = seen.look, seen.look.mark.phase
    if seen.standstill in HALTS:
        return shortest
    if look.reason:
        return math.inf
    if seen.standstill is not None and look.mark.waiting:
        return usual  # in a collective there is no work of its own that might take long
    if (look.steps or 0) < WARM or phase is Phase.LEAVING or (phase is Phase.EVALUATE and works):
        usual = max(usual, warming_up)
    if works and phase in (Phase.SAVE, Phase.RESTORE, Phase.COMPILE):
        usual = max(usual, LONG)
    return usual


def compare(
    ranks: Sequence[Seen],
    *,
    now: float,
    usual: float,
    shortest: float | None = None,
    whole: bool = True,
    warming_up: float = WARMING_UP,
) -> HangVerdict | None:
    """Return which ranks hold up which for longer than is ``usual`` (in seconds); None: none does.

    Args:
        ranks: those of this machine.
        now: this moment.
        usual: what a rank that works may hold up the others.
        shortest: the limit for one that can't continue; None: the same.
        whole: these are all ranks of the job; what those of other machines do is not known here.
        warming_up: the least for a rank that has taken fewer than two steps.
    """
    shortest = usual if shortest is None else shortest

    def limit_of(seen: Seen) -> float:
        return patience(seen, usual=usual, shortest=shortest, warming_up=warming_up)

    waits = {seen.rank: since for seen in ranks if (since := seen.waiting_since) is not None}
    late = [seen for seen in ranks if seen.rank not in waits]
    alive = [seen for seen in ranks if seen.exit_code is None]
    if not waits:
        if len(alive) > 1 and all(seen.halted for seen in alive):
            since = max(seen.moved for seen in alive)
            return (
                HangVerdict(HangKind.LATE, tuple(seen.rank for seen in alive), (), since)
                if now - since > shortest
                else None
            )
        halted = any(seen.halted and seen.standstill is not Standstill.LOCKED for seen in alive)
        limits = [shortest if halted else limit_of(seen) for seen in alive]
        if len(alive) > 1 and all(now - seen.moved > limit for seen, limit in zip(alive, limits, strict=True)):
            return HangVerdict(
                HangKind.STILL, tuple(seen.rank for seen in alive), (), max(seen.moved for seen in alive)
            )
        return None
    since = max(waits.values())
    if not late:
        if any(seen.look.reason for seen in ranks):
            return None
        if all(seen.look.on_device for seen in ranks):
            return None  # as well each may have a long kernel of its own
        sure = whole and not any(seen.look.on_device for seen in ranks)
        limits = [
            patience(seen, usual=usual, shortest=shortest, works=not sure, warming_up=warming_up) for seen in ranks
        ]
        limit = max(0.0 if sure else WARMING_UP, *limits)
        return HangVerdict(HangKind.APART, (), tuple(waits), since) if now - since > limit else None
    slow = max(WARMING_UP, 10 * usual)
    overdue = [seen for seen in late if seen.exit_code is None and _is_overdue(seen, limit_of(seen), slow, since, now)]
    if any(seen.exit_code is None and seen not in overdue for seen in late):
        # A rank that can't continue is named at once; the others may still be at work.
        overdue = [seen for seen in overdue if seen.halted]
        if not overdue:
            return None
    if now - since <= shortest or (not overdue and now - since <= usual):  # not overdue: all late ranks have ended
        return None
    return HangVerdict(HangKind.LATE, tuple(seen.rank for seen in overdue or late), tuple(waits), since)


def _is_overdue(seen: Seen, limit: float, slow: float, since: float, now: float) -> bool:
    """Return whether a rank has held up the others for ``limit``, and has not moved for as long or is ``slow``."""
    held, quiet = now - since, now - seen.moved
    return held > limit and (quiet > limit or held > slow)


class Doing(enum.Enum):
    """What a rank's stack and its processor time tell."""

    WAITS = "waits"
    WORKS = "works"


def settle(verdict: HangVerdict, doing: Mapping[int, Doing]) -> HangVerdict | None:
    """Return the verdict once the stacks of all ranks are known; None: no rank holds up another.

    Of a rank that waits in a process group which its program made, the stack says so, and the page does not.
    """
    if verdict.kind is HangKind.APART:
        return verdict
    late = tuple(rank for rank in verdict.late if doing.get(rank, Doing.WORKS) is not Doing.WAITS)
    waiting = tuple(sorted({*verdict.waiting, *verdict.late} - set(late)))
    if not waiting and verdict.kind is not HangKind.LATE:
        return None
    return HangVerdict(HangKind.LATE if late else HangKind.APART, late, waiting, verdict.since)


#: Phases in the order in which a rank enters them in a step; the optimizer's is over when the step is counted.
_ORDER = (Phase.OPTIMIZER, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE)


def odd_ones(looks: Mapping[int, Look], waits_in: Mapping[int, str]) -> tuple[int, ...]:
    """Return which ranks have left out a collective, if all wait; empty if that can't be told.

    A rank that has left out a collective is further in the program than the others, or else waits where most do not.

    Args:
        looks: the pages of all ranks.
        waits_in: what each rank waits in, and where.
    """
    progress = {rank: (look.steps or 0, _within_step(look)) for rank, look in looks.items()}
    furthest = max(progress.values())
    ahead = tuple(rank for rank in looks if progress[rank] == furthest)
    if len(ahead) < len(looks):
        return ahead
    (common, size), *others = Counter(waits_in.values()).most_common()
    if not others or others[0][1] == size:
        return ()
    return tuple(rank for rank, what in waits_in.items() if what != common)


def _within_step(look: Look) -> int:
    entered = look.mark.entered
    return _ORDER.index(entered) if entered in _ORDER else 0
