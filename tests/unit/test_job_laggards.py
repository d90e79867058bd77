"""Who was steadily slower, from made-up sums."""

from __future__ import annotations

from lockstep.job.hang import Laggard, Pace, Progress
from lockstep.job.page import Phase


def _after(steps: int, **per_step: float) -> Progress:
    seconds = [0.0] * len(Phase)
    for name, value in per_step.items():
        seconds[Phase[name.upper()]] = value * steps
    return Progress(steps, tuple(seconds))


def _found(*moments: dict[int, Progress]) -> Laggard | None:
    pace = Pace()
    for moment in moments:
        pace.add(moment)
    return pace.laggard()


def test_a_rank_that_is_slower_in_every_interval_is_named_with_its_phase() -> None:
    laggard = _found(
        *(
            {
                0: _after(10 * i, data=0.002, forward=0.01, reduce=0.02),
                1: _after(10 * i, data=0.022, forward=0.01),
                2: _after(10 * i, data=0.003, forward=0.01, reduce=0.02),
            }
            for i in range(1, 8)
        )
    )
    assert laggard is not None
    assert laggard.describe() == (
        "rank 1 was steadily slower than the others: 32 ms of work a step against their 12.5 ms, most of the "
        "difference in data (22 ms against 2.5 ms)"
    )


def test_equal_ranks_few_intervals_and_turns_name_nobody() -> None:
    even = [{0: _after(i * 5, forward=0.01), 1: _after(i * 5, forward=0.011)} for i in range(1, 20)]
    assert _found(*even) is None
    uneven = [{0: _after(i * 5, forward=0.01), 1: _after(i * 5, forward=0.03)} for i in range(1, 20)]
    assert _found(*uneven[:5]) is None, "not steadily"
    assert _found(*uneven) is not None
    pace, sums = Pace(), [0.0, 0.0]
    for i in range(1, 20):
        sums[i % 2] += 0.1  # each is slow in turn
        sums[1 - i % 2] += 0.05
        pace.add({rank: _after(i + 1, forward=sums[rank] / (i + 1)) for rank in (0, 1)})
    assert pace.laggard() is None


def test_one_rank_alone_and_steps_that_nobody_took_are_left_out() -> None:
    assert _found(*({0: _after(i, forward=0.01)} for i in range(1, 20))) is None
    assert _found(*({0: _after(3, forward=0.01), 1: _after(3, forward=0.1)} for _ in range(20))) is None
