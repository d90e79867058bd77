"""What a trace tells of a rank's steps: recorded at made-up times, so that all of it can be worked out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.trace import EventKind, EventWriter, RankTrace
from lockstep.runs import trace as traces
from lockstep.runs.timeline import events_of
from lockstep.tools.plan.timetable import NoTimetable, Timetable, timetables
from tests.devices import Stream
from tests.traces import ABOUT, Checked, Steps, steps_of


def _columns(table: Timetable) -> dict[str, list[float]]:
    names = ("optimizer", "before", "backward", "handling", "averaging", "waiting")
    return {name: [round(value * 1e3, 6) for value in getattr(table, name)] for name in names}


def test_a_step_is_what_lies_between_two_averages_without_its_waits(tmp_path: Path) -> None:
    for rank in range(2):
        steps = Steps(tmp_path, rank=rank, threads=3, cores=7)
        steps.take(4, samples=5.0)
        steps.take(longer=rank)
        steps.close()
    first, second = timetables(steps_of(tmp_path, 2))
    assert _columns(first) == {
        "optimizer": [5.0] * 4,
        "before": [21.0] * 4,
        "backward": [40.0] * 4,
        "handling": [10.0] * 4,
        "averaging": [20.0] * 4,
        "waiting": [4.0] * 4,
    }
    assert _columns(second)["before"] == [21.0, 21.0, 21.0, 22.0]
    assert (first.rank, second.rank, first.backend, first.world_size) == (0, 1, "gloo", 2)
    assert (first.threads, first.cores, first.overlaps, first.device) == (3, 7, True, "cpu")
    assert (first.buckets, first.ready) == ((1000, 3000, 2000), (0.5, 0.75, 1.0))
    assert (first.local_samples, first.global_samples) == (0.0, 0.0), "the last step's, whose samples nobody counted"


def test_it_is_the_same_from_the_file(tmp_path: Path) -> None:
    for rank in range(2):
        steps = Steps(tmp_path, rank=rank)
        steps.take(5, samples=2.5)
        steps.close()
    trace, path = steps_of(tmp_path, 2), tmp_path / "trace.json.gz"
    trace.write(path)
    found = timetables(traces.read(path))
    assert found == timetables(trace)
    assert (found[0].local_samples, found[1].global_samples) == (2.5, 5.0)
    marks = [event for event in Checked(path).events if event["ph"] == "i" and event["name"] == "bucket ready #2"]
    assert len(marks) == 10, "and a viewer shows when each bucket was ready"


def test_backwards_that_only_accumulate_come_before(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for _ in range(5):
        steps.begin_backward(averages=False)
        steps.take()
    steps.close()
    assert _columns(timetables(steps_of(tmp_path, 1))[0])["before"] == [21.0] * 4


def test_a_step_in_which_a_backward_failed_is_left_out(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.take(3)
    steps.begin_backward()
    steps.take(longer=1000)
    steps.take(2)
    steps.close()
    assert _columns(timetables(steps_of(tmp_path, 1))[0])["before"] == [21.0] * 4


def test_ranks_are_compared_in_the_steps_that_all_of_them_have(tmp_path: Path) -> None:
    for rank, count in enumerate((5, 7)):
        steps = Steps(tmp_path, rank=rank)
        steps.take(count)
        if rank == 0:
            steps.close()
    assert [len(table.backward) for table in timetables(steps_of(tmp_path, 2))] == [4, 4]


def test_a_replica_whose_buckets_change_is_planned_with_as_it_is_in_the_end(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.take(4, longer=50)
    steps.take(4, replica=2, buckets=[7000])
    steps.close()
    (table,) = timetables(steps_of(tmp_path, 1))
    assert (table.buckets, len(table.backward)) == ((7000,), 3)
    assert max(table.before) < 0.03


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([1, 1, 1], ""),
        ([], ""),
        ([1, 2, 1, 2, 1], r"several replicas averaged their gradients in turn, and a plan is of one \(rank 0\)"),
    ],
)
def test_steps_that_make_no_plan(tmp_path: Path, turns: list[int], why: str) -> None:
    steps = Steps(tmp_path)
    for replica in turns:
        steps.take(replica=replica)
    steps.close()
    with pytest.raises(NoTimetable, match=f"^{why}$"):
        timetables(steps_of(tmp_path, 1))


def test_a_replica_that_can_not_be_planned_with_says_why(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.take(5)
    steps.begin_backward(why_not="a comm hook averages", averages=False)
    steps.close()
    with pytest.raises(NoTimetable, match=r"^a comm hook averages \(rank 0\)$"):
        timetables(steps_of(tmp_path, 1))


# On a GPU ------------------------------------------------------------------------------------------------------------


def _record_on_gpu(folder: Path, stream: Stream, *, steps: int = 5) -> EventWriter:
    """Queue steps in no time: 2 ms of optimizer, 3 of forward, 8 of backward, 1 of copies, 6 of waiting."""
    recorder = EventWriter(folder, rank=0, steps=1)
    recorder.open(steps=0)
    recorder.follow(stream)
    about: dict[str, Any] = {**ABOUT, "device": "cuda", "buckets": [10, 20], "averages": True}
    begins = recorder.name("backward begins", "gradients", **about)
    for step in range(steps):
        recorder.add(EventKind.PHASE, 0, 5)
        stream.queued += 2
        recorder.add(EventKind.PHASE, 0, 10)
        stream.queued += 3
        recorder.add(EventKind.MARK, begins)
        for bucket, part in ((1, 2), (2, 6)):
            stream.queued += part
            recorder.add(EventKind.MARK, recorder.name("bucket ready", "gradients"), bucket)
        recorder.begin(recorder.name("averaging gradients", "gradients"), step + 1)
        stream.queued += 1
        recorder.begin(recorder.name("wait for all_reduce", "wait"))
        stream.queued += 6
        recorder.end()
        recorder.end()
    recorder.add(EventKind.PHASE, 0, 5)
    return recorder


def test_on_a_gpu_a_step_is_what_its_stream_did(tmp_path: Path) -> None:
    stream = Stream()
    recorder = _record_on_gpu(tmp_path, stream)
    assert stream.done == 0, "nothing has waited for the GPU since the window opened"
    recorder.close()
    (table,) = timetables(steps_of(tmp_path, 1))
    rounded = {name: [round(value, 3) for value in column] for name, column in _columns(table).items()}
    assert rounded == {
        "optimizer": [2.0] * 4,
        "before": [3.0] * 4,
        "backward": [8.0] * 4,
        "handling": [1.0] * 4,
        "averaging": [6.0] * 4,
        "waiting": [0.0] * 4,
    }
    assert table.ready == pytest.approx((0.25, 1.0), abs=1e-3)
    assert table.device == "cuda"


def test_the_trace_has_a_lane_by_the_gpus_time(tmp_path: Path) -> None:
    recorder = _record_on_gpu(tmp_path, Stream(), steps=2)
    recorder.close()
    part = RankTrace.read(tmp_path, 0)
    assert part is not None
    found = [event for event in events_of(part, {}) if event.get("cat") == "phase on the GPU"]
    assert [(event["name"], round(event["dur"] / 1e6)) for event in found] == [
        ("optimizer", 2), ("your code", 18), ("optimizer", 2), ("your code", 18),
    ]  # fmt: skip


def test_where_the_gpus_clock_was_not_read_it_says_so(tmp_path: Path) -> None:
    stream = Stream()
    stream.captures = True
    _record_on_gpu(tmp_path, stream).close()
    with pytest.raises(NoTimetable, match=r"its gradients are on a GPU, and when that came to '.*' is not known"):
        timetables(steps_of(tmp_path, 1))


def test_a_plan_is_of_the_steps_whose_times_the_gpu_has_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.job.device._MOST_MARKS", 60)
    _record_on_gpu(tmp_path, Stream(), steps=20).close()
    (table,) = timetables(steps_of(tmp_path, 1))
    assert 3 <= len(table.backward) < 10
    assert table.backward == pytest.approx([0.008] * len(table.backward), abs=1e-6)


def _seconds_to_read(folder: Path, count: int) -> float:
    steps = Steps(folder, steps=count)
    steps.take(count)
    steps.close()
    trace, took = steps_of(folder, 1), []
    for _ in range(5):
        begun = time.process_time()
        assert len(timetables(trace)[0].backward) == count - 1
        took.append(time.process_time() - begun)
    return min(took)  # (a garbage collection looks at all that other tests have left in this process)


def test_the_longest_trace_is_read_in_a_time_that_grows_with_it_alone(tmp_path: Path) -> None:
    few, many = (_seconds_to_read(tmp_path, count) for count in (500, 4000))
    assert many < 24 * few, "eight times as much, and not sixty-four"
