"""What the ranks of a run do now: their pages, looked at by another process than their launcher."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from lockstep import _proc
from lockstep.job.files import JobFiles
from lockstep.job.hang import Shares
from lockstep.job.page import NAMES, Cell, Mark, Pages, Phase
from lockstep.runs.history import Run, UnknownRun

#: Seconds that rates and shares are of.
WINDOW = 10.0


@dataclass(frozen=True)
class Row:
    """A rank at one moment."""

    rank: int
    #: What it does, and, where it waits, in what.
    doing: str
    #: Steps of the whole run, or since this start where nobody counts those.
    steps: int
    #: Of the last seconds: steps a second, and the parts of the time that went to waiting and to data.
    rate: float
    waiting: float
    data: float
    #: Resident bytes; 0: it has ended.
    memory: int


@dataclass(frozen=True)
class _Moment:
    at: float
    steps: list[int]
    seconds: list[list[float]]


class Live:
    """The ranks of this machine, for as long as the run goes on.

    Args:
        run: the run.

    Raises:
        UnknownRun: it has ended, or takes no steps yet.
    """

    def __init__(self, run: Run) -> None:
        if not run.is_alive:
            raise UnknownRun(f"{run.name} has ended ({run.ending}): lockstep runs lists it")
        start = run.about["starts"][-1]
        self._pids = {int(rank): pid for rank, pid in start["ranks"].items()}
        if not JobFiles(start["folder"]).pages.exists():
            raise UnknownRun(f"{run.name}: its ranks are just being started again")
        self._pages = Pages(start["folder"], start["world_size"])
        self._shares = Shares(len(self._pids))
        self._moments: deque[_Moment] = deque()
        self._looked = time.monotonic()

    @property
    def goes_on(self) -> bool:
        """Whether any of the ranks is still there."""
        return any(pid is not None and _proc.started(pid) is not None for pid in self._pids.values())

    def look(self) -> None:
        """Look at all pages; to be called many times a second."""
        now = time.monotonic()
        marks = self._of(Cell.MARK)
        self._shares.add(marks, now - self._looked)
        self._looked = now
        if not self._moments or now - self._moments[-1].at > 0.5:
            seconds = [list(each) for each in self._shares.seconds]
            self._moments.append(_Moment(now, [steps - 1 for steps in self._of(Cell.STEPS)], seconds))
            while now - self._moments[0].at > WINDOW and len(self._moments) > 2:
                self._moments.popleft()

    def rows(self) -> list[Row]:
        """Return how the ranks are, by the looks so far."""
        first, last = self._moments[0], self._moments[-1]
        passed = max(last.at - first.at, 1e-9)
        rows = []
        for place, (rank, pid) in enumerate(self._pids.items()):
            look = self._pages.look(rank)
            spent = [after - before for before, after in zip(first.seconds[place], last.seconds[place], strict=True)]
            whole = sum(spent) or 1.0
            steps = self._pages.get(rank, Cell.RUN_STEPS) or self._pages.get(rank, Cell.STEPS)
            rows.append(
                Row(
                    rank,
                    _doing(look.mark, look.waits_in),
                    max(0, steps - 1),
                    (last.steps[place] - first.steps[place]) / passed,
                    spent[Phase.WAIT] / whole,
                    spent[Phase.DATA] / whole,
                    _proc.resident(pid),
                )
            )
        return rows

    def close(self) -> None:
        """Let go of the pages."""
        self._pages.close()

    def _of(self, cell: Cell) -> list[int]:
        values = self._pages.all(cell)
        return [values[rank] for rank in self._pids]


def _doing(mark: Mark, waits_in: str) -> str:
    return f"waits in {waits_in}" if mark.waiting and waits_in else NAMES[mark.spends]
