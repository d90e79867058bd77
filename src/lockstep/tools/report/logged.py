"""Find the numbers that the script of a run has logged (metrics.jsonl), and thin them out for a report."""

from __future__ import annotations

import glob
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.runs.history import Run
from lockstep.text import as_size

#: Bytes of a file that are read; names that are drawn; points of one name, and of all together.
_BYTES, _NAMES, _POINTS, _ALL_POINTS = 64 * 2**20, 60, 400, 12_000
#: The most files of earlier runs that are read.
_ASIDE = 50
#: The fields of a line that are not logged values.
_OWN = ("step", "time", "nonfinite")
#: The key of a line with what lockstep evaluate has found of a checkpoint.
_EVALUATION = "evaluation"


@dataclass(frozen=True)
class Metric:
    """One name of a log. A point is the mean of ``count`` lines, if there were too many to draw them all."""

    name: str
    #: Seconds since the run began, steps, and values; NaN: not finite, or none.
    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    #: The least and the greatest value in each point; equal to the values where no lines were put together.
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    #: For each point, True if some of its numbers were infinite or NaN.
    odd: list[bool] = field(default_factory=list)


def read_metrics(run: Run, notes: list[str], *, until: float | None) -> list[Metric]:
    """Read the numbers that a run has logged while it ran.

    Args:
        run: its record, which names the files.
        notes: gets a sentence for each thing that can't be shown.
        until: when the run ended, on the wall clock; None: it has not.
    """
    found: dict[str, Metric] = {}
    paths = [Path(str(path)) for path in run.about.get("logs", ())]
    for path in paths:
        prefix = f"{path.parent.name}/{path.name}: " if len(paths) > 1 else ""
        lines = _lines(path, run, until, notes)
        if lines is None:
            notes.append(f"{path} does not exist (any more), so what the script logged in it is not shown")
            continue
        for line in lines:
            _take(line, run.began, prefix, found)
    shown = [metric for metric in found.values() if any(map(math.isfinite, metric.values)) or any(metric.odd)]
    if len(shown) > _NAMES:
        notes.append(f"{len(shown)} names were logged; the first {_NAMES} are shown")
        shown = shown[:_NAMES]
    most = max(20, min(_POINTS, _ALL_POINTS // max(1, len(shown))))
    return [_thin(metric, most) for metric in shown]


def _lines(path: Path, run: Run, until: float | None, notes: list[str]) -> list[dict[str, Any]] | None:
    """Return the lines that were written while the run was running; None: there is no such file.

    A run that began anew in the same folder has renamed the file. A folder that was moved has it beside the record.
    """
    seen = False
    for candidate in (path, run.path.parent / path.name):
        aside = sorted(candidate.parent.glob(f"{glob.escape(path.stem)}-*{path.suffix}"))[:_ASIDE]
        for each in (candidate, *aside):
            try:
                lines = list(_within(each, run.began, until, notes))
            except OSError:
                continue
            seen = True
            if any(_EVALUATION not in line for line in lines):
                return _in_order(lines)
    return [] if seen else None


def _within(path: Path, began: float, until: float | None, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that were written between two moments, and those of evaluations."""
    with open(path, "rb") as file:
        data = file.read(_BYTES)
        if file.read(1):
            notes.append(f"{path} is larger than {as_size(_BYTES)}: the beginning of it is shown")
    for text in data.rpartition(b"\n")[0].splitlines():
        try:
            line = json.loads(text)
            time, step = line["time"], line["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # not a line that lockstep.Log has written
        if not isinstance(time, (int, float)) or type(step) is not int or abs(step) > 2**53:
            continue
        if _EVALUATION in line or (began - 1.0 <= time and (until is None or time <= until + 5.0)):
            yield line


def _in_order(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the lines of evaluations, which come late and in any order, where training was at their step.

    Those of steps before the first line of this run, or after its last, are of other runs in the same folder.
    """
    logged = [line for line in lines if _EVALUATION not in line]
    steps = [line["step"] for line in logged]
    late = sorted((line for line in lines if _EVALUATION in line), key=lambda line: int(line["step"]))
    placed = [
        {**line, "time": logged[place - 1]["time"]} for line in late if (place := bisect_right(steps, line["step"]))
    ]
    return [*logged, *(line for line in placed if line["step"] <= steps[-1])]


def _take(line: dict[str, Any], began: float, prefix: str, found: dict[str, Metric]) -> None:
    odd = line.get("nonfinite")
    odd = odd if isinstance(odd, dict) else {}
    for name, value in line.items():
        if name in _OWN or isinstance(value, str):
            continue
        number = float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan
        metric = found.setdefault(prefix + name, Metric(prefix + name))
        metric.times.append(float(line["time"]) - began)
        metric.steps.append(line["step"])
        for values in (metric.values, metric.low, metric.high):
            values.append(number)
        metric.odd.append(name in odd or (value is not None and not math.isfinite(number)))


def _thin(metric: Metric, most: int) -> Metric:
    """Put neighbours together until at most ``most`` points are left."""
    count = len(metric.times)
    if count <= most:
        return metric
    thin = Metric(metric.name)
    for point in range(most):
        part = slice(point * count // most, (point + 1) * count // most)
        known = [value for value in metric.values[part] if math.isfinite(value)]
        thin.times.append(metric.times[part][-1])
        thin.steps.append(metric.steps[part][-1])
        thin.values.append(sum(known) / len(known) if known else math.nan)
        thin.low.append(min(known, default=math.nan))
        thin.high.append(max(known, default=math.nan))
        thin.odd.append(any(metric.odd[part]))
    return thin
