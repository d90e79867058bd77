"""How a job ends: the exit code and the last word, for every combination of what may be known."""

from __future__ import annotations

import itertools
from signal import SIGTERM, Signals
from typing import Any

import pytest

from lockstep.job.files import EXIT_SAVED
from lockstep.launch.closing import Closing, JobEnd, LastWord, decide, for_the_others, of_hosts, why_over
from lockstep.rendezvous.messages import EndKind

_BOTH = (False, True)
_KINDS = (None, *EndKind)
_ALL: dict[str, tuple[Any, ...]] = {
    "refused_with": (None, 3),
    "saved": _BOTH,
    "stopped_by": (None, SIGTERM),
    "failing": _BOTH,
    "asked_listeners": _BOTH,
    "completed": _BOTH,
    "done": _BOTH,
    "meeting": _BOTH,
    "kind": _KINDS,
}
_COMBINATIONS = [dict(zip(_ALL, values, strict=True)) for values in itertools.product(*_ALL.values())]

_Row = dict[str, Any]


def _values(wanted: Any) -> tuple[Any, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _and(*rows: _Row) -> _Row:
    """What all of these say, each a value or several of what is known, everything else being of any value."""
    both: _Row = {}
    for name, wanted in ((name, _values(wanted)) for row in rows for name, wanted in row.items()):
        both[name] = tuple(value for value in both.get(name, wanted) if value in wanted)
    return both


_BEGUN: _Row = {"refused_with": None}
_OTHER_THAN_JOINING = tuple(kind for kind in _KINDS if kind is not EndKind.JOINING)
#: What was saved because the job was to end is what the user is to hear.
_SAVED = [
    _BEGUN | {"saved": True, "stopped_by": SIGTERM},
    _BEGUN | {"saved": True, "stopped_by": None, "meeting": False, "kind": _OTHER_THAN_JOINING},
]
#: What was saved to let machines join is no end: the ranks were about to start again, and something has prevented it.
_SAVED_TO_GO_ON = _BEGUN | {"saved": True, "stopped_by": None, "meeting": True}
_SAVED_TO_MEET = _BEGUN | {"saved": True, "stopped_by": None, "meeting": False, "kind": EndKind.JOINING}
_UNSAVED = _BEGUN | {"saved": False}
#: Everything was done on all machines before anybody asked for an end.
_DONE = _UNSAVED | {"kind": EndKind.DONE, "completed": True, "meeting": False}
_UNDONE = [
    _UNSAVED | {"kind": tuple(kind for kind in _KINDS if kind is not EndKind.DONE)},
    _UNSAVED | {"kind": EndKind.DONE, "completed": False},
    _UNSAVED | {"kind": EndKind.DONE, "completed": True, "meeting": True},
]
#: A signal ends the job as long as no rank has failed before, or where the round was over for another reason.
_SIGNALLED = [
    *[_and(each, {"stopped_by": SIGTERM, "failing": False}) for each in _UNDONE],
    _UNSAVED | {"stopped_by": SIGTERM, "failing": True, "kind": (EndKind.LOST, EndKind.JOINING, EndKind.STOPPED)},
]
_FAILED_FIRST: _Row = {"stopped_by": SIGTERM, "failing": True, "kind": (None, EndKind.FAILED, EndKind.DONE)}
#: No signal does.
_BY_ITSELF = [_and(each, how) for each in _UNDONE for how in ({"stopped_by": None}, _FAILED_FIRST)]
#: And the ranks are still of this round.
_HERE = [_and(each, {"meeting": False}) for each in _BY_ITSELF]

#: What is known, and what comes of it.
_TABLE: list[tuple[_Row, LastWord, int | None]] = [
    ({"refused_with": 3}, LastWord.REFUSED, 3),
    *[(each, LastWord.SAVED, EXIT_SAVED) for each in _SAVED],
    (_SAVED_TO_GO_ON, LastWord.ZYGOTE_LOST, None),
    (_SAVED_TO_MEET | {"completed": False}, LastWord.ZYGOTE_LOST, None),
    (_SAVED_TO_MEET | {"completed": True}, LastWord.NOTHING, 0),
    (_DONE | {"stopped_by": None}, LastWord.NOTHING, 0),
    (_DONE | {"stopped_by": SIGTERM}, LastWord.CAME_LATE, 0),
    *[(_and(each, {"asked_listeners": True, "completed": True}), LastWord.CAME_LATE, 0) for each in _SIGNALLED],
    *[(_and(each, {"asked_listeners": True, "completed": False}), LastWord.STOPPED, 143) for each in _SIGNALLED],
    *[(_and(each, {"asked_listeners": False}), LastWord.STOPPED, 143) for each in _SIGNALLED],
    *[(_and(each, {"meeting": True}), LastWord.ZYGOTE_LOST, None) for each in _BY_ITSELF],
    *[(_and(each, {"kind": EndKind.FAILED}), LastWord.VERDICT, 7) for each in _HERE],
    *[(_and(each, {"kind": EndKind.LOST, "completed": True}), LastWord.VERDICT, 0) for each in _HERE],
    *[
        (_and(each, {"kind": EndKind.LOST, "completed": False}), LastWord.VERDICT_AND_ZYGOTE_LOST, None)
        for each in _HERE
    ],
    *[(_and(each, {"kind": EndKind.JOINING, "completed": True}), LastWord.NOTHING, 0) for each in _HERE],
    *[(_and(each, {"kind": EndKind.JOINING, "completed": False}), LastWord.ZYGOTE_LOST, None) for each in _HERE],
    *[
        (_and(each, {"kind": (None, EndKind.STOPPED, EndKind.DONE), "done": done}), word, code)
        for each in _HERE
        for done, word, code in ((True, LastWord.NOTHING, 0), (False, LastWord.ZYGOTE_LOST, None))
    ],
]


def _fits(known: dict[str, Any], row: _Row) -> bool:
    return all(known[name] in _values(wanted) for name, wanted in row.items())


def test_every_combination_ends_as_one_row_says() -> None:
    for known in _COMBINATIONS:
        (expected,) = [Closing(word, code) for row, word, code in _TABLE if _fits(known, row)]
        assert decide(JobEnd(failed_with=7, **known)) == expected, known


def test_the_others_end_with_what_this_machine_does_but_for_a_failure() -> None:
    for known in _COMBINATIONS:
        if _fits(known, _BEGUN | {"meeting": False, "done": True}):
            end = JobEnd(failed_with=7, **known)
            assert for_the_others(end) == (7 if end.kind is EndKind.FAILED else decide(end).exit_code or 0), known


@pytest.mark.parametrize(
    ("codes", "pressed", "stopped_by", "code"),
    [
        ([0, 0], [], None, 0),
        ([0], [0], None, 0),
        ([0, 3, 5], [], None, 3),
        ([0], [143], None, 143),  # it had not finished when it was told to end
        ([3], [143], None, 3),
        ([None], [143], None, 1),
        ([None, 3], [], None, 3),
        ([0, None], [], None, 1),
        ([EXIT_SAVED, 1], [], None, EXIT_SAVED),
        ([1], [EXIT_SAVED], SIGTERM, EXIT_SAVED),
        ([143, 1], [], SIGTERM, 143),
        ([1, 143], [], SIGTERM, 143),
        ([1], [143], SIGTERM, 143),
        ([1, 1], [], SIGTERM, 1),
        ([0, 0], [], SIGTERM, 0),
        ([0, None], [], SIGTERM, 143),
        ([None], [], SIGTERM, 143),
        ([], [], SIGTERM, 143),
        ([], [], None, 0),
    ],
)
def test_the_hosts_of_a_job_end_with_one_code(
    codes: list[int | None], pressed: list[int], stopped_by: Signals | None, code: int
) -> None:
    assert of_hosts(codes, pressed=pressed, stopped_by=stopped_by) == code


@pytest.mark.parametrize(
    ("stopped_by", "failing", "failed", "saved", "kind"),
    [
        (SIGTERM, False, False, False, EndKind.STOPPED),
        (SIGTERM, False, False, True, EndKind.STOPPED),
        (SIGTERM, False, True, False, EndKind.STOPPED),
        (SIGTERM, False, True, True, EndKind.STOPPED),
        (SIGTERM, True, False, False, EndKind.DONE),
        (SIGTERM, True, False, True, EndKind.STOPPED),
        (SIGTERM, True, True, False, EndKind.FAILED),
        (SIGTERM, True, True, True, EndKind.STOPPED),
        (None, False, False, False, EndKind.DONE),
        (None, False, False, True, EndKind.STOPPED),
        (None, False, True, False, EndKind.FAILED),
        (None, False, True, True, EndKind.STOPPED),
        (None, True, False, False, EndKind.DONE),
        (None, True, False, True, EndKind.STOPPED),
        (None, True, True, False, EndKind.FAILED),
        (None, True, True, True, EndKind.STOPPED),
    ],
)
def test_why_an_attempt_is_over(
    stopped_by: Signals | None, failing: bool, failed: bool, saved: bool, kind: EndKind
) -> None:
    assert why_over(stopped_by=stopped_by, failing=failing, failed=failed, saved=saved) is kind
