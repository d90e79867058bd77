"""What a run's time went to, which rank the others waited for, and what that cost. Pure.

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

import enum
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.job.hang import WARM
from lockstep.job.page import NAMES, Phase

#: Fewer steps, or looks, tell nothing.
_FEWEST_STEPS, _FEWEST_LOOKS = 10, 60
#: Parts of a step: what a slow rank costs before it is named; what a phase has of the difference to be the cause; data,
#: and waiting for nobody of this machine, to be what limits the run.
_COSTS, _CAUSE, _INPUT, _NETWORK = 0.05, 0.8, 0.2, 0.3
#: How surely a difference must be known, in standard deviations.
_SURE = 3.0
#: How many of them a second cause must come to.
_DOUBT = 2.0
#: Ranks with a row of their own.
_ROWS = 16
#: The columns of the table, and what stands in each.
_COLUMNS = {
    "data": (Phase.DATA,),
    "forward": (Phase.FORWARD,),
    "backward": (Phase.BACKWARD, Phase.REDUCE),
    "optimizer": (Phase.OPTIMIZER,),
    "your code": (Phase.OWN, Phase.START),
    "saving": (Phase.SAVE, Phase.RESTORE),
    "compile": (Phase.COMPILE,),
    "evaluation": (Phase.EVALUATE,),
    "waiting": (Phase.WAIT,),
}


@dataclass(frozen=True)
class Progress:
    """How far a rank has come, all since it was started."""

    #: Optimizer steps.
    steps: int
    #: Seconds by phase, waiting included.
    seconds: tuple[float, ...]
    #: Samples that its steps were taken with; 0: nobody counts them.
    samples: int = 0
    #: Seconds for which others have waited while it worked, those of several added up, and shared by those that worked.
    held: float = 0.0
    #: Resident bytes, as last seen; 0: not known.
    memory: int = 0
    #: Seconds of its GPU by phase, in the steps that were timed; none: there is no GPU, or none is known of it.
    device: tuple[float, ...] = ()
    #: The most bytes that it ever had of its GPU, and how many the GPU has.
    device_memory: tuple[int, int] = (0, 0)


class Bottleneck(enum.Enum):
    """What limits a run."""

    BALANCED = "balanced"
    INPUT = "input-bound"
    COMPUTE_STRAGGLER = "compute straggler"
    INPUT_STRAGGLER = "input straggler"
    COMMUNICATION = "communication-bound"
    TURNS = "no single cause"
    SHORT = "too short to tell"


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


class Ledger:
    """How far the ranks have come while all of them took steps, moment by moment."""

    def __init__(self) -> None:
        self._first: dict[int, Progress] = {}
        self._latest: dict[int, Progress] = {}
        self._times = (0.0, 0.0)
        self._looks = (0, 0)
        self._taken = 0

    def add(self, ranks: Mapping[int, Progress], *, now: float, looks: int) -> None:
        """Record a moment; what comes before the first two steps, and the last moments in which a rank leaves, are left
        out.

        Args:
            ranks: of each rank of this machine, and of the others where all of them are known. When these come to be
                known, the account begins anew; a moment in which they are not is left out.
            now: on the monotonic clock.
            looks: how many looks at the pages that rests on.
        """
        if not ranks or any(rank.steps < WARM for rank in ranks.values()):
            return
        self._taken = min(rank.steps for rank in ranks.values())
        if not ranks.keys() <= self._first.keys():
            self._first = self._latest = dict(ranks)
            self._times, self._looks = (now, now), (looks, looks)
        elif len(ranks) == len(self._first) and all(_trains_on(self._latest[each], ranks[each]) for each in ranks):
            self._latest = dict(ranks)
            self._times, self._looks = (self._times[0], now), (self._looks[0], looks)

    def summary(self, *, median: float, here: Collection[int], world_size: int) -> Summary | None:
        """Return the account of it all; None: no step was seen.

        Args:
            median: seconds of the median step.
            here: the ranks of this machine.
            world_size: ranks of the job.
        """
        if not self._first:
            return None
        seconds, looks = (later - earlier for earlier, later in (self._times, self._looks))
        spent = {
            number: Progress(
                now.steps - self._first[number].steps,
                tuple(after - before for before, after in zip(self._first[number].seconds, now.seconds, strict=True)),
                now.samples - self._first[number].samples,
                now.held - self._first[number].held,
                device=now.device,
                device_memory=now.device_memory,
            )
            for number, now in self._latest.items()
        }
        for number, rank in spent.items():
            if number not in here:
                longer = seconds / (math.fsum(rank.seconds) or 1.0)
                told = tuple(each * longer for each in rank.seconds)
                spent[number] = replace(rank, seconds=told, held=rank.held * longer)
        memory = {number: rank.memory for number, rank in self._latest.items() if number not in here}
        return Summary(self._taken, median, seconds, int(looks), spent, here, world_size, memory)


@dataclass(frozen=True)
class Summary:
    """What the time of one start of the ranks went to."""

    #: Optimizer steps of each rank.
    taken: int
    #: Seconds of the median step; 0: not known.
    median: float
    #: Seconds that the rest is about, looks in them, and what each rank did in them.
    seconds: float
    looks: int
    ranks: Mapping[int, Progress]
    #: The ranks of this machine, and how many the job has.
    here: Collection[int]
    world_size: int
    #: Resident bytes of the others in the end, as far as they are known.
    memory: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the job are in it."""
        return len(self.ranks) == self.world_size

    @property
    def steps(self) -> int:
        """The steps that were watched."""
        return min(rank.steps for rank in self.ranks.values())

    @property
    def samples_per_second(self) -> float | None:
        """Samples that these ranks took steps with, each second; None: nobody counts them."""
        samples = sum(rank.samples for rank in self.ranks.values())
        return samples / self.seconds if samples and self.seconds else None

    @property
    def bottleneck(self) -> Bottleneck:
        """What limits the run."""
        if self.steps < _FEWEST_STEPS or self.looks < _FEWEST_LOOKS:
            return Bottleneck.SHORT
        straggler = self.straggler
        if straggler is not None:
            return Bottleneck.INPUT_STRAGGLER if straggler.phase is Phase.DATA else Bottleneck.COMPUTE_STRAGGLER
        if statistics.mean(self.share(rank, "data") for rank in self.ranks) >= _INPUT:
            return Bottleneck.INPUT
        waited = sum(rank.seconds[Phase.WAIT] for rank in self.ranks.values())
        held = sum(rank.held for rank in self.ranks.values())
        whole = self.seconds * len(self.ranks)
        if (waited - held) / whole >= _NETWORK:
            return Bottleneck.COMMUNICATION
        return Bottleneck.TURNS if held / whole >= _INPUT else Bottleneck.BALANCED

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others waited for, if it is known surely that there was one."""
        if len(self.ranks) < 2 or self.steps < _FEWEST_STEPS or self.looks < _FEWEST_LOOKS:
            return None
        work = {number: sum(rank.seconds) - rank.seconds[Phase.WAIT] for number, rank in self.ranks.items()}
        slowest, second = sorted(work, key=lambda number: work[number], reverse=True)[:2]
        excess, pause = work[slowest] - work[second], self.seconds / self.looks
        two = (self.ranks[slowest], self.ranks[second])
        if slowest in self.here and second in self.here:
            apart = sum(rank.held for rank in two) / pause
        else:
            apart = sum(rank.seconds[Phase.WAIT] for rank in two) / pause
        if excess < _COSTS * self.seconds or excess / pause < _SURE * math.sqrt(max(1.0, apart)):
            return None
        others = {
            phase: statistics.median(rank.seconds[phase] for number, rank in self.ranks.items() if number != slowest)
            for phase in Phase
            if phase is not Phase.WAIT
        }
        by_phase = {phase: self.ranks[slowest].seconds[phase] - usual for phase, usual in others.items()}
        phase = max(by_phase, key=lambda phase: by_phase[phase])
        # What is in doubt is no second cause.
        longer = by_phase[phase] + sum(
            max(0.0, each - _DOUBT * math.sqrt((2 * others[other] + each) * pause if each > 0 else 0.0))
            for other, each in by_phase.items()
            if other is not phase
        )
        own = self.ranks[slowest].seconds[phase]
        return Straggler(
            slowest,
            excess / self.steps,
            phase if by_phase[phase] >= _CAUSE * longer else None,
            own / self.steps,
            (own - by_phase[phase]) / self.steps,
        )

    def share(self, rank: int, column: str) -> float:
        """Return the part of a rank's time that went to a column of the table."""
        seconds = self.ranks[rank].seconds
        return sum(seconds[phase] for phase in _COLUMNS[column]) / (sum(seconds) or 1.0)

    def to_json(self, peaks: Mapping[int, int | None]) -> dict[str, Any]:
        """Return it in JSON's types; the arguments are those of :meth:`describe`."""
        straggler, peaks = self.straggler, {**self.memory, **peaks}
        return {
            "bottleneck": self.bottleneck.value,
            "steps": self.taken,
            "median": self.median,
            "watched": {"steps": self.steps, "seconds": self.seconds, "looks": self.looks},
            "samples_per_second": self.samples_per_second,
            "ranks": {
                str(rank): {
                    "seconds": _by_name(each.seconds),
                    "held": each.held,
                    "memory": peaks.get(rank),
                    **({"device": _by_name(each.device), "device_memory": each.device_memory} if each.device else {}),
                }
                for rank, each in self.ranks.items()
            },
            "straggler": None
            if straggler is None
            else {
                "rank": straggler.rank,
                "costs": straggler.costs,
                "phase": None if straggler.phase is None else straggler.phase.name.lower(),
            },
        }

    def describe(self, peaks: Mapping[int, int | None]) -> str:
        """Describe it: two lines, and a row for each rank where one of them or a phase stands out.

        Args:
            peaks: the most memory that each rank of this machine ever had, in bytes; None: not known.
        """
        peaks = {**self.memory, **peaks}
        bottleneck, lines = self.bottleneck, [self._headline(), *self._devices()]
        if bottleneck in (Bottleneck.BALANCED, Bottleneck.SHORT):
            told = "; ".join(part for part in (self._shares(), _memory(peaks)) if part)
            return "\n".join([*lines, f"{bottleneck.value}: {told}" if told else bottleneck.value])
        return "\n".join([*lines, f"{bottleneck.value}: {self._why(bottleneck)}", *self._table(peaks)])

    def _headline(self) -> str:
        words = [f"{self.taken:,} steps"]
        if self.median:
            words.append(f"{in_words(self.median)} each")
        if self.samples_per_second is not None:
            words.append(f"{self.samples_per_second:,.0f} samples/s")
        ranks = len(self.ranks)
        here = "" if self.is_whole else " of this machine"
        return f"{', '.join(words)} on {ranks} {'rank' if ranks == 1 else 'ranks'}{here}"

    def _shares(self) -> str:
        """What the ranks' time went to in the mean."""
        return _in_parts([rank.seconds for rank in self.ranks.values()])

    def _devices(self) -> list[str]:
        """What the GPUs' time went to in the mean, and the most memory that a rank had, where there are any."""
        timed = [rank.device for rank in self.ranks.values() if sum(rank.device)]
        used, size = max((rank.device_memory for rank in self.ranks.values()), default=(0, 0))
        words = [_in_parts(timed)] if timed else []
        words += [f"at most {_size(used)} of {_size(size)} a rank"] if size else []
        return [f"on the GPUs: {'; '.join(words)}"] if words else []

    def _why(self, bottleneck: Bottleneck) -> str:
        straggler, step = self.straggler, self.seconds / max(1, self.steps)
        if straggler is None:
            return {
                Bottleneck.INPUT: "the ranks wait for their data; more or faster workers of the loader",
                Bottleneck.COMMUNICATION: "all ranks wait at once, for the network"
                + (" or for memory" if len(self.here) == self.world_size else " or for ranks of other machines"),
            }.get(bottleneck, "the ranks wait for each other in turn, and none is slower than the others all the time")
        where = "no single cause"
        if straggler.phase is not None:
            name = NAMES[straggler.phase]
            where = f"in {name}: {in_words(straggler.own)} a step against {in_words(straggler.others)}"
        without = in_words(step - straggler.costs)
        return (
            f"rank {straggler.rank}, {where}; without it a step would take {without} instead of {in_words(step)} "
            f"({straggler.costs / step:.0%} less)"
        )

    def _table(self, peaks: Mapping[int, int | None]) -> list[str]:
        shown = sorted(self.ranks, key=lambda rank: self.share(rank, "waiting"))[:_ROWS]  # who waits least first
        columns = [name for name in _COLUMNS if any(self.share(rank, name) >= 0.005 for rank in self.ranks)]
        head = ["rank", *columns, *(["memory"] if any(peaks.get(rank) for rank in shown) else [])]
        rows = [head]
        for rank in sorted(shown):
            row = [str(rank), *(f"{self.share(rank, name):.0%}" for name in columns)]
            if len(head) > len(row):
                row.append(_size(peaks.get(rank)))
            rows.append(row)
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        more = len(self.ranks) - len(shown)
        return [*lines, *([f"(and {more} ranks that wait longer)"] if more else [])]


