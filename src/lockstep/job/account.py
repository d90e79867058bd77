"""What the ranks did between two moments, and which of them the others waited for. Pure.

Note [What a slow rank costs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks in step take equally long for a step, whatever each of them does in it: where one is slow, the others wait, also
in the middle of a phase that then takes as long on all of them. So waiting is counted apart from work, the slow rank
is the one that works longest and waits least, and what it costs is what it works longer than the next one: without it
a step would take that much less. (The question "what if this rank were as fast as the others" is that of Lin et al.
2025, arXiv:2505.05713, who answer it by simulation from traces.) The phase it lost the time in is named where it is
four fifths of the difference; else there is no single cause.

All of it comes from looks at the ranks' pages (Note [The launcher's clock] in hang.py), so it is an estimate. The
looks see all ranks of a machine at one moment, so the difference of two ranks is known by the looks in which one
waited and the other did not, say m of them, and it is believed from three times the square root of m on. What a rank
spends longer in another phase than the one it is blamed for counts as far as it is more than two standard deviations,
by the looks that fell into that phase on either.

Of ranks on two machines it is only known how often each waited, which is more than m, so what is believed is believed
on less than it could be. What is heard of them is a second old, at the beginning as at the end, and counts as if it
were not.

Where all ranks wait at one moment, they wait for the network or for the memory, or for ranks of other machines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.job.hang import WARM
from lockstep.job.page import Phase

#: Fewer steps, or looks, tell nothing.
FEWEST_STEPS, FEWEST_LOOKS = 10, 60
#: Parts of a step: what a slow rank costs before it is named; what a phase has of the difference to be the cause.
COSTS, _CAUSE = 0.05, 0.8
#: How surely a difference must be known, in standard deviations.
SURE = 3.0
#: How many of them a second cause must come to.
_DOUBT = 2.0
#: Seconds for which moments are as close as looks, and then between two of them at least: a run of a second has a
#: step's time as well.
_YOUNG, _CLOSE = 2.0, 0.05
#: Moments of a start that are kept at most, and as many of all ranks together; at least.
_MOST, _CELLS, _FEWEST = 600, 16_384, 48


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come, all since it was started."""

    #: Optimizer steps.
    steps: int
    #: Seconds by phase, waiting included.
    seconds: tuple[float, ...]
    #: Samples that its steps were taken with; 0: they are not counted.
    samples: int = 0
    #: Seconds for which others have waited while it worked, those of several added up, and shared by those that worked.
    held: float = 0.0
    #: Resident bytes, as last seen; 0: not known.
    memory: int = 0
    #: Seconds of its GPU by phase, in the steps that were timed; none: there is no GPU, or none is known of it.
    device: tuple[float, ...] = ()
    #: The most bytes that it ever had of its GPU, and how many the GPU has.
    device_memory: tuple[int, int] = (0, 0)
    #: Seconds of pauses of Python's garbage collector, whatever the phase around them, and how many there were.
    collected: float = 0.0
    collections: int = 0

    @property
    def work(self) -> float:
        """Seconds in which it did not wait."""
        return math.fsum(self.seconds) - self.seconds[Phase.WAIT]

    def since(self, before: Progress) -> Progress:
        """Return what came after ``before``; what is no sum stays as it is."""
        return replace(
            self,
            steps=self.steps - before.steps,
            seconds=tuple(after - earlier for earlier, after in zip(before.seconds, self.seconds, strict=True)),
            samples=self.samples - before.samples,
            held=self.held - before.held,
            collected=self.collected - before.collected,
            collections=self.collections - before.collections,
        )

    def plus(self, other: Progress) -> Progress:
        """Return what both have come together; of what is no sum, the greater."""
        both = [self.device, other.device] if self.device and other.device else [self.device or other.device]
        return replace(
            self,
            steps=self.steps + other.steps,
            seconds=tuple(map(math.fsum, zip(self.seconds, other.seconds, strict=True))),
            samples=self.samples + other.samples,
            held=self.held + other.held,
            memory=max(self.memory, other.memory),
            device=tuple(map(math.fsum, zip(*both, strict=True))),
            device_memory=max(self.device_memory, other.device_memory),
            collected=self.collected + other.collected,
            collections=self.collections + other.collections,
        )


