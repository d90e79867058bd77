"""Put the series of a run on one time axis, cut into bins.

Note [Bins of a report]
~~~~~~~~~~~~~~~~~~~~~~~
The time axis is cut where the first machine's series has rows, so that a bin holds what was really counted in it; from
a long series evenly chosen rows are read. There are at most :data:`_BINS`, and fewer if there are many ranks, so that
the report of any run has a size that browsers can handle. Each start of the ranks has bins of its own, beginning when
its processes were started, with time between them that belongs to none. The counts of other machines are interpolated
at the same moments, by the machines' own clocks.

A row says how many steps are done, not when the last one was, so the time of a step is off by a step in a bin's length,
or by a row where steps are longer. It is therefore taken over as many bins together as make ten of either, up to a bin
in which a step was done, and from the first such bin on: the time before it belongs to no step.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.job.page import Phase
from lockstep.runs.history import Run
from lockstep.runs.series import Series

#: The most bins of a run, and the most bins times ranks; the fewest bins of a start.
_BINS, _CELLS, _FEWEST = 600, 40_960, 8
#: The columns that are read; a column that a file lacks is all 0.
_NAMES = ("steps", "samples", "tokens", "memory", "held", *(phase.name.lower() for phase in Phase))
NAN = math.nan

#: Rank -> bin -> value; NaN: unknown.
Table = list[list[float]]


@dataclass(frozen=True)
class Start:
    """The ranks of a run, started once."""

    number: int
    at: float
    #: The bins of this start.
    bins: range
    world_size: int


@dataclass(frozen=True)
class Span:
    """The series of one start on one machine, with a row of zeros at its beginning; times are the whole run's."""

    run: Run
    number: int
    world_size: int
    ranks: tuple[int, ...]
    times: list[float]
    #: Column -> float [rows][ranks].
    columns: dict[str, list[Sequence[float]]]
    has_held: bool

    def last(self, name: str, place: int) -> float:
        """Return a rank's last value of a column."""
        value = self.columns[name][-1][place]
        return value if math.isfinite(value) else 0.0

    def at(self, name: str, moment: float) -> Sequence[float]:
        """Return the ranks' values of a column at a moment: those of a row, or interpolated between two rows."""
        times, rows = self.times, self.columns[name]
        after = min(bisect.bisect_left(times, moment), len(times) - 1)
        if times[after] <= moment or after == 0:
            return rows[after]
        part = (moment - times[after - 1]) / (times[after] - times[after - 1])
        return [one + part * (other - one) for one, other in zip(rows[after - 1], rows[after], strict=True)]


def read_spans(run: Run, shift: float, notes: list[str]) -> list[Span]:
    """Read the series of a machine; what can't be read is noted."""
    found = []
    recorded = [start for start in run.about["starts"] if "series" in start]
    for start in recorded:
        count = max(1, int(start["world_size"]))
        most = max(_FEWEST, min(_BINS, _CELLS // count) // len(recorded))
        path = run.series_of(start)
        try:
            series = Series.read(path, most=most)
        except FileNotFoundError:
            notes.append(f"{path} does not exist, so what the ranks did in that start can't be shown")
            continue
        except (OSError, ValueError) as error:
            notes.append(str(error))
            continue
        span = _span(run, start, series, shift)
        if span is not None:
            found.append(span)
    return found


def _span(run: Run, start: dict[str, Any], series: Series, shift: float) -> Span | None:
    count = len(series.ranks)
    times, rows = [float(start["at"])], []
    for row, time in enumerate(series.times):
        if math.isfinite(time) and time > times[-1]:
            times.append(time)
            rows.append(row)
    if not rows or not count:
        return None
    zeros = (0.0,) * count
    columns: dict[str, list[Sequence[float]]] = {}
    for name in _NAMES:
        there = series.columns.get(name)
        columns[name] = [zeros, *(zeros if there is None else there[row] for row in rows)]
    columns["memory"][0] = columns["memory"][1]
    shifted = [time + shift for time in times]
    world_size = int(start["world_size"])
    return Span(run, int(start["number"]), world_size, series.ranks, shifted, columns, "held" in series.columns)


@dataclass(frozen=True)
class Grid:
    """The bins of a run."""

    begins: list[float]
    ends: list[float]
    starts: list[Start]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Grid:
        """Cut the time of one machine into bins, where its series have their rows."""
        begins: list[float] = []
        ends: list[float] = []
        starts: list[Start] = []
        for span in spans:
            first = len(begins)
            begins += span.times[:-1]
            ends += span.times[1:]
            starts.append(Start(span.number, span.times[0], range(first, len(begins)), span.world_size))
        return cls(begins, ends, starts)

    @property
    def lengths(self) -> list[float]:
        """Seconds of each bin."""
        return [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]

    def spread(self, spans: Iterable[Span], ranks: Sequence[int]) -> dict[str, Table]:
        """Return, by column, the count of each of ``ranks`` in each bin; for memory, the value at the bin's end."""
        tables = {name: [[NAN] * len(self.begins) for _ in ranks] for name in _NAMES}
        places = {rank: place for place, rank in enumerate(ranks)}
        for span in spans:
            rows = [places[rank] for rank in span.ranks]
            for bin_, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
                if not span.times[0] <= (begin + end) / 2 <= span.times[-1]:
                    continue
                for name, table in tables.items():
                    later = span.at(name, end)
                    earlier = span.at(name, begin) if name != "memory" else (0.0,) * len(rows)
                    for place, before, after in zip(rows, earlier, later, strict=True):
                        table[place][bin_] = after - before if after > before else 0.0
        return tables
