"""Which checkpoints to keep: a rule over their steps and metrics. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Retention:
    """Which checkpoints a run keeps. A checkpoint stays if any one of these wants it.

    The newest one that is good always stays, whatever the rule says.
    """

    #: The checkpoints of the last so many steps. None: all of them; 0: none but the newest.
    last: int | None = 3
    #: Those whose step is a multiple of this, for good. None: no such rule.
    every: int | None = None
    #: So many of the best by the metric that they were saved with (``save(metric=…)``), the newer one of two equals.
    best: int = 0
    #: Whether the best metric is the smallest ("min": a loss) or the largest ("max": an accuracy).
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 0:
            raise ValueError(f"last={self.last}: expected 0 or more, or None to keep all checkpoints")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: expected at least 1, or None")
        if self.best < 0:
            raise ValueError(f"best={self.best}: expected 0 or more")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}: expected 'min' or 'max'")


@dataclass(frozen=True)
class Entry:
    """One checkpoint, as the rule sees it."""

    #: Its folder's name.
    name: str
    step: int
    #: Which save of this step it is, from 1; the last one replaces the others.
    revision: int = 1
    #: What it was saved with. None, or a number that is not finite: it never is the best.
    metric: float | None = None
    #: Whether it is whole; None: nobody has looked.
    good: bool | None = None


def superfluous(entries: Iterable[Entry], rule: Retention) -> list[Entry]:
    """**Local.** The checkpoints that may go, oldest first.

    The newest one known to be good never goes, nor does any newer than it: whether those are good is not known, or
    they are damaged, which someone may want to look at. Without any known to be good, nothing goes. A damaged one
    takes no place among the kept; it goes once it is older than the last ``rule.last``.
    """
    oldest_first = sorted(entries, key=lambda entry: (entry.step, entry.revision))
    good = [number for number, entry in enumerate(oldest_first) if entry.good]
    if not good:
        return []
    older, newest = oldest_first[: good[-1]], oldest_first[good[-1]]
    candidates = [*_latest_of_each_step([entry for entry in older if entry.good is not False], newest), newest]
    kept = _wanted(candidates, rule)
    oldest_of_the_last = _oldest_of_the_last(candidates, rule)
    return [
        entry
        for entry in older
        if entry.name not in kept and (entry.good is not False or entry.step < oldest_of_the_last)
    ]


def _latest_of_each_step(entries: list[Entry], newest: Entry) -> list[Entry]:
    """Those that no later save of the same step replaces."""
    latest = {entry.step: entry for entry in entries}
    latest.pop(newest.step, None)
    return list(latest.values())


def _wanted(candidates: list[Entry], rule: Retention) -> set[str]:
    """The names of the candidates (oldest first) that the rule keeps."""
    last = candidates if rule.last is None else candidates[len(candidates) - min(rule.last, len(candidates)) :]
    every = [entry for entry in candidates if rule.every is not None and entry.step % rule.every == 0]
    measured = [entry for entry in reversed(candidates) if entry.metric is not None and math.isfinite(entry.metric)]
    sign = 1 if rule.mode == "min" else -1
    best = sorted(measured, key=lambda entry: sign * (entry.metric or 0.0))[: rule.best]  # stable: newer first
    return {entry.name for entry in (*last, *every, *best)}


def _oldest_of_the_last(candidates: list[Entry], rule: Retention) -> float:
    if rule.last is None:
        return -math.inf
    return candidates[-min(max(rule.last, 1), len(candidates))].step
