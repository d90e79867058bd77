"""What a rank's end says: the exit code of SystemExit's argument, and words for objects that have none."""

from __future__ import annotations

import pytest

from lockstep.launch import rank


@pytest.mark.parametrize(
    ("argument", "code"),
    [
        (None, 0), (0, 0), (False, 0), (True, 1), (7, 7), (255, 255),
        (256, 1), (2**40, 1), (2**70, 1), (257, 1), (-1, 255), (-256, 1),
        ("no data here", 1), ("", 1), (0.0, 1), ((), 1), ([], 1),
    ],
)  # fmt: skip
def test_what_is_not_zero_never_becomes_success(argument: object, code: int) -> None:
    assert rank._exit_code(SystemExit(argument)) == code


class _Odd(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_without_words_has_some() -> None:
    assert rank._text(_Odd()) == "<_Odd str() failed>"
    assert rank._text(ValueError("bad batch")) == "bad batch"
