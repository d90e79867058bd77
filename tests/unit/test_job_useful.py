"""Which part of a run's time was useful, and what it cost, from made-up starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.job.account import Progress
from lockstep.job.page import Phase
from lockstep.job.summary import RunSummary, Summary
from lockstep.job.useful import UsefulTime, parse_price


def _start(number: int, *, before: int | None, taken: int = 100, starting: float = 4.0, **phases: float) -> Summary:
    """A start of two ranks that took ``taken`` steps in 0.1 s each, after ``starting`` seconds; ``slow`` are the
    seconds that rank 1 works longer in its forward."""
    seconds, slow = 0.1 * taken, phases.pop("slow", 0.0)
    ranks = {}
    for rank in range(2):
        spent = [0.0] * len(Phase)
        for name, part in phases.items():
            spent[Phase[name.upper()]] = part
        own = slow if rank == 1 else 0.0
        spent[Phase.FORWARD] += own
        spent[Phase.WAIT] += slow - own
        spent[Phase.BACKWARD] = seconds - sum(spent)
        ranks[rank] = Progress(taken, tuple(spent), held=own)
    return Summary(
        seconds,
        round(30 * seconds),
        ranks,
        here=(0, 1),
        taken=taken,
        world_size=2,
        starts=(number,),
        restarts=number,
        starting=starting,
        lasted=starting + seconds,
        before=before,
    )


def _useful(*starts: Summary, lasted: float) -> UsefulTime:
    whole = RunSummary.of(starts, lasted=lasted)
    assert whole is not None
    return whole.useful


def test_of_one_start_all_but_the_start_up_and_the_saving_is_useful() -> None:
    found = _useful(_start(0, before=0, save=1.0), lasted=15.0)
    assert (found.lasted, found.restarts, found.restarting, found.late) == (15.0, 0, 0.0, {})
    assert found.starting == pytest.approx(5.0), "what passes before the ranks are forked is part of it"
    assert found.saving == pytest.approx(1.0)
    assert found.useful == pytest.approx(9.0)


def test_restarts_cost_their_start_up_and_the_steps_that_are_taken_again() -> None:
    """The first start reached step 100, the second one resumed from 60, the third from 150 of 160."""
    starts = [_start(0, before=0), _start(1, before=60), _start(2, before=150, starting=2.0)]
    found = _useful(*starts, lasted=45.0)
    assert (found.restarts, found.repeated) == (2, 50)
    assert found.starting == pytest.approx(4.0)
    assert found.restarting == pytest.approx(45.0 - 40.0 + 4.0 + 2.0 + 5.0)
    assert found.useful == pytest.approx(45.0 - 4.0 - 16.0) == pytest.approx(0.1 * 250)
    assert found.describe() == "useful time: 56% of 0:45; 2 restarts (50 steps again) 36%, start-up 9%"


def test_a_step_that_is_taken_again_is_lost_once() -> None:
    """What the others waited for a rank in such a step, and what it saved, is part of the restart already."""
    starts = [_start(number, before=50 * number, slow=2.0, save=1.0) for number in range(2)]
    found = _useful(*starts, lasted=28.0)
    assert found.repeated == 50
    assert found.restarting == pytest.approx(4.0 + 5.0)
    assert found.late == {1: pytest.approx(0.75 * 4.0)}
    assert found.saving == pytest.approx(0.75 * 2.0)
    assert found.useful == pytest.approx(0.75 * 20.0 - 3.0 - 1.5)


def test_the_first_start_of_machines_that_meet_is_no_restart() -> None:
    """A launcher that meets others has the number 0 for what it prepares before they have met."""
    found = _useful(replace(_start(1, before=0), restarts=0), lasted=15.0)
    assert (found.restarts, found.restarting) == (0, 0.0)
    assert found.starting == pytest.approx(5.0)


def test_where_nobody_counts_the_steps_of_the_run_none_is_said_to_be_repeated() -> None:
    assert _useful(_start(0, before=None), _start(1, before=None), lasted=30.0).repeated == 0


def test_a_start_without_a_second_step_counts_as_part_of_the_restarts() -> None:
    found = _useful(_start(1, before=0), lasted=24.0)
    assert (found.restarts, found.starting) == (1, 0.0)
    assert found.restarting == pytest.approx(14.0)


def test_a_slow_rank_costs_what_the_verdict_says() -> None:
    start = _start(0, before=0, slow=3.0)
    straggler = start.straggler()
    assert straggler is not None
    found = _useful(start, lasted=14.0)
    assert found.late == {1: pytest.approx(straggler.costs * 100)} == {1: pytest.approx(3.0)}
    assert found.useful == pytest.approx(7.0)


def test_a_price_is_that_of_all_nodes() -> None:
    two = replace(_start(0, before=0, slow=3.0), machines=(("a", 1), ("b", 1)))
    found = _useful(two, lasted=14.0)
    assert found.nodes == 2
    assert found.cost(3600.0) == pytest.approx(28.0)
    assert found.describe_cost(3600.0) == (
        "this run cost 28.00 (2 nodes for 0:14 at 3600/h), of it 8.00 for start-up and 6.00 for rank 1's lateness"
    )
    assert found.to_json() == {
        "lasted": 14.0,
        "useful": pytest.approx(7.0),
        "starting": 4.0,
        "restarting": 0.0,
        "restarts": 0,
        "repeated_steps": 0,
        "late": {"1": pytest.approx(3.0)},
        "saving": 0.0,
        "nodes": 2.0,
    }


def test_the_summary_tells_the_useful_time_where_there_is_a_price_or_a_restart() -> None:
    one = RunSummary.of([_start(0, before=0)], lasted=15.0)
    two = RunSummary.of([_start(0, before=0), _start(1, before=60)], lasted=30.0)
    assert one is not None
    assert two is not None
    assert "useful" not in one.describe({})
    assert one.describe({}, price=3.2).splitlines()[-2:] == [one.useful.describe_cost(3.2), one.useful.describe()]
    assert two.describe({}).splitlines()[-1] == two.useful.describe()
    assert two.to_json({})["useful"] == two.useful.to_json()


@pytest.mark.parametrize(("text", "price"), [("3.2/h", 3.2), ("3", 3.0), (".5 / hour", 0.5)])
def test_prices(text: str, price: float) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "-1/h", "3.2/min", "3,2/h", "nan", "$3/h"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the price of one node per hour"):
        parse_price(text)
