"""What ranks write down of when their gradients were ready, and what is planned with it against what it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lockstep.ddp import drift, same_batches
from lockstep.runs import history
from lockstep.runs.history import UnknownRun
from lockstep.tools.plan.network import Network
from lockstep.tools.plan.plan import INSIDE, Plan, Recorded, Setting
from lockstep.tools.plan.timetable import Timetable
from tests.launching import python_path, run
from tests.traces import Checked

_SCRIPT = Path(__file__).with_name("planned.py")
_ROOT = _SCRIPT.parents[2]
#: Bytes of the script's layers: 64 x 64 weights and 64 biases of float32.
_LAYER = 4 * 64 * 65


def _record(folder: Path, way: str, *words: str, ranks: int = 2, backend: str = "shm") -> float:
    """Run the script; what it recorded is in ``folder``. Return its median step."""
    command = ["lockstep", "run", "-n", str(ranks), "--log-dir", str(folder), *words, str(_SCRIPT), way, str(folder)]
    done = run(command, folder.parent, torch=True, LOCKSTEP_BACKEND=backend, PYTHONPATH=python_path(_ROOT))
    assert done.code == 0, done
    return float(done.out)


def _tables(folder: Path) -> list[Timetable]:
    return list(Recorded.of(history.read(folder)).tables)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_say_when_each_bucket_was_ready(tmp_path: Path, backend: str) -> None:
    _record(tmp_path / "run", "plain", backend=backend)
    tables = _tables(tmp_path / "run")
    assert [table.rank for table in tables] == [0, 1]
    for table in tables:
        assert (table.backend, table.world_size, table.threads) == (backend, 2, 1)
        assert table.overlaps == (backend == "gloo")
        assert len(table.buckets) == 2
        # Over gloo a flag for each parameter, and in the last bucket those for where the rank is, what it holds and
        # what it trains on.
        flags = 4 * (4 + 4 + drift.FLAGS + same_batches.FLAGS)
        assert 4 * _LAYER <= sum(table.buckets) <= 4 * _LAYER + 2 * flags
        assert 0 < table.ready[0] < table.ready[1] <= 1
        for column in (table.optimizer, table.before, table.backward, table.handling):
            assert len(column) == 20
            assert all(0 < seconds < 60 for seconds in column)


def test_a_lone_rank_says_it_too(tmp_path: Path) -> None:
    _record(tmp_path / "run", "plain", ranks=1)
    (table,) = _tables(tmp_path / "run")
    assert table.world_size == 1
    assert sum(table.buckets) == 4 * _LAYER
    assert 0 < table.ready[0] < table.ready[1] <= 1
    assert set(table.averaging) == {0.0}


def test_backwards_that_only_accumulate_come_before(tmp_path: Path) -> None:
    _record(tmp_path / "run", "accumulated")
    for table in _tables(tmp_path / "run"):
        assert min(table.before) > 0.01
        assert median(table.backward) < median(table.before), "on a busy machine single ones may take longer"


def test_a_compiled_model_is_timed(tmp_path: Path) -> None:
    _record(tmp_path / "run", "compiled")
    for table in _tables(tmp_path / "run"):
        assert len(table.buckets) == 2
        assert all(0 < ready <= 1 for ready in table.ready)


def test_a_backward_that_fails_is_in_no_timed_step(tmp_path: Path) -> None:
    _record(tmp_path / "run", "failing", ranks=1)
    (table,) = _tables(tmp_path / "run")
    assert len(table.before) == 19, "the twenty, without the one"
    assert max(table.before) < 60


def test_parameters_that_are_trained_later_change_the_buckets(tmp_path: Path) -> None:
    _record(tmp_path / "run", "unfrozen")
    for table in _tables(tmp_path / "run"):
        assert sum(table.buckets) >= 4 * _LAYER, "of all four layers, and not of three"
        assert len(table.backward) < 20


def test_a_trace_that_was_asked_for_is_planned_with(tmp_path: Path) -> None:
    _record(tmp_path / "run", "plain", "--trace", "6:3")
    assert [len(table.backward) for table in _tables(tmp_path / "run")] == [5, 5]
    trace = Checked(tmp_path / "run" / "trace.json.gz")
    for rank in range(2):
        assert len(trace.of("gradients", rank)) == 6
        marks = [each for each in trace.events if each["ph"] == "i" and trace.ranks[each["pid"]] == rank]
        assert sorted({each["name"] for each in marks}) == ["backward begins", "bucket ready #1", "bucket ready #2"]
        assert len(marks) == 6 * 3


def test_a_restarted_run_is_planned_with_its_last_start(tmp_path: Path) -> None:
    _record(tmp_path / "run", "restarted", "--max-restarts", "1")
    run_ = history.read(tmp_path / "run")
    assert [start["trace"] for start in run_.about["starts"]] == ["trace.json.gz"] * 2
    assert [len(table.backward) for table in _tables(tmp_path / "run")] == [20, 20]
    assert [path.name for path in (tmp_path / "run").glob("trace*")] == ["trace.json.gz"]


def test_a_model_that_was_timed_is_gone_when_it_is_given_up(tmp_path: Path) -> None:
    _record(tmp_path / "run", "gone", ranks=1)
    assert len(_tables(tmp_path / "run")[0].backward) == 20


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("local", "it trained with LocalSteps"),
        ("several", "several replicas averaged their gradients in turn"),
        ("hooked", "a comm hook (_hook) averages the buckets"),
        ("sparse", "sparse gradients are sent as what they hold"),
        ("part", "the replicas are on 1 of the 2 ranks"),
        ("sliced", "it trained in slices"),
        ("short", "a plan needs a replica (lockstep.replicate) that averages its gradients 4 times or more"),
    ],
)
def test_what_can_not_be_planned_with_says_why(tmp_path: Path, way: str, why: str) -> None:
    _record(tmp_path / "run", way)
    with pytest.raises(UnknownRun, match=re.escape(why)):
        Recorded.of(history.read(tmp_path / "run"))


@pytest.mark.timed
@pytest.mark.campaign  # what other work takes away between the two runs was not planned
def test_more_ranks_take_what_was_planned(tmp_path: Path) -> None:
    """Each rank computes by sleeping, so that this machine has cores for all of them."""
    ranks = 3
    _record(tmp_path / "one", "sleeping", ranks=1)
    taken = _record(tmp_path / "more", "sleeping", ranks=ranks)
    setting = Setting(Network(INSIDE, INSIDE, ranks), "ring", "strong")
    planned = Plan(Recorded.of(history.read(tmp_path / "one")), setting).at(ranks).step
    assert planned == pytest.approx(taken, rel=0.15)


def test_the_command_plans_with_what_a_run_has_left(tmp_path: Path) -> None:
    _record(tmp_path / "run", "plain")
    done = run(["lockstep", "runs", "plan", str(tmp_path / "run"), "--ranks", "16", "--json"], tmp_path)
    assert done.code == 0, done
    told: dict[str, Any] = json.loads(done.out)
    assert told["points"][0]["ranks"] == 16
    assert told["points"][0]["hosts"] == 8
