"""Figures as people read them, and that there is one way to write a size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep import _units

_SOURCE = Path(__file__).parents[2] / "src" / "lockstep"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (3, "3 bytes"),
        (999, "999 bytes"),
        (1000, "0.98 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (376 << 20, "376 MiB"),
        (1010 << 20, "0.99 GiB"),
        (99.96 * 2**20, "100 MiB"),
        (23.5 * 2**30, "23.5 GiB"),
        (5 << 40, "5 TiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_a_size_has_three_digits_and_a_binary_unit(count: float, words: str) -> None:
    assert _units.size(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (59.4, "0:59"), (59.5, "1:00"), (3599.7, "1:00:00"), (7384, "2:03:04")]
)
def test_a_moment_of_a_run(seconds: float, words: str) -> None:
    assert _units.clock(seconds) == words


def test_times_of_a_step() -> None:
    assert [_units.duration(each) for each in (0.00491, 0.0466, 1.25)] == ["4.91 ms", "46.6 ms", "1.25 s"]


def test_no_other_place_writes_sizes_of_its_own() -> None:
    """A mebibyte that is called MB in one place and MiB in another is two figures of one thing."""
    own = re.compile(r"""\{[^{}/]*/ *(2 ?\*\* ?[1234]0|1024)\b[^{}]*\}|["' ][KMGT]B["']""")
    found = {
        str(path.relative_to(_SOURCE))
        for kind in ("py", "js")
        for path in _SOURCE.rglob(f"*.{kind}")
        if path.name != "_units.py" and own.search(path.read_text())
    }
    # What was given is said again in the unit that the option has; and a page's script can't call Python.
    assert found <= {"tools/verify/runs.py", "tools/report/page.js"}
