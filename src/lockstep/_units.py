"""Figures as people read them: sizes, the time of a step, moments of a run.

One place, so that one figure looks the same wherever it is told.
"""

from __future__ import annotations

import math

#: A size has at most three digits before its unit.
_DIGITS = 999.5


def size(count: float) -> str:
    """Return a number of bytes in binary units, three digits of it: ``376 MiB``, ``23.5 GiB``, ``512 bytes``."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < _DIGITS:
            break
        value, unit = value / 1024, larger
    places = 0 if unit == "bytes" or value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:,.{places}f}"
    return f"{text.rstrip('0').rstrip('.') if places else text} {unit}"


def duration(seconds: float) -> str:
    """Return a step's or a phase's time: ``1.25 s``, ``4.91 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def clock(seconds: float) -> str:
    """Return a moment of a run, or how long it took: ``1:23``, ``2:03:04``."""
    minutes, rest = divmod(math.floor(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
