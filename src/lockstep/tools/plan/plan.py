"""Estimate what a step would take on more ranks and hosts, from the trace of a run. Pure.

Note [How a plan is made]
~~~~~~~~~~~~~~~~~~~~~~~~~
A step begins where all ranks have met, at the end of the last average. Then each computes, and bucket k of the
gradients can be sent once it is ready on all ranks, and once the bucket before it has gone:

    gone[k] = max(gone[k - 1], ready[k]) + all_reduce(bytes[k])

The step ends when the last bucket has gone, and the time for copying gradients in and out is added. If a run sends
nothing during backward (over shm, for example), all gradients are one bucket that is ready at the end.

Note [The slowest of many]
~~~~~~~~~~~~~~~~~~~~~~~~~~
All ranks wait for the slowest, and of more ranks the slowest is slower. Part of the ranks' times varies from step to
step in common (an evaluation, a save, another machine's load): it is taken off as the median over ranks, and the length
of a step is the median of these. The rest is each rank's deviation in each step. N ranks are N / R times the R that
were recorded, and each draws one of its own deviations: the expected largest of them all has a closed form, so nothing
is drawn. (Fewer than R ranks are drawn from all of them equally.) It never exceeds what was recorded, so a rare hiccup
that came in none of the timed steps is missing, however many ranks there are; and for a lone rank it is not known by
how much ranks differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lockstep.job.useful import cost_of
from lockstep.runs import trace as traces
from lockstep.runs.history import Run, UnknownRun
from lockstep.text import as_duration, as_size, counted, joined
from lockstep.tools.plan.network import Link, Network
from lockstep.tools.plan.timetable import LEAST, NoTimetable, Timetable, timetables

#: The link inside a host where none was measured: 5 µs, and 5 GB a second.
INSIDE = Link(5e-6, 5e9)
#: Bytes of gradients below which the time of their average tells the latency, and nothing of the rate.
_SMALL = 64 * 1024
#: The fraction of a step from which on the time in other collectives is told.
_OTHER = 0.02


@dataclass(frozen=True)
class Recorded:
    """The content of the trace of one start of a run, for the ranks of one machine."""

    name: str
    tables: tuple[Timetable, ...]

    @classmethod
    def of(cls, run: Run) -> Recorded:
        """Read the last trace of a run.

        Raises:
            UnknownRun: there is no trace, it is damaged or of another version, or it can't be planned with.
        """
        needs = (
            f"a plan needs a replica (lockstep.replicate) that averages its gradients {LEAST + 1} times or more in the "
            "steps that are traced (the 21 after the first 10, or those that --trace names), in ranks that lockstep "
            "run or spawn started"
        )
        starts = [start for start in run.about["starts"] if start.get("trace")]
        if not starts:
            known = any("trace" in start for start in run.about["starts"])
            why = needs if known else "it was recorded by an earlier lockstep, or was killed at once: record it again"
            raise UnknownRun(f"{run.name}: it has no trace of its steps: {why}")
        try:
            tables = timetables(traces.read(run.path.parent / str(starts[-1]["trace"])))
        except traces.BadTrace as error:
            raise UnknownRun(f"{run.name}: its trace can't be read: {error}") from None
        except NoTimetable as error:
            raise UnknownRun(f"{run.name}: a plan can't be made of it: {str(error) or needs}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UnknownRun(
                f"{run.name}: its trace is of another version of lockstep, or damaged ({type(error).__name__}: {error})"
            ) from None
        if len({table.buckets for table in tables}) > 1:
            raise UnknownRun(f"{run.name}: its ranks had different buckets, and a plan is of replicas")
        return cls(run.name, tables)

    @property
    def first(self) -> Timetable:
        """The timetable of one rank, for what all have in common."""
        return self.tables[0]

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.first.world_size

    @property
    def samples(self) -> int:
        """Samples of the global batch; 0: they were not counted, or the ranks' shares are of something else."""
        samples = float(self.first.global_samples)
        return int(samples) if samples.is_integer() else 0

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.first.buckets)

    @property
    def ready(self) -> list[float]:
        """The fraction of the backward that was over when each bucket was ready; 1 for the last one."""
        parts = [statistics.median(table.ready[k] for table in self.tables) for k in range(len(self.first.buckets))]
        return [*parts[:-1], 1.0]

    @property
    def step(self) -> float:
        """Seconds of the median step, as it was recorded."""
        return statistics.median(statistics.median(map(sum, zip(*table.columns, strict=True))) for table in self.tables)

    @property
    def waiting(self) -> float:
        """The median seconds of a step in other collectives."""
        return statistics.median(statistics.median(table.waiting) for table in self.tables)

    @property
    def crowding(self) -> float:
        """The ranks' threads for each core of the machine; at least 1."""
        return max(1.0, len(self.tables) * self.first.threads / self.first.cores)

    def measured_inside(self) -> Link | None:
        """Return the link between ranks of this host, by the times of their averages; None: these do not tell."""
        table, ranks = self.first, len(self.tables)
        if ranks < 2 or ranks < self.ranks or (table.overlaps and len(table.buckets) > 1):
            return None
        # The rank that comes last waits for nobody, so its time is that of the average alone.
        seconds = statistics.median(map(min, zip(*(table.averaging for table in self.tables), strict=True)))
        messages = 2 * (ranks - 1)
        if self.bytes < _SMALL:
            return Link(seconds / messages, INSIDE.bandwidth)
        sending = seconds - messages * INSIDE.latency
        return Link(INSIDE.latency, messages / ranks * self.bytes / sending) if sending > 0 else None


