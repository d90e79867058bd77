"""Scale the axes of a report, and write its values as people read them. page.js does the same when it zooms."""

from __future__ import annotations

import math

from lockstep.text import as_size

#: Steps of a time axis, in seconds.
_TIMES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def ticks(low: float, high: float, most: int, *, unit: str) -> list[float]:
    """Return at most ``most`` + 1 round values between two."""
    span = high - low
    if not span > 0:
        return [low]
    scale = _scale(unit, high)
    rough = span / scale / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999) * scale
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round moments between two, in seconds."""
    rough = (high - low) / most
    step: float = next((each for each in _TIMES if each >= rough), 86400 * math.ceil(rough / 86400))
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def shown(value: float, unit: str) -> str:
    """Return a value as it is read: ``12.3 ms``, ``45%``, ``276 MiB``."""
    if not math.isfinite(value):
        return "–"
    if unit == "seconds":
        return f"{_digits(value)} s" if abs(value) >= 1 else f"{_digits(value * 1e3)} ms"
    if unit == "share":
        return f"{_digits(value * 100)}%"
    if unit == "bytes":
        return as_size(value)
    if unit == "rate":
        return f"{_digits(value)}/s"
    return _digits(value)


def moment(seconds: float, step: float = 1.0) -> str:
    """Return a moment of the run: ``1:23``, ``2:03:04``; with tenths where ticks are less than a second apart."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    last = f"{rest / 10:04.1f}" if step < 1 else f"{rest // 10:02}"
    return f"{hours}:{minutes:02}:{last}" if hours else f"{minutes}:{last}"


def top(values: list[float]) -> float:
    """Return where an axis from 0 ends: at the greatest value, or, where a few values are far above the others, nearer
    to the others."""
    known = sorted(value for value in values if math.isfinite(value))
    if not known or known[-1] <= 0:
        return 1.0
    usual = known[min(len(known) - 1, int(0.98 * len(known)))]
    return 1.05 * (known[-1] if known[-1] <= 2.5 * usual or usual <= 0 else 1.5 * usual)


def span(values: list[float]) -> tuple[float, float]:
    """Return where an axis that need not begin at 0 begins and ends: at the least and the greatest value, or nearer to
    the others where a few values are far above them."""
    known = sorted(value for value in values if math.isfinite(value))
    low, high = known[0], known[-1]
    usual = known[min(len(known) - 1, int(0.98 * len(known)))] - low
    if usual > 0 and high - low > 2.5 * usual:
        high = low + 1.5 * usual
    room = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def _scale(unit: str, high: float) -> float:
    if unit == "bytes":
        return 2.0**30 if high >= 2**30 else 2.0**20
    return 0.01 if unit == "share" else 1.0


def _digits(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the point."""
    size = abs(value)
    if size >= 1e6 or (size and size < 1e-3):
        return f"{value:.2e}"
    if size >= 100:
        return f"{value:,.0f}"
    places = 0 if not size else max(0, 2 - math.floor(math.log10(size) + 1e-12))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
