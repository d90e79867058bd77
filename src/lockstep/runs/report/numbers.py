"""What a report shows of a run, as numbers: the records of its machines are put on one time axis. No drawing here.

Note [Bins of a report]
~~~~~~~~~~~~~~~~~~~~~~~
The time axis is cut where the first machine's series has rows, so that a bin holds what was really counted in it; of
a long series evenly chosen rows are read. There are at most :data:`_BINS`, and less where there are many ranks, so that
the report of any run is of a size that browsers like. Each start of the ranks has bins of its own, beginning when its
processes were started, with time between them that belongs to none. What other machines have counted is interpolated
at the same moments, on clocks that are as equal as the machines' own.

A row says how many steps are done, not when the last one was, so the time of a step is off by a step in a bin's length,
or by a row where steps are longer. It is therefore taken over as many bins together as make ten of either.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.job.page import NAMES, Phase
from lockstep.job.summary import Ledger, Progress
from lockstep.runs import history
from lockstep.runs.history import Run, UnknownRun
from lockstep.runs.report.logged import Metric, read_metrics
from lockstep.runs.series import Series

#: Bins of a run at most, in all and with all ranks' values; of a start at least.
_BINS, _CELLS, _FEWEST = 600, 40_960, 8
#: Steps, or rows, that a step's time is taken over where they are few; and parts that the run is cut into at least.
_TOGETHER, _PARTS = 10, 24
#: Rows that a verdict is made of.
_FEW_ROWS = 60
#: Looks at the pages in a second, at least.
_LOOKS = 30
NAN = math.nan

#: By rank, then by bin; NaN where nothing is known.
Table = list[list[float]]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a moment."""

    at: float
    #: checkpoint, restart, late, failed, stopped, or another word of the record.
    kind: str
    text: str


@dataclass(frozen=True)
class Start:
    """The ranks of a run, started once."""

    number: int
    at: float
    #: Bins from the first to the last, which does not belong to it any more.
    bins: range
    world_size: int


@dataclass(frozen=True)
class Total:
    """A rank over the whole run."""

    rank: int
    host: str
    #: Optimizer steps, in all starts.
    steps: float
    #: Seconds by phase.
    seconds: dict[Phase, float]
    #: Seconds for which others waited while it worked; None: the record is of a version that does not say.
    held: float | None
    #: Bytes at most; None: not known.
    memory: float | None

    def share(self, phase: Phase) -> float:
        """The part of the rank's time that went to a phase."""
        return self.seconds[phase] / (sum(self.seconds.values()) or 1.0)


@dataclass(frozen=True)
class Account:
    """All that is drawn. Times are in seconds since the run began."""

    run: Run
    #: The records of the job's machines that were found, this one's first.
    machines: list[Run]
    starts: list[Start]
    begins: list[float]
    ends: list[float]
    ranks: list[int]
    #: Seconds of a step, with waiting and without.
    step: Table
    work: Table
    #: The part of the time that went to each phase, of those that took any.
    phases: dict[Phase, Table]
    #: The part of the others' time that went to waiting for a rank; None: the record does not say.
    held: Table | None
    memory: Table
    #: Samples a second, by bin; None: nobody counts them.
    samples: list[float] | None
    totals: list[Total]
    marks: list[Mark]
    metrics: list[Metric]
    #: The summary's first two lines; empty: it can't be told.
    verdict: str
    #: What could not be shown, a sentence each.
    notes: list[str] = field(default_factory=list)

    @cached_property
    def seconds(self) -> float:
        """How long the run took, or has taken so far."""
        last = [self.ends[-1], *(mark.at for mark in self.marks)]
        if "ended" in self.run.about:
            last.append(float(self.run.about["ended"]) - self.run.began)
        return max(last)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The run's own summary; None: it has not ended well."""
        return self.run.summary

    @cached_property
    def median(self) -> float:
        """Seconds of the median step; 0: not known."""
        if self.summary is not None and self.summary.get("median"):
            return float(self.summary["median"])
        known = [value for row in self.step for value in row if math.isfinite(value)]
        return statistics.median(known) if known else 0.0

    def mean(self, phase: Phase) -> list[float]:
        """The part of all ranks' time that went to a phase, by bin."""
        return [_mean(row) for row in zip(*self.phases[phase], strict=True)]


