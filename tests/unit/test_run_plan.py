"""What a step would take on more ranks: the network's formulas, the slowest of many, buckets in turn, and bad input."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.job.account import Progress
from lockstep.job.page import Phase
from lockstep.launch.tracing import Tracer
from lockstep.rendezvous.messages import Round
from lockstep.runs import history
from lockstep.runs.history import UnknownRun
from lockstep.runs.record import Recorder
from lockstep.text import parse_bandwidth, parse_latency
from lockstep.tools.plan.chart import describe
from lockstep.tools.plan.network import Link, Network
from lockstep.tools.plan.plan import INSIDE, Plan, Recorded, Setting, Slowest, parse_counts, powers
from lockstep.tools.plan.timetable import Timetable
from tests.schemas import holds
from tests.traces import Steps, steps_of

_A, _RATE = 1e-3, 1e6
_SLOW, _FAST = Link(_A, _RATE), Link(1e-5, 1e9)


def _network(ranks_per_host: int = 1) -> Network:
    return Network(_SLOW, _FAST, ranks_per_host)


# The network ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64, 16384])
def test_a_ring_sends_two_messages_for_each_other_rank(ranks: int) -> None:
    seconds, name = _network().all_reduce(5000, ranks, "ring")
    assert seconds == pytest.approx(2 * (ranks - 1) * (_A + 5000 / ranks / _RATE))
    assert name == "ring"


def test_a_trees_latency_grows_with_the_logarithm_and_its_bytes_do_not() -> None:
    for ranks, levels in ((2, 1), (3, 2), (4, 2), (5, 3), (1024, 10)):
        assert _network().all_reduce(0, ranks, "tree")[0] == pytest.approx(2 * levels * _A)
    assert _network().all_reduce(1e12, 1024, "tree")[0] == pytest.approx(2 * 1e12 / _RATE, rel=0.01)


def test_inside_a_host_the_fast_link_counts() -> None:
    network = _network(4)
    assert network.hosts(9) == 3
    assert network.all_reduce(4000, 4, "ring")[0] == pytest.approx(6 * _FAST.seconds(1000))
    assert network.all_reduce(8000, 8, "ring")[0] == pytest.approx(14 * _SLOW.seconds(1000)), (
        "the slowest sets the pace"
    )
    inside, between = 6 * _FAST.seconds(2000), 2 * _SLOW.seconds(4000)
    assert network.all_reduce(8000, 8, "hierarchical")[0] == pytest.approx(inside + between)
    for algorithm in ("ring", "tree", "hierarchical"):
        assert network.all_reduce(8000, 1, algorithm)[0] == 0


def test_the_best_is_the_fastest_for_each_size() -> None:
    network = _network()
    for size in (0, 10, 1e4, 1e9):
        seconds = {name: network.all_reduce(size, 512, name)[0] for name in ("ring", "tree", "hierarchical")}
        assert network.all_reduce(size, 512, "best")[0] == min(seconds.values())
    assert network.all_reduce(10, 512, "best")[1] == "tree"
    assert network.all_reduce(1e9, 4, "best")[1] == "ring"


@pytest.mark.parametrize(
    ("text", "seconds"), [("20us", 2e-5), ("20 µs", 2e-5), ("0.5ms", 5e-4), ("300ns", 3e-7), ("1s", 1)]
)
def test_latencies(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gbit", 25e9 / 8),
        ("100Mbit/s", 12.5e6),
        ("25gbit", 25e9 / 8),
        ("3GB", 3e9),
        ("3GB/s", 3e9),
        ("2GiB", 2.0**31),
    ],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["20", "", "20 minutes", "-1us", "us", "1.2.3us"])
def test_a_latency_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number and its unit, such as 20us"):
        parse_latency(text)


@pytest.mark.parametrize("text", ["25", "", "0Gbit", "25G", "25Gb", "-1Gbit", "fast"])
def test_a_bandwidth_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number and its unit, a second: 25Gbit"):
        parse_bandwidth(text)


# The slowest of many ------------------------------------------------------------------------------------------------


def test_the_slowest_of_all_recorded_ranks_is_what_was_recorded() -> None:
    """Two ranks, the second always slower by 2: so are two planned ones."""
    slowest = Slowest([[10, 12, 50, 11], [12, 14, 52, 13]])
    assert slowest.of(2) == pytest.approx(statistics.median([11, 13, 51, 12]) + 1)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_slowest_is_the_mean_over_all_that_can_be_drawn(copies: int) -> None:
    ranks = [[5.0, 7.0, 6.0], [6.0, 6.5, 9.0]]
    common = [statistics.median(step) for step in zip(*ranks, strict=True)]
    deviations = [[value - shared for value, shared in zip(row, common, strict=True)] for row in ranks]
    drawn = itertools.product(*(row for row in deviations for _ in range(copies)))
    expected = statistics.median(common) + statistics.mean(map(max, drawn))
    assert Slowest(ranks).of(2 * copies) == pytest.approx(expected)


def test_fewer_than_were_recorded_are_drawn_from_all_alike() -> None:
    ranks = [[5.0, 7.0], [6.0, 6.5], [9.0, 8.0]]
    common = [statistics.median(step) for step in zip(*ranks, strict=True)]
    deviations = [value - shared for row in ranks for value, shared in zip(row, common, strict=True)]
    for count in (1, 2):
        expected = statistics.mean(max(drawn) for drawn in itertools.product(deviations, repeat=count))
        assert Slowest(ranks).of(count) == pytest.approx(statistics.median(common) + expected)


def test_the_slowest_grows_with_the_ranks_and_never_beyond_what_was_seen() -> None:
    ranks = [[10 + (7 * step + 3 * rank) % 5 / 10 for step in range(20)] for rank in range(4)]
    slowest = Slowest(ranks)
    values = [slowest.of(count) for count in (1, 2, 4, 8, 64, 16384)]
    assert values == sorted(values)
    highest = max(value - statistics.median(step) for step in zip(*ranks, strict=True) for value in step)
    assert values[-1] == pytest.approx(slowest.usual + highest)


def test_nobody_knows_by_how_much_a_lone_ranks_companions_differ() -> None:
    assert Slowest([[3.0, 1.0, 2.0]]).of(1000) == 2.0


# Plans ---------------------------------------------------------------------------------------------------------------


def _table(rank: int = 0, **changes: Any) -> Timetable:
    values: dict[str, Any] = {
        "backend": "gloo",
        "world_size": 1,
        "overlaps": True,
        "buckets": (1000, 3000, 2000),
        "ready": (0.25, 0.5, 1.0),
        "optimizer": (0.001,) * 4,
        "before": (0.019,) * 4,
        "backward": (0.04,) * 4,
        "handling": (0.002,) * 4,
        "averaging": (0.0,) * 4,
        "waiting": (0.0,) * 4,
    }
    return Timetable(rank, **{**values, **changes})


def _plan(table: Timetable | None = None, **setting: Any) -> Plan:
    tables = (table or _table(),)
    return Plan(Recorded("run", tables), Setting(**{"network": _network(), "scaling": "weak", **setting}))


def test_a_bucket_waits_until_it_is_ready_and_for_those_before_it() -> None:
    point = _plan(_table(buckets=(10_000, 30_000, 20_000)), algorithm="ring").at(2)
    gone = 0.030 + 0.012  # the first; the second was ready at 0.040
    for size in (30_000, 20_000):
        gone += 2 * (_A + size / 2 / _RATE)
    assert point.step == pytest.approx(gone + 0.002)
    assert point.network == pytest.approx(gone - 0.060)
    assert point.averaging == pytest.approx(6 * _A + 60_000 / _RATE)
    assert [point.computing, point.handling, point.hosts] == pytest.approx([0.060, 0.002, 2])


def test_what_hides_behind_the_backward_costs_nothing() -> None:
    fast = Network(Link(0.0, 1e15), _FAST, 1)
    assert _plan(network=fast).at(64).step == pytest.approx(0.062)


def test_without_overlap_all_goes_at_once_at_the_end() -> None:
    point = _plan(algorithm="ring", overlaps=False).at(2)
    assert point.step == pytest.approx(0.060 + 2 * (_A + 3000 / _RATE) + 0.002)


def test_one_rank_sends_nothing() -> None:
    point = _plan().at(1)
    assert [point.step, point.network, point.efficiency] == pytest.approx([0.060, 0.0, 1.0])
    assert point.algorithm == ""


def test_a_batch_that_stays_is_cut_and_the_optimizer_is_not() -> None:
    plan = _plan(_table(local_samples=10.0, global_samples=10.0), scaling="strong", overlaps=False, algorithm="ring")
    point = plan.at(4)  # slices of 3, 3, 2 and 2 samples
    assert point.computing == pytest.approx(0.001 + 0.3 * 0.059)
    assert point.samples_per_second == pytest.approx(10 / point.step)
    assert point.efficiency == pytest.approx(0.060 / 4 / point.step)
    assert plan.fitting([1, 8, 16]) == [1, 8]
    with pytest.raises(ValueError, match="16 ranks: the global batch has 10 samples, so there are ranks without any"):
        plan.at(16)


def test_ranks_share_the_cores_they_are_told_of() -> None:
    table = _table(threads=2, cores=2)
    plan = _plan(table, network=_network(4), cores=2, overlaps=False, algorithm="ring")
    assert plan.at(1).computing == pytest.approx(0.060)
    assert plan.at(2).computing == pytest.approx(0.120)
    assert plan.at(8).computing == pytest.approx(0.240)
    crowded = _plan(replace(table, cores=1), network=_network(4), cores=8, overlaps=False, algorithm="ring")
    assert crowded.at(4).computing == pytest.approx(0.030), "two threads had one core, and have two"


def test_what_ranks_of_a_host_take_tells_of_the_link_between_them() -> None:
    tables = tuple(
        _table(rank, world_size=2, overlaps=False, buckets=(2_000_000,), ready=(1.0,), averaging=(late, 0.004) * 2)
        for rank, late in enumerate((0.004, 0.040))
    )
    link = Recorded("run", tables).measured_inside()
    assert link is not None
    assert link.latency == INSIDE.latency
    assert link.bandwidth == pytest.approx(2_000_000 / (0.004 - 2 * INSIDE.latency))
    small = tuple(replace(table, buckets=(80,)) for table in tables)
    assert Recorded("run", small).measured_inside() == Link(0.002, INSIDE.bandwidth)
    assert Recorded("run", tables[:1]).measured_inside() is None, "the other rank is on another machine"


def test_counts() -> None:
    assert powers(16) == [1, 2, 4, 8, 16]
    assert powers(12) == [1, 2, 4, 8, 12]
    assert parse_counts("8, 64,2") == [2, 8, 64]
    for text in ("0", "8,,2", "many", "-1", "8,0"):
        with pytest.raises(ValueError, match="expected numbers from 1 on"):
            parse_counts(text)


def test_sixteen_thousand_ranks_take_less_than_a_second() -> None:
    buckets = 400
    tables = tuple(
        _table(
            rank,
            world_size=64,
            buckets=(1000,) * buckets,
            ready=tuple((place + 1) / buckets for place in range(buckets)),
            **{name: tuple(0.01 + (step * rank % 7) / 1e3 for step in range(20)) for name in ("before", "backward")},
            **dict.fromkeys(("optimizer", "handling", "averaging", "waiting"), (0.001,) * 20),
        )
        for rank in range(64)
    )
    begun = time.process_time()
    plan = Plan(Recorded("run", tables), Setting(_network(8), scaling="weak"))
    points = [plan.at(count) for count in powers(16384)]
    assert "16,384" in describe(plan, points)
    assert time.process_time() - begun < 20, "a second, and more where the processor is shared"
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert all(math.isfinite(point.step) for point in points)


# Runs and what is none -----------------------------------------------------------------------------------------------


def _run(folder: Path, start: dict[str, Any] | None = None) -> Path:
    """A record with one start, and two ranks' trace of 62 ms a step."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "run": 1,
        "lockstep": "0",
        "program": ["train.py"],
        "began": 1.0,
        "launcher": 1,
        "events": [],
        "ended": 2.0,
    }
    start = {"number": 0, "world_size": 2, "trace": "trace.json.gz"} if start is None else start
    (folder / "run.json").write_text(json.dumps({**about, "starts": [{"at": 1.0, "world_size": 2, **start}]}))
    return folder


