"""What the time went to and who held up the others, from made-up sums."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from lockstep.job.account import Ledger, Progress
from lockstep.job.hang import Shares
from lockstep.job.page import WAITS, Phase
from lockstep.job.stretches import Stretch
from lockstep.job.summary import Bottleneck, RunSummary, Summary
from lockstep.job.throughput import StepFlops
from lockstep.text import as_duration
from tests.simulated import simulate

_MB = 2**20


def _summary(ranks: dict[int, dict[str, float]], *, steps: int = 1000, seconds: float = 20.0, **other: int) -> Summary:
    """Ranks that spent so many parts of their time in each phase; ``held`` is no phase."""
    found = {}
    for rank, parts in ranks.items():
        spent = [0.0] * len(Phase)
        for name, part in parts.items():
            if name != "held":
                spent[Phase[name.upper()]] = part * seconds
        held = parts.get("held", 0.0) * seconds
        found[rank] = Progress(steps, tuple(spent), other.get("samples", 0), held)
    looks, away = other.get("looks", 1000), other.get("away", 0)
    return Summary(seconds, looks, found, here=list(found), taken=steps, world_size=len(found) + away)


def _describe(summary: Summary, peaks: dict[int, int | None] | None = None) -> str:
    return RunSummary((summary,)).describe(peaks or {})


_MORE = "next: lockstep runs report draws the run; lockstep runs plan estimates more ranks"


def test_three_lines_when_all_is_well() -> None:
    even = {rank: {"data": 0.1, "forward": 0.3, "backward": 0.5, "wait": 0.1, "held": 0.1} for rank in (0, 1)}
    summary = _summary(even, samples=32_000)
    assert summary.bottleneck is Bottleneck.BALANCED
    assert _describe(summary, {0: 300 * _MB, 1: 412 * _MB}) == (
        "1,000 steps, 20 ms each, 3,200 samples/s on 2 ranks\n"
        "balanced: data 10%, forward 30%, backward 50%, waiting 10%; at most 412 MiB of memory a rank\n"
        f"{_MORE}"
    )
    told = RunSummary((summary,)).describe({}, run="./logs").splitlines()
    assert told[-1] == "next: lockstep runs report ./logs draws the run; lockstep runs plan ./logs estimates more ranks"


@pytest.mark.parametrize(
    ("phase", "bottleneck", "name"),
    [
        ("data", Bottleneck.INPUT_STRAGGLER, "data"),
        ("forward", Bottleneck.COMPUTE_STRAGGLER, "forward"),
        ("own", Bottleneck.COMPUTE_STRAGGLER, "your code"),
    ],
)
def test_a_slow_rank_is_named_with_its_phase_and_what_it_costs(phase: str, bottleneck: Bottleneck, name: str) -> None:
    usual = {"data": 0.1, "forward": 0.2, "own": 0.1, "backward": 0.3}
    slow = {**usual, phase: usual[phase] + 0.25, "wait": 0.05, "held": 0.6}
    summary = _summary({0: {**usual, "wait": 0.3}, 1: slow, 2: {**usual, "wait": 0.3}})
    assert summary.bottleneck is bottleneck
    straggler = summary.straggler()
    assert straggler is not None
    assert (straggler.rank, straggler.phase) == (1, Phase[phase.upper()])
    assert straggler.costs == pytest.approx(0.25 * 0.02)
    first, why, head, *rows, then = _describe(summary, {0: None, 1: None, 2: None}).splitlines()
    assert first == "1,000 steps, 20 ms each on 3 ranks"
    own, others = 20 * (usual[phase] + 0.25), 20 * usual[phase]
    assert why == (
        f"{bottleneck.value}: rank 1, in {name}: {own:.3g} ms a step against {others:.3g} ms; without it a step would "
        "take 15 ms instead of 20 ms (25% less)"
    )
    assert head.split("  ") == ["rank", "data", "forward", "backward", "your code", "waiting"]
    assert rows[1].split() == [
        "1",
        *(f"{slow[column]:.0%}" for column in ("data", "forward", "backward", "own", "wait")),
    ]
    assert then == f"next: {summary.advice()}"
    assert ("lockstep runs stack 1 1" in then) is (phase != "forward")


def test_what_may_be_chance_is_no_second_cause() -> None:
    usual = {"data": 0.26, "forward": 0.29, "own": 0.27, "wait": 0.18}
    slow = {"data": 0.31, "forward": 0.25, "own": 0.42, "wait": 0.02, "held": 0.3}
    straggler = _summary({0: usual, 1: slow, 2: usual}, looks=860).straggler()
    assert straggler is not None
    assert straggler.phase is Phase.OWN
    straggler = _summary({0: usual, 1: slow, 2: usual}, looks=86_000).straggler()
    assert straggler is not None
    assert straggler.phase is None, "seen a hundred times as often, it is one"


def test_a_difference_that_no_phase_explains_has_no_single_cause() -> None:
    usual = {"data": 0.1, "forward": 0.2, "backward": 0.3}
    slow = {"data": 0.25, "forward": 0.35, "backward": 0.4, "held": 0.4}
    summary = _summary({0: {**usual, "wait": 0.4}, 1: slow})
    straggler = summary.straggler()
    assert straggler is not None
    assert straggler.phase is None
    assert "rank 1, no single cause; without it a step would take 12 ms instead of 20 ms (40% less)" in (
        _describe(summary)
    )


def test_what_is_not_surely_known_is_not_said() -> None:
    """One rank worked for a tenth longer, but the two took turns in most of the looks."""
    turns = {0: {"forward": 0.55, "wait": 0.45, "held": 0.35}, 1: {"forward": 0.65, "wait": 0.35, "held": 0.45}}
    few = _summary(turns, looks=100)
    assert few.straggler() is None
    assert few.bottleneck is Bottleneck.TURNS
    many = _summary(turns, looks=2000)
    found = many.straggler()
    assert found is not None
    assert found.rank == 1
    assert _summary(turns, steps=9, looks=2000).bottleneck is Bottleneck.SHORT
    assert _describe(_summary(turns, looks=59)).splitlines()[1].startswith("too short to tell: forward 60%, ")


def test_what_limits_ranks_that_are_equal() -> None:
    data = {rank: {"data": 0.3, "forward": 0.6, "wait": 0.1} for rank in (0, 1)}
    assert _summary(data).bottleneck is Bottleneck.INPUT
    network = {rank: {"forward": 0.6, "wait": 0.4} for rank in (0, 1)}
    assert _summary(network).bottleneck is Bottleneck.COMMUNICATION
    assert "for the network or for ranks of other machines" in _describe(_summary(network, away=1))
    assert "on 2 ranks of this machine" in _describe(_summary(network, away=1))
    each_other = {rank: {"forward": 0.6, "wait": 0.4, "held": 0.4} for rank in (0, 1)}
    assert _summary(each_other).bottleneck is Bottleneck.TURNS


def test_each_verdict_says_what_to_do_next() -> None:
    found = {
        Bottleneck.INPUT: _summary({rank: {"data": 0.3, "forward": 0.7} for rank in (0, 1)}),
        Bottleneck.COMMUNICATION: _summary({rank: {"forward": 0.6, "wait": 0.4} for rank in (0, 1)}),
        Bottleneck.TURNS: _summary({rank: {"forward": 0.6, "wait": 0.4, "held": 0.4} for rank in (0, 1)}),
        Bottleneck.SHORT: _summary({0: {"forward": 1.0}}, steps=3),
    }
    assert {summary.bottleneck for summary in found.values()} == {*found}
    told = [summary.advice() for summary in found.values()]
    apart = _summary({rank: {"forward": 0.6, "wait": 0.4} for rank in (0, 1)}, away=1)
    told.append(apart.advice())
    assert len({*told}) == 5, told
    assert "num_workers" in told[0]
    assert "lockstep doctor HOST HOST" in told[-1]
    for summary in (*found.values(), apart):
        assert _describe(summary).splitlines()[-1] == f"next: {summary.advice()}"
        assert summary.to_json({})["next"] == summary.advice()


@pytest.mark.parametrize(
    ("steps", "seconds", "looks", "missing"),
    [
        (9, 20.0, 1000, "10 steps or more after the first 2"),
        (500, 0.5, 30, "2 seconds or more"),
        (500, 4.0, 40, "6 seconds or more"),  # a busy machine, whose launcher came to look every tenth of a second
        (3, 0.2, 12, "10 steps or more after the first 2 and 2 seconds or more"),
        (3, 0.0, 0, "10 steps or more after the first 2 and 2 seconds or more"),
    ],
)
def test_a_run_that_is_too_short_is_asked_for_what_is_missing(
    steps: int, seconds: float, looks: int, missing: str
) -> None:
    summary = _summary({0: {"forward": 1.0}}, steps=steps, seconds=seconds, looks=looks)
    assert summary.bottleneck is Bottleneck.SHORT
    assert summary.advice() == f"train for {missing} to get a verdict"


def test_one_rank_alone_holds_up_nobody() -> None:
    summary = _summary({0: {"forward": 0.5, "own": 0.5}})
    assert summary.bottleneck is Bottleneck.BALANCED
    assert _describe(summary, {0: 3 * 2**30}).splitlines() == [
        "1,000 steps, 20 ms each on 1 rank",
        "balanced: forward 50%, your code 50%; at most 3 GiB of memory a rank",
        _MORE,
    ]


def _with_memory(whole: int, shared: int, own: int) -> list[str]:
    summary = _summary({0: {"forward": 1.0}, 1: {"forward": 1.0}})
    rank = replace(summary.ranks[1], memory=whole * _MB, shared_memory=shared * _MB, own_memory=own * _MB)
    return replace(summary, ranks={0: summary.ranks[0], 1: rank}).remarks()


def test_shared_memory_is_told_from_a_ranks_own() -> None:
    assert _with_memory(3072, 2048, 700) == [
        "of 3 GiB of memory of a rank, 2 GiB is shared: the machine has it once for all who use it; 700 MiB is the "
        "rank's own"
    ]
    assert _with_memory(300, 63, 200) == [], "too little"
    assert _with_memory(3000, 290, 2000) == [], "too small a part"


@pytest.mark.parametrize(
    ("peaks", "said"),
    [({0: 300 * _MB}, "too short to tell: at most 300 MiB of memory a rank"), ({0: None}, "too short to tell")],
)
def test_a_run_of_a_moment_says_what_is_known_of_it(peaks: dict[int, int | None], said: str) -> None:
    assert _describe(_summary({0: {}}, seconds=0.0, looks=0), peaks).splitlines()[1:-1] == [said]


def test_of_many_ranks_those_that_wait_least_have_a_row() -> None:
    ranks = {rank: {"forward": 0.5, "wait": 0.5} for rank in range(64)}
    ranks[37] = {"forward": 1.0, "held": 31.5}
    *lines, _ = _describe(_summary(ranks)).splitlines()
    assert len(lines) == 3 + 16 + 1
    assert any(line.split()[0] == "37" for line in lines[3:-1])
    assert lines[-1] == "(and 48 ranks that wait longer)"


def _at(steps: int, seconds: float, leaving: float = 0.0) -> Progress:
    spent = [0.0] * len(Phase)
    spent[Phase.FORWARD], spent[Phase.LEAVING] = seconds, leaving
    return Progress(steps, tuple(spent), steps * 4)


def test_only_what_lies_between_steps_that_all_have_taken_counts() -> None:
    ledger = Ledger()
    assert Summary.of_start(ledger, taken=0, here=(0, 1), world_size=2) is None
    ledger.add({0: _at(1, 9.0), 1: _at(5, 9.0)}, now=9.0, looks=9)
    young = Summary.of_start(ledger, end=9.0, taken=1, here=(0, 1), world_size=2)
    assert young is not None
    assert (young.taken, young.steps, young.seconds, young.looks) == (1, 0, 0.0, 0), "rank 0 warms up"
    assert (young.starting, young.lasted) == (9.0, 9.0)
    assert RunSummary.of([young, young]) is None, "nothing is known of what a step takes"
    for now in (10, 11, 12):
        ledger.add({0: _at(now, now), 1: _at(now, now)}, now=now, looks=now * 30)
    ledger.add({0: _at(12, 60.0), 1: _at(13, 60.0)}, now=60.0, looks=900)  # the end: rank 0 evaluates
    summary = Summary.of_start(ledger, taken=12, here=(0, 1), world_size=2)
    assert summary is not None
    assert (summary.taken, summary.steps, summary.seconds, summary.looks) == (12, 2, 2.0, 60)
    assert RunSummary((summary,)).throughput.samples_per_second == 8.0
    assert [rank.seconds[Phase.FORWARD] for rank in summary.ranks.values()] == [2.0, 2.0]


def test_the_moments_in_which_a_rank_leaves_count_only_for_the_number_of_steps() -> None:
    ledger = Ledger()
    for now in (10, 11):
        ledger.add({0: _at(now, now), 1: _at(now, now)}, now=now, looks=now * 30)
    ledger.add({0: _at(15, 11.5, 0.5), 1: _at(15, 12.0)}, now=12.0, looks=360)
    summary = Summary.of_start(ledger, taken=15, here=(0, 1), world_size=2)
    assert summary is not None
    assert (summary.taken, summary.steps, summary.seconds) == (15, 1, 1.0)
    assert summary.ranks[0].seconds[Phase.LEAVING] == 0


def test_ranks_of_other_machines_count_from_when_they_are_known_and_by_their_own_seconds() -> None:
    """Rank 1 is elsewhere: its seconds come late, and are those of another stretch of time."""
    ledger = Ledger()
    ledger.add({0: _at(8, 8)}, now=8, looks=240)
    for now in range(10, 31):
        waits = [0.0] * len(Phase)
        waits[Phase.FORWARD], waits[Phase.WAIT] = 0.6 * (now - 0.5), 0.3 * (now - 0.5)
        ledger.add(
            {0: _at(now, now), 1: Progress(now - 1, tuple(waits), 4 * now, 0.0, 7 * _MB)}, now=now, looks=30 * now
        )
    ledger.add({0: _at(40, 40)}, now=40, looks=1200)
    summary = Summary.of_start(ledger, taken=40, here=(0,), world_size=2)
    assert summary is not None
    assert (summary.steps, summary.seconds, summary.is_whole) == (20, 20.0, True)
    assert sum(summary.ranks[1].seconds) == pytest.approx(20.0)
    straggler = summary.straggler()
    assert straggler is not None
    assert straggler.rank == 0
    assert straggler.costs == pytest.approx(1 / 3)
    text = _describe(summary, {0: 5 * _MB})
    assert "on 2 ranks; start-up and first steps took 10.00 s\n" in text
    assert [line.split()[-1] for line in text.splitlines()[-3:-1]] == ["MiB", "MiB"]


def test_who_works_while_others_wait_holds_them_up() -> None:
    """Three ranks: in each look the one or the two that work share what the others wait."""
    shares, works, waits = Shares(3), int(Phase.FORWARD), int(Phase.FORWARD) + WAITS
    shares.add([works, works, works], 1.0)
    shares.add([waits, waits, waits], 1.0)
    assert shares.held == [0, 0, 0]
    shares.add([waits, works, waits], 1.0)
    assert shares.held == [0, 2.0, 0]
    shares.add([waits, works, works], 1.0)
    assert shares.held == [0, 2.5, 0.5]


@pytest.mark.parametrize("seed", range(20))
def test_looks_at_random_moments_blame_nobody_where_ranks_are_equal(seed: int) -> None:
    """Steps whose lengths vary by a third, independently on each rank, and a look at moments that vary, too."""
    assert _simulated(seed, slow=1.0).straggler() is None


@pytest.mark.parametrize("seed", range(20))
def test_looks_at_random_moments_find_a_rank_that_is_slower_by_a_fifth(seed: int) -> None:
    straggler = _simulated(seed, slow=1.2).straggler()
    assert straggler is not None
    assert (straggler.rank, straggler.phase) == (1, Phase.FORWARD)


def _simulated(seed: int, *, slow: float) -> Summary:
    ledger = simulate(seed, slow=lambda rank, _: slow if rank == 1 else 1.0)
    summary = Summary.of_start(ledger, taken=3000, here=range(4), world_size=4)
    assert summary is not None
    return summary


# All starts ----------------------------------------------------------------------------------------------------------


def _start(number: int, slow: int | None, *, ranks: int = 2, begin: float = 0.0, seconds: float = 20.0) -> Summary:
    """A start of some seconds in which a rank was slower by half, or none was."""
    ledger = simulate(number, slow=lambda rank, _: 1.5 if rank == slow else 1.0, ranks=ranks, seconds=seconds)
    summary = Summary.of_start(
        ledger, number=number, begin=-1.0, end=seconds, taken=1000 + number, here=range(ranks), world_size=ranks
    )
    assert summary is not None
    moved = tuple(replace(each, begin=each.begin + begin, end=each.end + begin) for each in summary.stretches)
    return replace(summary, stretches=moved)


def _cut_short(number: int, *, ranks: int = 2) -> Summary:
    """A start that ended after its first step, three seconds after it began."""
    ledger = Ledger()
    ledger.add(dict.fromkeys(range(ranks), _at(1, 3.0)), now=3.0, looks=90)
    summary = Summary.of_start(ledger, number=number, end=3.0, taken=1, here=range(ranks), world_size=ranks, restarts=1)
    assert summary is not None
    return summary


def test_a_start_of_a_single_step_counts_with_its_step_and_its_time() -> None:
    usual = RunSummary.of([_start(0, 1)])
    whole = RunSummary.of([_start(0, 1), _cut_short(1), _cut_short(2)])
    assert usual is not None
    assert whole is not None
    told, alone = whole.to_json({}), usual.to_json({})
    assert (told["starts"], told["steps"]) == ([0, 1, 2], 1002)
    assert told["starting"] == pytest.approx(alone["starting"] + 6.0), "three seconds each"
    unchanged = ("step", "verdict", "watched", "ranks")
    assert [told[key] for key in unchanged] == [alone[key] for key in unchanged]
    assert whole.headline() == (
        f"1,002 steps in 3 starts, {as_duration(alone['step'])} each on 2 ranks; start-up and first steps of the 3 "
        f"starts took {as_duration(told['starting'])}"
    )
    assert (told["useful"]["lasted"], told["useful"]["restarting"]) == pytest.approx((27.0, 6.0))


def test_a_start_of_a_single_step_on_other_ranks_is_a_part_of_its_own() -> None:
    flops = StepFlops(10**9, 4, 0.001)
    first = _start(0, None)
    first = replace(first, ranks={rank: replace(each, flops=flops) for rank, each in first.ranks.items()})
    whole = RunSummary.of([first, _cut_short(1, ranks=3)])
    assert whole is not None
    lines = whole.describe({}).splitlines()
    assert lines[0].startswith("1,001 steps in 2 starts, ")
    assert lines[0].partition(";")[0].endswith(" on 2 and 3 ranks")
    (place,) = (number for number, line in enumerate(lines) if line.startswith("start 1: "))
    assert lines[place : place + 2] == [
        "start 1: 1 step on 3 ranks; start-up and first steps took 3.00 s",
        "too short to tell",
    ]
    assert whole.throughput.flops_per_second == first.throughput.flops_per_second is not None


def test_a_rank_that_was_slow_in_the_first_start_is_told_of_after_a_restart() -> None:
    whole = RunSummary.of([_start(0, 1), _start(1, None, begin=30.0)])
    assert whole is not None
    head, verdict, *_ = whole.describe({}).splitlines()
    assert head.startswith("2,001 steps in 2 starts, ")
    assert re.match(r"compute straggler: rank 1, in forward: .* \(1\d% less\)$", verdict), (
        "half of the time, on the whole"
    )
    told = whole.to_json({})
    (stretch,) = told["stretches"]
    assert (stretch["rank"], stretch["phase"]) == (1, "forward")
    assert (stretch["from"], stretch["to"]) == pytest.approx((0.0, 20.0), abs=1.5)
    assert (told["starts"], told["steps"]) == ([0, 1], 2001)
    assert told["step"] == pytest.approx(told["watched"]["seconds"] / told["watched"]["steps"])


def test_a_short_slow_start_is_a_stretch_of_a_run_that_is_balanced_on_the_whole() -> None:
    whole = RunSummary.of([_start(0, 1, seconds=12.0), *(_start(number, None, seconds=60.0) for number in range(1, 4))])
    assert whole is not None
    assert [part.bottleneck for part in whole.parts] == [Bottleneck.BALANCED]
    lines = whole.describe({}).splitlines()
    assert re.fullmatch(r"rank 1 from 0:0\d to 0:1[12], in forward: cost [23]\d% of that time", lines[2]), lines


def test_starts_on_other_ranks_have_verdicts_of_their_own() -> None:
    starts = [_start(0, 1, ranks=4), _start(1, None, ranks=4, begin=20.0), _start(2, 0, ranks=2, begin=40.0)]
    whole = RunSummary.of(starts)
    assert whole is not None
    lines = whole.describe(dict.fromkeys(range(4), 300 * _MB)).splitlines()
    assert re.match(r"3,003 steps in 3 starts, [\d.]+ ms each on 4 and 2 ranks", lines[0]), lines
    first = next(
        place for place, line in enumerate(lines) if line.startswith("starts 0 and 1: 2,001 steps in 2 starts")
    )
    second = next(place for place, line in enumerate(lines) if line.startswith("start 2: 1,002 steps, "))
    assert lines[first].endswith("on 4 ranks")
    assert lines[second].endswith("on 2 ranks")
    assert lines[first + 1].startswith("compute straggler: rank 1, ")
    assert lines[second + 1].startswith("compute straggler: rank 0, ")
    told = whole.to_json({})
    assert [part["straggler"]["rank"] for part in told["parts"]] == [1, 0]
    assert sorted(told["ranks"]) == ["0", "1", "2", "3"]
    assert [line.partition(":")[0] for line in told["remarks"]][:1] == ["starts 0 and 1"]


def test_the_same_numbers_on_other_machines_are_other_ranks() -> None:
    one, other = (replace(_start(number, None), machines=((f"host{number}", 2),)) for number in (0, 1))
    whole = RunSummary.of([one, other])
    assert whole is not None
    assert len(whole.parts) == 2


def test_what_is_told_counts_from_the_beginning_of_the_run() -> None:
    start = replace(_start(0, 1), stretches=(Stretch(1, 108.0, 122.0, 3.0, Phase.DATA),))
    whole = RunSummary.of([replace(start, ranks=_start(0, None).ranks)], began=100.0)
    assert whole is not None
    assert "rank 1 from 0:08 to 0:22, in data: cost 21% of that time" in whole.describe({})


def test_the_time_before_the_second_step_is_named_apart() -> None:
    ledger = Ledger()
    for moment in range(40):
        ledger.add({0: _at(2 + moment, 9 + 0.05 * moment)}, now=9 + 0.05 * moment, looks=3 * moment)
    start = Summary.of_start(ledger, begin=0.0, end=11.0, taken=42, here=(0,), world_size=1)
    assert start is not None
    assert RunSummary((start,)).headline().startswith("42 steps, 50 ms each, ")
    assert RunSummary((start,)).headline().endswith("on 1 rank; start-up and first steps took 9.00 s")
    both = RunSummary((start.plus(start),))
    assert both.headline().endswith("on 1 rank; start-up and first steps of the 2 starts took 18.00 s")


def test_a_ledger_keeps_its_first_and_its_last_moment() -> None:
    ledger = Ledger()
    for now in range(10, 5000):
        ledger.add({0: _at(now, now)}, now=now, looks=now)
        assert (ledger.moments[0].at, ledger.moments[-1].at) == (10, now)
    assert 300 < len(ledger.moments) <= 601
    apart = [later.at - each.at for each, later in pairwise(ledger.moments)]
    assert max(apart[1:-1]) <= 2 * min(apart[1:-1]), "evenly"


# The garbage collector -----------------------------------------------------------------------------------------------


def test_pauses_of_the_garbage_collector_have_a_name_where_they_cost_something() -> None:
    ranks = _summary({0: {"forward": 0.7, "wait": 0.3}, 1: {"forward": 1.0, "held": 0.3}}).ranks
    paused = {0: ranks[0], 1: replace(ranks[1], collected=6.0, collections=12)}
    summary = Summary(20.0, 1000, paused, here=range(2), taken=1000, world_size=2)
    lines = _describe(summary).splitlines()
    assert lines[1].startswith("compute straggler: rank 1, in Python's garbage collector (in forward): 20 ms a step"), (
        lines
    )
    assert lines[2].startswith(
        "Python's garbage collector: rank 1 paused 12 times for 6.00 s, 30.0% of its time (15.0% in the mean of all "
    )
    little = {0: ranks[0], 1: replace(ranks[1], collected=0.1, collections=12)}
    assert "garbage" not in _describe(replace(summary, ranks=little))
