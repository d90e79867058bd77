"""Who holds up whom: the ranks' pages compared, with no process in sight.

Note [Late or slow]
~~~~~~~~~~~~~~~~~~~
A rank is late when others wait for it in a collective and it does not wait itself. It is reported once the last of the
others has waited for the rank's *patience* and the rank's own page has not changed for as long:

- five seconds (``LOCKSTEP_LATE``), or ten median steps where these are longer: what is *usual*;
- a minute, while the rank has taken fewer than two steps (start-up, the first compilation), and while it evaluates: its
  last forward was one in eval mode;
- five minutes, while lockstep saves or restores a checkpoint there, or torch.compile compiles;
- for ever inside ``lockstep.expect_slow``.

A rank whose page does change is at work, not stuck, and is reported only after a minute (or a hundred median steps).
These are seconds without a sign of life, so work of any length that goes through lockstep (a loader's batches,
a model's forwards) is no alarm as long as it moves.

Before the report the stacks of all ranks are looked at. A late rank that sits in a debugger is left alone; one that
computes in a model outside of a step (an average of weights on rank 0, say) evaluates, and has its minute.

If all ranks wait, none is late: they wait in different collectives, or for another machine (reported after a minute).
If none is known to wait and none moves, their stacks tell who waits; see :func:`settle`.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.recorder.layout import Look, Phase

#: Seconds without a sign of life; see Note [Late or slow].
STEPS = 10
WARMING_UP = 60.0
LONG = 300.0
#: Steps that a rank has taken before its time to start is over.
_WARM = 2
#: How many steps' times the median is of.
_REMEMBERED = 101


class Kind(enum.Enum):
    """What is wrong."""

    #: Some ranks are late, the others wait for them.
    LATE = "late"
    #: All ranks wait, in different collectives or one that does not end.
    APART = "apart"
    #: No rank moves, and the pages do not say who waits for whom.
    STILL = "still"


@dataclass(frozen=True)
class Seen:
    """One rank as the watcher has seen it."""

    rank: int
    #: Its page; None: it has written nothing.
    look: Look | None
    #: When its page changed last, on the monotonic clock.
    moved: float
    #: How it ended, or None while it lives.
    exit_code: int | None = None
    #: Since when the watcher has looked without a break; what came before does not count.
    since: float = 0.0

    @property
    def waiting_since(self) -> float | None:
        """When it began to wait for others; None: it does not."""
        if self.look is None or self.exit_code is not None or self.look.waiting_since is None:
            return None
        return max(self.look.waiting_since, self.since)


@dataclass(frozen=True)
class Verdict:
    """Who holds up whom."""

    kind: Kind
    #: The ranks to look at, and those that wait for them.
    late: tuple[int, ...]
    waiting: tuple[int, ...]
    #: Since when the ranks that wait have all been there.
    since: float


class StepTimes:
    """How long a step takes, from the count of steps at each look. The first ones, which warm up, are left out."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._steps = 0
        self._at: float | None = None

    def add(self, steps: int, at: float) -> None:
        """**Local.** The slowest rank has taken ``steps`` by ``at``."""
        if steps < _WARM or steps <= self._steps:
            return
        if self._at is not None:
            self._times.append((at - self._at) / (steps - self._steps))
        self._steps, self._at = steps, at

    @property
    def median(self) -> float:
        """Seconds of the median step; 0 while no two steps were seen."""
        return statistics.median(self._times) if self._times else 0.0


def patience(look: Look | None, usual: float) -> float:
    """**Local.** Seconds that a rank may hold up others without a sign of life; see Note [Late or slow]."""
    if look is not None and look.reason:
        return math.inf
    if look is None or look.steps < _WARM or look.phase is Phase.EVALUATE:
        usual = max(usual, WARMING_UP)
    if look is not None and look.phase in (Phase.SAVE, Phase.RESTORE, Phase.COMPILE):
        usual = max(usual, LONG)
    return usual


def compare(ranks: Sequence[Seen], *, now: float, usual: float, whole: bool = True) -> Verdict | None:
    """**Local.** Who holds up whom for longer than is ``usual`` (in seconds); None: nobody.

    ``whole``: these are all ranks of the job; what those of other machines do is not known here.
    """
    waits = {seen.rank: since for seen in ranks if (since := seen.waiting_since) is not None}
    late = [seen for seen in ranks if seen.rank not in waits]
    alive = [seen for seen in ranks if seen.exit_code is None]
    if not waits:
        if len(alive) > 1 and all(now - seen.moved > patience(seen.look, usual) for seen in alive):
            return Verdict(Kind.STILL, tuple(seen.rank for seen in alive), (), max(seen.moved for seen in alive))
        return None
    since = max(waits.values())
    if not late:
        looks = [seen.look for seen in ranks]
        if any(look is not None and look.reason for look in looks):
            return None
        limit = max(0.0 if whole else WARMING_UP, *(patience(look, usual) for look in looks))
        return Verdict(Kind.APART, (), tuple(waits), since) if now - since > limit else None
    if any(not _is_overdue(seen, since=since, now=now, usual=usual) for seen in late if seen.exit_code is None):
        return None
    if now - since <= usual:  # all that is late has ended
        return None
    still_there = [seen for seen in late if seen.exit_code is None]
    return Verdict(Kind.LATE, tuple(seen.rank for seen in still_there or late), tuple(waits), since)


def _is_overdue(seen: Seen, *, since: float, now: float, usual: float) -> bool:
    limit = patience(seen.look, usual)
    held, quiet = now - since, now - seen.moved
    return held > limit and (quiet > limit or held > max(WARMING_UP, 10 * limit))


class Doing(enum.Enum):
    """What a rank's stack and its processor time tell."""

    WAITS = "waits"
    WORKS = "works"


def settle(verdict: Verdict, doing: Mapping[int, Doing]) -> Verdict | None:
    """**Local.** The verdict once the stacks of all ranks are known; None: nobody holds up anybody.

    A rank that waits in a process group of its own says nothing of it in its page, but its stack does.
    """
    if verdict.kind is Kind.APART:
        return verdict
    late = tuple(rank for rank in verdict.late if doing.get(rank, Doing.WORKS) is not Doing.WAITS)
    waiting = tuple(sorted({*verdict.waiting, *verdict.late} - set(late)))
    if not waiting:
        return None
    return Verdict(Kind.LATE if late else Kind.APART, late, waiting, verdict.since)


#: How far into a step a rank is by the last phase that it entered; the optimizer's is over when the step is counted.
_ORDER = (Phase.OPTIMIZER, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE)


def odd_ones(looks: Mapping[int, Look], waits_in: Mapping[int, str]) -> tuple[int, ...]:
    """**Local.** Which ranks have left out a collective, if all wait; empty if that can't be told.

    Who leaves out a collective gets further in the program than the others; or else is where most are not.

    Args:
        looks: the pages of all ranks.
        waits_in: what each rank waits in, and where.
    """
    progress = {rank: (look.steps, _within_step(look)) for rank, look in looks.items()}
    furthest = max(progress.values())
    ahead = tuple(rank for rank in looks if progress[rank] == furthest)
    if len(ahead) < len(looks):
        return ahead
    (common, size), *others = Counter(waits_in.values()).most_common()
    if not others or others[0][1] == size:
        return ()
    return tuple(rank for rank, what in waits_in.items() if what != common)


def _within_step(look: Look) -> int:
    return _ORDER.index(look.entered) if look.entered in _ORDER else 0