def _traced(folder: Path, *abouts: dict[str, Any], steps: int = 5) -> Path:
    """The same with a trace of ranks that say this of themselves."""
    for rank, about in enumerate(abouts or ({}, {})):
        recorded = Steps(folder.parent, rank=rank, **about)
        recorded.take(steps)
        recorded.close()
    _run(folder)
    steps_of(folder.parent, len(abouts) or 2).write(folder / "trace.json.gz")
    return folder


def _call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["runs", "plan", *words])
    return done.exit_code, done.output


def test_the_command_prints_a_table_a_curve_and_what_it_assumes(tmp_path: Path) -> None:
    code, text = _call(str(_traced(tmp_path / "a-run")), "--up-to", "16384", "--bandwidth", "10Gbit")
    assert code == 0, text
    assert text.startswith("a-run: recorded on 2 ranks over gloo, 100 ms a step\n\n")
    assert "16,384  8,192" in text
    assert "●" in text
    assert "a link between hosts has 20 µs and 10 Gbit/s (latency guessed: name yours)" in " ".join(text.split())
    assert "strong scaling: the global batch is cut among the ranks" in " ".join(text.split())


def test_the_command_prints_json(tmp_path: Path) -> None:
    code, text = _call(
        str(_traced(tmp_path / "a-run")), "--ranks", "2,8", "--json", "--scaling", "weak", "--no-overlap"
    )
    assert code == 0, text
    told = holds(text, "lockstep.runs.plan/1")
    assert [point["ranks"] for point in told["points"]] == [2, 8]
    assert told["setting"]["scaling"] == "weak"
    assert told["setting"]["overlaps"] is False
    assert told["recorded"]["buckets"] == [1000, 3000, 2000]


