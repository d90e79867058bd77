"""The summary of a run: as its launcher left it, or, for a run that is running or was killed, computed from its
series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.job.account import Ledger, Progress
from lockstep.job.page import Phase
from lockstep.job.summary import Bottleneck, RunSummary, Summary
from lockstep.job.throughput import StepFlops
from lockstep.runs.history import Run
from lockstep.runs.series import Series

#: Looks at the pages in a second, at least.
_LOOKS = 30
#: Rows that are read of a start.
_ROWS = 600


def summary_of(run: Run) -> dict[str, Any] | None:
    """Return what :meth:`lockstep.job.summary.RunSummary.to_json` says of a run; None: it can't be told.

    Raises:
        ValueError, KeyError, TypeError: the record is damaged.
    """
    recorded = run.summary
    if recorded is not None and "step" in recorded:  # (those of earlier versions were about the last start alone)
        return recorded
    found = [start for start in (_start(run, start) for start in run.about["starts"]) if start is not None]
    summary = RunSummary.of(found, lasted=run.seconds)
    return None if summary is None else summary.to_json({}, run=run.reference, goes_on=run.is_alive)


def code_of(summary: dict[str, Any]) -> str | None:
    """Return the code of a summary's verdict; None: it has none that is known."""
    words = {each.value: each.code for each in Bottleneck}  # earlier versions wrote the words alone
    code = summary.get("code", words.get(summary.get("bottleneck", "")))
    return None if code is None else str(code)


def _start(run: Run, start: dict[str, Any]) -> Summary | None:
    """Sum up one start of the ranks from its series; None if no series allows that."""
    if "series" not in start:
        return None
    try:
        series = Series.read(run.series_of(start), most=_ROWS)
    except (OSError, ValueError):
        return None
    if not {"steps", "held"} <= series.columns.keys() or not series.times:
        return None
    ledger, begun, flops = Ledger(), float(start["at"]), dict(start.get("flops") or {})
    for row, time in enumerate(series.times):
        ledger.add(_ranks(series, row, flops), now=time, looks=int(_LOOKS * (time - begun)))
    taken = start.get("steps", min(series.columns["steps"][-1]))
    here = [int(rank) for rank in start.get("ranks") or series.ranks]
    return Summary.of_start(
        ledger,
        number=int(start["number"]),
        begin=begun,
        end=series.times[-1],
        taken=int(taken),
        here=here,
        world_size=int(start.get("world_size", len(series.ranks))),
        machines=start.get("machines") or (),
        restarts=int(start.get("restarts", 0)),
        before=start.get("before"),
    )


def _ranks(series: Series, row: int, flops: Mapping[str, Sequence[float]]) -> dict[int, Progress]:
    """Return how far the ranks had come at a row; of what the file does not have, all is 0.

    Args:
        series: of a start.
        row: of the series.
        flops: by rank what it has counted of one step (:class:`StepFlops`).
    """

    def of(name: str, place: int) -> float:
        column = series.columns.get(name)
        return 0.0 if column is None else column[row][place]

    return {
        rank: Progress(
            int(of("steps", place)),
            tuple(of(phase.name.lower(), place) for phase in Phase),
            int(of("samples", place)),
            of("held", place),
            int(of("memory", place)),
            collected=of("collected", place),
            tokens=int(of("tokens", place)),
            flops=_step_flops(flops.get(str(rank))),
        )
        for place, rank in enumerate(series.ranks)
    }


def _step_flops(told: Sequence[float] | None) -> StepFlops | None:
    if told is None:
        return None
    flops, samples, at_peak = told
    return StepFlops(int(flops), int(samples), float(at_peak))
