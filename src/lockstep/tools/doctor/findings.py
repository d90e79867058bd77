"""What a check has found: how bad it is, what it is, what to do about it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.text import counted


class Level(str, enum.Enum):
    """How bad it is."""

    OK = "ok"
    #: A job runs, but slower than it could, or not in every form.
    WARNING = "warning"
    #: A job fails, or trains something else than is meant.
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found."""

    level: Level
    #: A word or two for what was looked at.
    about: str
    #: The finding, as a sentence without a full stop.
    what: str
    #: The advice; empty: nothing needs to be done.
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return what :meth:`from_json` reads back."""
        return {**asdict(self), "level": self.level.value}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Finding:
        """Read what another process has found."""
        return cls(**{**fields, "level": Level(fields["level"])})


def ok(about: str, what: str) -> Finding:
    """Return that all is well."""
    return Finding(Level.OK, about, what)


def warning(about: str, what: str, advice: str) -> Finding:
    """Return what makes a job slower, or some jobs impossible."""
    return Finding(Level.WARNING, about, what, advice)


def wrong(about: str, what: str, advice: str) -> Finding:
    """Return what makes a job fail."""
    return Finding(Level.WRONG, about, what, advice)


def verdict(findings: Iterable[Finding]) -> str:
    """Return all findings in a few words."""
    counts = Counter(finding.level for finding in findings)
    words = []
    if counts[Level.WRONG]:
        words.append("1 thing is wrong" if counts[Level.WRONG] == 1 else f"{counts[Level.WRONG]} things are wrong")
    if counts[Level.WARNING]:
        words.append(counted(counts[Level.WARNING], "warning"))
    return ", ".join(words) or "all is well"
