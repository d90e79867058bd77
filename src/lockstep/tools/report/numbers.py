"""Collect the numbers that a report shows of a run: put the records of its machines on one time axis."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lockstep.job.page import NAMES, Phase
from lockstep.runs import history, reckoning
from lockstep.runs.history import Run, UnknownRun
from lockstep.runs.record import RunEnd
from lockstep.text import counted
from lockstep.tools.report.bins import NAN, Grid, Span, Start, Table, read_spans
from lockstep.tools.report.logged import Metric, read_metrics

#: Steps, or rows, over which a step's time is taken where they are few; and the fewest parts that a run is cut into.
_TOGETHER, _PARTS = 10, 24
#: The keys of a summary that say what the ranks get done.
_RATES = ("samples_per_second", "tokens_per_second", "flops_per_second", "mfu")


@dataclass(frozen=True)
class Marker:
    """Something that happened at a moment."""

    at: float
    #: checkpoint, restart, late, failed, stopped, or another word of the record.
    kind: str
    text: str


@dataclass(frozen=True)
class Total:
    """A rank over the whole run."""

    rank: int
    host: str
    #: Optimizer steps, in all starts.
    steps: float
    #: The seconds of each phase.
    seconds: dict[Phase, float]
    #: Seconds for which others waited while it worked; None: the record is of a version that does not say.
    held: float | None
    #: Peak bytes; None: not known.
    memory: float | None

    def share(self, phase: Phase) -> float:
        """Return the fraction of the rank's time that went to a phase."""
        return self.seconds[phase] / (sum(self.seconds.values()) or 1.0)


@dataclass(frozen=True)
class Account:
    """The data of all charts. Times are in seconds since the run began."""

    run: Run
    #: The records of the job's machines that were found, this one's first.
    machines: list[Run]
    grid: Grid
    ranks: list[int]
    #: Seconds of a step, with waiting and without.
    step: Table
    work: Table
    #: The part of the time that went to each phase, of those that took any.
    phases: dict[Phase, Table]
    #: The part of the others' time that went to waiting for a rank; None: the record does not say.
    held: Table | None
    memory: Table
    #: Samples a second, by bin; None: they are not counted.
    samples: list[float] | None
    #: Tokens a second, likewise.
    tokens: list[float] | None
    totals: list[Total]
    marks: list[Marker]
    metrics: list[Metric]
    #: The summary's headline, its verdict and its remarks, a line each; empty: it can't be told.
    verdict: str
    #: Optimizer steps and seconds of a step, as in the summary; 0: not known.
    steps: int
    seconds_a_step: float
    #: Samples and tokens a second, FLOPs a second of a device and its MFU, by their keys in the summary; what is not
    #: known is not there.
    rates: dict[str, float]
    #: A sentence for each thing that could not be shown.
    notes: list[str] = field(default_factory=list)

    @cached_property
    def seconds(self) -> float:
        """How long the run took, or has taken so far."""
        last = [self.grid.ends[-1], *(mark.at for mark in self.marks)]
        if "ended" in self.run.about:
            last.append(float(self.run.about["ended"]) - self.run.began)
        return max(last)

    def mean(self, phase: Phase) -> list[float]:
        """Return the fraction of all ranks' time that went to a phase, by bin."""
        return [mean(row) for row in zip(*self.phases[phase], strict=True)]


def collect(run: Run) -> Account:
    """Put together what is known of a run.

    Raises:
        UnknownRun: its series can't be read, or its ranks have taken no step.
    """
    try:
        return _collect(run)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnknownRun(f"{run.path}: not a whole record of a run ({type(error).__name__}: {error})") from error


