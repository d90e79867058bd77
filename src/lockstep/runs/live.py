"""What the ranks of a run do now: their pages, looked at by another process than their launcher."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from lockstep import _proc
from lockstep.job.files import JobFiles
from lockstep.job.page import NAMES, Cell, Look, Pages, Phase
from lockstep.job.throughput import Throughput
from lockstep.runs import history
from lockstep.runs.history import Run, UnknownRun

#: Seconds that rates and shares are of; what the launcher notes comes about once a second.
WINDOW = 10.0
#: Bytes at the end of a log in which its last line is looked for.
_TAIL = 1 << 16
#: The fields of a line that are not logged values.
_OWN = ("step", "time", "nonfinite")


@dataclass(frozen=True)
class Row:
    """A rank at one moment."""

    rank: int
    #: Its process; None: on another machine.
    pid: int | None
    #: The rank's activity, and the call in which it waits.
    doing: str
    #: Steps of the whole run, or since this start if those are not counted.
    steps: int
    #: Over the last seconds: steps a second, and the fractions of the time spent in waiting and on data.
    rate: float
    waiting: float
    data: float
    #: Resident bytes; 0: not known, or it has ended.
    memory: int


@dataclass(frozen=True)
class _Moment:
    """All ranks of the job, those that nothing is known of included."""

    at: float
    steps: list[int]
    samples: list[int]
    tokens: list[int]
    spent: list[list[float]]


class Live:
    """The ranks of a job, as far as this machine's launcher knows them, for as long as the run goes on, also when they
    are started again.

    Args:
        run: the run.

    Raises:
        UnknownRun: it has ended, or takes no steps yet.
    """

    def __init__(self, run: Run) -> None:
        run = history.read(run.path)  # it may have ended since
        run.refuse_unless_alive()
        self._path = run.path
        start = run.start
        if not JobFiles(start["folder"]).pages.exists():
            raise UnknownRun(f"{run.name}: its ranks are just being started again")
        self._open(start)
        self.look()

    def _open(self, start: dict[str, Any]) -> None:
        self._folder = str(start["folder"])
        self._pids = {int(rank): pid for rank, pid in start["ranks"].items()}
        #: The time at which each of them started: once it has ended, another process may get its id.
        self._started = {rank: None if pid is None else _proc.started(pid) for rank, pid in self._pids.items()}
        self._pages = Pages(start["folder"], start["world_size"])
        self._moments: deque[_Moment] = deque()

    def _is_there(self, rank: int) -> bool:
        pid, started = self._pids[rank], self._started[rank]
        return pid is not None and started is not None and _proc.started(pid) == started

    def _state(self, rank: int) -> str:
        """Return what the kernel says of a rank of this machine, which comes before what its page says; empty: it lives
        and may go on."""
        if rank not in self._pids:
            return ""
        if not self._is_there(rank):
            return "has ended"
        stat = _proc.stat(self._pids[rank] or 0)
        return "" if stat is None or stat.state not in "Tt" else "is stopped"

    @property
    def goes_on(self) -> bool:
        """Whether any of this machine's ranks is still there, or its launcher, which may start them again."""
        return any(map(self._is_there, self._pids)) or history.read(self._path).is_alive

    def look(self) -> None:
        """Look at all pages; to be called about twice a second. Where the ranks were started again, at those of now."""
        if not any(map(self._is_there, self._pids)):
            start = history.read(self._path).start
            if start["folder"] != self._folder and JobFiles(start["folder"]).pages.exists():
                self._pages.close()
                self._open(start)
        steps, samples, tokens = (self._pages.all(cell) for cell in (Cell.STEPS, Cell.SAMPLES, Cell.TOKENS))
        spent = [self._pages.spent(rank) for rank in range(len(steps))]
        self._moments.append(_Moment(time.monotonic(), steps, samples, tokens, spent))
        while self._moments[-1].at - self._moments[0].at > WINDOW and len(self._moments) > 2:
            self._moments.popleft()

    def rows(self) -> list[Row]:
        """Return how the ranks are, by the looks so far; those of other machines as their launchers told a second ago,
        where the launchers hear of each other."""
        first, last = self._moments[0], self._moments[-1]
        passed = max(last.at - first.at, 1e-9)
        rows = []
        for rank, mark in enumerate(self._pages.all(Cell.MARK)):
            if rank not in self._pids and not mark:
                continue
            look = self._pages.look(rank)
            spent = [after - before for before, after in zip(first.spent[rank], last.spent[rank], strict=True)]
            whole = sum(spent) or 1.0
            steps = self._pages.get(rank, Cell.RUN_STEPS) or last.steps[rank]
            rows.append(
                Row(
                    rank,
                    self._pids.get(rank),
                    self._state(rank) or _doing(look),
                    max(0, steps - 1),
                    (last.steps[rank] - first.steps[rank]) / passed,
                    spent[Phase.WAIT] / whole,
                    spent[Phase.DATA] / whole,
                    self._pages.get(rank, Cell.MEMORY),
                )
            )
        return rows

    def throughput(self) -> Throughput:
        """Return what all ranks that are known got done in the last seconds, together."""
        first, last = self._moments[0], self._moments[-1]
        ranks = [rank for rank, steps in enumerate(last.steps) if steps]
        taken = (last.steps[rank] - first.steps[rank] for rank in ranks)
        rows = (
            (
                self._pages.step_flops(rank),
                last.samples[rank] - first.samples[rank],
                last.tokens[rank] - first.tokens[rank],
            )
            for rank in ranks
        )
        return Throughput.of(last.at - first.at, rows, steps=min(taken, default=0))

    def logged(self) -> str:
        """Return the numbers that the script logged last (:class:`lockstep.Log`), in words; empty: none that are known
        here."""
        last = self.last_line()
        if last is None:
            return ""
        odd = last.get("nonfinite") or {}
        numbers = {
            name: f"{value:.4g}" if isinstance(value, (int, float)) else "NaN or infinite"
            for name, value in last.items()
            if name not in _OWN and (isinstance(value, (int, float)) or name in odd)
        }
        return f"step {last['step']:,}: {', '.join(f'{name} {value}' for name, value in numbers.items())}"

    def last_line(self) -> dict[str, Any] | None:
        """Return the line that the script logged last, as it is in the file; None: none is known here."""
        try:
            paths = history.read(self._path).about.get("logs", [])
        except UnknownRun:  # being written, or removed
            return None
        lines = [line for line in map(_last_line, paths) if line is not None]
        return max(lines, key=lambda line: float(line["time"]), default=None)

    def close(self) -> None:
        """Let go of the pages."""
        self._pages.close()


def _last_line(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            line = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])
    except (OSError, ValueError):  # not there any more, or nothing in it yet
        return None
    return line if isinstance(line, dict) and {"step", "time"} <= line.keys() else None


def _doing(look: Look) -> str:
    if look.debugging:
        return f"in a debugger at {look.debugged_at}"
    return f"waits in {look.waits_in}" if look.mark.waiting and look.waits_in else NAMES[look.mark.spends]
