"""Which rank was steadily slower than the others, and in what: from the seconds that each spent in each phase."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.recorder.layout import NAMES, Look, Phase

#: What a rank does by itself in a step. What it waits for, and what only some ranks do, is left out.
_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OWN)
#: A rank is slow in an interval if it took this much longer than the median of the others ...
_SLOWER = 1.2
#: ... and steadily so if it was in this part of the intervals, of at least so many.
_PART = 0.7
_INTERVALS = 5


@dataclass(frozen=True)
class Laggard:
    """A rank that was steadily slower than the others. Times are seconds a step."""

    rank: int
    own: float
    others: float
    #: Where most of the difference is, and how long it took there.
    phase: Phase
    own_phase: float
    others_phase: float

    def describe(self) -> str:
        """One sentence."""
        return (
            f"rank {self.rank} was steadily slower than the others: {_time(self.own)} of work a step against their "
            f"{_time(self.others)}, most of the difference in {NAMES[self.phase]} ({_time(self.own_phase)} against "
            f"{_time(self.others_phase)})"
        )


class Pace:
    """Compares the ranks interval by interval."""

    def __init__(self) -> None:
        self._before: dict[int, Look] = {}
        self._first: dict[int, Look] = {}
        self._latest: dict[int, Look] = {}
        self._intervals = 0
        self._slow: dict[int, int] = {}

    def add(self, looks: Mapping[int, Look]) -> None:
        """**Local.** All ranks' pages at a moment, by rank. Steps before the first two are not looked at."""
        if len(looks) < 2 or any(look.steps < 2 for look in looks.values()):
            return
        if not self._first or any(looks[rank].steps < before.steps for rank, before in self._before.items()):
            self._first = dict(looks)
            self._before = dict(looks)
            return
        if any(look.steps == self._before[rank].steps for rank, look in looks.items()):
            return  # no whole step by some rank: the interval goes on
        work = {
            rank: sum(_per_step(self._before[rank], look, phase) for phase in _STEP) for rank, look in looks.items()
        }
        self._before, self._latest = dict(looks), dict(looks)
        if not all(work.values()):
            return  # some rank's sums were not brought up to date in between
        self._intervals += 1
        slowest = max(work, key=lambda rank: work[rank])
        if work[slowest] > _SLOWER * _median_of_others(work, slowest):
            self._slow[slowest] = self._slow.get(slowest, 0) + 1

    def laggard(self) -> Laggard | None:
        """**Local.** The rank that was steadily slower, if one was."""
        rank = max(self._slow, key=lambda rank: self._slow[rank], default=None)
        if rank is None or self._intervals < _INTERVALS or self._slow[rank] < _PART * self._intervals:
            return None
        by_phase = {
            phase: {each: _per_step(self._first[each], look, phase) for each, look in self._latest.items()}
            for phase in _STEP
        }
        total = {each: sum(by_phase[phase][each] for phase in _STEP) for each in self._latest}
        phase = max(_STEP, key=lambda phase: by_phase[phase][rank] - _median_of_others(by_phase[phase], rank))
        return Laggard(
            rank,
            total[rank],
            _median_of_others(total, rank),
            phase,
            by_phase[phase][rank],
            _median_of_others(by_phase[phase], rank),
        )


def _per_step(before: Look, after: Look, phase: Phase) -> float:
    return (after.seconds[phase] - before.seconds[phase]) / max(1, after.steps - before.steps)


def _median_of_others(values: Mapping[int, float], rank: int) -> float:
    return statistics.median(value for other, value in values.items() if other != rank)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