def test_a_price_says_what_a_thousand_steps_would_cost(tmp_path: Path) -> None:
    folder = str(_traced(tmp_path / "a-run"))
    words = [folder, "--ranks", "2,8", "--ranks-per-host", "4", "--price", "3.6/h"]
    code, text = _call(*words, "--json")
    assert code == 0, text
    for point, hosts in zip(holds(text, "lockstep.runs.plan/1")["points"], (1, 2), strict=True):
        assert point["cost_of_1000_steps"] == pytest.approx(hosts * point["step"])  # 3.6 an hour, a thousand steps
    code, table = _call(*words)
    assert re.search(r"1,000 steps cost\n +2 .* 0\.076\n +8 .* 0\.061\n", table), table
    assert "steps cost" not in _call(folder, "--ranks", "2,8")[1]
    (free,) = holds(_call(folder, "--ranks", "2", "--json")[1], "lockstep.runs.plan/1")["points"]
    assert free["cost_of_1000_steps"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "0"], "--ranks '0': expected numbers from 1 on, with commas between: 8,64,512"),
        (["--ranks", "2", "--up-to", "4"], "--ranks and --up-to: name one of them"),
        (["--up-to", "0"], "--up-to 0: expected a number from 1 on"),
        (["--ranks-per-host", "0"], "--ranks-per-host 0: expected a number from 1 on"),
        (["--cores", "-2"], "--cores -2: expected a number from 1 on"),
        (["--bandwidth", "25"], "bandwidth '25': expected a number and its unit"),
        (["--latency", "soon"], "latency 'soon': expected a number and its unit"),
        (["--intra-bandwidth", "25G"], "bandwidth '25G': expected a number and its unit"),
    ],
)
def test_bad_options_are_a_sentence(tmp_path: Path, words: list[str], text: str) -> None:
    code, said = _call(str(_traced(tmp_path / "a-run")), *words)
    assert code == 2
    assert said.startswith(f"lockstep runs plan: {text}"), said
    assert said.count("\n") == 1


