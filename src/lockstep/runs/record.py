"""Write down how a run goes: the launcher's side."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import _proc, knobs, machine
from lockstep._files import write_whole
from lockstep.codes import CodedEnum
from lockstep.job.account import Progress
from lockstep.job.files import EXIT_SAVED
from lockstep.job.notes import (
    CHECKPOINT,
    COSTS,
    DIGESTS,
    FLOPS,
    LEFT_OUT,
    LOADER,
    LOG,
    NONFINITE,
    PASS,
    UNWRITTEN,
    Notes,
    unwritten,
)
from lockstep.job.page import Phase
from lockstep.job.summary import RunSummary
from lockstep.runs import digests, loaders
from lockstep.runs.homes import reference
from lockstep.runs.series import SeriesWriter
from lockstep.text import counted
from lockstep.topology import format_cpus
from lockstep.version import __version__

#: The version of run.json.
VERSION = 1
#: The sums over batches in parts of equal cost; see job/notes.py.
COST_SUMS = ("batches", "by_number", "by_cost", "exact")
#: Checkpoints that are noted at most.
_CHECKPOINTS = 1000


class RunEnd(CodedEnum):
    """How a run ended, or that it goes on."""

    RUNNING = "running", "run-running"
    DONE = "done", "run-done"
    SAVED = "stopped on request, and saved", "run-saved"
    STOPPED = "stopped on request, and not saved", "run-stopped"
    FAILED = "failed", "run-failed"
    KILLED = "killed, and its launcher with it", "run-killed"
    UNKNOWN = "not known", "run-unknown"


class Recorder:
    """Writes run.json and a series for each start of the ranks, once they take steps.

    Of a run that fails before its first step it writes run.json alone, so that whoever asks what happened is told of
    that one. A run that ends well without a step, or is stopped before one, leaves no record: it trained nothing, and
    nobody has to find out why.

    A disk that is full ends the record, not the run.

    Args:
        folder: makes the folder of the run's logs, or returns it, absolute; called when there is something to write.
        program: what runs, with its arguments.
        tell: says something to the user.
    """

    def __init__(self, folder: Callable[[], Path], *, program: Sequence[str], tell: Callable[[str], None]) -> None:
        self._make_folder = folder
        self._tell = tell
        self._began, self._clock = time.time(), time.monotonic()
        self._about: dict[str, Any] = {
            "run": VERSION,
            "lockstep": __version__,
            "program": list(program),
            "directory": os.getcwd(),
            "host": socket.gethostname(),
            "launcher": os.getpid(),
            "launcher_began": _proc.started(os.getpid()),
            "began": self._began,
            "starts": [],
            "events": [],
            "checkpoints": [],
            "logs": [],
            "nonfinite": {},
        }
        self._folder: Path | None = None
        self._suffix = ""
        self._series: SeriesWriter | None = None
        self._start: dict[str, Any] | None = None
        self._ranks: dict[int, Progress] = {}
        self._notes: Notes | None = None
        #: One checkpoint in ``_stride`` is noted; the number of checkpoints so far.
        self._stride, self._checkpoints = 1, 0
        #: The step of the last one, noted or not.
        self._last_checkpoint: int | None = None
        self._failed = False

    def begin(
        self,
        *,
        number: int,
        node: int,
        world_size: int,
        ranks: Sequence[int],
        job_folder: Path,
        machines: Sequence[tuple[str, int]] = (),
        restarts: int = 0,
        bound: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """The ranks are started, for the ``number``-th time, from 0.

        Args:
            number: how often they were started before.
            node: which machine of the job this is.
            world_size: ranks of the whole job.
            ranks: those whose moments will be added.
            job_folder: the private folder of this start.
            machines: the name of each machine of the job, and how many ranks it has; empty: this one is alone.
            restarts: those of the job before this start.
            bound: the CPUs that each rank of this machine is bound to; empty or None: to none.
        """
        self._take_notes()
        if not self._about["starts"]:
            self._suffix = f"-node{node}" if node else ""
            self._about["node"] = node
        self._series, self._notes = None, Notes(job_folder)
        self._ranks = dict.fromkeys(ranks, Progress(0, (0.0,) * len(Phase)))
        self._start = {
            "number": number,
            "at": self._seconds(),
            "world_size": world_size,
            "folder": str(job_folder),
            "machines": [list(each) for each in machines],
            "restarts": restarts,
            "bound": {str(rank): format_cpus(cpus) for rank, cpus in (bound or {}).items()},
        }

    def add(self, ranks: Mapping[int, Progress], pids: Mapping[int, int | None]) -> None:
        """Add a moment of the ranks, or of those that are known; begins to write when one of them has taken a step.

        Args:
            ranks: how far they have come.
            pids: the processes of those of this machine.
        """
        if self._failed or self._start is None or not any(rank.steps for rank in ranks.values()):
            return
        counted = self._seconds()  # before a file or a folder has to be made
        try:
            if self._series is None:
                path = self.make_folder() / f"series-{self._start['number']}{self._suffix}.bin"
                # First, so that whoever reads the record finds the series that it names.
                self._series = SeriesWriter(path, list(self._ranks), interval=knobs.times().row)
                self._start |= {"series": path.name, "ranks": {str(rank): pid for rank, pid in pids.items()}}
                self._start.setdefault("trace", None)
                self._about["starts"].append(self._start)
                self._about.setdefault("environment", _environment())
                self._write()
            self._ranks.update(ranks)
            rows = [
                [rank.steps, rank.samples, rank.memory, *rank.seconds, rank.held, rank.collected, rank.tokens]
                for rank in self._ranks.values()
            ]
            self._series.add(counted, rows)
            self._note_flops()
        except OSError as error:
            self._give_up(error)
        if self._take_notes():
            self._update()

    def _note_flops(self) -> None:
        """Note once what all ranks of this start have counted of one step."""
        flops = {str(number): rank.flops for number, rank in self._ranks.items()}
        if self._start is not None and "flops" not in self._start and None not in flops.values():
            self._start["flops"] = flops
            self._write()

    def end_start(self, steps: int, *, before: int | None) -> None:
        """The ranks of this start have ended: the last moment that was added is their last, whenever a row is due.

        Args:
            steps: the optimizer steps that each has taken.
            before: the steps that the run had before this start; None: not known.
        """
        if self._series is None or self._start is None or self._failed:
            return
        self._start |= {"steps": steps, "before": before}
        try:
            self._series.end()
        except OSError as error:
            self._give_up(error)
        self._update()

    def traced(self, name: str) -> None:
        """Note the name of the file, in the run's folder, that has the trace of this start."""
        if self._start is not None:
            self._start["trace"] = name
            self._update()

    def last_checkpoint(self) -> int | None:
        """Return the step of the last complete checkpoint that this machine's ranks have told of; None: of none."""
        self._take_notes()
        return self._last_checkpoint

    def remarks(self) -> list[str]:
        """Return the remarks on the ranks' notes, a line each."""
        self._take_notes()
        return remarks_of(self._about)

    @property
    def folder(self) -> Path | None:
        """The folder of the run's logs, absolute; None if there is none yet."""
        return self._folder

    @property
    def clock(self) -> float:
        """When the run began, on the monotonic clock: moments of the record count from then."""
        return self._clock

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Note something that happened.

        Args:
            kind: of it.
            text: for people.
            facts: for programs, in JSON's types.
        """
        self._about["events"].append({"at": self._seconds(), "kind": kind, "text": text, **facts})
        self._update()

    def end(
        self,
        *,
        exit_code: int,
        summary: RunSummary | None,
        peaks: Mapping[int, int | None],
        end: RunEnd | None = None,
        word: str = "",
    ) -> None:
        """The run is over; where nothing was written so far, nothing is unless it has failed.

        Args:
            exit_code: of the job.
            summary: what its time went to; None: nothing is known of that.
            peaks: the most memory of each rank.
            end: how it ended; None: as the exit code says.
            word: what was said of that; empty: nothing, or it is an event.
        """
        self._take_notes()
        self._about["ended"] = time.time()
        self._about["exit_code"] = exit_code
        how = end or end_by(exit_code)
        self._about["end"] = {"code": how.code, "text": word}
        if summary is not None:
            run = "" if self._folder is None else reference(self._folder)
            self._about["summary"] = summary.to_json(peaks, run=run)
        if how is RunEnd.FAILED and not self._about["starts"]:
            self._write_without_steps()
        else:
            self._update()

    def _write_without_steps(self) -> None:
        """Begin and end the record of a run that failed before its first step."""
        if self._start is not None:
            self._about["starts"].append(self._start | {"steps": 0, "before": None, "trace": None})
        self._about.setdefault("environment", _environment())
        try:
            self._write()
        except OSError as error:
            self._give_up(error)

    def _take_notes(self) -> bool:
        """Add what ranks have told since the last time; return whether that was anything."""
        try:
            notes = [] if self._notes is None else self._notes.take()
        except OSError as error:
            self._give_up(error)
            return False
        for note in notes:
            if note["is"] == CHECKPOINT:
                self._add_checkpoint(note["at"] - self._clock, note["step"])
            elif note["is"] == NONFINITE:
                self._add_nonfinite(note["name"], note["step"], alone=bool(note["alone"]))
            elif note["is"] == LOG and note["path"] not in self._about["logs"]:
                self._about["logs"].append(note["path"])
            elif note["is"] == FLOPS and note["why"] not in self._about.setdefault("uncounted", []):
                self._about["uncounted"].append(note["why"])
            elif note["is"] == LEFT_OUT:
                self._add_left_out(note["step"], note["of"])
            elif note["is"] == COSTS:
                known = self._about.setdefault("costs", dict.fromkeys(COST_SUMS, 0))
                known.update((name, known[name] + note[name]) for name in COST_SUMS)
            elif note["is"] in (LOADER, PASS) and self._start is not None:
                add = loaders.add_loader if note["is"] == LOADER else loaders.add_pass
                add(self._start.setdefault("loaders", []), note)
            elif note["is"] == DIGESTS and self._start is not None:
                digests.add_digests(self._start, note)
            elif note["is"] == UNWRITTEN:
                self._tell(unwritten(note["rank"], note["why"]))
        return bool(notes)

    def _add_nonfinite(self, name: str, step: int, *, alone: bool) -> None:
        """Note that numbers of a name were infinite or NaN: at which step first, and since when they all are."""
        known = self._about["nonfinite"].setdefault(name, {"first": step, "since": None})
        known["since"] = step if alone else None

    def _add_left_out(self, step: int, of: str) -> None:
        """Note a step that was left out because averages were not finite, and whose gradients the first came from."""
        known = self._about.setdefault("left_out", {"steps": 0, "first": step, "of": of})
        known["steps"], known["last"] = known["steps"] + 1, step

    def _add_checkpoint(self, at: float, step: int) -> None:
        """Note a checkpoint; of very many every other one goes, as with the rows of a series."""
        self._last_checkpoint = step
        noted = self._about["checkpoints"]
        if self._checkpoints % self._stride == 0:
            noted.append({"at": at, "step": step})
        self._checkpoints += 1
        if len(noted) > _CHECKPOINTS:
            del noted[1::2]
            self._stride *= 2

    def _seconds(self) -> float:
        return time.monotonic() - self._clock

    def _update(self) -> None:
        if self._folder is not None and not self._failed:
            try:
                self._write()
            except OSError as error:
                self._give_up(error)

    @property
    def elsewhere(self) -> str:
        """What commands take for this run where they don't find it as the newest; empty: they do, or nothing is
        written."""
        run = "" if self._folder is None else reference(self._folder)
        return run if os.sep in run else ""

    def make_folder(self) -> Path:
        """Return the folder of the run's logs; it is made the first time.

        Raises:
            OSError: it can't be made.
        """
        if self._folder is None:
            self._folder = self._make_folder()
        return self._folder

    def _write(self) -> None:
        write_whole(self.make_folder() / f"run{self._suffix}.json", json.dumps(self._about, indent=1) + "\n")

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            self._tell(f"the record of this run ends here, but the run continues: {error}")
        self._failed = True


def end_by(exit_code: int) -> RunEnd:
    """Return how a run ended that left with an exit code, where nothing else is known."""
    return {0: RunEnd.DONE, EXIT_SAVED: RunEnd.SAVED}.get(exit_code, RunEnd.FAILED)


def nonfinite_in_words(about: Mapping[str, Any]) -> list[str]:
    """Return what a record knows of logged numbers that were not finite, a line for each name."""
    return [
        f"{name}: NaN or infinite from step {each['since']:,} on"
        if each["since"] is not None
        else f"{name}: some NaN or infinite, first at step {each['first']:,}"
        for name, each in about.get("nonfinite", {}).items()
    ]


def left_out_in_words(about: Mapping[str, Any]) -> list[str]:
    """Return a line on the steps that were left out because averages were not finite, if there were such steps."""
    known = about.get("left_out")
    if known is None:
        return []
    first, last = f"step {known['first']:,} ({known['of']})", f", the last step {known['last']:,}"
    which = f"it was {first}" if known["steps"] == 1 else f"the first was {first}{last}"
    return [f"{counted(known['steps'], 'step')} left out, since averaged gradients were infinite or NaN: {which}"]


def costs_in_words(about: Mapping[str, Any]) -> list[str]:
    """Return a line on what global batches in parts of equal cost have won, if there were such batches."""
    known = about.get("costs")
    if known is None or not known["exact"]:
        return []
    by_cost, by_number = (known[name] / known["exact"] for name in ("by_cost", "by_number"))
    change = 1 - by_cost / by_number
    batches = counted(known["batches"], "global batch", "global batches")
    return [
        f"parts of equal cost: in {batches} the costliest rank had {by_cost:.2f} times the mean cost, and would have "
        f"had {by_number:.2f} times with equal numbers of samples "
        f"({abs(change):.0%} {'less' if change >= 0 else 'more'})"
    ]


def remarks_of(about: Mapping[str, Any]) -> list[str]:
    """Return what a record knows of what ranks have told: FLOPs that were not counted, what parts of equal cost have
    won, steps that were left out, and numbers that were not finite."""
    return [
        *(f"FLOPs {why}" for why in about.get("uncounted", ())),
        *costs_in_words(about),
        *left_out_in_words(about),
        *nonfinite_in_words(about),
    ]


def _environment() -> dict[str, Any]:
    """Return what the run's figures depend on besides its program."""
    from importlib import metadata  # here: it takes longer to import than all of the launcher's own

    torch = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    system = os.uname()
    return {
        "python": sys.version.split()[0],
        "torch": torch,
        "kernel": system.release,
        "architecture": system.machine,
        "processor": machine.processor(),
        "cores": machine.cores(),
        "gpus": machine.gpus(),
        "variables": knobs.chosen(),
    }
