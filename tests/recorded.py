"""Runs that were never run: their records, written by what writes those of real ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.job.page import Phase
from lockstep.runs.series import SeriesWriter

#: When they began, in seconds since the epoch.
BEGAN = 1_795_350_000.0


def write_series(
    path: Path,
    *,
    ranks: Sequence[int] = (0, 1),
    first: float = 0.0,
    seconds: int = 60,
    step: float = 0.01,
    slow: int | None = 1,
    by: Callable[[int], float] = lambda _: 1.0,
) -> None:
    """Write a series, a row a second. A step is a tenth data, and half as much forward as backward; the others wait for
    the rank that is ``slow`` for a fifth of the time. ``by``: how much longer a step takes in each second.

    Args:
        path: the file.
        ranks: of the machine.
        first: seconds of the run at which the ranks were started; they take a second to begin.
        seconds: rows.
        step: seconds of a step.
        slow: that rank; None: nobody waits.
        by: see above.
    """
    writer, draw = SeriesWriter(path, ranks), random.Random(0)
    steps, spent = 0.0, {rank: [0.0] * len(Phase) for rank in ranks}
    held = dict.fromkeys(ranks, 0.0)
    for rank in ranks:
        spent[rank][Phase.START] = 1.0
    for second in range(1, seconds + 1):
        steps += 1.0 / (step * by(second))
        for rank in ranks:
            wait = 0.0 if slow is None or rank == slow else 0.2
            noise = draw.uniform(0.0, 0.02) if wait else 0.0
            wait -= noise
            parts = {Phase.DATA: 0.1, Phase.WAIT: wait, Phase.OPTIMIZER: 0.05, Phase.OWN: 0.05}
            work = 1.0 - sum(parts.values())
            for phase, part in {**parts, Phase.FORWARD: work / 3, Phase.BACKWARD: work * 2 / 3}.items():
                spent[rank][phase] += part
            if slow is not None:
                held[slow] += wait
        rows = [
            [
                int(steps),
                8 * int(steps),
                (200 + rank + second / 10) * 2**20,
                *spent[rank],
                held[rank],
                0.0,
                80 * int(steps),
            ]
            for rank in ranks
        ]
        writer.add(first + 1.0 + second, rows)


def write_record(folder: Path, *, starts: Sequence[dict[str, Any]] | None = None, **about: Any) -> Path:
    """Write run.json; ``starts`` and what else is given in place of what an ended run of two ranks has."""
    folder.mkdir(parents=True, exist_ok=True)
    start = {"number": 0, "at": 0.0, "world_size": 2, "folder": "/nowhere", "series": "series-0.bin", "ranks": {}}
    record = {
        "run": 1,
        "lockstep": "0.1.0",
        "program": ["train.py", "--lr", "0.1"],
        "directory": "/home/somebody",
        "host": "here",
        "node": 0,
        "launcher": 1,
        "launcher_began": None,
        "began": BEGAN,
        "starts": [{**start, **each} for each in (starts or [{}])],
        "events": [],
        "checkpoints": [],
        "logs": [],
        "ended": BEGAN + 62.0,
        "exit_code": 0,
        **about,
    }
    (folder / "run.json").write_text(json.dumps({name: value for name, value in record.items() if value is not ...}))
    return folder


def write_log(
    path: Path, values: Mapping[str, Callable[[int], Any]], *, every: float = 1.0, seconds: float = 60.0
) -> Path:
    """Write metrics.jsonl: a line each so many seconds, each value by the step that it is of."""
    lines = []
    for place in range(1, int(seconds / every) + 1):
        step = 100 * place
        line = {"step": step, "time": BEGAN + every * place}
        lines.append(json.dumps({**line, **{name: value(step) for name, value in values.items()}}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
