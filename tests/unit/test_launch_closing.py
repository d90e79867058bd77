"""How a job ends: the exit code and the last word, for every combination of what may be known."""

from __future__ import annotations

import itertools
from signal import SIGTERM, Signals
from typing import Any

import pytest

from lockstep.job.files import EXIT_SAVED
from lockstep.launch.closing import Closing, JobEnd, LastWord, decide, for_the_others, why_over
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

_BEGUN: dict[str, Any] = {"refused_with": None}
_UNSAVED = _BEGUN | {"saved": False}
#: A signal ends the job as long as no rank has failed before, or where the round was over for another reason.
_SIGNALLED = [
    _UNSAVED | {"stopped_by": SIGTERM, "failing": False},
    _UNSAVED | {"stopped_by": SIGTERM, "failing": True, "kind": (EndKind.LOST, EndKind.JOINING, EndKind.STOPPED)},
]
#: No signal does.
_BY_ITSELF = [
    _UNSAVED | {"stopped_by": None},
    _UNSAVED | {"stopped_by": SIGTERM, "failing": True, "kind": (None, EndKind.FAILED, EndKind.DONE)},
]
_NOT_FAILED = (None, EndKind.JOINING, EndKind.STOPPED, EndKind.DONE)
_HERE = _UNSAVED | {"stopped_by": None, "meeting": False}
_FAILED_FIRST = _UNSAVED | {"stopped_by": SIGTERM, "failing": True, "meeting": False}

#: What is known, each a value or several, everything else being of any value; and what comes of it.
_TABLE: list[tuple[dict[str, Any], LastWord, int | None]] = [
    ({"refused_with": 3}, LastWord.REFUSED, 3),
    (_BEGUN | {"saved": True}, LastWord.SAVED, EXIT_SAVED),
    *[(each | {"asked_listeners": True, "completed": True}, LastWord.CAME_LATE, 0) for each in _SIGNALLED],
    *[(each | {"asked_listeners": True, "completed": False}, LastWord.STOPPED, 143) for each in _SIGNALLED],
    *[(each | {"asked_listeners": False}, LastWord.STOPPED, 143) for each in _SIGNALLED],
    *[(each | {"meeting": True}, LastWord.ZYGOTE_LOST, None) for each in _BY_ITSELF],
    (_HERE | {"kind": EndKind.FAILED}, LastWord.VERDICT, 7),
    (_FAILED_FIRST | {"kind": EndKind.FAILED}, LastWord.VERDICT, 7),
    (_HERE | {"kind": EndKind.LOST, "completed": True}, LastWord.VERDICT, 0),
    (_HERE | {"kind": EndKind.LOST, "completed": False}, LastWord.VERDICT_AND_ZYGOTE_LOST, None),
    (_HERE | {"kind": _NOT_FAILED, "done": True}, LastWord.NOTHING, 0),
    (_HERE | {"kind": _NOT_FAILED, "done": False}, LastWord.ZYGOTE_LOST, None),
    (_FAILED_FIRST | {"kind": (None, EndKind.DONE), "done": True}, LastWord.NOTHING, 0),
    (_FAILED_FIRST | {"kind": (None, EndKind.DONE), "done": False}, LastWord.ZYGOTE_LOST, None),
]


def _fits(known: dict[str, Any], row: dict[str, Any]) -> bool:
    return all(known[name] in (wanted if isinstance(wanted, tuple) else (wanted,)) for name, wanted in row.items())


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
