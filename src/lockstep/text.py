"""Figures and lists formatted for people: sizes, times, counts, ranks, names.

One place for all keeps them alike everywhere. Sizes of memory and files are in binary units and labelled so (MiB);
rates of a network are in decimal units, as its vendors and tools give them (Gbit/s).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

#: The beginning of a line that says what to do about the verdict above it: a command, or a line to change.
NEXT = "next:"
#: Columns of a line that a command prints, where it breaks lines.
WIDTH = 120
#: The limit from which a size takes the next unit: at most three digits stand before the unit.
_DIGITS = 999.5
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}


def as_size(count: float) -> str:
    """Return a number of bytes in binary units, to three digits: ``376 MiB``, ``23.5 GiB``, ``512 bytes``."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < _DIGITS:
            break
        value, unit = value / 1024, larger
    places = 0 if unit == "bytes" or value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:,.{places}f}"
    return f"{text.rstrip('0').rstrip('.') if places else text} {unit}"


def as_rate(rate: float) -> str:
    """Return a network's rate, given in bytes a second, as bits in decimal units: ``25 Gbit/s``, ``100 Mbit/s``."""
    bits = rate * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def as_amount(count: float, unit: str) -> str:
    """Return a large number in decimal units, to three digits: ``1.23 TFLOP``, ``45.6 GFLOP/s``."""
    value, prefix = float(count), ""
    for larger in "kMGTPE":
        if value < _DIGITS:
            break
        value, prefix = value / 1000, larger
    return f"{value:.3g} {prefix}{unit}"


def as_duration(seconds: float) -> str:
    """Return the duration of a step, a phase or a message: ``1.25 s``, ``4.91 ms``, ``20 µs``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def as_clock(seconds: float) -> str:
    """Return a moment of a run, or its duration: ``1:23``, ``2:03:04``."""
    minutes, rest = divmod(math.floor(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parse_time_limit(given: str) -> float:
    """Return the seconds of ``11h30m``, ``90m``, ``1d 2h`` or, without a unit, ``3600``.

    Raises:
        ValueError: it is none of these, or 0.
    """
    words = given.replace(" ", "").lower()
    found = re.fullmatch(r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", words)
    parts = [_number(part) for part in (found.groups(default="0") if found else (words,))]
    units = (86400, 3600, 60, 1) if found else (1,)
    seconds = None if None in parts else sum(part * unit for part, unit in zip(parts, units, strict=True) if part)
    if not seconds or not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{given!r}: expected a time such as 11h30m, 90m or, in seconds, 3600")
    return seconds


def parse_latency(given: str) -> float:
    """Return the seconds of ``20us``, ``0.5ms``.

    Raises:
        ValueError: it is not a duration, or has no unit.
    """
    found = re.fullmatch(r"([\d.]+) *(ns|us|µs|μs|ms|s)", given.strip())
    value = _number(found[1]) if found else None
    if found is None or value is None:
        raise ValueError(f"latency {given!r}: expected a number and its unit, such as 20us or 0.5ms")
    return value * _SECONDS[found[2]]


def parse_bandwidth(given: str) -> float:
    """Return the bytes a second of ``25Gbit``, ``100Mbit/s`` or ``3GB/s``.

    Raises:
        ValueError: it is not a rate, has no unit, or is 0.
    """
    found = re.fullmatch(r"([\d.]+) *([kmgt]?|[kmg]i)(bit|b)(?:/?s|ps)?", given.strip(), re.IGNORECASE)
    value = _number(found[1]) if found else None
    # Kb and KB mean different things and are often confused, so bits must be written out.
    if found is None or not value or found[3] == "b":
        raise ValueError(
            f"bandwidth {given!r}: expected a number and its unit, a second: 25Gbit or 100Mbit for bits, 3GB for bytes"
        )
    bits = 8 if found[3].lower() == "b" else 1
    return value * _PREFIXES[found[2].lower()] * bits / 8


def parse_amount(given: str) -> float | None:
    """Return the number that ``989T``, ``1.5P``, ``312e12`` or ``2.2 PFLOP/s`` says; None: it says none above 0."""
    found = re.fullmatch(r"(\d[\d.]*(?:e[+-]?\d+)?) *([kmgtpe]?)(?:flops?(?:/s)?)?", given.strip(), re.IGNORECASE)
    value = _number(found[1]) if found else None
    if found is None or not value:
        return None
    return value * 1000.0 ** " kmgtpe".index(found[2].lower() or " ")


def _number(given: str) -> float | None:
    try:
        return float(given)
    except ValueError:
        return None


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 step``, ``3 steps``, ``12,000 steps``; with a ``plural`` also ``1 batch``, ``3 batches``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def joined(items: Iterable[object], last: str = "and") -> str:
    """Return ``a``, ``a and b``, ``a, b and c``; ``last`` may be ``or``."""
    words = [*map(str, items)]
    return f" {last} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def listed(items: Sequence[str], *, most: int = 8, between: str = ", ") -> str:
    """Join ``items`` for a message: the first ``most`` of them, and the number of the others."""
    shown = between.join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def numbered(noun: str, numbers: Iterable[int], *, most: int = 16) -> str:
    """Return ``rank 3``, or ``ranks 0 to 3 and 7``: three or more consecutive numbers are a run.

    Args:
        noun: the kind of thing that is numbered.
        numbers: the numbers, in any order.
        most: the most numbers and runs to write out; the others are only counted.
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in ([run] if len(run) > 2 else [[number] for number in run])]
    words = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    if len(parts) > most:
        words = [*words[:most], f"{sum(map(len, parts[most:]))} more"]
    return f"{noun}{'' if sum(map(len, parts)) == 1 else 's'} {joined(words)}"


def which_ranks(ranks: Iterable[int], *, most: int = 16) -> str:
    """Return ``rank 3``, or ``ranks 0 to 3 and 7``; see :func:`numbered`."""
    return numbered("rank", ranks, most=most)


def in_columns(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Return a line for each row, with the cells of a column padded to its widest: the first ``left`` columns are
    aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(pairs)
        ).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def sentence(words: str) -> str:
    """Return ``words`` with a full stop, unless they end like a sentence already."""
    return words if words.endswith((".", "!", "?")) else f"{words}."


def in_one_line(words: str) -> str:
    """Return words with one space in the place of each line break and other white space."""
    return " ".join(words.split())


def wrapped(words: str, first: str = "", later: str = "") -> list[str]:
    """Return ``words`` in lines of :data:`WIDTH` columns, broken between words; ``first`` and ``later`` begin them."""
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def first_line(words: object, most: int = 200) -> str:
    """Return the first line of ``words`` that is not blank, cut after ``most`` characters; empty: there are none."""
    first = next(iter(str(words or "").strip().splitlines()), "").rstrip()
    return first if len(first) <= most else f"{first[:most]}…"


def last_lines(words: str, most: int) -> list[str]:
    """Return the last ``most`` lines of ``words`` that are not blank, without trailing blanks."""
    return [line.rstrip() for line in words.splitlines() if line.strip()][-most:]
