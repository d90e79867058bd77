"""Who holds up whom, from made-up pages."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.recorder.compare import Doing, Kind, Seen, StepTimes, Verdict, compare, odd_ones, settle
from lockstep.recorder.layout import Look, Phase

NOW = 1000.0


def _look(phase: Phase = Phase.OWN, **changes: Any) -> Look:
    fields: dict[str, Any] = {
        "events": 100, "phase": phase, "since": NOW - 500, "entered": phase, "place": "train.py:3", "steps": 10,
        "waiting_since": None, "waits_in": "", "reason": "", "seconds": (0.0,) * len(Phase),
    }  # fmt: skip
    return Look(**{**fields, **changes})


def _waits(rank: int, seconds: float, **changes: Any) -> Seen:
    look = _look(Phase.REDUCE, waiting_since=NOW - seconds, waits_in="all_reduce", **changes)
    return Seen(rank, look, moved=NOW - seconds)


def _works(rank: int, quiet: float, look: Look | None = None, **changes: Any) -> Seen:
    return Seen(rank, look or _look(**changes), moved=NOW - quiet)


def _compare(*ranks: Seen, usual: float = 5.0, whole: bool = True) -> Verdict | None:
    return compare(ranks, now=NOW, usual=usual, whole=whole)


def test_a_rank_that_the_others_have_waited_for_is_late() -> None:
    assert _compare(_waits(0, 5.1), _works(1, 5.1)) == Verdict(Kind.LATE, (1,), (0,), NOW - 5.1)
    assert _compare(_waits(0, 4.9), _works(1, 100.0)) is None


def test_the_others_must_all_have_come() -> None:
    assert _compare(_waits(0, 60), _waits(1, 2), _works(2, 60)) is None, "rank 1 was late itself until just now"
    verdict = _compare(_waits(0, 60), _works(1, 60), _works(2, 60), _waits(3, 6))
    assert verdict is not None
    assert (verdict.late, verdict.waiting) == ((1, 2), (0, 3))


def test_a_rank_that_moves_is_slow_and_not_late_for_a_minute() -> None:
    assert _compare(_waits(0, 50), _works(1, 1)) is None
    assert _compare(_waits(0, 61), _works(1, 1)) is not None
    assert _compare(_waits(0, 61), _works(1, 1), usual=7) is None, "ten times what is usual"


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 5.0),
        ({"steps": 1}, 60.0),
        ({"phase": Phase.EVALUATE}, 60.0),
        ({"phase": Phase.SAVE}, 300.0),
        ({"phase": Phase.RESTORE}, 300.0),
        ({"phase": Phase.COMPILE}, 300.0),
        ({"reason": "evaluation"}, float("inf")),
    ],
)
def test_what_takes_long_has_longer(changes: dict[str, Any], limit: float) -> None:
    late = _look(**changes)
    assert _compare(_waits(0, min(limit, 1e6) - 0.1), _works(1, 1e6, late)) is None
    if limit < 1e6:
        assert _compare(_waits(0, limit + 0.1), _works(1, 1e6, late)) is not None


def test_long_steps_have_longer() -> None:
    assert _compare(_waits(0, 20), _works(1, 20), usual=30) is None
    assert _compare(_waits(0, 31), _works(1, 31), usual=30) is not None


def test_a_rank_that_is_excused_excuses_nobody_else_but_is_waited_for() -> None:
    assert _compare(_waits(0, 20), _works(1, 20), _works(2, 20, reason="upload")) is None


def test_a_rank_that_has_ended_is_late() -> None:
    ended = Seen(1, _look(Phase.LEAVING), moved=NOW - 9, exit_code=0)
    verdict = _compare(_waits(0, 6), ended)
    assert verdict is not None
    assert verdict.late == (1,)
    assert _compare(_waits(0, 4), ended) is None
    stuck = _compare(_waits(0, 6), ended, _works(2, 6))
    assert stuck is not None
    assert stuck.late == (2,), "one that is still there may come"


def test_all_wait() -> None:
    assert _compare(_waits(0, 6), _waits(1, 4)) is None
    verdict = _compare(_waits(0, 60), _waits(1, 6))
    assert verdict is not None
    assert (verdict.kind, verdict.late, verdict.waiting) == (Kind.APART, (), (0, 1))
    assert _compare(_waits(0, 50), _waits(1, 50), whole=False) is None, "another machine's ranks may be busy"
    assert _compare(_waits(0, 61), _waits(1, 61), whole=False) is not None


def test_nobody_moves_and_nobody_is_known_to_wait() -> None:
    verdict = _compare(_works(0, 6), _works(1, 6))
    assert verdict is not None
    assert verdict.kind is Kind.STILL
    assert _compare(_works(0, 6), _works(1, 4)) is None
    assert _compare(_works(0, 6)) is None, "a rank alone holds up nobody"
    assert settle(verdict, {0: Doing.WORKS, 1: Doing.WORKS}) is None
    assert settle(verdict, {0: Doing.WAITS, 1: Doing.WORKS}) == Verdict(Kind.LATE, (1,), (0,), verdict.since)
    assert settle(verdict, {0: Doing.WAITS, 1: Doing.WAITS}) == Verdict(Kind.APART, (), (0, 1), verdict.since)


def test_what_came_before_a_break_of_the_watcher_does_not_count() -> None:
    waits = Seen(0, _look(waiting_since=NOW - 500), moved=NOW - 2, since=NOW - 2)
    assert _compare(waits, _works(1, 2)) is None


def test_who_left_out_a_collective_has_got_further() -> None:
    behind, ahead = _look(Phase.OWN, entered=Phase.OPTIMIZER), _look(Phase.REDUCE, entered=Phase.BACKWARD)
    texts = {0: "barrier at 3", 1: "all_reduce at 9"}
    assert odd_ones({0: behind, 1: ahead}, texts) == (1,)
    assert odd_ones({0: _look(steps=11), 1: ahead}, texts) == (0,)
    assert odd_ones({0: ahead, 1: ahead}, texts) == ()
    assert odd_ones({0: ahead, 1: ahead, 2: ahead}, {**texts, 2: "barrier at 3"}) == (1,)


def test_the_median_step_forgets_no_long_one_and_counts_several_in_one_look() -> None:
    times = StepTimes()
    assert times.median == 0.0
    times.add(1, -100.0)  # a compilation, perhaps
    times.add(2, -50.0)
    assert times.median == 0.0
    for steps, at in ((2, 0.0), (2, 5.0), (5, 6.0), (6, 8.0), (7, 10.0), (8, 12.0)):
        times.add(steps, at)
    assert times.median == 2.0