def _collect(run: Run) -> Account:
    notes: list[str] = []
    machines = [run, *_others(run, notes)]
    own = read_spans(run, 0.0, notes)
    known = {rank for span in own for rank in span.ranks}  # of other machines as well, where their launchers have told
    elsewhere = (span for other in machines[1:] for span in read_spans(other, other.began - run.began, notes))
    spans = [*own, *(span for span in elsewhere if not known.issuperset(span.ranks))]
    if not own:
        soon = " so far" if run.is_alive else ""
        why = f"; lockstep runs explain {run.reference} says how it failed" if run.end is RunEnd.FAILED else ""
        raise UnknownRun(notes[0] if notes else f"{run.name}: its ranks have taken no step{soon}: nothing to show{why}")
    ranks = sorted({rank for span in spans for rank in span.ranks})
    grid = Grid.of(own)
    table, long = grid.spread(spans, ranks), grid.lengths
    seconds = {phase: table[phase.name.lower()] for phase in Phase}
    whole = [[sum(parts) for parts in zip(*rows, strict=True)] for rows in zip(*seconds.values(), strict=True)]
    training = [_until_left(start.bins, seconds[Phase.LEAVING]) for start in grid.starts]
    windows = [window for bins in training for window in _windows(bins, table["steps"], long, grid.ends[-1])]
    work = [
        [total - wait for total, wait in zip(*rows, strict=True)]
        for rows in zip(whole, seconds[Phase.WAIT], strict=True)
    ]
    shares = {phase: _parts(mine, whole) for phase, mine in seconds.items() if _any(mine)}
    has_held = all(span.has_held for span in spans)
    metrics = read_metrics(run, notes, until=None if run.is_alive else _ended(run, grid.ends[-1]))
    step = _per_step([long] * len(ranks), table["steps"], windows)
    samples = _rate(table["samples"], long, windows)
    summary, totals = reckoning.summary_of(run), _totals(spans, machines)
    return Account(
        run,
        machines,
        grid,
        ranks,
        step=step,
        work=_per_step(work, table["steps"], windows),
        phases=shares,
        held=_held(table["held"], spans, ranks, long) if has_held else None,
        memory=[[value or NAN for value in row] for row in table["memory"]],  # 0: the process has ended
        samples=samples,
        tokens=_rate(table["tokens"], long, windows),
        totals=totals,
        marks=_marks(machines, run.began, grid.starts),
        metrics=metrics,
        verdict=_verdict(summary),
        steps=int(max((total.steps for total in totals), default=0)) if notes else run.steps,
        seconds_a_step=float(summary["step"]) if summary is not None else 0.0,
        rates={key: float(summary[key]) for key in _RATES if summary.get(key)} if summary is not None else {},
        notes=notes,
    )


# The records ---------------------------------------------------------------------------------------------------------


def _others(run: Run, notes: list[str]) -> list[Run]:
    """Return the records that the job's other machines have left in the same folder; ``notes`` gets those that can't be
    read."""
    found = []
    for path in sorted(run.path.parent.glob("run*.json")):
        try:
            other = history.read(path)
        except UnknownRun as error:
            notes.append(str(error))
            continue
        same = other.about["program"] == run.about["program"] and other.about.get("node") != run.about.get("node")
        if path != run.path and same and _overlap(run, other):
            found.append(other)
    return found


def _overlap(one: Run, other: Run) -> bool:
    ends = [float(each.about.get("ended", math.inf)) for each in (one, other)]
    return one.began < ends[1] and other.began < ends[0]


def _ended(run: Run, last: float) -> float:
    """Return when a run ended, on the wall clock, as far as its record tells."""
    return float(run.about.get("ended", run.began + last))


# From counts to what is drawn ----------------------------------------------------------------------------------------


def _until_left(bins: range, leaving: Table) -> range:
    """Return the bins of a start without those at its end in which a rank has left the training."""
    for bin_ in bins:
        if any(row[bin_] > 0 for row in leaving):
            return range(bins.start, bin_)
    return bins


def _windows(bins: range, steps: Table, long: list[float], whole: float) -> list[range]:
    """Return the windows of bins over which a step's time is taken; see Note [Bins of a report] in bins.py."""
    if not bins:
        return []
    known = [row for row in steps if any(math.isfinite(value) for value in row[bins.start : bins.stop])]
    taken = min((sum(map(_number, row[bins.start : bins.stop])) for row in known), default=0.0)
    if taken <= 0:
        return []
    row = statistics.median(long[bin_] for bin_ in bins)
    step = sum(long[bin_] for bin_ in bins) / taken
    wanted = min(_TOGETHER * min(step, row), whole / _PARTS)
    ahead = known[0]
    found: list[range] = []
    first = next(bin_ for bin_ in bins if _number(ahead[bin_]) > 0) + 1
    passed, counts = 0.0, [0.0] * len(known)
    for bin_ in bins[first - bins.start :]:
        passed += long[bin_]
        counts = [count + _number(each[bin_]) for count, each in zip(counts, known, strict=True)]
        if min(counts) >= 1 and _number(ahead[bin_]) > 0 and passed >= 0.999 * wanted:
            found.append(range(first, bin_ + 1))
            first, passed, counts = bin_ + 1, 0.0, [0.0] * len(known)
    return found or [bins]  # the start is too short to be cut into windows


