"""Uncaught errors show the user's own frames, and every message once."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any, cast

import pytest
import torch

import lockstep
from lockstep import tracebacks
from lockstep.comm.waiting import wait_for
from lockstep.errors import said


def _shown(error: BaseException) -> list[str]:
    """The files' names of the frames in what Python prints, and the last lines of its parts."""
    tracebacks.fold(error)
    text = "".join(traceback.format_exception(error))
    return [line.split('"')[1].rpartition("/")[2] for line in text.splitlines() if line.startswith("  File ")]


def _raised(fn: object) -> BaseException:
    with pytest.raises(Exception) as info:  # noqa: PT012
        assert callable(fn)
        fn()
    return info.value


def _wrong_shape() -> None:
    torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(1, 3))


def test_frames_of_torch_are_folded_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown(_raised(_wrong_shape))[-2:] == ["test_tracebacks.py"] * 2
    assert "module.py" not in _shown(_raised(_wrong_shape))
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "full")
    assert "module.py" in _shown(_raised(_wrong_shape))


def _chained() -> None:
    try:
        _wrong_shape()
    except RuntimeError as error:
        raise ValueError("not a sample") from error


def test_what_is_told_to_another_process_has_the_users_frames_and_leaves_the_error_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = _raised(_chained)
    before = "".join(traceback.format_exception(error))
    told = tracebacks.users_text(error)
    assert "in _wrong_shape" in told
    assert told.endswith("ValueError: not a sample\n")
    assert "mat1 and mat2 shapes cannot be multiplied" in told
    assert "module.py" in before
    assert "module.py" not in told
    assert "".join(traceback.format_exception(error)) == before
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "full")
    assert tracebacks.users_text(error) == before


def test_what_can_not_be_told_whole_is_named() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert "Broken" in tracebacks.users_text(Broken())


def _lost() -> None:
    wait_for(partial(torch.ones(2).view, 3), lambda: "rank 0 of 2: averaging")


def test_a_cause_that_the_message_repeats_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    error = _raised(_lost)
    _shown(error)
    text = "".join(traceback.format_exception(error))
    assert text.count("invalid for input of size") == 1
    assert text.count("Traceback") == 1
    assert text.splitlines()[-1].startswith("lockstep.PeerLost: rank 0 of 2: averaging: ")
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "full")
    error = _raised(_lost)
    _shown(error)
    assert "".join(traceback.format_exception(error)).count("invalid for input of size") == 2


def _of_the_users() -> None:
    def broken() -> None:
        raise RuntimeError("in the user's own code")

    wait_for(broken, lambda: "rank 0 of 2: averaging")


def test_a_cause_that_the_user_raised_stays() -> None:
    error = _raised(_of_the_users)
    _shown(error)
    assert isinstance(error.__cause__, RuntimeError)
    assert "in broken" in "".join(traceback.format_exception(error))


def test_a_traceback_without_a_frame_of_the_users_stays() -> None:
    try:
        wait_for(partial(torch.ones(2).view, 3), lambda: "rank 0 of 2")
    except lockstep.PeerLost as caught:
        error = caught
    assert error.__traceback__ is not None
    error.__traceback__ = inner = error.__traceback__.tb_next
    tracebacks.fold(error)
    assert error.__traceback__ is inner is not None


def test_errors_that_came_from_each_other_in_a_circle_end() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    tracebacks.fold(one)
    assert one.__cause__ is two


def test_what_another_room_knows_of_an_error_is_added_to_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "explainers", [lambda error: "do this" if isinstance(error, KeyError) else None])
    known, other = KeyError("a"), ValueError("b")
    for error in (known, other):
        tracebacks.explain(error)
    assert (known.args, other.args) == (("a: do this",), ("b",))


def _without_a_line() -> BaseException:
    """An error from an instruction that belongs to no line, as tools that generate code leave them."""

    def fails() -> None:
        raise ValueError("from generated code")

    fails.__code__ = fails.__code__.replace(co_linetable=b"")
    return _raised(fails)


def test_an_instruction_without_a_line_hides_nothing() -> None:
    error = _without_a_line()
    tracebacks.fold(error)
    assert "ValueError: from generated code" in tracebacks.text(error)


class _Wordless(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_error_whose_words_fail_is_told() -> None:
    assert said(_Wordless()) == "<_Wordless str() failed>"
    assert "_Wordless" in tracebacks.text(_Wordless())


@pytest.mark.parametrize(
    "error",
    [
        SyntaxError("odd", cast("Any", ("file.py", "no number", "x", "text"))),
        ValueError("half of a pair: \udc80"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        RecursionError("maximum recursion depth exceeded"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_odd_errors_are_told(error: Exception) -> None:
    tracebacks.fold(error)
    assert type(error).__name__ in tracebacks.text(error)


def test_an_error_that_is_false_is_still_a_cause() -> None:
    class Empty(Exception):
        def __len__(self) -> int:
            return 0

    error = ValueError("x")
    error.__context__, error.__cause__ = KeyError("context"), Empty()
    tracebacks.fold(error)
    assert isinstance(error.__cause__, Empty)


def test_the_members_of_a_group_are_folded_as_well() -> None:
    group = ValueError("as a group is")
    member = _raised(_wrong_shape)
    vars(group)["exceptions"] = (member,)
    tracebacks.fold(group)
    frames = traceback.extract_tb(member.__traceback__)
    assert {frame.filename.rpartition("/")[2] for frame in frames} == {"test_tracebacks.py"}


def test_what_python_thinks_was_meant_is_told() -> None:
    error = _raised(lambda: cast(Any, torch.nn.Linear(1, 1)).weigth)
    assert tracebacks.text(error).endswith("'Linear' object has no attribute 'weigth'. Did you mean: 'weight'?\n")