@dataclass(frozen=True)
class Milestone:
    """How far the ranks had come at a moment."""

    at: float
    #: Looks at the pages that it rests on, since the ranks were started.
    looks: int
    ranks: Mapping[int, Progress]


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for. Times are seconds a step."""

    rank: int
    #: What a step would take less without it.
    costs: float
    #: Where it lost four fifths of that, and what that phase takes there and elsewhere; None: no single cause.
    phase: Phase | None
    own: float
    others: float
    #: Whether it lost as much in pauses of Python's garbage collector, whatever the phase around them.
    collects: bool = False


@dataclass(frozen=True)
class TimeAccount:
    """What each rank did in some time."""

    seconds: float
    looks: int
    ranks: Mapping[int, Progress]
    #: The ranks of this machine.
    here: Collection[int]

    @classmethod
    def between(cls, before: Milestone, after: Milestone, here: Collection[int]) -> TimeAccount:
        """Return what lies between two moments of a start."""
        seconds = after.at - before.at
        spent = {rank: now.since(before.ranks[rank]) for rank, now in after.ranks.items()}
        for number, rank in spent.items():
            if number not in here:  # its seconds are those of another stretch of time
                longer = seconds / (math.fsum(rank.seconds) or 1.0)
                told = tuple(each * longer for each in rank.seconds)
                spent[number] = replace(rank, seconds=told, held=rank.held * longer)
        return cls(seconds, after.looks - before.looks, spent, here)

    @property
    def steps(self) -> int:
        """The steps that were watched."""
        return min(rank.steps for rank in self.ranks.values())

    @property
    def step(self) -> float:
        """Seconds of a step, all that a step of the training takes included: the time, by the steps in it. 0: not
        known. (The one time of a step that is told anywhere: parts of it, and what they cost, add up to it.)"""
        return self.seconds / self.steps if self.steps else 0.0

    def straggler(self, *, costs: float = COSTS, sure: float = SURE) -> Straggler | None:
        """Return the rank that the others waited for, if it is known surely that there was one.

        Args:
            costs: the part of a step that it must cost.
            sure: how surely that must be known, in standard deviations.
        """
        if len(self.ranks) < 2 or self.steps < FEWEST_STEPS or self.looks < FEWEST_LOOKS:
            return None
        work = {number: rank.work for number, rank in self.ranks.items()}
        slowest, second = sorted(work, key=lambda number: work[number], reverse=True)[:2]
        excess, pause = work[slowest] - work[second], self.seconds / self.looks
        two = (self.ranks[slowest], self.ranks[second])
        if slowest in self.here and second in self.here:
            apart = sum(rank.held for rank in two) / pause
        else:
            apart = sum(rank.seconds[Phase.WAIT] for rank in two) / pause
        if excess < costs * self.seconds or excess / pause < sure * math.sqrt(max(1.0, apart)):
            return None
        others = [rank for number, rank in self.ranks.items() if number != slowest]
        phase, longer, lost = self._cause(two[0], others, pause)
        collected = two[0].collected - statistics.median(rank.collected for rank in others)
        own = two[0].seconds[phase]
        return Straggler(
            slowest,
            excess / self.steps,
            phase if lost >= _CAUSE * longer else None,
            own / self.steps,
            (own - lost) / self.steps,
            collects=collected >= _CAUSE * excess,
        )

    def _cause(self, slow: Progress, others: Sequence[Progress], pause: float) -> tuple[Phase, float, float]:
        """Return the phase in which a rank lost most against the others, what it lost in all, and in that phase."""
        usual = {
            phase: statistics.median(rank.seconds[phase] for rank in others)
            for phase in Phase
            if phase is not Phase.WAIT
        }
        by_phase = {phase: slow.seconds[phase] - each for phase, each in usual.items()}
        phase = max(by_phase, key=lambda phase: by_phase[phase])
        # What is in doubt is no second cause.
        longer = by_phase[phase] + sum(
            max(0.0, each - _DOUBT * math.sqrt((2 * usual[other] + each) * pause if each > 0 else 0.0))
            for other, each in by_phase.items()
            if other is not phase
        )
        return phase, longer, by_phase[phase]


class Ledger:
    """How far the ranks of one start have come while all of them took steps, moment by moment.

    What comes before the first two steps, and the last moments in which a rank leaves, are left out.
    """

    def __init__(self) -> None:
        #: From the first that counts to the last. Where there are too many, every other one goes.
        self.moments: list[Milestone] = []
        #: Of so many moments one is kept, how many there were, and whether the last is there only until the next.
        self._stride, self._count, self._passes = 1, 0, False

    def is_due(self, now: float) -> bool:
        """Whether a moment is wanted now already, and not in a second: the training has only just begun."""
        if not self.moments:
            return True
        return now - self.moments[0].at < _YOUNG and now - self.moments[-1].at >= _CLOSE

    def add(self, ranks: Mapping[int, Progress], *, now: float, looks: int) -> None:
        """Record a moment.

        Args:
            ranks: of each rank of this machine, and of the others where all of them are known. When these come to be
                known, the account begins anew; a moment in which they are not is left out.
            now: on the monotonic clock.
            looks: how many looks at the pages that rests on.
        """
        if not ranks or any(rank.steps < WARM for rank in ranks.values()):
            return
        moment, moments = Milestone(now, looks, dict(ranks)), self.moments
        if not moments or not ranks.keys() <= moments[0].ranks.keys():
            self.moments, self._stride, self._count, self._passes = [moment], 1, 0, False
        elif len(ranks) == len(moments[0].ranks) and _train_on(moments[-1].ranks, ranks):
            if self._passes:
                moments.pop()
            moments.append(moment)
            self._count += 1
            self._passes = self._count % self._stride != 0
            if not self._passes and len(moments) > max(_FEWEST, min(_MOST, _CELLS // len(ranks))):
                del moments[1:-1:2]
                self._stride, self._count = 2 * self._stride, 0


def _train_on(before: Mapping[int, Progress], after: Mapping[int, Progress]) -> bool:
    """Whether all ranks have taken steps in between, and none is about to end."""
    return all(
        now.steps > before[rank].steps and now.seconds[Phase.LEAVING] == before[rank].seconds[Phase.LEAVING]
        for rank, now in after.items()
    )