@dataclass(frozen=True)
class Setting:
    """The setting that a plan is for."""

    network: Network
    #: How an all-reduce is done, as in :meth:`Network.all_reduce`.
    algorithm: str = "best"
    #: ``strong``: the global batch stays and is cut among more ranks; ``weak``: it grows with them.
    scaling: str = "strong"
    #: Cores of a host; None: each rank has as many as it had.
    cores: int | None = None
    #: True if buckets are sent during backward; None: as in the recorded run.
    overlaps: bool | None = None
    #: The properties of the link between hosts that were not given.
    guessed: tuple[str, ...] = ()
    #: The price of a node per hour; None: not known.
    price: float | None = None


@dataclass(frozen=True)
class Point:
    """A step on some number of ranks. Times are seconds."""

    ranks: int
    hosts: int
    step: float
    #: The step's parts: computing on a typical rank, waiting for the slowest, copying gradients, waiting for averages.
    computing: float
    stragglers: float
    handling: float
    network: float
    #: Seconds of the averages, hidden behind the backward or not; the algorithm of the largest message.
    averaging: float
    algorithm: str
    samples_per_second: float | None
    #: Samples a second, as a fraction of what as many ranks reach that each train alone.
    efficiency: float
    #: The cost of a thousand steps on these hosts; None: there is no price.
    cost_of_1000_steps: float | None = None


class Slowest:
    """The expected longest of N draws; see Note [The slowest of many].

    Args:
        ranks: seconds of each step, by rank.
    """

    def __init__(self, ranks: Sequence[Sequence[float]]) -> None:
        common: list[float] = [statistics.median(step) for step in zip(*ranks, strict=True)]
        #: Seconds of a typical rank.
        self.usual = statistics.median(common)
        self._steps, self._ranks = len(common), len(ranks)
        deviations = [
            (value - shared, rank) for rank, row in enumerate(ranks) for value, shared in zip(row, common, strict=True)
        ]
        self._sorted = sorted(deviations)

    def of(self, ranks: int) -> float:
        """Return the expected longest of ``ranks`` draws, in seconds."""
        if self._ranks == 1:
            return self.usual
        return self.usual + sum(chance * value for chance, value in self._chances(ranks))

    def _chances(self, ranks: int) -> Iterator[tuple[float, float]]:
        """Yield each deviation with the chance that it is the largest."""
        before = 0.0
        if ranks < self._ranks:
            count = len(self._sorted)
            for place, (value, _) in enumerate(self._sorted, start=1):
                below = math.pow(place / count, ranks)
                yield below - before, value
                before = below
            return
        each, unseen = ranks / self._ranks, self._ranks
        seen, logarithm = [0] * self._ranks, -self._ranks * math.log(self._steps)
        for value, rank in self._sorted:
            seen[rank] += 1
            if seen[rank] == 1:
                unseen -= 1
            else:
                logarithm += math.log(seen[rank] / (seen[rank] - 1))
            below = 0.0 if unseen else math.exp(each * logarithm)
            yield below - before, value
            before = below


