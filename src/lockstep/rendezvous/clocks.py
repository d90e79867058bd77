"""Work out how far one machine's clock is ahead of another's, from which event must have come first. Pure.

Machines meet, all at once: each says that it is here, and waits until all are. So no machine's wait ends before every
other one has said that it is here. By one meeting the clock there is ahead by at least the begin of the wait there less
its end here, and by at most the end of the wait there less its begin here. Several meetings narrow that down, for in
all but the first the machines come together. Nothing is assumed of how long messages take.
"""

from __future__ import annotations

from collections.abc import Sequence

#: The times at which a machine said that it is here and knew that all are, in nanoseconds on its own clock.
Look = tuple[int, int]


def ahead(there: Sequence[Look], here: Sequence[Look]) -> tuple[int, int, int]:
    """Return how far the clock there is ahead of the clock here, by how much that may be wrong, and when that was.

    Args:
        there: one machine's looks, of one meeting after the other.
        here: those of the other machine, of the same meetings.

    Returns:
        Nanoseconds; the last of them on the clock there.
    """
    at = there[-1][1]
    if there == here:
        return 0, 0, at
    pairs = list(zip(there, here, strict=True))
    least = max(said - through for (said, _), (_, through) in pairs)
    most = min(through - said for (_, through), (said, _) in pairs)
    return (least + most) // 2, (most - least + 1) // 2, at
