"""A rank's last words: a small JSON file in the job's private folder, written when an exception ends the rank."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

#: Characters of a message or traceback that are kept; a recursion's traceback can be megabytes.
_LONGEST = 50_000


@dataclass(frozen=True)
class FailureRecord:
    """Why a rank failed, by its own account."""

    rank: int
    #: When, on the monotonic clock, which all processes of a machine share.
    at: float
    exit_code: int
    #: The exception's type, as Python prints it.
    type: str
    message: str
    traceback: str

    @property
    def summary(self) -> str:
        """One line."""
        first = self.message.strip().splitlines()[:1]
        return f"{self.type}: {first[0]}" if first else self.type

    def write(self, folder: str) -> None:
        """**Local.** Leave the record, whole or not at all."""
        path = _path(folder, self.rank)
        temporary = path.with_suffix(f".tmp-{os.getpid()}")
        fields = asdict(self)
        fields["message"], fields["traceback"] = _shorten(self.message), _shorten(self.traceback)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(fields, file)
        temporary.rename(path)


def read(folder: str | Path, rank: int) -> FailureRecord | None:
    """**Local.** What ``rank`` left, or None."""
    try:
        text = _path(folder, rank).read_text()
    except FileNotFoundError:
        return None
    return FailureRecord(**json.loads(text))


def _path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"failure-{rank}.json"


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
