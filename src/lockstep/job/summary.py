"""Sum up what a run's time went to: over all starts, and in stretches in which a rank held up the others. Pure.

The rule by which a rank is blamed is Note [What a slow rank costs] in account.py.

Note [All starts]
~~~~~~~~~~~~~~~~~
The summary is that of the run. Starts on the same ranks are added up, so what they all took has one verdict: seconds,
looks and steps are sums, and the rule holds for sums. A rank of a start on four ranks is not a rank of one on two, nor
is it where machines met again in another order, so such starts have a verdict each, under their numbers, below the line
that says how many steps they took together. Steps that were taken again after a restart count again, since the summary
is of the ranks' time.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lockstep.codes import CodedEnum
from lockstep.job.account import (
    COSTS,
    FEWEST_LOOKS,
    FEWEST_STEPS,
    SURE,
    Ledger,
    Progress,
    Straggler,
    TimeAccount,
)
from lockstep.job.growth import Growth, find_growth
from lockstep.job.hang import WARM
from lockstep.job.page import NAMES, Phase
from lockstep.job.stretches import Stretch, find, find_pauses
from lockstep.job.throughput import Throughput
from lockstep.job.useful import UsefulTime
from lockstep.text import (
    NEXT,
    as_amount,
    as_clock,
    as_duration,
    as_size,
    counted,
    in_columns,
    joined,
    numbered,
    which_ranks,
)

#: The fractions of a step that must go to data, or to waits for none of the watched ranks, for these to be the limit.
_INPUT, _NETWORK = 0.2, 0.3
#: The fraction of the whole time that a stretch must cost to be told; the fraction of the time up to which it is told
#: if the verdict on the whole run blames the same rank.
_WORTH, _NEARLY_ALL = 0.01, 0.8
#: The part of a rank's time that pauses of the garbage collector take before they are told, and that of the run that
#: passes before its second step.
_COLLECTED, _STARTING = 0.01, 0.1
#: The fewest shared bytes of a rank that are told, and the smallest fraction of its memory.
_LEAST_SHARED, _PART_SHARED = 64 << 20, 0.1
#: Seconds in which an idle machine's launcher surely looks often enough for a verdict.
_SURELY_ENOUGH = 2
#: The most ranks with a row of their own, and the most stretches that are told.
_ROWS, _STRETCHES = 16, 5
#: The useful time of a summary that is not of a whole run.
_UNKNOWN = UsefulTime(0.0)
#: Column of the table -> its contents.
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


class Bottleneck(CodedEnum):
    """What limits a run."""

    BALANCED = "balanced", "balanced"
    INPUT = "input-bound", "input-bound"
    COMPUTE_STRAGGLER = "compute straggler", "compute-straggler"
    INPUT_STRAGGLER = "input straggler", "input-straggler"
    COMMUNICATION = "communication-bound", "communication-bound"
    TURNS = "no single cause", "no-single-cause"
    SHORT = "too short to tell", "too-short-to-tell"


@dataclass(frozen=True)
class Summary(TimeAccount):
    """What the time of one start of the ranks went to, or of several on the same ranks."""

    #: Optimizer steps of each rank, including steps that were not watched.
    taken: int = 0
    #: The number of ranks of the job.
    world_size: int = 0
    #: The numbers of the starts.
    starts: tuple[int, ...] = (0,)
    #: Seconds from the beginning of each start to its second step, summed; then all seconds of the starts.
    starting: float = 0.0
    lasted: float = 0.0
    #: The job's machines with their numbers of ranks; empty: there is one.
    machines: tuple[tuple[str, int], ...] = ()
    #: The restarts of the job before the start, and the steps of the whole run before it (None: not counted); of
    #: several starts, those before the first.
    restarts: int = 0
    before: int | None = None
    #: The stretches of time in which a rank held up the others, pauses among them.
    stretches: tuple[Stretch, ...] = ()
    #: The account of the pauses, which no verdict is based on: Note [Pauses] in stretches.py.
    paused: tuple[TimeAccount, ...] = ()
    #: The ranks whose memory grew all the time.
    growths: tuple[Growth, ...] = ()

    @classmethod
    def of_start(
        cls,
        ledger: Ledger,
        *,
        number: int = 0,
        begin: float = 0.0,
        end: float = 0.0,
        taken: int,
        here: Collection[int],
        world_size: int,
        machines: Sequence[tuple[str, int]] = (),
        restarts: int = 0,
        before: int | None = None,
    ) -> Summary | None:
        """Sum up one start; None: there was no step. Of a start without a second step no time is watched.

        Args:
            ledger: how far its ranks have come.
            number: how many starts came before.
            begin, end: when it began and ended, on the clock of the ledger's moments.
            taken: the steps that each rank has taken in the end.
            here: the ranks of this machine.
            world_size: ranks of the job.
            machines: those of the job, and how many ranks each has.
            restarts: those of the job before this start. (Where machines meet, ``number`` is one more.)
            before: the steps that the run had before this start, of which a Checkpointer knows; None: not known.
        """
        moments = ledger.moments or [each for each in (ledger.young,) if each is not None]
        if not moments or not taken:
            return None
        first, last = moments[0], moments[-1]
        account = TimeAccount.between(first, last, here)
        pauses = find_pauses(moments, here)
        stretches = [*find(moments, here, pauses), *pauses.values()]
        return cls(
            account.seconds,
            account.looks,
            account.ranks,
            here,
            taken=taken,
            world_size=world_size,
            starts=(number,),
            starting=max(0.0, first.at - begin),
            lasted=max(end, last.at) - begin,
            machines=tuple((str(host), int(ranks)) for host, ranks in machines),
            stretches=tuple(sorted(stretches, key=lambda stretch: (stretch.begin, stretch.rank))),
            paused=tuple(TimeAccount.between(moments[place], moments[place + 1], here) for place in pauses),
            growths=tuple(find_growth(moments, here)),
            restarts=restarts,
            before=before,
        )

    def joins(self, other: Summary) -> bool:
        """Return whether another start was one of the same ranks."""
        mine, others = (
            (sorted(each.ranks), sorted(each.here), each.world_size, each.machines) for each in (self, other)
        )
        return mine == others

    def plus(self, other: Summary) -> Summary:
        """Return the summary of both, of the same ranks."""
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            looks=self.looks + other.looks,
            ranks={rank: each.plus(other.ranks[rank]) for rank, each in self.ranks.items()},
            taken=self.taken + other.taken,
            starts=self.starts + other.starts,
            starting=self.starting + other.starting,
            lasted=self.lasted + other.lasted,
            stretches=self.stretches + other.stretches,
            paused=self.paused + other.paused,
            growths=self.growths + other.growths,
        )

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the job are in it."""
        return len(self.ranks) == self.world_size

    @property
    def throughput(self) -> Throughput:
        """What these ranks got done in the watched steps."""
        ranks = ((rank.flops, rank.samples, rank.tokens) for rank in self.ranks.values())
        return Throughput.of(self.seconds, ranks, steps=self.steps)

    @property
    def flops(self) -> int | None:
        """The FLOPs of all these ranks in the step that was counted; None: not those of all are known."""
        counted = [rank.flops for rank in self.ranks.values()]
        return sum(each.flops for each in counted if each is not None) if None not in counted else None

    @functools.cached_property
    def steady(self) -> TimeAccount:
        """The account without the pauses."""
        return self.without(self.paused)

    def straggler(self, *, costs: float = COSTS, sure: float = SURE) -> Straggler | None:
        """Return the rank that the others waited for, pauses left out; else as :meth:`TimeAccount.straggler`."""
        return TimeAccount.straggler(self.steady, costs=costs, sure=sure)

    @property
    def bottleneck(self) -> Bottleneck:
        """What limits the run."""
        if self.steps < FEWEST_STEPS or self.looks < FEWEST_LOOKS:
            return Bottleneck.SHORT
        straggler, steady = self.straggler(), self.steady
        if straggler is not None:
            return Bottleneck.INPUT_STRAGGLER if straggler.phase is Phase.DATA else Bottleneck.COMPUTE_STRAGGLER
        if statistics.mean(_share(rank, "data") for rank in steady.ranks.values()) >= _INPUT:
            return Bottleneck.INPUT
        waited = sum(rank.seconds[Phase.WAIT] for rank in steady.ranks.values())
        held = sum(rank.held for rank in steady.ranks.values())
        whole = steady.seconds * len(steady.ranks)
        if (waited - held) / whole >= _NETWORK:
            return Bottleneck.COMMUNICATION
        return Bottleneck.TURNS if held / whole >= _INPUT else Bottleneck.BALANCED

    @property
    def remarkable(self) -> list[Stretch]:
        """The stretches that cost enough of the whole to be told, and say something that the verdict does not."""
        straggler = self.straggler()
        found = [stretch for stretch in self.stretches if stretch.lost >= _WORTH * self.seconds]
        if straggler is not None:
            theirs = [each for each in found if each.rank == straggler.rank and not each.is_pause]
            if sum(stretch.end - stretch.begin for stretch in theirs) >= _NEARLY_ALL * self.steady.seconds:
                found = [stretch for stretch in found if stretch.rank != straggler.rank or stretch.is_pause]
        return found

    def share(self, rank: int, column: str) -> float:
        """Return the part of a rank's time that went to a column of the table."""
        return _share(self.ranks[rank], column)

    def verdict(self, peaks: Mapping[int, int | None]) -> str:
        """Return what limits the run, in a line."""
        bottleneck = self.bottleneck
        if bottleneck in (Bottleneck.BALANCED, Bottleneck.SHORT):
            told = "; ".join(part for part in (self._shares(), _memory(peaks)) if part)
            return f"{bottleneck.value}: {told}" if told else bottleneck.value
        return f"{bottleneck.value}: {self._why(bottleneck)}"

    def advice(self, run: str = "", *, goes_on: bool = False) -> str:
        """Return what to do next, with the command or the line to change.

        Args:
            run: the name of the run that the commands are to be about; empty: the newest, as where it has just ended.
            goes_on: its ranks can still be looked at.
        """
        of_run = f" {run}" if run else ""
        stack = f"lockstep runs stack{of_run or ' 1'}" if goes_on else "while it runs again, lockstep runs stack 1"
        straggler = self.straggler()
        if straggler is not None and straggler.collects:
            return "call gc.freeze() once the model and the data are loaded: the collector has fewer objects to scan"
        if straggler is not None and straggler.phase is Phase.DATA:
            return f"{stack} {straggler.rank} shows what its data waits for: its disk, its workers, larger samples"
        if straggler is not None and straggler.phase in (Phase.OWN, Phase.EVALUATE):
            return f"{stack} {straggler.rank} shows the line that takes so long"
        if straggler is not None and straggler.phase is Phase.SAVE:
            return "save less often, or beside training with Checkpointer.async_save(); a faster disk"
        if straggler is not None:
            return (
                "lockstep doctor on its machine finds other programs and limits; in slices a slower machine has less "
                "work: lockstep.shard(loader, slices=lockstep.Slices(8, balance=True)), and a loop over loader.steps()"
            )
        if self.bottleneck is Bottleneck.COMMUNICATION and len(self.here) < self.world_size:
            return (
                "lockstep doctor HOST HOST times the link between hosts; "
                f"lockstep runs plan{of_run} shows what a larger batch or a faster link would give"
            )
        return {
            Bottleneck.INPUT: "give the loader more workers: DataLoader(…, num_workers=4, persistent_workers=True)",
            Bottleneck.COMMUNICATION: "take a larger batch or fewer ranks: a step computes too little for its average",
            Bottleneck.TURNS: f"lockstep runs report{of_run} shows which rank the others wait for, and when",
            Bottleneck.SHORT: f"train for {self._missing()} to get a verdict",
        }.get(
            self.bottleneck,
            f"lockstep runs report{of_run} draws the run; lockstep runs plan{of_run} estimates more ranks",
        )

    def _missing(self) -> str:
        """What the run lacks for a verdict: steps, seconds, or both."""
        wanted = []
        if self.steps < FEWEST_STEPS:
            wanted.append(f"{FEWEST_STEPS} steps or more after the first {WARM}")
        if self.looks < FEWEST_LOOKS:  # as many seconds as they take at the pace so far, on a busy machine
            pace = self.seconds / self.looks if self.looks else 0.0
            wanted.append(f"{max(_SURELY_ENOUGH, math.ceil(FEWEST_LOOKS * pace))} seconds or more")
        return joined(wanted)

    def remarks(self) -> list[str]:
        """Return the other remarks, a line each: FLOPs, GPUs, stretches, memory, the garbage collector."""
        return [
            *self._flops(),
            *self._devices(),
            *self._stretches(),
            *self._shared(),
            *self._growth(),
            *self._collector(),
        ]

    def table(self, peaks: Mapping[int, int | None]) -> list[str]:
        """Return a row for each rank, where a rank or a phase stands out."""
        if self.bottleneck in (Bottleneck.BALANCED, Bottleneck.SHORT):
            return []
        shown = sorted(self.ranks, key=lambda rank: self.share(rank, "waiting"))[:_ROWS]  # who waits least first
        columns = [name for name in _COLUMNS if any(self.share(rank, name) >= 0.005 for rank in self.ranks)]
        head = ["rank", *columns, *(["memory"] if any(peaks.get(rank) for rank in shown) else [])]
        rows = [head]
        for rank in sorted(shown):
            row = [str(rank), *(f"{self.share(rank, name):.0%}" for name in columns)]
            if len(head) > len(row):
                peak = peaks.get(rank)
                row.append("-" if peak is None else as_size(peak))
            rows.append(row)
        more = len(self.ranks) - len(shown)
        return [*in_columns(rows), *([f"(and {more} ranks that wait longer)"] if more else [])]

    def _shares(self) -> str:
        """Say what the ranks' time went to in the mean."""
        return _in_parts([rank.seconds for rank in self.ranks.values()])

    def _flops(self) -> list[str]:
        told, flops = self.throughput.describe_flops(), self.flops
        return [f"FLOPs: {as_amount(flops, 'FLOP')} a step; {told}"] if told and flops else []

    def _devices(self) -> list[str]:
        """Say what the GPUs' time went to in the mean, and the most memory that a rank had, where ranks have GPUs."""
        timed = [rank.device for rank in self.ranks.values() if sum(rank.device)]
        used, size = max((rank.device_memory for rank in self.ranks.values()), default=(0, 0))
        words = [_in_parts(timed)] if timed else []
        words += [f"at most {as_size(used)} of {as_size(size)} a rank"] if used else []
        return [f"on the GPUs: {'; '.join(words)}"] if words else []

    def _stretches(self) -> list[str]:
        found = self.remarkable
        dearest = sorted(found, key=lambda stretch: stretch.lost, reverse=True)[:_STRETCHES]
        lines = [_told_of(stretch) for stretch in found if stretch in dearest]
        more = len(found) - len(lines)
        return [*lines, *([f"(and {more} more stretches that cost less)"] if more else [])]

    def _shared(self) -> list[str]:
        """Say how much of a rank's memory is one copy for several, where that is remarkable."""
        whole, shared, own = max((each.memory, each.shared_memory, each.own_memory) for each in self.ranks.values())
        if shared < _LEAST_SHARED or shared < _PART_SHARED * whole:
            return []
        return [
            f"of {as_size(whole)} of memory of a rank, {as_size(shared)} is shared: the machine has it once for all "
            f"who use it; {as_size(own)} is the rank's own"
        ]

    def _growth(self) -> list[str]:
        if not self.growths:
            return []
        most = max(self.growths, key=lambda found: found.after - found.before)
        ranks = sorted({found.rank for found in self.growths})
        return [
            f"memory creeps: that of {which_ranks(ranks)} grew all the time, by {as_size(most.a_step)} a step, from "
            f"{as_size(most.before)} to {as_size(most.after)}. If it goes on after the first epoch, something keeps "
            "what each step makes, such as a list of losses: keep loss.item(), and evaluate under torch.no_grad(); if "
            "it ends there, the data set keeps the samples that it reads"
        ]

    def _collector(self) -> list[str]:
        parts = {rank: each.collected / (math.fsum(each.seconds) or 1.0) for rank, each in self.ranks.items()}
        most = max(parts, key=lambda rank: parts[rank])
        if parts[most] < _COLLECTED:
            return []
        rank = self.ranks[most]
        times = "once" if rank.collections == 1 else f"{rank.collections:,} times"
        mean = statistics.mean(parts.values())
        others = f" ({mean:.1%} in the mean of all ranks)" if len(parts) > 1 else ""
        return [
            f"Python's garbage collector: rank {most} paused {times} for {as_duration(rank.collected)}, "
            f"{parts[most]:.1%} of its time{others}; call gc.freeze() once the model and the data are loaded: it "
            "then has fewer objects to scan"
        ]

    def _why(self, bottleneck: Bottleneck) -> str:
        straggler, step = self.straggler(), self.steady.step
        if straggler is None:
            return {
                Bottleneck.INPUT: "the ranks wait for their data",
                Bottleneck.COMMUNICATION: "all ranks wait at once, for the network"
                + (" or for memory" if len(self.here) == self.world_size else " or for ranks of other machines"),
            }.get(bottleneck, "the ranks wait for each other in turn, and none is slower than the others all the time")
        where = _where(straggler.phase, collects=straggler.collects)
        if straggler.phase is not None:
            own, others = (as_duration(each) for each in (straggler.own, straggler.others))
            where += f": {own} a step against {others}"
        return (
            f"rank {straggler.rank}, {where}; without it a step would take {as_duration(step - straggler.costs)} "
            f"instead of {as_duration(step)} ({straggler.costs / step:.0%} less)"
        )

    def to_json(self, peaks: Mapping[int, int | None], *, run: str = "", goes_on: bool = False) -> dict[str, Any]:
        """Return it in JSON's types; ``run`` and ``goes_on`` are those of :meth:`advice`."""
        straggler = self.straggler()
        return {
            "bottleneck": self.bottleneck.value,
            "code": self.bottleneck.code,
            "starts": list(self.starts),
            "steps": self.taken,
            "step": self.step,
            "starting": self.starting,
            "world_size": self.world_size,
            "watched": {"steps": self.steps, "seconds": self.seconds, "looks": self.looks},
            **self.throughput.to_json(),
            "flops": self.flops,
            "ranks": {str(rank): _told(each, peaks.get(rank)) for rank, each in self.ranks.items()},
            "straggler": None
            if straggler is None
            else {"rank": straggler.rank, "costs": straggler.costs, "phase": _name(straggler.phase)},
            "stretches": [
                {
                    "rank": stretch.rank,
                    "from": stretch.begin,
                    "to": stretch.end,
                    "lost": stretch.lost,
                    "phase": _name(stretch.phase),
                    "pause": stretch.is_pause,
                }
                for stretch in self.remarkable
            ],
            "verdict": self.verdict(peaks),
            "next": self.advice(run, goes_on=goes_on),
            "remarks": self.remarks(),
        }


