"""Find the ranks whose memory grew all the time. Pure.

Note [Memory that creeps]
~~~~~~~~~~~~~~~~~~~~~~~~~
A list that keeps the losses of all steps, with the graphs they came from, takes as much in the last step as in the
first. Memory that is in order rises as well, but not in this way: a cache fills up, an allocator reaches its peak, a
second model is loaded. So the steps of a start are cut into four quarters, and the least memory of each is taken, which
does not depend on what comes and goes within a step. Memory creeps if it rose from each quarter to the next, per step
by at least a third of the mean: what is kept at first fills the holes that the allocator has, so that even a list of
losses of equal size has grown by less than half of the mean in one quarter. A data set that keeps the samples it reads
does the same in an epoch that is as long as the run, and the memory of a process does not tell the two apart; the next
epoch does, in which no sample is new. So both are named. Only the process's own memory counts: the pages of a mapped
file of samples come in one by one during an epoch, and the kernel can drop them at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.job.account import Milestone

#: Seconds of training and moments below which nothing is said.
_SHORTEST, _FEWEST = 4.0, 8
#: The fewest bytes of growth that are told, and the smallest fraction of the first quarter's memory.
_LEAST, _PART = 64 << 20, 0.1
#: The fraction of the mean bytes a step by which memory must rise from each quarter to the next.
_STEADY = 1 / 3
_PARTS = 4


@dataclass(frozen=True)
class Growth:
    """A rank whose memory grew all the time."""

    rank: int
    #: Bytes of its own in the first quarter of the steps and in the last, and bytes a step in between.
    before: int
    after: int
    a_step: float


def find_growth(moments: Sequence[Milestone], here: Collection[int]) -> list[Growth]:
    """Return the ranks whose memory grew all the time, in order. See Note [Memory that creeps].

    Args:
        moments: from the first that counts to the last; the same ranks in each.
        here: the ranks of this machine; the memory of others is not known so well.
    """
    if len(moments) < _FEWEST or moments[-1].at - moments[0].at < _SHORTEST:
        return []
    found = (_judged(moments, rank) for rank in moments[0].ranks if rank in here)
    return [growth for growth in found if growth is not None]


def _judged(moments: Sequence[Milestone], rank: int) -> Growth | None:
    begin, end = (moment.ranks[rank].steps for moment in (moments[0], moments[-1]))
    parts: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]
    for moment in moments:
        progress = moment.ranks[rank]
        if progress.own_memory:  # 0: it was not known at that moment
            place = _PARTS * (progress.steps - begin) // (end - begin)
            parts[min(place, _PARTS - 1)].append((progress.own_memory, progress.steps))
    if not all(parts):
        return None
    least = [min(part) for part in parts]
    (first, begun), (last, ended) = least[0], least[-1]
    a_step = (last - first) / (ended - begun)
    slowest = min((after - before) / (then - now) for (before, now), (after, then) in pairwise(least))
    if slowest < _STEADY * a_step or last - first < max(_LEAST, _PART * first):
        return None
    return Growth(rank, first, last, a_step)
