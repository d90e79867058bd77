"""A rank's timetable: when each bucket was ready to be averaged, in some of its steps. What ``lockstep plan`` reckons
with.

The gradient engine makes it (``ddp/timing.py``) and leaves it in the job's folder; the launcher copies it to run.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep._files import write_whole
from lockstep.job.files import JobFiles

#: Digits of a second that are kept.
_DIGITS = 7


@dataclass(frozen=True)
class Timetable:
    """What one rank's clocks said. Times are seconds, of one step after the other, without the waits for other ranks.

    A step goes from the end of one averaged backward to the end of the next: from one moment at which all ranks have
    met to the next one.
    """

    rank: int
    #: Why there is nothing else; empty: there is.
    why_not: str = ""
    backend: str = ""
    #: Ranks that averaged.
    world_size: int = 0
    #: Threads that torch computes with, and cores that this rank may run on.
    threads: int = 1
    cores: int = 1
    #: Whether buckets were sent while backward went on; else all at its end, and :attr:`buckets` are those that would
    #: have been.
    overlaps: bool = False
    #: Samples of this rank in a step, and of all ranks; 0: nobody counts them.
    local_samples: float = 0.0
    global_samples: float = 0.0
    #: Bytes of each bucket, in the order in which they are reduced.
    buckets: tuple[int, ...] = ()
    #: When each was ready: the part of the backward that was over, in the median step.
    ready: tuple[float, ...] = ()
    #: The optimizers' steps.
    optimizer: tuple[float, ...] = ()
    #: All else before the backward: data, forward, own code, backwards that only accumulate.
    before: tuple[float, ...] = ()
    #: From the backward's begin to its end.
    backward: tuple[float, ...] = ()
    #: After the backward, beside the averaging itself: gradients copied into buckets and out of them.
    handling: tuple[float, ...] = ()
    #: After the backward, in the averaging: waiting for others and for the network, and adding up.
    averaging: tuple[float, ...] = ()
    #: In other collectives.
    waiting: tuple[float, ...] = ()

    def write(self, folder: str | Path) -> None:
        """Leave it in the job's folder, complete or not at all."""
        write_whole(JobFiles(folder).timetable(self.rank), json.dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return {name: _rounded(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Timetable:
        """Read it again.

        Raises:
            ValueError: it is none, or of another version.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise ValueError("not a timetable of this version")
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        table = cls(**read)
        columns = {len(column) for column in table.columns}
        if not table.why_not and (len(columns) != 1 or not table.backward or len(table.buckets) != len(table.ready)):
            raise ValueError("not a whole timetable")
        return table

    @property
    def columns(self) -> tuple[tuple[float, ...], ...]:
        """What a step is made of: seconds, by step."""
        return self.optimizer, self.before, self.backward, self.handling, self.averaging, self.waiting


def left(folder: str | Path, rank: int) -> dict[str, Any] | None:
    """Return what a rank has left in the job's folder, in JSON's types, or None."""
    try:
        values: dict[str, Any] = json.loads(JobFiles(folder).timetable(rank).read_text())
    except FileNotFoundError:
        return None
    return values


def _rounded(values: tuple[Any, ...]) -> list[Any]:
    return [round(value, _DIGITS) if isinstance(value, float) else value for value in values]
