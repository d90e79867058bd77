"""When a rank held up the others: found where it was planted, and nowhere else."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from lockstep.job.account import Ledger, Milestone, TimeAccount
from lockstep.job.page import Phase
from lockstep.job.stretches import Stretch, find, find_pauses
from lockstep.job.summary import Bottleneck, Summary
from tests.simulated import simulate


def _found(ledger: Ledger, ranks: int = 4) -> list[Stretch]:
    return find(ledger.moments, range(ranks))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_are_equal_are_not_blamed_for_any_stretch(seed: int, ranks: int) -> None:
    assert _found(simulate(seed, slow=lambda *_: 1.0, ranks=ranks), ranks) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_tenth_of_an_hour_of_noise_has_no_stretch(seed: int) -> None:
    assert _found(simulate(seed, slow=lambda *_: 1.0, ranks=2, seconds=360.0), 2) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ranks", "by"), [(2, 1.3), (2, 1.5), (4, 1.4), (4, 2.0)])
def test_a_planted_stretch_is_found_with_its_rank_its_time_its_phase_and_what_it_costs(
    seed: int, ranks: int, by: float
) -> None:
    ledger = simulate(
        seed,
        slow=lambda rank, now: by if rank == 1 and 20.0 <= now < 40.0 else 1.0,
        ranks=ranks,
        phase=Phase.DATA,
    )
    (stretch,) = _found(ledger, ranks)
    assert (stretch.rank, stretch.phase) == (1, Phase.DATA)
    assert (stretch.begin, stretch.end) == pytest.approx((20.0, 40.0), abs=2.5)
    steady = _found(simulate(seed, slow=lambda rank, _: by if rank == 1 else 1.0, ranks=ranks), ranks)
    assert len(steady) == 1, "slow all the time"
    assert stretch.part == pytest.approx(steady[0].part, abs=0.08), "as dear as where it is slow all the time"
    assert stretch.lost == pytest.approx(stretch.part * 20.0, rel=0.2)


def test_ranks_that_are_slow_one_after_the_other_are_told_apart() -> None:
    ledger = simulate(3, slow=lambda rank, now: 1.6 if rank == int(now // 20) else 1.0)
    assert [stretch.rank for stretch in _found(ledger)] == [0, 1, 2]


def test_a_rank_that_is_slow_twice_has_two_stretches() -> None:
    ledger = simulate(4, slow=lambda rank, now: 1.6 if rank == 2 and now % 30 < 12 else 1.0)
    found = [
        (stretch.rank, round(stretch.begin / 30), round((stretch.end - stretch.begin) / 12))
        for stretch in _found(ledger)
    ]
    assert found == [(2, 0, 1), (2, 1, 1)]


def test_what_is_short_or_cheap_is_no_stretch() -> None:
    assert _found(simulate(5, slow=lambda rank, now: 3.0 if rank == 1 and 20 <= now < 23 else 1.0)) == []
    assert _found(simulate(5, slow=lambda rank, _: 1.05 if rank == 1 else 1.0)) == []


def _pausing(seed: int, *, rank: int = 1, seconds: float = 12.0, slow: int | None = None) -> Ledger:
    """One step in the middle takes a rank so much longer; another rank may be slow all the time."""

    def by(each: int, now: float) -> float:
        if each == rank and 30.0 <= now < 30.05:  # of steps of 20 to 35 ms just one begins then
            return seconds / 0.02
        return 1.4 if each == slow else 1.0

    return simulate(seed, slow=by, ranks=3)


def _summary(ledger: Ledger) -> Summary:
    summary = Summary.of_start(ledger, taken=2000, here=range(3), world_size=3)
    assert summary is not None
    return summary


@pytest.mark.parametrize("seed", range(6))
def test_a_single_pause_is_told_as_one_and_makes_no_rank_slow(seed: int) -> None:
    ledger = _pausing(seed)
    ((place, pause),) = find_pauses(ledger.moments, range(3)).items()
    assert (pause.rank, pause.phase, pause.is_pause) == (1, Phase.FORWARD, True)
    assert pause.lost == pytest.approx(12.0, rel=0.2)
    assert find(ledger.moments, range(3), [place]) == []
    summary = _summary(ledger)
    assert TimeAccount.straggler(summary) is not None, "without a look at pauses it is the slow one"
    assert summary.straggler() is None
    assert summary.bottleneck is Bottleneck.BALANCED
    (line,) = summary.remarks()
    assert re.fullmatch(
        r"rank 1 paused once, from 0:\d\d to 0:\d\d, in forward: one step took 1\d(\.\d+)? s longer", line
    )


def test_the_rank_that_is_slow_is_found_beside_another_ones_pause() -> None:
    summary = _summary(_pausing(3, slow=2))
    found = summary.straggler()
    assert found is not None
    assert found.rank == 2
    assert [(each.rank, each.is_pause) for each in summary.remarkable] == [(1, True)]
    both = summary.plus(_summary(_pausing(4)))
    assert [each.rank for each in both.remarkable if each.is_pause] == [1, 1]
    assert both.steady.seconds == pytest.approx(both.seconds - 25.0, abs=4.0)


def test_steps_that_all_take_long_are_no_pauses() -> None:
    ledger = simulate(5, slow=lambda rank, _: 500.0 if rank else 200.0, ranks=2, seconds=200.0)
    assert find_pauses(ledger.moments, range(2)) == {}


def test_two_ranks_that_are_slow_together_cost_nothing_each() -> None:
    """Without either of them a step would take as long."""
    assert _found(simulate(6, slow=lambda rank, now: 1.5 if rank < 2 and 20 <= now < 40 else 1.0)) == []


def test_ranks_of_other_machines_are_blamed_only_where_it_is_surer() -> None:
    ledger = simulate(7, slow=lambda rank, now: 1.6 if rank == 3 and 20 <= now < 45 else 1.0)
    (stretch,) = find(ledger.moments, range(2))
    assert stretch.rank == 3
    assert (stretch.begin, stretch.end) == pytest.approx((20.0, 45.0), abs=2.5)


def test_the_stretches_of_many_ranks_are_found_quickly() -> None:
    moments = simulate(8, slow=lambda rank, now: 1.5 if rank == 1 and 20 <= now < 40 else 1.0).moments
    many = [
        Milestone(each.at, each.looks, {rank: each.ranks[rank % 4 if rank != 5 else 0] for rank in range(256)})
        for each in moments
    ]
    begun = time.process_time()
    assert find(many, range(256)) == [], "63 others are as slow as rank 1"
    assert time.process_time() - begun < 5.0, "with what a busy machine adds"


def test_one_rank_alone_and_too_few_moments() -> None:
    moments = simulate(9, slow=lambda *_: 1.0, ranks=1).moments
    assert find(moments, range(1)) == []
    assert find(moments[:1], range(1)) == []
    assert find([], range(1)) == []


def test_progress_adds_up() -> None:
    moments = simulate(10, slow=lambda *_: 1.0, ranks=2).moments
    first, middle, last = (moments[place].ranks[0] for place in (0, len(moments) // 2, -1))
    both, whole = middle.since(first).plus(last.since(middle)), last.since(first)
    assert replace(both, seconds=(), held=0.0) == replace(whole, seconds=(), held=0.0)
    assert (*both.seconds, both.held) == pytest.approx((*whole.seconds, whole.held))
    account = TimeAccount.between(moments[0], moments[-1], range(2))
    assert account.step == pytest.approx(account.seconds / account.steps)