def collect(run: Run) -> Account:
    """Put together what is known of a run.

    Raises:
        UnknownRun: its series can't be read, or its ranks have taken no step.
    """
    machines = [run, *_others(run)]
    notes: list[str] = []
    spans = [span for machine in machines for span in _spans(machine, machine.began - run.began, notes)]
    own = [span for span in spans if span.run is run]
    if not own:
        raise UnknownRun(notes[0] if notes else f"{run.name}: its ranks have taken no step so far: nothing to show")
    ranks = sorted({rank for span in spans for rank in span.ranks})
    edges, starts = _edges(own)
    pieces = [_Piece.of(span, edges, ranks) for span in spans]
    begins, ends = [begin for begin, _, _ in edges], [end for _, end, _ in edges]
    table = {name: _joined(pieces, name, len(ranks), len(edges)) for name in ("steps", "samples", "held", "memory")}
    seconds = {phase: _joined(pieces, phase.name.lower(), len(ranks), len(edges)) for phase in Phase}
    whole = [[sum(parts) for parts in zip(*rows, strict=True)] for rows in zip(*seconds.values(), strict=True)]
    long = [end - begin for begin, end in zip(begins, ends, strict=True)]
    windows = [window for start in starts for window in _windows(start.bins, table["steps"], long, ends[-1])]
    work = [
        [total - wait for total, wait in zip(*rows, strict=True)]
        for rows in zip(whole, seconds[Phase.WAIT], strict=True)
    ]
    shares = {
        phase: [
            [part / total if total > 0 else NAN for part, total in zip(*rows, strict=True)]
            for rows in zip(table_, whole, strict=True)
        ]
        for phase, table_ in seconds.items()
        if any(part > 0 for row in table_ for part in row)
    }
    has_held = all(span.has_held for span in spans)
    metrics = read_metrics(run, notes, until=None if run.is_alive else _ended(run, ends[-1]))
    return Account(
        run,
        machines,
        starts,
        begins,
        ends,
        ranks,
        step=_per_step([long] * len(ranks), table["steps"], windows),
        work=_per_step(work, table["steps"], windows),
        phases=shares,
        held=_held(table["held"], spans, ranks, long) if has_held else None,
        memory=table["memory"],
        samples=_rate(table["samples"], long, windows),
        totals=_totals(spans, machines),
        marks=_marks(machines, run.began, starts),
        metrics=metrics,
        verdict=_verdict(run),
        notes=notes,
    )


# The series ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """The series of one start on one machine, with a row of zeros at its beginning; times are the whole run's."""

    run: Run
    number: int
    world_size: int
    ranks: tuple[int, ...]
    times: list[float]
    #: By column: float [rows][ranks].
    columns: dict[str, list[Sequence[float]]]
    has_held: bool

    @property
    def at(self) -> float:
        return self.times[0]

    def last(self, name: str, place: int) -> float:
        """A rank's last value of a column."""
        value = self.columns[name][-1][place]
        return value if math.isfinite(value) else 0.0


def _others(run: Run) -> list[Run]:
    """Return the records that the job's other machines have left in the same folder."""
    found = []
    for path in sorted(run.path.parent.glob("run*.json")):
        try:
            other = history.read(path)
        except LockstepError:
            continue
        same = other.about["program"] == run.about["program"] and other.about.get("node") != run.about.get("node")
        if path != run.path and same and _overlap(run, other):
            found.append(other)
    return found


def _overlap(one: Run, other: Run) -> bool:
    ends = [float(each.about.get("ended", math.inf)) for each in (one, other)]
    return one.began < ends[1] and other.began < ends[0]


def _ended(run: Run, last: float) -> float:
    """When a run has ended, on the wall clock, as far as its record tells."""
    return float(run.about.get("ended", run.began + last))


