"""Ranks that were never run: what looks at their pages would have found."""

from __future__ import annotations

import random
from collections.abc import Callable

from lockstep.job.account import Ledger, Progress
from lockstep.job.hang import Shares
from lockstep.job.page import WAITS, Phase

#: Seconds of a step's work, and by which part of it each rank's varies in each step.
_WORK, _VARIES = 0.02, 0.15


def simulate(
    seed: int,
    *,
    slow: Callable[[int, float], float],
    ranks: int = 4,
    seconds: float = 60.0,
    phase: Phase = Phase.FORWARD,
) -> Ledger:
    """Return what is known of steps of about 20 ms whose lengths vary by a third, independently on each rank, and 40
    looks a second at moments that vary, too.

    Args:
        seed: of all that varies.
        slow: how many times longer a rank works at a moment.
        ranks: how many.
        seconds: how long.
        phase: in which they work.
    """
    draw, shares, ledger = random.Random(seed), Shares(ranks), Ledger()
    now, steps, looks, begun, end, work = 0.0, 2, 0, 0.0, 0.0, [0.0] * ranks
    while now < seconds:
        while end < now:
            begun, steps = end, steps + 1
            work = [_WORK * draw.uniform(1 - _VARIES, 1 + _VARIES) * slow(rank, begun) for rank in range(ranks)]
            end = begun + max(work) + 0.001
        marks = [int(phase) + (WAITS if now > begun + each else 0) for each in work]
        pause = 0.025 * draw.uniform(0.5, 1.5)
        shares.add(marks, pause)
        now, looks = now + pause, looks + 1
        if looks % 40 == 0:
            progress = {
                rank: Progress(steps, tuple(shares.seconds[rank]), 0, shares.held[rank]) for rank in range(ranks)
            }
            ledger.add(progress, now=now, looks=looks)
    return ledger