_NEEDS = r"a plan needs a replica \(lockstep.replicate\) that averages its gradients 4 times or more"


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"number": 0}, "it was recorded by an earlier lockstep, or was killed at once: record it again"),
        ({"number": 0, "timetables": {}}, "it was recorded by an earlier lockstep"),
        ({"number": 0, "trace": None}, f"it has no trace of its steps: {_NEEDS}"),
        ({"number": 0, "trace": "trace.json.gz"}, "its trace can't be read: .*trace.json.gz: there is no such file"),
        ({"number": 0, "trace": "run.json"}, "its trace can't be read: .*run.json: not a trace"),
    ],
)
def test_runs_without_a_trace(tmp_path: Path, start: dict[str, Any], text: str) -> None:
    run = history.read(_run(tmp_path / "a-run", start))
    with pytest.raises(UnknownRun, match=rf"a-run: .*{text}"):
        Recorded.of(run)


@pytest.mark.parametrize(
    ("abouts", "text"),
    [
        (
            ({}, {"why_not": "a comm hook averages"}),
            r"a plan can't be made of it: a comm hook averages \(rank 1\)",
        ),
        (({}, {"buckets": [1]}), "its ranks had different buckets"),
        (({"device": "cuda"},), "its gradients are on a GPU, and when that came to .* is not known"),
        (({"cores": None, "buckets": 3},), "its trace is of another version of lockstep, or damaged"),
    ],
)
def test_traces_that_tell_nothing(tmp_path: Path, abouts: tuple[dict[str, Any], ...], text: str) -> None:
    run = history.read(_traced(tmp_path / "a-run", *abouts))
    with pytest.raises(UnknownRun, match=rf"a-run: .*{text}"):
        Recorded.of(run)