@dataclass(frozen=True)
class Plan:
    """A plan of what steps on more ranks would take."""

    recorded: Recorded
    setting: Setting

    def at(self, ranks: int) -> Point:
        """Return a step on ``ranks`` ranks.

        Raises:
            ValueError: the global batch stays the same, and has fewer samples than there are ranks.
        """
        step, alone = self._step(ranks), self._alone
        growth = 1.0 if self.setting.scaling == "weak" else float(ranks)
        samples = self._samples(ranks)
        return Point(
            **step,
            samples_per_second=samples / step["step"] if samples else None,
            efficiency=alone["step"] / growth / step["step"],
            cost_of_1000_steps=None
            if self.setting.price is None
            else cost_of(1000 * step["step"], nodes=step["hosts"], price=self.setting.price),
        )

    @cached_property
    def _alone(self) -> dict[str, Any]:
        return self._step(1)

    def fitting(self, counts: Sequence[int]) -> list[int]:
        """Return those of ``counts`` at which every rank has a sample."""
        samples = self.recorded.samples
        return [count for count in counts if self.setting.scaling == "weak" or not samples or count <= samples]

    @property
    def overlaps(self) -> bool:
        """Whether buckets are sent during backward."""
        return self.recorded.first.overlaps if self.setting.overlaps is None else self.setting.overlaps

    def _samples(self, ranks: int) -> float:
        samples = float(self.recorded.samples)
        return samples if self.setting.scaling == "strong" else samples * ranks / self.recorded.ranks

    def _part(self, ranks: int) -> float:
        """Return the largest share of the batch, as a multiple of what a recorded rank had."""
        if self.setting.scaling == "weak":
            return 1.0
        samples, recorded = self.recorded.samples, self.recorded.ranks
        if not samples:
            return recorded / ranks
        if ranks > samples:
            raise ValueError(
                f"{ranks:,} ranks: the global batch has {samples:,} samples, so there are ranks without any: plan with "
                "--scaling weak, where the batch grows with the ranks, or record a run with a larger one"
            )
        return math.ceil(samples / ranks) * recorded / samples

    def _crowding(self, ranks: int) -> float:
        if self.setting.cores is None:
            return 1.0
        local = min(ranks, self.setting.network.ranks_per_host)
        return max(1.0, local * self.recorded.first.threads / self.setting.cores) / self.recorded.crowding

    def _step(self, ranks: int) -> dict[str, Any]:
        slower = self._crowding(ranks)
        part = slower * self._part(ranks)
        begins, ends = [], []
        for table in self.recorded.tables:
            begin = [slower * a + part * b for a, b in zip(table.optimizer, table.before, strict=True)]
            begins.append(begin)
            ends.append([a + part * b for a, b in zip(begin, table.backward, strict=True)])
        end = Slowest(ends)
        began, ended = Slowest(begins).of(ranks), end.of(ranks)
        handling = 0.0 if ranks == 1 else slower * self._handling()
        gone, averaging, most = 0.0, 0.0, (0.0, "")
        for size, ready in self._messages() if ranks > 1 else ():
            seconds, name = self.setting.network.all_reduce(size, ranks, self.setting.algorithm)
            gone = max(gone, began + ready * (ended - began)) + seconds
            averaging, most = averaging + seconds, max(most, (size, name))
        return {
            "ranks": ranks,
            "hosts": self.setting.network.hosts(ranks),
            "step": max(gone, ended) + handling,
            "computing": end.usual,
            "stragglers": round(ended - end.usual, 12),  # (otherwise a rounding error would look like a time)
            "handling": handling,
            "network": max(0.0, gone - ended),
            "averaging": averaging,
            "algorithm": most[1],
        }

    def _handling(self) -> float:
        return statistics.median(statistics.median(table.handling) for table in self.recorded.tables)

    def _messages(self) -> list[tuple[int, float]]:
        """Return the bytes of each message, and the fraction of the backward that is over when it is ready."""
        if not self.overlaps:
            return [(self.recorded.bytes, 1.0)]
        return list(zip(self.recorded.first.buckets, self.recorded.ready, strict=True))

    def assumptions(self) -> list[str]:
        """Return what the plan assumes, one sentence each."""
        recorded, setting, table = self.recorded, self.setting, self.recorded.first
        said = [
            f"computing, and when gradients are ready: {len(table.backward)} steps of "
            f"{counted(len(recorded.tables), 'rank')}, {as_size(recorded.bytes)} of gradients in "
            f"{counted(len(table.buckets), 'bucket')}"
        ]
        if self.overlaps:
            said.append("buckets are sent during backward, in their order, and cost it no time")
        else:
            said.append("all gradients are sent at once when backward has ended (as over shm; --overlap: as over gloo)")
        network = setting.network
        guess = f" ({joined(setting.guessed)} guessed: name yours)" if setting.guessed else ""
        said.append(
            f"{counted(network.ranks_per_host, 'rank')} a host; a link between hosts has "
            f"{network.between.words()}{guess}, one inside a host {network.inside.words()}; nothing else uses them"
        )
        if setting.scaling == "strong":
            batch = f" of {recorded.samples:,} samples" if recorded.samples else ""
            said.append(
                f"strong scaling: the global batch{batch} is cut among the ranks, and what a rank computes shrinks as "
                "its share does, but for the optimizer's step"
            )
        else:
            said.append("weak scaling: every rank has as many samples as it had, so the global batch grows")
        if len(recorded.tables) == 1:
            said.append("one rank was recorded, so it is not known how much several would differ: no stragglers")
        else:
            said.append(
                f"stragglers: N ranks are N/{len(recorded.tables)} of each recorded one, and each draws one of its "
                "timed steps; the expected slowest, never slower than what was recorded"
            )
        said.append(
            f"each rank has the {'cores' if table.device == 'cpu' else 'GPU'} it had"
            if setting.cores is None
            else f"a host has {setting.cores} cores, which the threads of its ranks share evenly"
        )
        if setting.price is not None:
            said.append(f"a host costs {setting.price:g}/h, also one that is not full of ranks")
        if recorded.waiting > _OTHER * recorded.step:
            said.append(f"left out: other collectives, for which a step waited {as_duration(recorded.waiting)}")
        return said


def parse_counts(text: str) -> list[int]:
    """Return the numbers of ranks of ``8,64,512``.

    Raises:
        ValueError: ``text`` has something else between its commas, or a 0.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 10 and int(word) for word in words):
        raise ValueError(f"--ranks {text!r}: expected numbers from 1 on, with commas between: 8,64,512")
    return sorted({int(word) for word in words})


def powers(up_to: int) -> list[int]:
    """Return the powers of two up to a number, and the number."""
    return sorted({2**exponent for exponent in range(up_to.bit_length())} | {up_to})


def to_json(plan: Plan, points: Sequence[Point]) -> dict[str, Any]:
    """Return a plan in JSON's types."""
    return {
        "run": plan.recorded.name,
        "recorded": {
            "ranks": plan.recorded.ranks,
            "step": plan.recorded.step,
            "buckets": list(plan.recorded.first.buckets),
            "ready": plan.recorded.ready,
        },
        "setting": {**asdict(plan.setting), "overlaps": plan.overlaps},
        "assumptions": plan.assumptions(),
        "points": [asdict(point) for point in points],
    }