def _trains_on(before: Progress, after: Progress) -> bool:
    """Whether a rank has taken steps in between, and is not about to end."""
    return after.steps > before.steps and after.seconds[Phase.LEAVING] == before.seconds[Phase.LEAVING]


def _by_name(seconds: tuple[float, ...]) -> dict[str, float]:
    return {phase.name.lower(): seconds[phase] for phase in Phase}


def _in_parts(ranks: Sequence[Sequence[float]]) -> str:
    """Say what part of the ranks' seconds went to each column, in the mean; less than a hundredth is left out."""
    parts = {
        name: statistics.mean(sum(seconds[phase] for phase in phases) / (sum(seconds) or 1.0) for seconds in ranks)
        for name, phases in _COLUMNS.items()
    }
    return ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part >= 0.01)


def _memory(peaks: Mapping[int, int | None]) -> str:
    most = max((peak for peak in peaks.values() if peak), default=None)
    return "" if most is None else f"at most {_size(most)} of memory a rank"


def _size(peak: int | None) -> str:
    if peak is None:
        return "-"
    return f"{peak / 2**30:.1f} GB" if peak >= 2**30 else f"{peak / 2**20:.0f} MB"


def in_words(seconds: float) -> str:
    """Return a step's or a phase's time: ``1.25 s``, ``4.91 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
