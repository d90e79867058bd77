"""Two ways to train that are timed in turn on the same ranks, and what they say of each other."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import lockstep


def in_turn(first: Callable[[], float], second: Callable[[], float], *, rounds: int) -> list[tuple[float, float]]:
    """**Collective.** Return what both ways took in each round, seconds of a step, after a round that warms up.

    Which one comes first in a round is drawn, alike on all ranks.
    """
    draw, found = random.Random(1), []
    for number in range(rounds + 1):
        seconds = {way: way() for way in draw.sample([first, second], 2)}
        if number:
            found.append((seconds[first], seconds[second]))
    return found


def row(measure: Callable[..., Any], name: str, ranks: int, backend: str, rounds: int) -> str:
    """Return a row of a table: the median of the first way, and the quartiles of the second one's ratio to it.

    Args:
        measure: called on each rank with its number, ``name`` and ``rounds``; returns what :func:`in_turn` does.
        name: what is measured.
        ranks: how many.
        backend: over which they talk.
        rounds: pairs.
    """
    os.environ["LOCKSTEP_BACKEND"] = backend
    pairs: Sequence[tuple[float, float]] = lockstep.spawn(measure, (name, rounds), ranks)[0]
    low, middle, high = statistics.quantiles((second / first for first, second in pairs), n=4)
    plain = statistics.median(first for first, _ in pairs)
    return f"| {name} | {ranks} | {backend} | {1000 * plain:.0f} | **{middle:.3f}** ({low:.3f} to {high:.3f}) |"
