"""What a rank has to tell for the record of its run: where it logs, which checkpoints are complete, what is NaN; and
what only the launcher can say, since the rank has nothing left to write to.

A line of JSON each, at the end of a file in the job's folder, which the launcher reads as it grows. Nothing is decided
by it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from lockstep import knobs
from lockstep.job.files import JobFiles

#: Kinds of notes: a checkpoint is complete, with its step; a log is written to, with its path; numbers of a name were
#: infinite or NaN, with the step of the first, and "alone": 1 where a line has no others, and 0 where it has; a rank's
#: log can't be written any more, with the rank and why.
CHECKPOINT, LOG, NONFINITE, UNWRITTEN = "checkpoint", "log", "nonfinite", "unwritten"


def unwritten(rank: int, why: str) -> str:
    """Say that a rank's log can't be written any more."""
    return f"rank {rank}'s log can't be written any more, the run goes on: {why}"


def tell(kind: str, **facts: str | int) -> None:
    """Leave a note, with the moment on the monotonic clock, which all processes of a machine share. Where no launcher
    of ours listens, nothing is done."""
    folder = knobs.job_dir()
    if folder is None:
        return
    line = json.dumps({"is": kind, "at": time.monotonic(), **facts}).encode() + b"\n"
    # A full disk, or a launcher that is gone with its folder, ends what is kept of a run and not the run.
    with contextlib.suppress(OSError):
        fd = os.open(JobFiles(folder).notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


class Notes:
    """The launcher's end: reads what the ranks of one start have told.

    Args:
        folder: the job's private folder of this start.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = JobFiles(folder).notes
        self._read = 0

    def take(self) -> list[dict[str, Any]]:
        """Return the notes since the last call; what is not whole yet comes with the next one.

        A line that is no note is left out: where the disk was full, half of one has the next one behind it.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole[0]) + len(whole[1])
        return [note for note in map(_note, whole[0].splitlines()) if note is not None]


def _note(line: bytes) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return note
