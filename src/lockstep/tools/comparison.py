"""Compare two runs: what changed, and whether it is more than chance. Pure.

Note [The noise of a run]
~~~~~~~~~~~~~~~~~~~~~~~~~
What a step takes, its phases and the samples a second are those of the run's summary: sums, which add up. But a run
that saved once more than the other one takes longer a step, and no step takes longer. So whether two runs differ is
decided by medians. A run's series has, for each interval between two rows, the seconds that a step took on average; of
these the median is taken. Its notch says how well it is known: 1.57 times the interquartile range, divided by the
square root of the number of intervals (McGill, Tukey and Larsen, Variations of box plots, 1978). Where the notches of
two runs do not overlap, their medians differ, at about 95 %. Intervals of one run resemble each other more than those
of two (another machine, other work beside it), which no single run can tell: repeat what matters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.job.page import NAMES, Phase
from lockstep.runs import reckoning
from lockstep.runs.history import Run, UnknownRun
from lockstep.runs.series import Series
from lockstep.text import as_duration, as_size, counted, in_columns

#: Intervals at the beginning that are left out as warm-up, and the fewest that must follow them.
_WARM, _FEWEST = 2, 4
#: Fields of a run's environment that are shown if two runs differ in them.
_ENVIRONMENT = ("torch", "python", "processor", "cores", "gpus")


@dataclass(frozen=True)
class Pace:
    """A run's steps. Times are in seconds."""

    #: A step by the run's summary: the time divided by the steps in it.
    step: float
    #: The median over intervals of a step's time, and its notch. See Note [The noise of a run].
    median: float
    notch: float
    samples_per_second: float | None
    #: Phase -> its seconds in a step, in the mean over ranks; their sum is the step.
    phases: dict[str, float]
    #: The peak memory of any rank, in bytes; 0: not known.
    memory: float

    @classmethod
    def of(cls, run: Run) -> Pace:
        """Work out the pace of a run.

        Raises:
            UnknownRun: it is too short.
        """
        times = [
            (series.times[after] - series.times[before]) / min(_difference(series, "steps", before, after))
            for series in run.series
            for before, after in list(_intervals(series))[_WARM:]
        ]
        summary = reckoning.summary_of(run)
        if len(times) < _FEWEST or summary is None or not summary["step"]:
            raise UnknownRun(
                f"{run.name}: too short to be compared: {counted(run.steps, 'step')} in {run.seconds:.0f} s, where "
                f"{_WARM + _FEWEST + 1} seconds or more, with a step in each, tell enough"
            )
        quarters = statistics.quantiles(times, n=4)
        notch = 1.57 * (quarters[2] - quarters[0]) / math.sqrt(len(times))
        phases = dict.fromkeys(_names(), 0.0)
        for part in summary.get("parts", [summary]):
            for name in phases:
                spent = statistics.mean(rank["seconds"].get(name, 0.0) for rank in part["ranks"].values())
                phases[name] += spent / summary["watched"]["steps"]
        memory = max((rank["memory"] or 0.0 for rank in summary["ranks"].values()), default=0.0)
        return cls(summary["step"], statistics.median(times), notch, summary["samples_per_second"], phases, memory)


