"""Find the runs that were recorded, and read what is known of one."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep import _proc
from lockstep._files import local_path
from lockstep.errors import LockstepError
from lockstep.runs import shape
from lockstep.runs.homes import reference
from lockstep.runs.record import VERSION, RunEnd, end_by, remarks_of
from lockstep.runs.series import Series


class UnknownRun(LockstepError):
    """There is no such run, or its record can't be read."""

    code = "unknown-run"


@dataclass(frozen=True)
class Run:
    """A run's record: what one machine's launcher has written of it."""

    #: The path of the record's file.
    path: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """What it is called: its folder."""
        return self.path.parent.name

    @property
    def reference(self) -> str:
        """What commands take for it, wherever it lies; see :func:`lockstep.runs.homes.reference`."""
        return reference(self.path.parent)

    @property
    def program(self) -> str:
        """What ran, with its arguments, on one line: what a terminal would act on stands as in a string of Python; a
        character that can't be written, of a file's name for example, is a ``?``."""
        return _printable(" ".join(self.about["program"]))

    @property
    def began(self) -> float:
        """When, in seconds since the epoch."""
        return float(self.about["began"])

    @cached_property
    def is_alive(self) -> bool:
        """Whether its launcher still ran, on this machine, when the record was read."""
        pid, began = self.about["launcher"], self.about.get("launcher_began")
        return "ended" not in self.about and self.is_here and _proc.started(pid) == began

    @property
    def is_here(self) -> bool:
        """Whether it was started on this machine, whose processes can be looked at."""
        here = socket.gethostname()
        return bool(self.about.get("host", here) == here)

    def refuse_unless_alive(self) -> None:
        """Raise what to say where its ranks are to be looked at.

        Raises:
            UnknownRun: it has ended, or goes on elsewhere.
        """
        if not self.is_here and "ended" not in self.about:
            raise UnknownRun(f"{self.name} was started on {self.about['host']}: run the same command there")
        if not self.is_alive:
            raise UnknownRun(f"{self.name} has ended ({self.ending}), and its ranks with it")

    @property
    def ending(self) -> str:
        """How it ended, in a word or two."""
        if self.is_alive:
            return "runs"
        if "exit_code" not in self.about:
            return "killed" if self.is_here else f"not known: on {self.about['host']}"
        return {0: "done", 75: "saved"}.get(self.about["exit_code"], f"exit {self.about['exit_code']}")

    @property
    def end(self) -> RunEnd:
        """How it ended, for programs."""
        if self.is_alive:
            return RunEnd.RUNNING
        if "exit_code" not in self.about:
            return RunEnd.KILLED if self.is_here else RunEnd.UNKNOWN
        code = (self.about.get("end") or {}).get("code")
        known = {each.code: each for each in RunEnd}
        return known[code] if code in known else end_by(self.about["exit_code"])  # earlier versions wrote no code

    @property
    def seconds(self) -> float:
        """How long it took, or has taken by its record so far."""
        if "ended" in self.about:
            return float(self.about["ended"]) - self.began
        last = [series.times[-1] for series in self.series if series.times]
        return max(last, default=0.0)

    @property
    def start(self) -> dict[str, Any]:
        """The record of its last start, of which there is none before a rank has taken a step, unless it has failed.

        Raises:
            UnknownRun: there is no record yet.
        """
        if not self.about["starts"]:
            raise UnknownRun(f"{self.name}: its ranks have taken no step yet")
        start: dict[str, Any] = self.about["starts"][-1]
        return start

    @property
    def world_size(self) -> int:
        """Ranks of the whole job, in its last start."""
        return int(self.about["starts"][-1].get("world_size", 0)) if self.about["starts"] else 0

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken, in all starts, each counted from its beginning: of a start that has ended as
        its ranks have counted them, of one that goes on up to the last second.

        Raises:
            UnknownRun: a series is not there, damaged, or of a later version.
        """
        recorded = [start for start in self.about["starts"] if "series" in start]
        last = [series.columns.get("steps", [()])[-1] if series.times else () for series in self.series]
        return sum(
            int(start["steps"]) if "steps" in start else int(min(filter(math.isfinite, steps), default=0))
            for start, steps in zip(recorded, last, strict=True)
        )

    @property
    def summary(self) -> dict[str, Any] | None:
        """What :meth:`lockstep.job.summary.RunSummary.to_json` made of it; None: it has not ended. Of one that goes on
        see reckoning.py."""
        return self.about.get("summary")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, in order, as the launcher noted it. That late ranks have moved on is not an event of its own:
        it is said in that of their lateness, ``over`` with the second ``until``."""
        found: list[dict[str, Any]] = []
        late: dict[str, Any] = {}
        for event in self.about["events"]:
            if event.get("kind") == "late" and event.get("over") is True and late.get("over") is False:
                late |= {"over": True, "until": event.get("at"), "text": f"{late.get('text')}\n{event.get('text')}"}
                continue
            found.append(dict(event))
            if event.get("kind") == "late":
                late = found[-1]
        return found

    @property
    def remarks(self) -> list[str]:
        """What there is to say of what the ranks have told, a line each: FLOPs that were not counted, and numbers
        that were not finite."""
        return [_printable(line) for line in remarks_of(self.about)]

    @cached_property
    def series(self) -> list[Series]:
        """The series of its starts, in order.

        Raises:
            UnknownRun: one of them is not there, damaged, or of a later version.
        """
        try:
            return [Series.read(self.series_of(start)) for start in self.about["starts"] if "series" in start]
        except (OSError, ValueError) as error:
            raise UnknownRun(str(error)) from error

    def series_of(self, start: dict[str, Any]) -> Path:
        """Return the file of the series of one of its starts, which lies beside the record."""
        return self.path.parent / Path(str(start["series"])).name


