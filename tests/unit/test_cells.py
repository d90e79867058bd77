"""What cells on ranks are made of, without ranks."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import types
from typing import Any

import pytest

from lockstep.errors import LaunchError
from lockstep.interactive import output
from lockstep.interactive.messages import must_renew
from lockstep.interactive.output import CellText, KeptOutput, RankPipe
from lockstep.interactive.serve import _compiled, _futures
from lockstep.job.stop import Action, Agreement, Proposal
from lockstep.launch import by_value, spawn


@pytest.mark.parametrize(
    ("standings", "failed", "expected"),
    [
        ([{}, {}], True, False),
        ([{"world": [3, 0, 0]}, {"world": [3, 0, 0]}], True, False),
        ([{"world": [3, 0, 0]}, {"world": [4, 0, 0]}], True, True),  # one is in a collective that the other left out
        ([{"world": [3, 0, 0]}, {"world": [4, 0, 0]}], False, False),  # which the next cell may go on with
        ([{"world": [3, 1, 0]}, {"world": [3, 1, 0]}], False, True),  # nothing can go on with a group that has ended
        ([{"world": [3, 0, 1]}, {"world": [3, 0, 0]}], True, True),  # a message is on its way
        ([{"world": [3, 0, 0], "pair": [1, 0, 0]}, {"world": [3, 0, 0]}], True, False),  # a group of some ranks
    ],
)
def test_process_groups_begin_anew_where_the_ranks_are_apart(
    standings: list[dict[str, list[int]]], failed: bool, expected: bool
) -> None:
    assert must_renew(standings, failed=failed) is expected


def test_kept_output_is_what_a_terminal_would_show() -> None:
    kept = KeptOutput()
    for text in ("a\n", " 1%\r", " 50%\r100%", "\r\nend"):
        kept.add(CellText(1, 1, text))
    assert kept.text == "a\n100%\nend"


def test_of_very_much_output_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_KEPT", 10)
    kept = KeptOutput()
    for number in range(10):
        kept.add(CellText(1, 1, f"line {number}\n"))
    assert kept.text == "… 63 characters left out …\nline 9\n"


def test_a_pipe_cuts_no_character_in_two() -> None:
    pipe = RankPipe(1, 2)
    try:
        with open(pipe.writing, "wb", buffering=0, closefd=False) as file:
            file.write("ü".encode()[:1])
            assert pipe.drain() == []
            file.write("ü!".encode()[1:])
        assert pipe.drain() == [CellText(1, 2, "ü!")]
        pipe.hand_over()
        assert pipe.read() == ([], False)
    finally:
        pipe.close()


def test_a_pipe_is_drained_of_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = RankPipe(1, 2)
    try:
        with open(pipe.writing, "wb", buffering=0, closefd=False) as file:
            more = iter("123")

            def read(descriptor: int, most: int) -> bytes:
                file.write(next(more).encode())  # as a thread that never stops
                return os.read(descriptor, most)

            file.write(b"0")
            monkeypatch.setattr(output, "os", types.SimpleNamespace(read=read, close=os.close))
            assert pipe.drain() == [CellText(1, 2, "0")]
            assert pipe.drain() == [CellText(1, 2, "1")]
    finally:
        pipe.close()


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("x = 1\nx + 1", 2),
        ("x = 1", None),
        ("1;", None),
        ("", None),
        ("# only a comment", None),
        ("for x in range(3): x", None),
        ("(\n  4\n)  # with a comment\n", 4),
        ("4  # with a semicolon;", 4),
        ("4;  # with a comment", None),
        ("'4;'", "4;"),
    ],
)
def test_the_last_line_has_a_value_if_it_is_an_expression(source: str, value: object) -> None:
    body, last = _compiled(source, "<cell 1>")
    space: dict[str, object] = {}
    exec(body, space)
    assert (None if last is None else eval(last, space)) == value
    assert body.co_filename == "<cell 1>"


def test_a_syntax_error_has_no_frames_of_ours() -> None:
    with pytest.raises(SyntaxError) as raised:
        _compiled("x = (", "<cell 7>")
    assert raised.value.filename == "<cell 7>"


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("import os\n!ls", "no magics and no !commands"),
        ("%time 1", "no magics and no !commands"),
        ("x = !ls", "no magics and no !commands"),
        ("x?", "no magics and no !commands"),
        ("await x", "asyncio.run"),
        ("async with x: ...", "asyncio.run"),
        ("x = (", ""),
    ],
)
def test_what_only_ipython_understands_is_said(source: str, hint: str) -> None:
    with pytest.raises(SyntaxError) as raised:
        _compiled(source, "<cell 7>")
    assert hint in str(raised.value)
    assert ("plain Python" in str(raised.value)) == bool(hint)


def test_an_import_from_the_future_holds_for_later_cells() -> None:
    first, _ = _compiled("from __future__ import annotations", "<cell 1>")
    body, last = _compiled("def f(x: unknown): ...\nf", "<cell 2>", _futures(first, 0))
    space: dict[str, object] = {}
    exec(body, space)
    assert last is not None
    assert eval(last, space).__annotations__ == {"x": "unknown"}


def _typed(source: str) -> dict[str, object]:
    """The names of a module that can't be imported, as a notebook's ``__main__``."""
    space: dict[str, object] = {"__name__": "__typed__", "__builtins__": __builtins__}
    exec(source, space)
    return space


def test_what_was_typed_goes_by_value_and_the_rest_as_ever() -> None:
    space = _typed("base = 5\nclass Point:\n    x = 2\ndef add(n): return base + n + Point.x")
    file = io.BytesIO()
    by_value.pickler(file).dump((space["add"], space["Point"], KeptOutput()))
    add, point, kept = pickle.loads(file.getvalue())  # noqa: S301
    assert add(1) == 8
    assert (point.x, kept.text) == (2, "")
    with pytest.raises(RuntimeError, match="should only be shared between processes through inheritance"):
        by_value.pickler(io.BytesIO(), shares=True).dump(multiprocessing.Lock())  # multiprocessing's own refusal


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    by_value.pickler(file).dump(value)
    return file.getvalue()


def _unpickled(packed: bytes) -> Any:
    return pickle.loads(packed)  # noqa: S301  (made here)


def test_a_class_that_was_sent_goes_back_as_itself() -> None:
    space = _typed("class Point:\n    scale = 3")
    point: Any = space.pop("Point")
    _unpickled(_pickled(point))  # as it is sent
    by_value.note_received()
    packed = _pickled([point(), point])
    point.scale = 4
    here, kind = _unpickled(packed)
    assert (type(here), kind, point.scale) == (point, point, 4), "it would be 3 if the class had come with its value"
    del point, here, kind
    gc.collect()
    with pytest.raises(LookupError, match="defined anew"):
        _unpickled(packed)


def test_a_typed_function_needs_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    function = types.FunctionType((lambda rank: rank).__code__, {"__name__": "__main__"}, "work")
    function.__qualname__ = "work"
    assert function.__module__ == "__main__"
    assert spawn._is_typed(function, {}) is True
    assert spawn._is_typed(function, {"init_main_from_path": "train.py"}) is False
    monkeypatch.setattr(by_value, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"work was typed at a prompt.*\n?.*pip install 'torch-lockstep\[notebook\]'"):
        spawn._is_typed(function, {})
    assert spawn._is_typed(test_kept_output_is_what_a_terminal_would_show, {}) is False


class _Board:
    def __init__(self) -> None:
        self.proposals: dict[int, list[Proposal]] = {}

    def propose(self, round_: int, proposal: Proposal) -> None:
        self.proposals.setdefault(round_, []).append(proposal)

    def smallest(self, round_: int) -> Proposal | None:
        return min(self.proposals.get(round_, []), default=None)


def test_a_cells_agreement_knows_nothing_of_the_cells_before() -> None:
    board = _Board()
    first = Agreement(board, world_size=2, round_=4)
    assert first.due(1, wanted=Action.STOP) is None
    assert first.due(3, wanted=None) is Action.STOP
    assert Agreement(board, world_size=2, round_=5).due(9, wanted=None) is None
