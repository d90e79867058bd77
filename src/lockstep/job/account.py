"""Find what the ranks did between two moments, and which of them the others waited for. Pure.

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

Of ranks on two machines it is only known how often each waited, which is more than m: the test is stricter there than
it need be. Their figures arrive about a second late; since that shifts both ends of the interval, it is ignored.

Where all ranks wait at one moment, they wait for the network or for the memory, or for ranks of other machines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from lockstep.job.hang import WARM
from lockstep.job.page import Phase
from lockstep.job.throughput import StepFlops

#: The fewest steps and looks from which a verdict is given.
FEWEST_STEPS, FEWEST_LOOKS = 10, 60
#: The fraction of a step that a slow rank must cost to be named; the fraction of the difference between two ranks that
#: a phase must account for to be the cause.
COSTS, CAUSE = 0.05, 0.8
#: Standard deviations by which a difference must exceed 0 to be believed.
SURE = 3.0
#: Standard deviations that are subtracted from what another phase contributes, before it counts as a second cause.
_DOUBT = 2.0
#: For the first 2 s of training, moments may be as close as 0.05 s, so that a run of a second has a step time as well.
_YOUNG, _CLOSE = 2.0, 0.05
#: Limits on the moments kept of a start: the most, the most times the number of ranks, and the fewest.
_MOST, _CELLS, _FEWEST = 600, 16_384, 48


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a rank since it was started."""

    #: The number of optimizer steps taken.
    steps: int
    #: Seconds by phase, waiting included.
    seconds: tuple[float, ...]
    #: Samples in these steps; 0: they are not counted.
    samples: int = 0
    #: Seconds that others waited while this rank worked: the sum over ranks that waited, shared by those that worked.
    held: float = 0.0
    #: Resident bytes at the last look; 0: unknown.
    memory: int = 0
    #: Seconds of GPU time by phase, in the steps that were timed; empty: there is no GPU, or its times are unknown.
    device: tuple[float, ...] = ()
    #: Peak bytes of GPU memory, and the GPU's capacity in bytes.
    device_memory: tuple[int, int] = (0, 0)
    #: Seconds of pauses of Python's garbage collector, in any phase, and the number of pauses.
    collected: float = 0.0
    collections: int = 0
    #: Resident bytes at the last look that are neither a file's nor shared; 0: unknown, as of other machines' ranks.
    own_memory: int = 0
    #: Resident bytes at the last look that are shared and no file's: one copy for all who have them; 0: as above.
    shared_memory: int = 0
    #: Tokens that the script has counted for these steps; 0: it counts none.
    tokens: int = 0
    #: The FLOPs of one step, as they were counted; None: they were not.
    flops: StepFlops | None = None

    @property
    def work(self) -> float:
        """The seconds in which the rank did not wait."""
        return math.fsum(self.seconds) - self.seconds[Phase.WAIT]

    def since(self, before: Progress) -> Progress:
        """Return the progress made after ``before``; fields that are not sums keep their value."""
        return replace(
            self,
            steps=self.steps - before.steps,
            seconds=tuple(after - earlier for earlier, after in zip(before.seconds, self.seconds, strict=True)),
            samples=self.samples - before.samples,
            tokens=self.tokens - before.tokens,
            held=self.held - before.held,
            collected=self.collected - before.collected,
            collections=self.collections - before.collections,
        )

    def plus(self, other: Progress) -> Progress:
        """Return the sum of both; fields that are not sums take the greater value."""
        both = [self.device, other.device] if self.device and other.device else [self.device or other.device]
        return replace(
            self,
            steps=self.steps + other.steps,
            seconds=tuple(map(math.fsum, zip(self.seconds, other.seconds, strict=True))),
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            held=self.held + other.held,
            memory=max(self.memory, other.memory),
            device=tuple(map(math.fsum, zip(*both, strict=True))),
            device_memory=max(self.device_memory, other.device_memory),
            collected=self.collected + other.collected,
            collections=self.collections + other.collections,
            own_memory=max(self.own_memory, other.own_memory),
            shared_memory=max(self.shared_memory, other.shared_memory),
            flops=other.flops or self.flops,
        )