@dataclass(frozen=True)
class Comparison:
    """Two runs, side by side."""

    a: Run
    b: Run
    before: Pace
    after: Pace

    @property
    def change(self) -> float:
        """The fraction by which the median step of B is longer than that of A; negative: shorter."""
        return self.after.median / self.before.median - 1

    @property
    def differs(self) -> bool:
        """Whether the median steps differ by more than chance, as far as these two runs can tell."""
        return abs(self.after.median - self.before.median) > self.before.notch + self.after.notch

    def is_slower_by(self, percent: float) -> bool:
        """Return whether a step takes more than ``percent`` longer, beyond chance."""
        return self.differs and self.change * 100 > percent

    def describe(self) -> str:
        """Return the comparison in words: a table and a sentence."""
        before, after = self.before, self.after
        rows = [["", "A", "B", "change"]]
        rows += [[name, str(one), str(other), ""] for name, one, other in self._facts() if one != other]
        rows.append(["median step", *(_with_notch(each) for each in (before, after)), f"{self.change:+.1%}"])
        whole = f"{after.step / before.step - 1:+.1%}"
        rows.append(["step", as_duration(before.step), as_duration(after.step), whole])
        if before.samples_per_second and after.samples_per_second:
            one, other = before.samples_per_second, after.samples_per_second
            rows.append(["samples/s", f"{one:,.0f}", f"{other:,.0f}", f"{other / one - 1:+.1%}"])
        for name in _names():
            one, other = before.phases[name], after.phases[name]
            if max(one, other) >= 0.005 * max(before.step, after.step):
                part = f"{(other - one) / before.step:+.1%} of the step"
                rows.append([f"  {_shown(name)}", as_duration(one), as_duration(other), part])
        if before.memory and after.memory:
            sizes = [as_size(each) for each in (before.memory, after.memory)]
            rows.append(["memory of a rank", *sizes, f"{after.memory / before.memory - 1:+.1%}"])
        names = [f"A: {self.a.name}: {self.a.program}", f"B: {self.b.name}: {self.b.program}"]
        logged = [f"{one}: {line}" for one, run in (("A", self.a), ("B", self.b)) for line in run.remarks]
        return "\n".join([*names, "", *in_columns(rows, left=1), "", *logged, self._sentence()])

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types; times are seconds, sizes bytes."""
        return {
            "a": _told(self.a, self.before),
            "b": _told(self.b, self.after),
            "changed": [
                {"what": name, "a": str(one), "b": str(other)} for name, one, other in self._facts() if one != other
            ],
            "change": self.change,
            "differs": self.differs,
            "text": self._sentence(),
        }

    def _facts(self) -> Iterator[tuple[str, object, object]]:
        for name in ("lockstep", "host"):
            yield name, self.a.about.get(name, "-"), self.b.about.get(name, "-")
        yield "ranks", self.a.world_size, self.b.world_size
        yield "ended", self.a.ending, self.b.ending
        one, other = (each.about.get("environment") or {} for each in (self.a, self.b))
        for name in _ENVIRONMENT:
            yield name, one.get(name, "-"), other.get(name, "-")
        one, other = (each.get("variables") or {} for each in (one, other))
        for name in sorted({*one, *other}):
            yield name, one.get(name, "-"), other.get(name, "-")

    def _sentence(self) -> str:
        if not self.differs:
            return "no difference between their steps that is more than chance"
        slower = "longer" if self.change > 0 else "less long"
        return f"the median step of B takes {abs(self.change):.1%} {slower}, more than chance within each run"


def _told(run: Run, pace: Pace) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.path.parent),
        "program": run.about["program"],
        "ranks": run.world_size,
        "end": {"code": run.end.code, "exit_code": run.about.get("exit_code")},
        "median_step_seconds": pace.median,
        "notch_seconds": pace.notch,
        "step_seconds": pace.step,
        "samples_per_second": pace.samples_per_second,
        "phases_seconds": pace.phases,
        "memory_bytes": pace.memory or None,
        "remarks": run.remarks,
    }


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs.

    Raises:
        UnknownRun: one of them is too short.
    """
    return Comparison(a, b, Pace.of(a), Pace.of(b))


def parse_percent(text: str) -> float:
    """Return the number in ``5`` or ``5%``.

    Raises:
        ValueError: it is none, or negative.
    """
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"--fail-over {text}: expected a percentage, such as 5%")
    return number


def _names() -> list[str]:
    return [phase.name.lower() for phase in Phase]


def _shown(name: str) -> str:
    return "waiting" if name == "wait" else NAMES[Phase[name.upper()]]


def _intervals(series: Series) -> Iterator[tuple[int, int]]:
    """Yield pairs of rows between which all ranks took a step, and none was about to end."""
    before = 0
    for after in range(1, len(series.times)):
        if max(_difference(series, "leaving", before, after)) > 0:
            return
        if min(_difference(series, "steps", before, after)) > 0:
            yield before, after
            before = after


def _difference(series: Series, name: str, before: int, after: int) -> list[float]:
    column = series.columns.get(name)
    if column is None:  # an earlier version had no such phase
        return [0.0] * len(series.ranks)
    return [later - earlier for earlier, later in zip(column[before], column[after], strict=True)]


def _with_notch(pace: Pace) -> str:
    return f"{as_duration(pace.median)} ± {pace.notch / pace.median:.1%}"
