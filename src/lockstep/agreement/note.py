"""A note in the job's folder that says: the ranks saved, and left because they were asked to."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

#: The exit code of a run that was asked to stop and has saved: sysexits' EX_TEMPFAIL, "try again".
EXIT_SAVED = 75

_FILE = "stopped.json"
_FAILED = "failed"


@dataclass(frozen=True)
class StopNote:
    """Where a run that was asked to stop goes on."""

    #: Optimizer steps taken.
    step: int
    #: The checkpoint's folder.
    folder: str

    def write(self, job_folder: str | Path) -> None:
        """**Local.** Leave the note, whole or not at all."""
        temporary = Path(job_folder, f"{_FILE}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(Path(job_folder, _FILE))


def read(job_folder: str | Path) -> StopNote | None:
    """**Local.** The note, if there is one."""
    try:
        return StopNote(**json.loads(Path(job_folder, _FILE).read_text()))
    except FileNotFoundError:
        return None


def mark_failed(job_folder: str | Path) -> None:
    """**Local.** Tell the ranks that a signal to stop is not the user's: one of them failed, so nobody can finish a
    step."""
    Path(job_folder, _FAILED).touch(mode=0o600)


def has_failed(job_folder: str | Path) -> bool:
    """**Local.** Whether that was told."""
    return os.path.exists(os.path.join(job_folder, _FAILED))