def _printable(words: str) -> str:
    words = words.encode(errors="replace").decode()
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in words)


def read(path: Path) -> Run:
    """Read the record of a run from its folder, or from the file itself.

    Raises:
        UnknownRun: there is no record, it is damaged, or it is of a later version.
    """
    file = _record_in(path) if path.is_dir() else path
    run = _read(path, file)
    if "ended" not in run.about and run.is_here and not run.is_alive:
        run = _read(path, file)  # a launcher writes its end before it goes, which may have been just now
    return run


def _read(path: Path, file: Path) -> Run:
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError:
        raise UnknownRun(f"{path}: no run was recorded there (there is no {file.name})") from None
    except NotADirectoryError:
        raise UnknownRun(f"{path}: not a folder of a run") from None
    except (OSError, ValueError) as error:
        raise UnknownRun(f"{file}: not a record of a run: {error}") from None
    if not isinstance(about, dict) or not isinstance(about.get("run"), int):
        raise UnknownRun(f"{file}: not a record of a run")
    if about["run"] != VERSION:
        raise UnknownRun(f"{file}: written by lockstep {about.get('lockstep')}, which this lockstep can't read")
    try:
        shape.check(about)
    except TypeError as error:
        raise UnknownRun(f"{file}: the record is damaged: {error}") from None
    return Run(file, about)


def _record_in(folder: Path) -> Path:
    """Return the file of a folder's record; one named with --log-dir may be that of several machines."""
    return next(iter([*folder.glob("run.json"), *sorted(folder.glob("run-node*.json"))]), folder / "run.json")


@dataclass(frozen=True)
class Records:
    """All records in some folders."""

    #: The runs whose records can be read, newest first.
    runs: list[Run]
    #: The name of a run whose record can't be read -> why, in a sentence without its full stop.
    damaged: dict[str, str]


def records(homes: Iterable[Path]) -> Records:
    """Return the records of runs in ``homes`` and in folders below them."""
    found, damaged = [], {}
    for home in homes:
        try:
            folders = [Path(entry.path) for entry in os.scandir(home) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for folder in [Path(home), *folders]:
            file = _record_in(folder)
            try:
                found.append(read(file))
            except UnknownRun as error:
                if file.exists():
                    damaged[folder.name] = str(error)
    return Records(sorted(found, key=lambda run: run.began, reverse=True), damaged)


def runs(homes: Iterable[Path]) -> list[Run]:
    """Return the runs recorded in ``homes`` and in folders below them, newest first; what can't be read is left out."""
    return records(homes).runs


def find(name: str | None, homes: Iterable[Path], *, going_on: bool = False) -> Run:
    """Return a run by its number in the list, from 1 (a folder that is called so is ``./1``), by its folder, or by its
    name or a part of it; None: the newest.

    Args:
        name: what names it.
        homes: folders that hold records, or folders with them.
        going_on: without a name prefer the newest of the runs that go on on this machine: a shorter one may have begun
            after it, and have ended.

    Raises:
        UnknownRun: there is no such run, or the name fits several.
    """
    if name is not None and not name.isdecimal() and (os.sep in name or os.path.exists(name)):
        return read(local_path(name, "RUN"))
    there = records(homes)
    found = there.runs
    if name is None and going_on:
        found = [run for run in found if run.is_alive] or found
    if name is None or name.isdecimal():
        number = 1 if name is None else int(name)
        if not 1 <= number <= len(found):
            raise UnknownRun(f"no such run: {len(found)} recorded here, see lockstep runs")
        return found[number - 1]
    fitting = [run for run in found if run.name.startswith(name) or name in run.name]
    if not fitting:
        for damaged, why in there.damaged.items():
            if name in damaged:
                raise UnknownRun(why)
        raise UnknownRun(f"{name}: no run of this name was recorded, and no folder is called so: see lockstep runs")
    if len(fitting) > 1 and not any(run.name == name for run in fitting):
        raise UnknownRun(f"{name}: could be any of {', '.join(run.name for run in fitting[:5])}")
    return next((run for run in fitting if run.name == name), fitting[0])
