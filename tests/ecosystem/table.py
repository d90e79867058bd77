"""The table that the rows fill: what was trained, over what, how far from one process, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

#: What a rank or a program hands back: arrays by name.
Numbers = Mapping[str, npt.NDArray[Any]]


def difference(one: Numbers, many: Numbers) -> float:
    """**Local.** The greatest absolute difference between arrays of the same name.

    Raises:
        AssertionError: the names or shapes differ, or a number is not finite.
    """
    assert sorted(one) == sorted(many), f"names differ: {sorted(set(one) ^ set(many))}"
    greatest = 0.0
    for name, wanted in one.items():
        got = many[name]
        assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
        assert np.isfinite(got).all(), f"{name}: not finite"
        if wanted.size:
            greatest = max(greatest, float(np.abs(got.astype(np.float64) - wanted.astype(np.float64)).max()))
    return greatest


@dataclass
class Row:
    """One row; a test fills it, and what a test did not finish is a failure."""

    library: str
    what: str
    over: str
    verdict: str = "FAILED"
    difference: float | None = None
    limit: float | None = None
    notes: list[str] = field(default_factory=list)

    def same(self, one: Numbers, many: Sequence[Numbers], *, limit: float) -> None:
        """**Local.** Every rank's numbers are those of one process, to ``limit``; the row says how far they are off."""
        self.difference = max(self.difference or 0.0, *(difference(one, rank) for rank in many))
        self.limit = limit
        assert self.difference <= limit, f"{self.what}: off by {self.difference:.3g}, allowed {limit:g}"
        self.verdict = "same numbers"

    def says(self, text: str, words: str) -> None:
        """**Local.** What does not work is refused in these words."""
        assert words in text, f"expected {words!r} in:\n{text}"
        self.verdict = "refused in words"
        self.notes = [words]

    def holds(self, verdict: str, condition: bool, otherwise: str) -> None:
        """**Local.** A row that is no comparison of numbers."""
        assert condition, otherwise
        self.verdict = verdict


def _version(library: str) -> str:
    name = library.split(" ")[0]
    return version(name)


def markdown(rows: list[Row]) -> str:
    """**Local.** The rows as a table."""
    lines = [
        "| library | version | what | over | largest difference | allowed | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        off = "" if row.difference is None else f"{row.difference:.1e}" if row.difference else "0"
        allowed = "" if row.limit is None else f"{row.limit:.0e}" if row.limit else "0"
        verdict = "; ".join([row.verdict, *row.notes])
        lines.append(
            f"| {row.library} | {_version(row.library)} | {row.what} | {row.over} | {off} | {allowed} | {verdict} |"
        )
    return "\n".join(lines)
