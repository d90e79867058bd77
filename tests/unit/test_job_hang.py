"""Who holds up whom, from made-up pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.job.hang import (
    ASLEEP,
    HALTS,
    Doing,
    HangKind,
    HangVerdict,
    Looker,
    Seen,
    Shares,
    Standstill,
    StepTimes,
    compare,
    odd_ones,
    settle,
)
from lockstep.job.page import SERIAL, WAITS, Look, Mark, Phase

NOW = 1000.0


def _look(
    phase: Phase = Phase.OWN, *, entered: Phase | None = None, waiting: bool = False, serial: int = 100, **changes: Any
) -> Look:
    mark = Mark(phase, phase if entered is None else entered, waiting, serial)
    fields: dict[str, Any] = {"steps": 10, "waits_in": "", "reason": "", "stepped_at": "train.py:3 in step"}
    return Look(mark, **{**fields, **changes})


def _waits(rank: int, seconds: float, **changes: Any) -> Seen:
    look = _look(Phase.REDUCE, waiting=True, waits_in="all_reduce", **changes)
    return Seen(rank, look, moved=NOW - seconds)


def _works(
    rank: int, quiet: float, look: Look | None = None, *, standstill: Standstill | None = None, **changes: Any
) -> Seen:
    return Seen(rank, look or _look(**changes), moved=NOW - quiet, standstill=standstill)


def _compare(*ranks: Seen, usual: float = 5.0, whole: bool = True) -> HangVerdict | None:
    return compare(ranks, now=NOW, usual=usual, shortest=5.0, whole=whole)


def test_a_rank_that_the_others_have_waited_for_is_late() -> None:
    assert _compare(_waits(0, 5.1), _works(1, 5.1)) == HangVerdict(HangKind.LATE, (1,), (0,), NOW - 5.1)
    assert _compare(_waits(0, 4.9), _works(1, 100.0)) is None


def test_ranks_of_a_test_need_no_steps_to_warm_up() -> None:
    ranks = (_waits(0, 5.1, steps=0), _waits(1, 5.1, steps=None))
    assert _compare(*ranks) is None
    verdict = compare(ranks, now=NOW, usual=5.0, warming_up=5.0)
    assert verdict == HangVerdict(HangKind.APART, (), (0, 1), NOW - 5.1)
    late = (_waits(0, 5.1, steps=0), _works(1, 5.1, steps=1))
    assert _compare(*late) is None
    assert compare(late, now=NOW, usual=5.0, warming_up=5.0) == HangVerdict(HangKind.LATE, (1,), (0,), NOW - 5.1)


def _on_device(rank: int, seconds: float, **changes: Any) -> Seen:
    return Seen(rank, _look(Phase.OWN, entered=Phase.BACKWARD, on_device=True, **changes), moved=NOW - seconds)


def test_a_rank_whose_device_is_in_the_latest_backward_waits() -> None:
    assert _compare(_on_device(0, 5.1), _works(1, 5.1)) == HangVerdict(HangKind.LATE, (1,), (0,), NOW - 5.1)
    assert _compare(_on_device(0, 5.1), _works(1, 4.0)) is None


def test_devices_that_all_are_in_the_latest_backward_may_have_long_kernels() -> None:
    assert _compare(_on_device(0, 1000.0), _on_device(1, 1000.0)) is None
    assert _compare(_on_device(0, 59.0), _waits(1, 59.0)) is None, "rank 0 may come"
    verdict = _compare(_on_device(0, 61.0), _waits(1, 61.0))
    assert verdict is not None
    assert verdict.kind is HangKind.APART


def test_a_stopped_rank_does_not_wait_whatever_its_device_does() -> None:
    stopped = replace(_on_device(1, 6.0), standstill=Standstill.STOPPED)
    assert _compare(_on_device(0, 6.0), stopped) == HangVerdict(HangKind.LATE, (1,), (0,), NOW - 6.0)


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
        ({}, 60.0),
        ({"steps": 1}, 60.0),
        ({"phase": Phase.EVALUATE}, 60.0),
        ({"phase": Phase.LEAVING}, 60.0),
        ({"phase": Phase.SAVE}, 300.0),
        ({"phase": Phase.COMPILE}, 300.0),
    ],
)
def test_a_rank_that_moves_is_slow_after_a_minute_or_its_patience(changes: dict[str, Any], limit: float) -> None:
    moves = _look(**changes)
    assert _compare(_waits(0, limit - 0.1), _works(1, 1, moves)) is None
    verdict = _compare(_waits(0, limit + 0.1), _works(1, 1, moves))
    assert verdict == HangVerdict(HangKind.LATE, (1,), (0,), NOW - limit - 0.1)
    assert _compare(_waits(0, limit + 0.1), _works(1, 1, moves), usual=31) is None, "a hundred median steps"


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 5.0),
        ({"steps": 1}, 60.0),
        ({"steps": None}, 60.0),
        ({"phase": Phase.EVALUATE}, 60.0),
        ({"phase": Phase.LEAVING}, 60.0),
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
    assert (verdict.kind, verdict.late, verdict.waiting) == (HangKind.APART, (), (0, 1))
    assert _compare(_waits(0, 50), _waits(1, 50), whole=False) is None, "another machine's ranks may be busy"
    assert _compare(_waits(0, 61), _waits(1, 61), whole=False) is not None


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.RESTORE, Phase.EVALUATE, Phase.COMPILE])
def test_where_all_wait_no_work_of_a_phase_takes_the_time(phase: Phase) -> None:
    saves = Seen(1, _look(phase, waiting=True), moved=NOW - 6)
    verdict = _compare(_waits(0, 6), saves)
    assert verdict is not None
    assert verdict.kind is HangKind.APART
    here = replace(saves, moved=NOW - 70)
    may_last = phase is not Phase.EVALUATE  # what the ranks of another machine do is not known
    assert (_compare(_waits(0, 70), here, whole=False) is None) == may_last


def test_nobody_moves_and_nobody_is_known_to_wait() -> None:
    verdict = _compare(_works(0, 6), _works(1, 6))
    assert verdict is not None
    assert verdict.kind is HangKind.STILL
    assert _compare(_works(0, 6), _works(1, 4)) is None
    assert _compare(_works(0, 6)) is None, "a rank alone holds up nobody"
    assert settle(verdict, {0: Doing.WORKS, 1: Doing.WORKS}) is None
    assert settle(verdict, {0: Doing.WAITS, 1: Doing.WORKS}) == HangVerdict(HangKind.LATE, (1,), (0,), verdict.since)
    assert settle(verdict, {0: Doing.WAITS, 1: Doing.WAITS}) == HangVerdict(HangKind.APART, (), (0, 1), verdict.since)


@pytest.mark.parametrize("standstill", sorted(HALTS, key=str))
@pytest.mark.parametrize(
    "changes",
    [
        {"steps": None},
        {"reason": "evaluation"},
        *({"phase": phase} for phase in Phase if phase is not Phase.WAIT),
    ],
    ids=str,
)
def test_who_cannot_go_on_has_no_longer_whatever_it_is_at(changes: dict[str, Any], standstill: Standstill) -> None:
    late = _look(**changes)
    assert _compare(_waits(0, 4.9), _works(1, 60, late, standstill=standstill), usual=50) is None
    verdict = _compare(_waits(0, 5.1), _works(1, 5.1, late, standstill=standstill), usual=50)
    assert verdict == HangVerdict(HangKind.LATE, (1,), (0,), NOW - 5.1)


def test_who_cannot_go_on_is_named_beside_one_that_is_excused() -> None:
    stopped = _works(1, 6, standstill=Standstill.STOPPED)
    verdict = _compare(_waits(0, 6), stopped, _works(2, 6, reason="upload"))
    assert verdict is not None
    assert (verdict.late, verdict.waiting) == ((1,), (0,))


def test_who_is_stopped_where_nobody_is_known_to_wait_is_asked_for_early() -> None:
    early = [_works(0, 6, steps=None), _works(1, 6, steps=None)]
    assert _compare(*early) is None, "both start, for all that is known"
    stopped = _works(1, 6, steps=None, standstill=Standstill.STOPPED)
    verdict = _compare(early[0], stopped)
    assert verdict is not None
    assert verdict.kind is HangKind.STILL
    assert _compare(early[0], _works(1, 6, steps=None, standstill=Standstill.LOCKED)) is None, "it may wait, by its own"


def _mark(phase: Phase, event: int, *, waits: bool = False) -> int:
    return event * SERIAL + phase * 17 + WAITS * waits


@pytest.mark.parametrize("standstill", list(Standstill))
def test_who_is_at_a_standstill_does_not_wait_whatever_its_page_says(standstill: Standstill) -> None:
    stopped = replace(_waits(1, 7), standstill=standstill)
    assert _compare(_waits(0, 6), stopped) == HangVerdict(HangKind.LATE, (1,), (0,), NOW - 6)
    assert _compare(_waits(0, 6), stopped, _waits(2, 7)) == HangVerdict(HangKind.LATE, (1,), (0, 2), NOW - 6)
    assert _compare(_waits(0, 4), stopped) is None
    assert _compare(stopped, _works(0, 1)) is None, "nobody waits for it yet"
    early = replace(_waits(1, 7, steps=0), standstill=standstill)
    assert _compare(_waits(0, 6), early) is not None, "in a collective there is no start-up"


@pytest.mark.parametrize("standstill", [Standstill.TRACED, Standstill.STARVED])
def test_a_debugger_or_a_busy_machine_at_a_ranks_own_work_changes_nothing(standstill: Standstill) -> None:
    held = _works(1, 50, phase=Phase.EVALUATE, standstill=standstill)
    assert _compare(_waits(0, 50), held) is None
    assert _compare(_waits(0, 61), replace(held, moved=NOW - 61)) is not None


def test_ranks_that_all_stand_still_are_all_named() -> None:
    stopped = [replace(_waits(rank, 6), standstill=Standstill.STOPPED) for rank in range(2)]
    verdict = _compare(*stopped)
    assert verdict == HangVerdict(HangKind.LATE, (0, 1), (), NOW - 6)
    assert settle(verdict, {0: Doing.WORKS, 1: Doing.WORKS}) == verdict
    assert _compare(stopped[0]) is None, "a rank alone holds up nobody"


def test_the_time_of_a_rank_that_stands_still_in_a_collective_is_no_waiting() -> None:
    looker = Looker(2, 0.0)
    waits = SERIAL + WAITS + int(Phase.REDUCE)
    looker.still = frozenset([1])
    for turn in range(1, 101):
        looker.look([waits, waits], turn * 0.02)
    assert looker.shares.of(0)[Phase.WAIT] > 0.95
    assert looker.shares.of(1)[Phase.WAIT] == 0
    assert looker.shares.held[1] > 1.9


def test_a_looker_knows_since_when_and_forgets_what_came_before_a_break() -> None:
    looker = Looker(2, 100.0)
    assert looker.due == 100.0
    looker.look([_mark(Phase.DATA, 1), 0], 101.0)
    looker.look([_mark(Phase.DATA, 1), _mark(Phase.REDUCE, 1, waits=True)], 102.0)
    assert looker.moved == [101.0, 102.0]
    looker.look([_mark(Phase.DATA, 2), _mark(Phase.REDUCE, 1, waits=True)], 103.0)
    assert looker.moved == [103.0, 102.0], "the same phase once more is a sign of life"
    looker.look([_mark(Phase.DATA, 2), _mark(Phase.REDUCE, 1, waits=True)], 103.0 + ASLEEP + 0.1)
    assert looker.moved == [107.1, 107.1]
    assert looker.shares.seconds[0][Phase.DATA] == 2.5, "half of the first; what nobody looked at is no phase's"


def test_the_time_of_a_person_in_a_debugger_is_nobodys() -> None:
    looker = Looker(2, 100.0)
    marks = [_mark(Phase.DATA, 2), _mark(Phase.REDUCE, 1, waits=True)]
    looker.look(marks, 101.0)
    looker.look(marks, 102.0, debugging=True)
    looker.look(marks, 103.0, debugging=True)
    assert looker.moved == [103.0, 103.0], "both begin to wait anew"
    looker.look(marks, 104.0)
    assert looker.moved == [103.0, 103.0]
    assert [sum(seconds) for seconds in looker.shares.seconds] == [2.0, 2.0]


def test_looks_come_often_at_first_irregularly_and_never_rarely() -> None:
    looker, now, pauses = Looker(1, 0.0), 0.0, []
    for event in range(1, 2000):
        looker.look([_mark(Phase.DATA, event)], now)
        pauses.append(looker.due - now)
        now = looker.due
    assert 280 < sum(1 for at in _running(pauses) if at < 5.0) < 350
    assert all(0.0079 <= pause <= 0.046 for pause in pauses)
    assert len({round(pause, 4) for pause in pauses[:100]}) > 20


def _running(values: list[float]) -> list[float]:
    total, found = 0.0, []
    for value in values:
        total += value
        found.append(total)
    return found


def test_shares_of_known_steps_are_right_to_three_points() -> None:
    """Also those of steps that last as long as the time between two looks, or a part of it."""
    parts = {Phase.DATA: 0.5, Phase.FORWARD: 0.1, Phase.BACKWARD: 0.25, Phase.OWN: 0.05, Phase.WAIT: 0.1}
    for step, run in ((0.001, 30), (0.008, 30), (0.016, 30), (0.03, 30), (0.08, 5), (0.137, 5), (1.0, 5)):
        looker, now = Looker(1, 0.0), 0.0
        while now < run:
            within, phase = now / step % 1.0, Phase.DATA
            for phase, part in parts.items():  # noqa: B007  (the one in which the loop ends)
                within -= part
                if within < 0:
                    break
            waits = phase is Phase.WAIT
            looker.look([_mark(Phase.REDUCE if waits else phase, int(now / step), waits=waits)], now)
            now = looker.due
        shares = looker.shares.of(0)
        assert sum(shares.values()) == pytest.approx(1.0)
        for phase in Phase:
            assert abs(shares[phase] - parts.get(phase, 0.0)) < 0.03, (step, phase)


def test_shares_of_some_phases_add_up_as_well() -> None:
    shares = Shares(2)
    assert shares.of(0) == dict.fromkeys(Phase, 0.0)
    for phase, seconds in ((Phase.DATA, 0.0), (Phase.DATA, 1.0), (Phase.FORWARD, 0.0), (Phase.FORWARD, 3.0)):
        shares.add([_mark(phase, 1), 0], seconds)
    shares.add([0, 0], 5.0)
    assert shares.of(0, (Phase.DATA, Phase.FORWARD)) == {Phase.DATA: 1 / 6.5, Phase.FORWARD: 5.5 / 6.5}
    assert shares.of(1)[Phase.START] == 1.0


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
