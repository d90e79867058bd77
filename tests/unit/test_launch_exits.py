"""What a rank's end says: the exit code of SystemExit's argument, and words for objects that have none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep import knobs
from lockstep.errors import said
from lockstep.job.files import FailureRecord
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
    assert said(_Odd()) == "<_Odd str() failed>"
    assert said(ValueError("bad batch")) == "bad batch"


@pytest.mark.parametrize(("argument", "code"), [(256, 1), (-1, 255), (3, 3)])
def test_a_ranks_last_words_hold_the_code_that_it_ends_with(
    argument: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.JOB_DIR, str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        rank._run(lambda: sys.exit(argument), 0, silent=True)
    record = FailureRecord.read(tmp_path, 0)
    assert record is not None
    assert (stopped.value.code, record.exit_code, record.message) == (code, code, "")


def test_an_exception_without_words_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        raise _Odd

    monkeypatch.setenv(knobs.JOB_DIR, str(tmp_path))
    with pytest.raises(SystemExit):
        rank._run(program, 0, silent=True)
    record = FailureRecord.read(tmp_path, 0)
    assert record is not None
    assert "in program\n    raise _Odd\n" in record.traceback
    assert record.message == "<_Odd str() failed>"
