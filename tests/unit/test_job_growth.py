"""Whose memory grew all the time, from made-up looks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lockstep.job.account import Ledger, Progress
from lockstep.job.growth import Growth
from lockstep.job.page import Phase
from lockstep.job.summary import RunSummary, Summary

_MB = 2**20


def _summary(*memory: Callable[[int], float], seconds: int = 40, here: int = 2) -> Summary:
    """The summary of ranks that take ten steps a second and hold so many MiB of their own at a second."""
    ledger = Ledger()
    for now in range(seconds + 1):
        spent = [0.0] * len(Phase)
        spent[Phase.FORWARD] = float(now)
        ranks = {
            rank: Progress(10 * (now + 1), tuple(spent), own_memory=int(own(now) * _MB))
            for rank, own in enumerate(memory)
        }
        ledger.add(ranks, now=float(now), looks=30 * (now + 1))
    found = Summary.of_start(ledger, taken=10 * seconds, here=range(here), world_size=len(memory))
    assert found is not None
    return found


def _steady(now: int) -> float:
    return 300.0 + (now % 3)


def test_memory_that_creeps_is_told_with_the_ranks_and_what_a_step_adds() -> None:
    found = _summary(lambda now: 300 + 20 * now, _steady)
    assert found.growths == (Growth(0, 300 * _MB, 900 * _MB, 2 * _MB),)
    text = RunSummary((found,)).describe({})
    assert "memory creeps: that of rank 0 grew all the time, by 2 MiB a step, from 300 MiB to 900 MiB. " in text
    assert "If it goes on after the first epoch, something keeps what each step makes" in text
    assert "if it ends there, the data set keeps the samples that it reads" in text
    both = RunSummary((_summary(lambda now: 300 + 20 * now, lambda now: 300 + 10 * now),)).describe({})
    assert "that of ranks 0 and 1 grew all the time, by 2 MiB a step" in both


def test_what_comes_and_goes_within_a_step_does_not_hide_it() -> None:
    (growth,) = _summary(lambda now: 300 + 20 * now + 200 * (now % 2), _steady).growths
    assert growth.a_step == pytest.approx(2 * _MB, rel=0.1)


def test_memory_that_fills_the_allocators_holes_at_times_creeps() -> None:
    """The resident MiB, those of mapped files included, of a rank of docs/symptoms/memory-creeps.md under load."""
    held = [430, 440, 452, 456, 473, 473, 495, 495, 501, 503, 505, 505, 511, 511, 521, 523]
    held += [523, 527, 537, 539, 545, 549, 559, 561, 567, 567, 583, 585, 591, 593, 601, 607, 607]
    (growth,) = _summary(held.__getitem__, _steady, seconds=len(held) - 1).growths
    assert (growth.before, growth.after) == (430 * _MB, 567 * _MB)


@pytest.mark.parametrize(
    "memory",
    [
        _steady,
        lambda now: 300 + (500 if now > 20 else 0),  # a second model
        lambda now: 300 + min(600, 40 * now),  # a cache that fills up
        lambda now: 300 + 600 * (1 - 0.9**now),  # an allocator that reaches its peak
        lambda now: 900 - 10 * now,
        lambda now: 300 + 1.5 * now,  # less than 64 MiB
        lambda now: 30_000 + 20 * now,  # less than a tenth
        lambda now: 0 if now < 10 else 300 + 20 * now,  # not known at first
    ],
)
def test_memory_that_is_in_order_is_not_told(memory: Callable[[int], float]) -> None:
    assert _summary(memory, _steady).growths == ()


def test_short_runs_and_ranks_of_other_machines_are_not_judged() -> None:
    assert _summary(lambda now: 300 + 200 * now, _steady, seconds=3).growths == ()
    assert _summary(_steady, lambda now: 300 + 20 * now, here=1).growths == ()


def test_of_several_starts_the_greatest_growth_is_told_once() -> None:
    one, other = _summary(lambda now: 300 + 20 * now, _steady), _summary(lambda now: 300 + 30 * now, _steady)
    lines = re.findall("memory creeps: .*", RunSummary.of([one, other]).describe({}))  # type: ignore[union-attr]
    assert len(lines) == 1
    assert "that of rank 0 grew all the time, by 3 MiB a step, from 300 MiB to 1.17 GiB" in lines[0]