def _spans(run: Run, shift: float, notes: list[str]) -> list[_Span]:
    """Read the series of a machine; what can't be read is noted."""
    found = []
    recorded = [start for start in run.about["starts"] if "series" in start]
    for start in recorded:
        count = max(1, len(start.get("ranks", ())))
        most = max(_FEWEST, min(_BINS, _CELLS // count) // len(recorded)) + 1
        path = run.path.parent / Path(str(start["series"])).name
        try:
            series = Series.read(path, most=most)
        except FileNotFoundError:
            notes.append(f"{path} is not there, so what the ranks did in that start can't be shown")
            continue
        except (OSError, ValueError) as error:
            notes.append(str(error))
            continue
        span = _span(run, start, series, shift)
        if span is not None:
            found.append(span)
    return found


def _span(run: Run, start: dict[str, Any], series: Series, shift: float) -> _Span | None:
    count = len(series.ranks)
    names = ("steps", "samples", "memory", "held", *(phase.name.lower() for phase in Phase))
    times, rows = [float(start["at"])], []
    for row, time in enumerate(series.times):
        if math.isfinite(time) and time > times[-1]:
            times.append(time)
            rows.append(row)
    if not rows or not count:
        return None
    zeros = (0.0,) * count
    columns: dict[str, list[Sequence[float]]] = {}
    for name in names:
        there = series.columns.get(name)
        columns[name] = [zeros, *(zeros if there is None else there[row] for row in rows)]
    columns["memory"][0] = columns["memory"][1]
    shifted = [time + shift for time in times]
    world_size = int(start["world_size"])
    return _Span(run, int(start["number"]), world_size, series.ranks, shifted, columns, "held" in series.columns)


#: Of each bin: when it begins and ends, and of which start it is.
_Edges = list[tuple[float, float, int]]


def _edges(spans: Iterable[_Span]) -> tuple[_Edges, list[Start]]:
    """Cut the time of a machine into bins, where its series have their rows."""
    edges: _Edges = []
    starts: list[Start] = []
    for span in spans:
        first = len(edges)
        edges += [(begin, end, len(starts)) for begin, end in zip(span.times, span.times[1:], strict=False)]
        starts.append(Start(span.number, span.at, range(first, len(edges)), span.world_size))
    return edges, starts


@dataclass(frozen=True)
class _Piece:
    """What the ranks of one span have counted in each bin that it covers; float [ranks] by column and bin."""

    places: list[int]
    bins: list[int]
    columns: dict[str, list[list[float]]]

    @classmethod
    def of(cls, span: _Span, edges: _Edges, ranks: Sequence[int]) -> _Piece:
        places = {rank: place for place, rank in enumerate(ranks)}
        middle = [(begin + end) / 2 for begin, end, _ in edges]
        bins = [bin_ for bin_, at in enumerate(middle) if span.times[0] <= at <= span.times[-1]]
        columns = {}
        for name, rows in span.columns.items():
            if name == "memory":
                columns[name] = [_at(span.times, rows, edges[bin_][1]) for bin_ in bins]
                continue
            columns[name] = [
                [
                    later - earlier if later > earlier else 0.0
                    for earlier, later in zip(
                        _at(span.times, rows, edges[bin_][0]), _at(span.times, rows, edges[bin_][1]), strict=True
                    )
                ]
                for bin_ in bins
            ]
        return cls([places[rank] for rank in span.ranks], bins, columns)


def _at(times: list[float], rows: list[Sequence[float]], at: float) -> Sequence[float]:
    """Return the values of a moment: those of a row, or between two rows."""
    after = min(bisect.bisect_left(times, at), len(times) - 1)
    if times[after] == at or after == 0 or at > times[after]:
        return rows[after]
    part = (at - times[after - 1]) / (times[after] - times[after - 1])
    return [one + part * (other - one) for one, other in zip(rows[after - 1], rows[after], strict=True)]


def _joined(pieces: Iterable[_Piece], name: str, ranks: int, bins: int) -> Table:
    table = [[NAN] * bins for _ in range(ranks)]
    for piece in pieces:
        for bin_, values in zip(piece.bins, piece.columns[name], strict=True):
            for place, value in zip(piece.places, values, strict=True):
                table[place][bin_] = value
    return table


# From counts to what is drawn ----------------------------------------------------------------------------------------


def _windows(bins: range, steps: Table, long: list[float], whole: float) -> list[range]:
    """Return the bins that a step's time is taken over together; see Note [Bins of a report]."""
    if not bins:
        return []
    known = [row for row in steps if any(math.isfinite(value) for value in row[bins.start : bins.stop])]
    taken = min((sum(map(_number, row[bins.start : bins.stop])) for row in known), default=0.0)
    if taken <= 0:
        return []
    row = statistics.median(long[bin_] for bin_ in bins)
    step = sum(long[bin_] for bin_ in bins) / taken
    wanted = min(_TOGETHER * min(step, row), whole / _PARTS)
    found: list[range] = []
    first, passed, counts = bins.start, 0.0, [0.0] * len(known)
    for bin_ in bins:
        passed += long[bin_]
        counts = [count + _number(each[bin_]) for count, each in zip(counts, known, strict=True)]
        if min(counts) >= 1 and passed >= 0.999 * wanted:
            found.append(range(first, bin_ + 1))
            first, passed, counts = bin_ + 1, 0.0, [0.0] * len(known)
    return found


def _per_step(seconds: Table, steps: Table, windows: list[range]) -> Table:
    """Return seconds a step by rank and bin: the same in all bins of a window."""
    table = []
    for mine, taken in zip(seconds, steps, strict=True):
        row = [NAN] * len(mine)
        for window in windows:
            if len(window) == 1:
                count = taken[window.start]
                row[window.start] = mine[window.start] / count if count > 0 else NAN
                continue
            count = sum(map(_number, taken[window.start : window.stop]))
            if count > 0:
                value = sum(map(_number, mine[window.start : window.stop])) / count
                row[window.start : window.stop] = [value] * len(window)
        table.append(row)
    return table


def _rate(samples: Table, long: list[float], windows: list[range]) -> list[float] | None:
    rates = [NAN] * len(long)
    for window in windows:
        count = sum(_number(value) for row in samples for value in row[window.start : window.stop])
        passed = sum(long[window.start : window.stop])
        rates[window.start : window.stop] = [count / passed] * len(window)
    return rates if any(rate > 0 for rate in rates) else None


def _held(held: Table, spans: Sequence[_Span], ranks: Sequence[int], long: list[float]) -> Table:
    """Return the part of the time of a machine's other ranks that went to waiting for each."""
    others = {rank: max(1, len(span.ranks) - 1) for span in spans for rank in span.ranks}
    return [
        [
            min(1.0, value / (others[rank] * passed)) if math.isfinite(value) else NAN
            for value, passed in zip(row, long, strict=True)
        ]
        for rank, row in zip(ranks, held, strict=True)
    ]


def _totals(spans: Sequence[_Span], machines: Sequence[Run]) -> list[Total]:
    hosts = {id(machine): str(machine.about.get("host", "")) for machine in machines}
    peaks: dict[int, float] = {}
    for machine in machines:
        for rank, told in ((machine.summary or {}).get("ranks") or {}).items():
            if told.get("memory"):
                peaks[int(rank)] = float(told["memory"])
    found: dict[int, Total] = {}
    for span in spans:
        for place, rank in enumerate(span.ranks):
            before = found.get(rank)
            seconds = {phase: span.last(phase.name.lower(), place) for phase in Phase}
            held: float | None = span.last("held", place) if span.has_held else None
            most = max((row[place] for row in span.columns["memory"] if math.isfinite(row[place])), default=0.0)
            steps = span.last("steps", place)
            if before is not None:
                seconds = {phase: value + before.seconds[phase] for phase, value in seconds.items()}
                held = None if held is None or before.held is None else held + before.held
                most, steps = max(most, before.memory or 0.0), steps + before.steps
            memory = max(most, peaks.get(rank, 0.0)) or None
            found[rank] = Total(rank, hosts[id(span.run)], steps, seconds, held, memory)
    return [found[rank] for rank in sorted(found)]


def _marks(machines: Sequence[Run], began: float, starts: Sequence[Start]) -> list[Mark]:
    """Return what has happened, in order; what several machines tell in the same words is said once."""
    marks = [
        Mark(start.at, "restart", f"started again, on {start.world_size} ranks ({start.number}. restart)")
        for start in starts
        if start.number
    ]
    said: set[tuple[str, str]] = set()
    for machine in machines:
        shift, about = machine.began - began, machine.about
        for event in about["events"]:
            kind, text = str(event.get("kind", "")), str(event.get("text", ""))
            if (kind, text) not in said or len(machines) == 1:
                said.add((kind, text))
                marks.append(Mark(_number(event.get("at")) + shift, kind, text))
        for each in about.get("checkpoints", ()):
            marks.append(Mark(_number(each.get("at")) + shift, "checkpoint", f"checkpoint at step {each.get('step')}"))
    return sorted(marks, key=lambda mark: mark.at)


def _verdict(run: Run) -> str:
    """Return the summary's first two lines; of a run without one, by what is recorded so far."""
    about = run.summary
    if about is None:
        return _so_far(run)
    return "\n".join(str(about.get("text", f"\n{about.get('bottleneck', '')}")).split("\n")[:2])


def _so_far(run: Run) -> str:
    """Say what limits a run that has no summary, in the two lines of a summary, by the last series of its machine; empty:
    it can't be told."""
    recorded = [start for start in run.about["starts"] if "series" in start]
    try:
        series = Series.read(run.path.parent / Path(str(recorded[-1]["series"])).name, most=_FEW_ROWS)
    except (OSError, ValueError, IndexError):
        return ""
    if "held" not in series.columns:
        return ""
    ledger, begun = Ledger(), float(recorded[-1]["at"])
    names = [phase.name.lower() for phase in Phase]
    if any(name not in series.columns for name in names):
        return ""
    for row, time in enumerate(series.times):
        ranks = {
            rank: Progress(
                int(series.columns["steps"][row][place]),
                tuple(series.columns[name][row][place] for name in names),
                int(series.columns["samples"][row][place]),
                series.columns["held"][row][place],
            )
            for place, rank in enumerate(series.ranks)
        }
        ledger.add(ranks, now=time, looks=int(_LOOKS * (time - begun)))
    summary = ledger.summary(median=0.0, elsewhere=int(recorded[-1]["world_size"]) > len(series.ranks))
    return "" if summary is None else "\n".join(summary.describe({}).split("\n")[:2])


def phase_name(phase: Phase) -> str:
    """How a phase is called in a report."""
    return "waiting" if phase is Phase.WAIT else NAMES[phase]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else NAN
