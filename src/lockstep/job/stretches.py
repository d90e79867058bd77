"""Find when, in a run, one rank held up the others. Pure.

Note [Stretches]
~~~~~~~~~~~~~~~~
A rank that was slow for a third of a run costs little on the whole, or as much as another one that was slow later. So
besides the whole run its stretches are judged, by the same rule (Note [What a slow rank costs] in account.py). Of each
rank it is known, from moment to moment, how much longer it worked than the middle one of all. Less the tenth of the
time that a stretch has to cost, that is a series whose greatest sum over neighbours (Bentley, Programming Pearls,
1984) is the likeliest stretch; what lies before it and behind it is looked through in the same way. Where it has a gap
of a stretch's length, in which the rank was not slow at all, it is two.

A search through all stretches of all ranks finds a remarkable one even where all differences are chance. So a stretch
is believed from five standard deviations on, where the whole run needs three, from six seconds on, and where it costs a
tenth of its time. summary.py tells of those that cost at least a hundredth of the whole run.

Note [Pauses]
~~~~~~~~~~~~~
A moment is noted when all ranks have taken a step since the last one, once a second at most. So where two neighbouring
moments are far apart, a single step took that long. If one rank worked for most of it while the others waited, it
paused once: it read a large file, it waited for a lock, somebody stopped it. That says nothing of its other steps, so
pauses are told as such, and left out of what a verdict on the run, or on a stretch, is based on.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.job.account import CAUSE, Milestone, TimeAccount
from lockstep.job.page import Phase

#: The fraction of its time that a stretch must cost, the standard deviations by which that must exceed 0, its seconds.
_COSTS, _SURE, _SHORTEST = 0.1, 5.0, 6.0
#: The extra work of a rank over the median rank, as a fraction of the start's time, below which it is not examined.
_WORTH = 0.005
#: Two moments this many times as far apart as usual (the median) have a pause between them; it is one rank's if that
#: rank held up the others for this fraction of it.
_APART, _ALONE = 5.0, 0.5
#: The extra work of a rank in a part of a stretch, as a fraction of its time, up to which it was not slow there.
_GAP = 0.03


@dataclass(frozen=True)
class Stretch:
    """A time in which a rank held up the others."""

    rank: int
    #: The beginning and the end, on the clock of the moments.
    begin: float
    end: float
    #: Seconds that the others would not have had to wait without it.
    lost: float
    #: The phase in which it lost them; None: no single cause.
    phase: Phase | None
    #: True if it lost them in pauses of Python's garbage collector.
    collects: bool = False
    #: True if it lost them at once, in a single step; see Note [Pauses].
    is_pause: bool = False

    @property
    def part(self) -> float:
        """The fraction of its own time that it cost."""
        return self.lost / (self.end - self.begin)


def find_pauses(moments: Sequence[Milestone], here: Collection[int]) -> dict[int, Stretch]:
    """Return the pauses of one start, by the place of the moment before each. See Note [Pauses].

    Args:
        moments: from the first that counts to the last; the same ranks in each.
        here: the ranks of this machine.
    """
    if len(moments) < 2 or len(moments[0].ranks) < 2:
        return {}
    found = {}
    apart = max(_SHORTEST, _APART * statistics.median(after.at - before.at for before, after in pairwise(moments)))
    for place, (before, after) in enumerate(pairwise(moments)):
        seconds = after.at - before.at
        if seconds < apart:
            continue
        account = TimeAccount.between(before, after, here)
        work = {rank: each.work for rank, each in account.ranks.items()}
        slowest, second = sorted(work, key=lambda rank: work[rank], reverse=True)[:2]
        lost = work[slowest] - work[second]
        if account.looks and lost >= _ALONE * seconds:
            phase, longer, most = account.cause(slowest)
            known = phase if most >= CAUSE * longer else None
            found[place] = Stretch(slowest, before.at, after.at, lost, known, is_pause=True)
    return found


def find(moments: Sequence[Milestone], here: Collection[int], pauses: Collection[int] = ()) -> list[Stretch]:
    """Return the stretches of one start in which a rank held up the others, in order. See Note [Stretches].

    Args:
        moments, here: as for :func:`find_pauses`.
        pauses: the places of the moments before pauses, which belong to no stretch.
    """
    if len(moments) < 2 or len(moments[0].ranks) < 2:
        return []
    longer: dict[int, list[float]] = {rank: [] for rank in moments[0].ranks}
    lengths = [after.at - before.at for before, after in pairwise(moments)]
    for place, (before, after) in enumerate(pairwise(moments)):
        work = {rank: each.work for rank, each in TimeAccount.between(before, after, here).ranks.items()}
        usual = statistics.median_low(work.values())
        for rank, each in work.items():
            longer[rank].append(0.0 if place in pauses else each - usual)
    worth = _WORTH * sum(lengths)
    found = [
        stretch
        for rank, excess in longer.items()
        for first, last in _likeliest(excess, lengths)
        if sum(excess[first:last]) >= worth
        and (stretch := _judged(moments[first], moments[last], here, rank)) is not None
    ]
    return sorted(found, key=lambda stretch: (stretch.begin, stretch.rank))


def _likeliest(excess: Sequence[float], lengths: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield the parts in which a rank worked longest beyond what a stretch costs, without the gaps in them, as places
    between moments."""
    scores = [each - _COSTS * seconds for each, seconds in zip(excess, lengths, strict=True)]
    todo = [(0, len(scores))]
    while todo:
        begin, end = todo.pop()
        first, last = _greatest(scores, begin, end)
        if last == first:
            continue
        todo += [(begin, first), (last, end)]
        left, right = _greatest([-score for score in scores], first, last)
        gap = sum(lengths[left:right])
        if gap >= _SHORTEST and sum(excess[left:right]) <= _GAP * gap:
            todo += [(first, left), (right, last)]
        else:
            yield first, last


def _greatest(scores: Sequence[float], begin: int, end: int) -> tuple[int, int]:
    """Return the run of neighbours between two places whose sum is greatest; an empty one if no score is positive."""
    best, first, last, running, since = 0.0, begin, begin, 0.0, begin
    for place in range(begin, end):
        running += scores[place]
        if running <= 0.0:
            running, since = 0.0, place + 1
        elif running > best:
            best, first, last = running, since, place + 1
    return first, last


def _judged(before: Milestone, after: Milestone, here: Collection[int], rank: int) -> Stretch | None:
    """Return the time between two moments as a stretch of this rank, if it passes the test."""
    if after.at - before.at < _SHORTEST:
        return None
    account = TimeAccount.between(before, after, here)
    found = account.straggler(costs=_COSTS, sure=_SURE)
    if found is None or found.rank != rank:
        return None
    return Stretch(rank, before.at, after.at, found.costs * account.steps, found.phase, found.collects)