@dataclass(frozen=True)
class RunSummary:
    """What the time of a whole run went to. See Note [All starts]."""

    #: The summaries of consecutive starts on the same ranks, in order; at least one.
    parts: tuple[Summary, ...]
    useful: UsefulTime = _UNKNOWN

    @classmethod
    def of(cls, starts: Sequence[Summary], *, began: float = 0.0, lasted: float = 0.0) -> RunSummary | None:
        """Put the starts of a run together; None: none of them has come to a second step.

        Args:
            starts: those with a step, in order.
            began: when the run began, on the clock of their moments; what is told counts from then.
            lasted: the seconds of the whole run.
        """
        parts: list[Summary] = []
        for start in starts:
            stretches = tuple(replace(each, begin=each.begin - began, end=each.end - began) for each in start.stretches)
            shifted = replace(start, stretches=stretches)
            if parts and parts[-1].joins(shifted):
                parts[-1] = parts[-1].plus(shifted)
            else:
                parts.append(shifted)
        if not any(start.taken >= WARM for start in starts):
            return None
        return cls(tuple(parts), _useful(starts, parts, lasted))

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the job are in it, in all starts."""
        return all(part.is_whole for part in self.parts)

    @property
    def taken(self) -> int:
        """Optimizer steps of each rank."""
        return sum(part.taken for part in self.parts)

    @property
    def step(self) -> float:
        """Seconds of a step; 0: not known."""
        steps = sum(part.steps for part in self.parts)
        return sum(part.seconds for part in self.parts) / steps if steps else 0.0

    @property
    def throughput(self) -> Throughput:
        """What the ranks got done in all steps that were watched."""
        watched = [part for part in self.parts if part.seconds] or self.parts
        return functools.reduce(Throughput.plus, (part.throughput for part in watched))

    def headline(self) -> str:
        """Return how many steps there were, how long they took, and on how many ranks."""
        starts = sum(len(part.starts) for part in self.parts)
        words = [f"{counted(self.taken, 'step')}{f' in {starts} starts' if starts > 1 else ''}"]
        if self.step:
            words.append(f"{as_duration(self.step)} each")
        words += self.throughput.rates
        ranks = list(dict.fromkeys(len(part.ranks) for part in self.parts))
        many = joined(ranks) if len(ranks) < 3 else f"{min(ranks)} to {max(ranks)}"
        here = "" if self.is_whole else " of this machine"
        line = f"{', '.join(words)} on {many} {'rank' if ranks == [1] else 'ranks'}{here}"
        starting, lasted = (sum(values) for values in zip(*((p.starting, p.lasted) for p in self.parts), strict=True))
        if starting >= _STARTING * lasted > 0:
            of_all = f" of the {starts} starts" if starts > 1 else ""
            line += f"; start-up and first steps{of_all} took {as_duration(starting)}"
        return line

    def describe(self, peaks: Mapping[int, int | None], *, price: float | None = None, run: str = "") -> str:
        """Describe it: three lines, and a row for each rank where one of them or a phase stands out; where there were
        several numbers of ranks, that for each; where there were restarts or there is a price, the useful time.

        Args:
            peaks: the most memory that each rank of this machine ever had, in bytes; None: not known.
            price: the price of a node per hour; None: not known.
            run: see :meth:`Summary.advice`.
        """
        lines = [self.headline()]
        for part in self.parts:
            known = _known(part, peaks)
            verdict = part.verdict(known)
            if len(self.parts) > 1:
                verdict = f"{numbered('start', part.starts)}: {RunSummary((part,)).headline()}\n{verdict}"
            lines += [verdict, *part.remarks(), *part.table(known), f"{NEXT} {part.advice(run)}"]
        if price is not None:
            lines.append(self.useful.describe_cost(price))
        if price is not None or self.useful.restarts:
            lines.append(self.useful.describe())
        return "\n".join(lines)

    def to_json(self, peaks: Mapping[int, int | None], *, run: str = "", goes_on: bool = False) -> dict[str, Any]:
        """Return it in JSON's types; the arguments are those of :meth:`describe` and :meth:`Summary.advice`.

        What is said of a part of the starts only is that of the longest, and all are in ``parts``.
        """
        parts = [part.to_json(_known(part, peaks), run=run, goes_on=goes_on) for part in self.parts]
        longest = max(range(len(parts)), key=lambda place: self.parts[place].seconds)
        several = len(parts) > 1
        ranks: dict[int, Progress] = {}
        for part in self.parts:
            for rank, each in part.ranks.items():
                ranks[rank] = ranks[rank].plus(each) if rank in ranks else each
        remarks = [line for part in parts for line in part["remarks"]]
        if several:
            remarks = [
                f"{numbered('start', each.starts)}: {line}"
                for each, part in zip(self.parts, parts, strict=True)
                for line in (part["verdict"], *part["remarks"])
            ]
        return parts[longest] | {
            "starts": [number for part in parts for number in part["starts"]],
            "steps": self.taken,
            "step": self.step,
            "starting": sum(part["starting"] for part in parts),
            "watched": {name: sum(part["watched"][name] for part in parts) for name in ("steps", "seconds", "looks")},
            **self.throughput.to_json(),
            "ranks": {str(rank): _told(each, peaks.get(rank, each.memory or None)) for rank, each in ranks.items()},
            "stretches": [stretch for part in parts for stretch in part["stretches"]],
            "headline": self.headline(),
            "useful": self.useful.to_json(),
            "remarks": remarks,
            **({"parts": parts} if several else {}),
            "text": self.describe(peaks),
        }


def _useful(starts: Sequence[Summary], parts: Sequence[Summary], lasted: float) -> UsefulTime:
    """Tell the useful part of a run from the rest. See Note [Useful time] in useful.py.

    Args:
        starts: the summaries of its starts.
        parts: those of consecutive starts on the same ranks put together.
        lasted: the seconds of the whole run.
    """
    within = sum(start.lasted for start in starts)
    lasted = max(lasted, within)
    restarts = max(start.restarts for start in starts)
    first = sum(start.starting for start in starts if not start.restarts)
    others = sum(start.starting for start in starts) - first
    outside = lasted - within  # imports, machines that meet, ends of starts, starts without a step
    repeated, repeating = 0, 0.0
    for start, then in pairwise(starts):
        if start.before is not None and then.before is not None:
            again = max(0, start.before + start.taken - then.before)
            repeated += again
            repeating += again * start.step
    late: dict[int, float] = {}
    for part in parts:
        straggler = part.straggler()
        if straggler is not None:
            late[straggler.rank] = late.get(straggler.rank, 0.0) + straggler.costs * part.steps
        for stretch in part.remarkable:
            if straggler is None or stretch.rank != straggler.rank:
                late[stretch.rank] = late.get(stretch.rank, 0.0) + stretch.lost
    saving = sum(part.seconds * statistics.mean(part.share(rank, "saving") for rank in part.ranks) for part in parts)
    once = 1 - repeated / (sum(start.taken for start in starts) or 1)  # the rest is in the steps that are repeated
    return UsefulTime(
        lasted,
        starting=first if restarts else first + outside,
        restarting=outside + others + repeating if restarts else 0.0,
        restarts=restarts,
        repeated=repeated,
        late={rank: once * seconds for rank, seconds in late.items()},
        saving=once * saving,
        nodes=sum((len(start.machines) or 1) * start.lasted for start in starts) / within if within else 1.0,
    )


def _known(part: Summary, peaks: Mapping[int, int | None]) -> dict[int, int | None]:
    """Return the most memory that its ranks ever had; of those of other machines, as it was last seen."""
    return {rank: peaks.get(rank, each.memory or None) for rank, each in part.ranks.items()}


def _told(rank: Progress, memory: int | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "seconds": _by_name(rank.seconds),
        "held": rank.held,
        "collected": rank.collected,
        "collections": rank.collections,
        "memory": memory,
    }
    return told | ({"device": _by_name(rank.device), "device_memory": rank.device_memory} if rank.device else {})


def _told_of(stretch: Stretch) -> str:
    when = f"from {as_clock(stretch.begin)} to {as_clock(stretch.end)}"
    where = _where(stretch.phase, collects=stretch.collects)
    if stretch.is_pause:
        return f"rank {stretch.rank} paused once, {when}, {where}: one step took {as_duration(stretch.lost)} longer"
    return f"rank {stretch.rank} {when}, {where}: cost {stretch.part:.0%} of that time"


def _share(rank: Progress, column: str) -> float:
    return sum(rank.seconds[phase] for phase in _COLUMNS[column]) / (sum(rank.seconds) or 1.0)


def _where(phase: Phase | None, *, collects: bool) -> str:
    if collects:
        return "in Python's garbage collector" + ("" if phase is None else f" (in {NAMES[phase]})")
    return "no single cause" if phase is None else f"in {NAMES[phase]}"


def _name(phase: Phase | None) -> str | None:
    return None if phase is None else phase.name.lower()


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
    return "" if most is None else f"at most {as_size(most)} of memory a rank"