def _any(table: Table) -> bool:
    return any(value > 0 for row in table for value in row)


def _parts(seconds: Table, whole: Table) -> Table:
    """Return a phase's seconds as fractions of those of all phases."""
    return [
        [part / total if total > 0 else NAN for part, total in zip(*rows, strict=True)]
        for rows in zip(seconds, whole, strict=True)
    ]


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


def _held(held: Table, spans: Sequence[Span], ranks: Sequence[int], long: list[float]) -> Table:
    """Return the part of the time of a machine's other ranks that went to waiting for each."""
    others = {rank: max(1, len(span.ranks) - 1) for span in spans for rank in span.ranks}
    return [
        [
            min(1.0, value / (others[rank] * passed)) if math.isfinite(value) else NAN
            for value, passed in zip(row, long, strict=True)
        ]
        for rank, row in zip(ranks, held, strict=True)
    ]


def _totals(spans: Sequence[Span], machines: Sequence[Run]) -> list[Total]:
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
            found[rank] = Total(rank, _host(span, rank), steps, seconds, held, memory)
    return [found[rank] for rank in sorted(found)]


def _host(span: Span, rank: int) -> str:
    """Return the name of a rank's machine."""
    last = -1
    start = next(start for start in span.run.about["starts"] if start["number"] == span.number)
    for name, ranks in start.get("machines") or ():
        last += int(ranks)
        if rank <= last:
            return str(name)
    return str(span.run.about.get("host", ""))


def _marks(machines: Sequence[Run], began: float, starts: Sequence[Start]) -> list[Marker]:
    """Return the events in order; an event that several machines report in the same words comes once."""
    marks = [
        Marker(start.at, "restart", f"restart {start.number}, on {counted(start.world_size, 'rank')}")
        for start in starts
        if start.number
    ]
    said: set[tuple[str, str]] = set()
    for machine in machines:
        shift, about = machine.began - began, machine.about
        for at, kind, text in (*_events(machine), *_end(machine)):
            if (kind, text) not in said or len(machines) == 1:
                said.add((kind, text))
                marks.append(Marker(at + shift, kind, text))
        for each in about.get("checkpoints", ()):
            marks.append(
                Marker(_number(each.get("at")) + shift, "checkpoint", f"checkpoint at step {each.get('step')}")
            )
    return sorted(marks, key=lambda mark: mark.at)


def _events(machine: Run) -> Iterator[tuple[float, str, str]]:
    for event in machine.events:
        yield _number(event.get("at")), str(event.get("kind", "")), str(event.get("text", ""))


def _end(machine: Run) -> Iterator[tuple[float, str, str]]:
    """Yield how a run ended, if something was said of it: by which signal, say, and where it has saved."""
    text = (machine.about.get("end") or {}).get("text")
    if text and "ended" in machine.about:
        kinds = {RunEnd.SAVED: "stopped", RunEnd.STOPPED: "stopped", RunEnd.FAILED: "failed"}
        yield float(machine.about["ended"]) - machine.began, kinds.get(machine.end, "ended"), str(text)


def _verdict(summary: dict[str, Any] | None) -> str:
    """Return the summary's headline, its verdict, and its remarks, a line each; empty if there is none."""
    if summary is None:
        return ""
    return "\n".join([str(summary["headline"]), str(summary["verdict"]), *map(str, summary["remarks"])])


def phase_name(phase: Phase) -> str:
    """Return a phase's name in a report."""
    return "waiting" if phase is Phase.WAIT else NAMES[phase]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN: none is finite."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else NAN


def median(values: Iterable[float]) -> float:
    """Return the median of the finite values; 0: none is finite."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else 0.0
