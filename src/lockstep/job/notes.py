"""The notes that a rank leaves for the record of its run: its logs, complete checkpoints, values that are NaN; and
errors that only the launcher can report, since the rank has no output left to write to.

Each note is a line of JSON at the end of a file in the job's folder, which the launcher reads as it grows. No decision
depends on notes.
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
#: infinite or NaN, with the step of the first, and "alone" (1: the line has no other numbers, 0: it has); a rank's log
#: can't be written any more, with the rank and why; FLOPs were not counted, or not all of them, with why; a step was
#: left out because its averaged gradients were not finite, with its number and whose gradients it came from; global
#: batches were divided by cost, with their number, and the cost of the costliest rank added up over them: as it was,
#: with equal numbers of samples, and if they could be divided exactly; a
#: loader's settings when it is used first, and when they change; a pass over it, as data/pass_notes.py says; digests
#: of what rank 0's replicas hold after a step, as ddp/digest_chain.py says.
CHECKPOINT, LOG, NONFINITE, UNWRITTEN, FLOPS = "checkpoint", "log", "nonfinite", "unwritten", "flops"
LEFT_OUT, COSTS, LOADER, PASS, DIGESTS = "left out", "costs", "loader", "pass", "digests"


def unwritten(rank: int, why: str) -> str:
    """Return the message that a rank's log can't be written any more."""
    return f"rank {rank}'s log can't be written any more, but the run continues: {why}"


def tell(kind: str, **facts: Any) -> None:
    """Leave a note with its time on the monotonic clock, which all processes of a machine share. Without a launcher of
    ours, do nothing.

    Args:
        kind: of the note.
        facts: in JSON's types.
    """
    folder = knobs.job_dir()
    if folder is None:
        return
    line = json.dumps({"is": kind, "at": time.monotonic(), **facts}).encode() + b"\n"
    # A full disk, or a launcher that is gone with its folder, costs the run its record but must not end it.
    with contextlib.suppress(OSError):
        fd = os.open(JobFiles(folder).notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


class Notes:
    """The launcher's reader of the notes that the ranks of one start leave.

    Args:
        folder: the job's private folder of this start.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = JobFiles(folder).notes
        self._read = 0

    def take(self) -> list[dict[str, Any]]:
        """Return the notes since the last call; a line that is still incomplete is returned by the next one.

        Invalid lines are left out: after a full disk, half a note and the next one share a line.

        Raises:
            OSError: they can't be read.
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