@dataclass(frozen=True)
class Milestone:
    """The progress of all ranks at one moment."""

    at: float
    #: Looks at the pages since the ranks were started.
    looks: int
    ranks: Mapping[int, Progress]


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for. Times are seconds a step."""

    rank: int
    #: Seconds by which a step would be shorter without this rank.
    costs: float
    #: The phase in which the rank lost at least four fifths of that, and the seconds of this phase on it and on the
    #: others; None: no single cause.
    phase: Phase | None
    own: float
    others: float
    #: True if pauses of Python's garbage collector, in any phase, account for at least four fifths of it.
    collects: bool = False


@dataclass(frozen=True)
class TimeAccount:
    """The progress of each rank between two moments."""

    seconds: float
    looks: int
    ranks: Mapping[int, Progress]
    #: The ranks of this machine.
    here: Collection[int]

    @classmethod
    def between(cls, before: Milestone, after: Milestone, here: Collection[int]) -> TimeAccount:
        """Return the account of the time between two moments of a start."""
        seconds = after.at - before.at
        spent = {rank: now.since(before.ranks[rank]) for rank, now in after.ranks.items()}
        for number, rank in spent.items():
            if number not in here:  # the seconds known of it are from a slightly different interval
                longer = seconds / (math.fsum(rank.seconds) or 1.0)
                told = tuple(each * longer for each in rank.seconds)
                spent[number] = replace(rank, seconds=told, held=rank.held * longer)
        return cls(seconds, after.looks - before.looks, spent, here)

    def without(self, parts: Iterable[TimeAccount]) -> TimeAccount:
        """Return the account without those of some parts of its time."""
        rest = self
        for part in parts:
            ranks = {number: rank.since(part.ranks[number]) for number, rank in rest.ranks.items()}
            rest = TimeAccount(rest.seconds - part.seconds, rest.looks - part.looks, ranks, self.here)
        return rest

    @property
    def steps(self) -> int:
        """The steps that all ranks took in this time."""
        return min(rank.steps for rank in self.ranks.values())

    @property
    def step(self) -> float:
        """The mean seconds of a step, everything included: the time divided by the steps in it; 0: unknown.

        All reports use this time of a step, so their parts and costs add up to it."""
        return self.seconds / self.steps if self.steps else 0.0

    def straggler(self, *, costs: float = COSTS, sure: float = SURE) -> Straggler | None:
        """Return the rank that the others waited for, or None if none is known with enough confidence.

        Args:
            costs: the fraction of a step that the rank must cost.
            sure: the confidence that is required, in standard deviations.
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
        phase, longer, lost = self.cause(slowest)
        collected = two[0].collected - statistics.median(rank.collected for rank in others)
        own = two[0].seconds[phase]
        return Straggler(
            slowest,
            excess / self.steps,
            phase if lost >= CAUSE * longer else None,
            own / self.steps,
            (own - lost) / self.steps,
            collects=collected >= CAUSE * excess,
        )

    def cause(self, rank: int) -> tuple[Phase, float, float]:
        """Return the phase in which a rank lost the most against the others, and the seconds lost in all and in it."""
        slow, pause = self.ranks[rank], self.seconds / self.looks
        others = [each for number, each in self.ranks.items() if number != rank]
        usual = {
            phase: statistics.median(rank.seconds[phase] for rank in others)
            for phase in Phase
            if phase is not Phase.WAIT
        }
        by_phase = {phase: slow.seconds[phase] - each for phase, each in usual.items()}
        phase = max(by_phase, key=lambda phase: by_phase[phase])
        # A loss within the noise does not count as a second cause.
        longer = by_phase[phase] + sum(
            max(0.0, each - _DOUBT * math.sqrt((2 * usual[other] + each) * pause if each > 0 else 0.0))
            for other, each in by_phase.items()
            if other is not phase
        )
        return phase, longer, by_phase[phase]


class Ledger:
    """The progress of the ranks of one start, moment by moment, while all of them take steps.

    The time before the second step, and the last moments in which a rank leaves, are left out.
    """

    def __init__(self) -> None:
        #: The moments in order. When there are too many, every other one is dropped.
        self.moments: list[Milestone] = []
        #: The last moment at which a rank had not taken its second step; None: none was recorded.
        self.young: Milestone | None = None
        #: One moment in ``_stride`` is kept; the moments counted so far; True if the next one replaces the last.
        self._stride, self._count, self._passes = 1, 0, False

    def is_due(self, now: float) -> bool:
        """Return whether a moment is wanted now, not only after a second, because the training has only just begun."""
        if not self.moments:
            return True
        return now - self.moments[0].at < _YOUNG and now - self.moments[-1].at >= _CLOSE

    def add(self, ranks: Mapping[int, Progress], *, now: float, looks: int) -> None:
        """Record a moment.

        Args:
            ranks: the progress of each rank of this machine, and of the other machines' ranks once all are known. When
                these become known, the account begins anew; later moments without them are left out.
            now: seconds on the monotonic clock.
            looks: looks at the pages so far.
        """
        if not ranks:
            return
        moment, moments = Milestone(now, looks, dict(ranks)), self.moments
        if any(rank.steps < WARM for rank in ranks.values()):
            self.young = moment
        elif not moments or not ranks.keys() <= moments[0].ranks.keys():
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
    """Return whether all ranks have taken steps in between and none is about to end."""
    return all(
        now.steps > before[rank].steps and now.seconds[Phase.LEAVING] == before[rank].seconds[Phase.LEAVING]
        for rank, now in after.items()
    )