def test_a_trace_of_too_few_averages_says_how_many_it_takes(tmp_path: Path) -> None:
    with pytest.raises(UnknownRun, match=f"a-run: a plan can't be made of it: {_NEEDS}"):
        Recorded.of(history.read(_traced(tmp_path / "a-run", steps=3)))
    assert len(Recorded.of(history.read(_traced(tmp_path / "b-run", steps=4))).first.backward) == 3


def test_a_trace_of_another_version_says_so(tmp_path: Path) -> None:
    path = _traced(tmp_path / "a-run") / "trace.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["lockstep"]["trace"] = 99
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(UnknownRun, match=r"a-run: its trace can't be read: .*which this lockstep can't read"):
        Recorded.of(history.read(path.parent))


def test_the_last_start_with_a_trace_is_planned_with(tmp_path: Path) -> None:
    folder = _traced(tmp_path / "a-run")
    about = json.loads((folder / "run.json").read_text())
    (traced,) = about["starts"]
    about["starts"] = [{**traced, "trace": "gone"}, traced, {**traced, "number": 2, "trace": None}]
    (folder / "run.json").write_text(json.dumps(about))
    assert Recorded.of(history.read(folder)).ranks == 2


def test_gpus_do_not_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (_table(device="cuda"),)
    monkeypatch.setattr(Recorded, "of", lambda run: Recorded(run.name, tables))
    folder = str(_run(tmp_path / "a-run"))
    code, said = _call(folder, "--cores", "8")
    assert code == 2
    assert "--cores 8: the ranks of a-run computed on GPUs, each on its own" in said
    code, said = _call(folder, "--ranks", "8")
    assert code == 0
    assert "each rank has the GPU it had" in said


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    code, said = _call(str(tmp_path))
    assert code == 2
    assert "no run was recorded there" in said


def test_other_collectives_are_named_and_left_out() -> None:
    plan = _plan(_table(waiting=(0.01,) * 4))
    assert any("left out: other collectives, for which a step waited 10 ms" in line for line in plan.assumptions())


def test_the_launcher_leaves_the_trace_with_the_record(tmp_path: Path) -> None:
    logs, job = tmp_path / "logs", tmp_path / "job"
    logs.mkdir()
    job.mkdir()
    recorder = Recorder(lambda: logs, program=["train.py"], tell=print)
    recorder.begin(number=0, node=0, world_size=2, ranks=range(2), job_folder=job)
    recorder.add({rank: Progress(1, (0.0,) * len(Phase)) for rank in range(2)}, {0: 1, 1: 2})
    with pytest.raises(UnknownRun, match=_NEEDS):
        Recorded.of(history.read(logs))
    tracer = Tracer(recorder.make_folder, home=job, round_=Round(0, (2,), "", 0), asked=None)
    assert tracer.look() == []
    for rank in range(2):
        steps = Steps(job, rank=rank)
        steps.take(5)
        steps.close()
    assert tracer.look() == [], "nobody has asked for it, so nothing is said"
    assert tracer.conclude(steps=40) == []
    assert tracer.written == "trace.json.gz"
    recorder.traced(tracer.written)
    assert not [*job.iterdir()], "what the ranks had recorded goes when it is read"
    recorder.end(exit_code=0, summary=None, peaks={})
    assert [table.rank for table in Recorded.of(history.read(logs)).tables] == [0, 1]


def test_a_trace_that_nobody_has_asked_for_is_not_missed(tmp_path: Path) -> None:
    tracer = Tracer(lambda: tmp_path / "logs", home=tmp_path, round_=Round(0, (2,), "", 0), asked=None)
    assert (tracer.conclude(steps=3), tracer.written) == ([], None)


def test_of_many_starts_the_last_ones_trace_remains_unless_it_was_asked_for(tmp_path: Path) -> None:
    names = []
    for asked in (None, (5, 3)):
        steps = Steps(tmp_path)
        steps.take(5)
        steps.close()
        tracer = Tracer(lambda: tmp_path, home=tmp_path, round_=Round(0, (1,), "", 0, number=2), asked=asked)
        tracer.conclude(steps=40)
        names.append(tracer.written)
    assert names == ["trace.json.gz", "trace-restart2.json.gz"]
