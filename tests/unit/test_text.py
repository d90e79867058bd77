"""Figures and lists as people read them, and that there is one way to write each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lockstep.text import (
    WIDTH,
    as_clock,
    as_duration,
    as_rate,
    as_size,
    counted,
    first_line,
    in_columns,
    joined,
    last_lines,
    listed,
    numbered,
    parse_amount,
    parse_time_limit,
    sentence,
    which_ranks,
    wrapped,
)

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
    assert as_size(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (59.4, "0:59"), (59.5, "1:00"), (3599.7, "1:00:00"), (7384, "2:03:04")]
)
def test_a_moment_of_a_run(seconds: float, words: str) -> None:
    assert as_clock(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 ms"), (2e-6, "2 µs"), (20e-6, "20 µs"), (0.00491, "4.91 ms"), (0.0466, "46.6 ms"), (1.25, "1.25 s")],
)
def test_how_long_a_step_takes(seconds: float, words: str) -> None:
    assert as_duration(seconds) == words


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("11h30m", 41400), ("90m", 5400), ("1d 2h", 93600), ("1.5H", 5400), ("45s", 45), ("3600", 3600), ("2.5", 2.5)],
)
def test_a_time_limit(given: str, seconds: float) -> None:
    assert parse_time_limit(given) == seconds


@pytest.mark.parametrize("given", ["", "0", "0h", "-5", "30m1h", "1:30:00", "an hour", "inf", "nan", "1..5h", "1e400"])
def test_no_time_limit(given: str) -> None:
    with pytest.raises(ValueError, match="expected a time such as 11h30m"):
        parse_time_limit(given)


def test_a_network_s_rate_is_decimal_and_in_bits() -> None:
    assert [as_rate(each) for each in (25e9 / 8, 1e8 / 8)] == ["25 Gbit/s", "100 Mbit/s"]


def test_counts_have_a_plural() -> None:
    assert [counted(each, "step") for each in (0, 1, 2, 12_000)] == ["0 steps", "1 step", "2 steps", "12,000 steps"]


def test_lists_in_words() -> None:
    assert [joined(each) for each in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert joined([1, 2, 3], "or") == "1, 2 or 3"


@pytest.mark.parametrize(
    ("items", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c", "d"], "a or b and 2 more")],
)
def test_a_list_says_how_many_are_left_out(items: list[str], text: str) -> None:
    assert listed(items, most=2, between=" or ") == text


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 1], "ranks 1 and 2"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([7, 0, 1, 2, 3, 3], "ranks 0 to 3 and 7"),
        ([0, 2, 4, 5, 8, 9, 10], "ranks 0, 2, 4, 5 and 8 to 10"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 4 more"),
        (
            [*range(0, 32, 2), *range(40, 50)],
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 10 more",
        ),
        (range(16384), "ranks 0 to 16383"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert which_ranks(ranks) == words


def test_other_numbers_in_words() -> None:
    assert numbered("start", [0]) == "start 0"
    assert numbered("start", [0, 1, 2, 5, 7], most=2) == "starts 0 to 2, 5 and 1 more"


def test_last_lines_are_not_blank() -> None:
    assert last_lines("a\n\nb  \nc\n\n", 2) == ["b", "c"]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["", "A", "B"], ["step", "1.25 s", "9 ms"], ["longer name", "-", ""]]
    assert in_columns(rows, left=1) == [
        "                  A     B",
        "step         1.25 s  9 ms",
        "longer name       -",
    ]
    assert in_columns([["1", "a"], ["22", "bb"]]) == [" 1   a", "22  bb"]


#: Names of values in messages that are sentences themselves, some with a full stop.
_SENTENCES = {"error", "text", "message", "why", "known", "trouble", "reason", "said"}


def test_no_message_puts_a_full_stop_behind_a_sentence() -> None:
    assert sentence("It ended.") == "It ended." == sentence("It ended")
    found = []
    for path in _SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr) or path.name == "text.py":
                continue
            for value, after in zip(node.values, node.values[1:], strict=False):
                stops = isinstance(after, ast.Constant) and re.match(r"\.(\s|$)", str(after.value))
                if stops and isinstance(value, ast.FormattedValue) and ast.unparse(value.value) in _SENTENCES:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(value.value)}")
    assert not found


def test_no_other_place_writes_plurals_and_lists_of_ranks() -> None:
    own = re.compile(r"""\{'s' ?\* ?\(|'' if [^{}]{1,60} == 1 else 's'|(?<!\w)ranks \{', '\.join""")
    found = {str(path.relative_to(_SOURCE)) for path in _SOURCE.rglob("*.py") if own.search(path.read_text())}
    assert found <= {"text.py"}
    other = re.compile(r"""["']1 [a-z ]+["'] if [^\n]{1,60} == 1 else f["']\{""")
    found = {str(path.relative_to(_SOURCE)) for path in _SOURCE.rglob("*.py") if other.search(path.read_text())}
    # A mean number of nodes is no count, and commas part a fingerprint's facts.
    assert found == {"job/useful.py", "comm/group/fingerprint.py"}


def test_no_other_place_breaks_lines() -> None:
    own = re.compile(r"textwrap\.(wrap|fill)\(|from textwrap import")
    found = {str(path.relative_to(_SOURCE)) for path in _SOURCE.rglob("*.py") if own.search(path.read_text())}
    assert found == {"text.py"}


def test_no_other_place_writes_sizes_of_its_own() -> None:
    """A mebibyte that is called MB in one place and MiB in another is two figures of one thing."""
    own = re.compile(r"""\{[^{}/]*/ *(2 ?\*\* ?[1234]0|1024)\b[^{}]*\}|["' ][KMGT]B["']""")
    found = {
        str(path.relative_to(_SOURCE))
        for kind in ("py", "js")
        for path in _SOURCE.rglob(f"*.{kind}")
        if path.name != "text.py" and own.search(path.read_text())
    }
    # What was given is said again in the unit that the option has; and a page's script can't call Python.
    assert found <= {"tools/verify/runs.py", "tools/report/page.js"}


def test_lines_are_broken_between_words_and_begin_as_asked() -> None:
    long, path = "word " * 40, "/a-path/" * 20
    found = wrapped(f"{long}{path} end", "- ", "  ")
    assert [line[:6] for line in found] == ["- word", "  word", "  /a-p", "  end"]
    assert [len(line) <= WIDTH for line in found] == [True, True, False, True], "a path stays whole"


@pytest.mark.parametrize(
    ("words", "first"),
    [("\n  one \ntwo", "one"), ("abcdef", "abcde…"), ("abcde", "abcde"), ("", ""), (None, ""), (" \n", "")],
)
def test_the_first_line_of_an_error(words: str | None, first: str) -> None:
    assert first_line(words, 5) == first


def test_plurals_without_an_s() -> None:
    assert counted(1, "batch", "batches") == "1 batch"
    assert counted(12_000, "batch", "batches") == "12,000 batches"


@pytest.mark.parametrize("amount", [312e12, 1.5e16, 1e15, 1e-3, 7.0])
def test_an_amount_that_python_writes_is_read_back(amount: float) -> None:
    assert parse_amount(str(amount)) == amount
