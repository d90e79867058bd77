"""The record of a run: written, cut off, thinned out, read again, found, compared; and what is no record."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import resource
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from lockstep import _proc
from lockstep.cli import main
from lockstep.cli.runs import _now
from lockstep.job import notes
from lockstep.job.account import Progress
from lockstep.job.page import Cell, Pages, Phase
from lockstep.job.throughput import Throughput
from lockstep.launch.stacks import stacks_of
from lockstep.runs import history
from lockstep.runs import series as series_module
from lockstep.runs.history import UnknownRun
from lockstep.runs.live import Live, Row
from lockstep.runs.record import Recorder, RunEnd
from lockstep.runs.series import COLUMNS, Series, SeriesWriter
from lockstep.tools import comparison
from tests.launching import LIMIT
from tests.recorded import write_record, write_series
from tests.schemas import holds


def _row(steps: float, **columns: float) -> list[float]:
    return [steps, *(columns.get(name, 0.0) for name in COLUMNS[1:])]


def test_a_series_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "series-0.bin", [2, 3])
    for second in range(5):
        writer.add(second, [_row(10 * second, forward=0.5 * second), _row(10 * second + 1, memory=2.0**30)])
    writer.add(4.2, [_row(99), _row(99)])  # too early
    found = Series.read(tmp_path / "series-0.bin")
    assert found.ranks == (2, 3)
    assert found.times == (0, 1, 2, 3, 4)
    assert found.columns["steps"] == [(10 * second, 10 * second + 1) for second in range(5)]
    assert found.columns["forward"][4] == (2.0, 0.0)
    assert found.columns["memory"][0] == (0.0, 2.0**30)
    assert (tmp_path / "series-0.bin").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("lost", [1, 3, 4, 60])
def test_a_series_that_was_cut_off_has_its_whole_rows(tmp_path: Path, lost: int) -> None:
    writer = SeriesWriter(tmp_path / "cut", [0])
    for second in range(3):
        writer.add(second, [_row(second)])
    data = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-lost])
    assert Series.read(tmp_path / "cut").times == (0, 1)


def test_a_row_that_a_full_disk_has_cut_off_does_not_shift_later_ones(tmp_path: Path) -> None:
    writer, path = SeriesWriter(tmp_path / "full", [0]), tmp_path / "full"
    writer.add(0, [_row(0)])
    whole = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.add(1, [_row(10)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == whole
    writer.add(2, [_row(20)])
    found = Series.read(path)
    assert (found.times, found.columns["steps"]) == ((0, 2), [(0,), (20,)])


def test_a_long_series_is_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_module, "MOST", 8)
    writer = SeriesWriter(tmp_path / "long", [0])
    for second in range(100):
        writer.add(second, [_row(second)])
    found = Series.read(tmp_path / "long")
    assert len(found.times) < 8
    assert [row[0] for row in found.columns["steps"]] == list(found.times), "whole rows"
    assert found.times[0] == 0
    assert found.times[-1] >= 80
    assert len({later - earlier for earlier, later in zip(found.times, found.times[1:], strict=False)}) == 1


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a series"),
        (b"no JSON\n", "not a series"),
        (b'{"series": 1}\n', "not a series"),
        (b'{"series": 2, "ranks": [0], "columns": ["steps"]}\n', "of version 2, and this lockstep reads version 1"),
    ],
)
def test_what_is_no_series(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=text):
        Series.read(tmp_path / "file")


# A run ---------------------------------------------------------------------------------------------------------------


class _Clock:
    """The seconds that a Recorder sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("lockstep.runs.record.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


def _progress(steps: int, *, step: float, wait: float = 0.0) -> Progress:
    seconds = [0.0] * len(Phase)
    seconds[Phase.FORWARD], seconds[Phase.WAIT] = steps * (step - wait), steps * wait
    return Progress(steps, tuple(seconds), 8 * steps, memory=300 << 20)


def _record(
    folder: Path, clock: _Clock, *, step: float, end: bool = True, of: Callable[[int], float] = lambda _: 1.0
) -> Recorder:
    """Thirty seconds of two ranks; ``of``: how much longer a step takes in each second."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(lambda: folder, program=["train.py", "--lr", "0.1"], tell=print)
    recorder.begin(number=0, node=0, world_size=2, ranks=range(2), job_folder=folder)
    steps = 0.0
    for second in range(1, 31):
        clock.now += 1.0
        steps += 1.0 / (step * of(second))
        recorder.add({rank: _progress(int(steps), step=step) for rank in range(2)}, {0: os.getpid(), 1: None})
    if end:
        recorder.end(exit_code=0, summary=None, peaks={})
    return recorder


def test_a_run_is_recorded_once_it_takes_steps(tmp_path: Path, clock: _Clock) -> None:
    def never() -> Path:
        raise AssertionError("nothing is to be written")

    recorder = Recorder(never, program=["serve.py"], tell=print)
    recorder.begin(number=0, node=0, world_size=1, ranks=range(1), job_folder=tmp_path)
    recorder.add({0: _progress(0, step=0.1)}, {0: 1})
    recorder.event("late", "rank 1")
    recorder.end(exit_code=0, summary=None, peaks={})
    _record(tmp_path / "run", clock, step=0.01)
    run = history.read(tmp_path / "run")
    assert (run.program, run.world_size, run.ending, run.steps) == ("train.py --lr 0.1", 2, "done", 3000)
    assert run.series[0].columns["memory"][-1][0] > 0
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o600}


def test_a_restart_is_a_series_of_its_own(tmp_path: Path, clock: _Clock) -> None:
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    run = history.read(tmp_path / "run")
    assert (run.ending, run.is_alive) == ("runs", True)
    recorder.event("failed", "rank 1 failed")
    recorder.begin(number=1, node=0, world_size=3, ranks=range(3), job_folder=tmp_path)
    recorder.add({rank: _progress(7, step=0.1) for rank in range(3)}, dict.fromkeys(range(3)))
    recorder.end(exit_code=1, summary=None, peaks={})
    run = history.read(tmp_path / "run")
    assert [series.ranks for series in run.series] == [(0, 1), (0, 1, 2)]
    assert (run.ending, run.steps, run.world_size) == ("exit 1", 307, 3)
    assert [event["kind"] for event in run.about["events"]] == ["failed"]


def test_checkpoints_and_logs_that_ranks_tell_of_are_noted(
    tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes.tell(notes.CHECKPOINT, step=1)  # nobody listens
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    monkeypatch.setenv("LOCKSTEP_JOB_DIR", str(tmp_path / "run"))
    clock.now += 1
    notes.tell(notes.LOG, path="/runs/metrics.jsonl")
    notes.tell(notes.CHECKPOINT, step=300)
    recorder.add({0: _progress(310, step=0.1)}, {0: None})
    run = history.read(tmp_path / "run")
    assert run.about["checkpoints"] == [{"at": 31.0, "step": 300}]
    assert run.about["logs"] == ["/runs/metrics.jsonl"]
    recorder.begin(number=1, node=0, world_size=1, ranks=[0], job_folder=tmp_path, machines=[("a", 1)])
    monkeypatch.setenv("LOCKSTEP_JOB_DIR", str(tmp_path))
    notes.tell(notes.LOG, path="/runs/metrics.jsonl")
    for step in range(3000):
        notes.tell(notes.CHECKPOINT, step=step)
    recorder.end(exit_code=0, summary=None, peaks={})
    about = history.read(tmp_path / "run").about
    assert about["logs"] == ["/runs/metrics.jsonl"]
    assert 400 < len(about["checkpoints"]) <= 1000
    assert {later["step"] - each["step"] for each, later in pairwise(about["checkpoints"][200:])} == {4}
    assert about["environment"]["torch"]


def test_numbers_that_are_not_finite_are_told_of(
    tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    monkeypatch.setenv("LOCKSTEP_JOB_DIR", str(tmp_path / "run"))
    notes.tell(notes.NONFINITE, name="loss", step=43, alone=0)
    notes.tell(notes.NONFINITE, name="loss", step=51, alone=1)
    notes.tell(notes.NONFINITE, name="acc\n", step=1_700, alone=1)
    notes.tell(notes.NONFINITE, name="acc\n", step=1_800, alone=0)
    assert recorder.remarks()[0] == "loss: NaN or infinite from step 51 on"
    recorder.end(exit_code=0, summary=None, peaks={})
    run = history.read(tmp_path / "run")
    words = ["loss: NaN or infinite from step 51 on", "acc\\n: some NaN or infinite, first at step 1,700"]
    assert run.remarks == words
    listed = CliRunner().invoke(main, ["runs", "ls", str(tmp_path)], env={"COLUMNS": "200"})
    assert all(line in listed.stdout for line in words), listed.stdout
    compared = comparison.compare(run, run).describe()
    assert all(f"A: {line}" in compared and f"B: {line}" in compared for line in words)
    for damage in ({"loss": 3}, {"loss": {"first": "x"}}, {"loss": {"first": 1, "since": "x"}}):
        about = {**run.about, "nonfinite": damage}
        (tmp_path / "run" / "run.json").write_text(json.dumps(about))
        with pytest.raises(UnknownRun, match=r"the record is damaged: nonfinite\.loss"):
            history.read(tmp_path / "run")


def test_notes_that_can_not_be_read_end_the_record_and_not_the_run(
    tmp_path: Path, clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    (tmp_path / "run" / "notes").mkdir()
    recorder.add({0: _progress(310, step=0.1)}, {0: None})
    assert (recorder.remarks(), recorder.last_checkpoint()) == ([], None)
    recorder.begin(number=1, node=0, world_size=1, ranks=[0], job_folder=tmp_path)
    recorder.end(exit_code=0, summary=None, peaks={})
    assert capsys.readouterr().out.count("the record of this run ends here, but the run continues: [Errno 21]") == 1


def test_steps_that_were_left_out_are_told_of(tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    monkeypatch.setenv("LOCKSTEP_JOB_DIR", str(tmp_path / "run"))
    because = "left out, since averaged gradients were infinite or NaN:"
    notes.tell(notes.LEFT_OUT, step=1_041, of="of 'fc.weight' on rank 1")
    assert recorder.remarks() == [f"1 step {because} it was step 1,041 (of 'fc.weight' on rank 1)"]
    notes.tell(notes.LEFT_OUT, step=1_050, of="of 'fc.bias' on rank 0")
    recorder.end(exit_code=0, summary=None, peaks={})
    run = history.read(tmp_path / "run")
    first = "the first was step 1,041 (of 'fc.weight' on rank 1)"
    assert run.remarks == [f"2 steps {because} {first}, the last step 1,050"]
    explained = CliRunner().invoke(main, ["runs", "explain", str(tmp_path / "run"), "--json"])
    assert holds(explained.stdout, "lockstep.runs.explain/1")["left_out"] == {
        "steps": 2,
        "first_step": 1041,
        "last_step": 1050,
        "of": "of 'fc.weight' on rank 1",
    }


def test_what_parts_of_equal_cost_have_won_is_told(
    tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    monkeypatch.setenv("LOCKSTEP_JOB_DIR", str(tmp_path / "run"))
    notes.tell(notes.COSTS, batches=3, by_number=30.0, by_cost=21.0, exact=20.0)
    notes.tell(notes.COSTS, batches=1, by_number=14.0, by_cost=12.0, exact=10.0)
    recorder.end(exit_code=0, summary=None, peaks={})
    run = history.read(tmp_path / "run")
    assert run.remarks == [
        "parts of equal cost: in 4 global batches the costliest rank had 1.10 times the mean cost, and would have had "
        "1.47 times with equal numbers of samples (25% less)"
    ]
    explained = CliRunner().invoke(main, ["runs", "explain", str(tmp_path / "run"), "--json"])
    assert holds(explained.stdout, "lockstep.runs.explain/1")["costs"] == {
        "batches": 4,
        "dearest": pytest.approx(1.1),
        "dearest_by_number": pytest.approx(44 / 30),
    }


def test_a_run_that_fails_before_its_first_step_is_the_newest(tmp_path: Path, clock: _Clock) -> None:
    home = tmp_path / "lockstep" / "logs"
    _record(home / "older", clock, step=0.05)
    recorder = Recorder(lambda: home / "failed", program=["train.py"], tell=print)
    (home / "failed").mkdir()
    recorder.begin(number=0, node=0, world_size=2, ranks=range(2), job_folder=tmp_path)
    recorder.event("failed", "rank 1 of 2 failed: exit code 3", failure={"rank": 1, "exit_code": 3}, again=False)
    recorder.end(exit_code=3, summary=None, peaks={})
    found = history.find(None, [home])
    assert (found.name, found.ending, found.end.code, found.steps, found.world_size) == (
        "failed",
        "exit 3",
        "run-failed",
        0,
        2,
    )
    invoke = functools.partial(CliRunner(env={"XDG_STATE_HOME": str(tmp_path)}).invoke, main)
    explained = invoke(["runs", "explain"])
    assert (explained.exit_code, "failed: train.py" in explained.output) == (0, True), explained.output
    assert "exit 3, " in explained.output
    drawn = invoke(["runs", "report"])
    assert drawn.exit_code != 0
    assert "failed: its ranks have taken no step: nothing to show; lockstep runs explain failed says" in drawn.output
    listed = invoke(["runs", "ls"])
    assert listed.exit_code == 0
    assert listed.output.index("failed") < listed.output.index("older")


@pytest.mark.parametrize("code", [0, 75, 130])
def test_a_run_without_steps_that_did_not_fail_leaves_no_record(tmp_path: Path, code: int) -> None:
    recorder = Recorder(lambda: tmp_path, program=["train.py"], tell=print)
    recorder.begin(number=0, node=0, world_size=2, ranks=range(2), job_folder=tmp_path)
    recorder.end(exit_code=code, summary=None, peaks={}, end=RunEnd.STOPPED if code == 130 else None)
    assert not (tmp_path / "run.json").exists()


def test_the_last_moment_of_a_start_is_recorded_whenever_it_comes(tmp_path: Path, clock: _Clock) -> None:
    recorder = _record(tmp_path / "run", clock, step=0.1, end=False)
    clock.now += 0.4
    recorder.add({rank: _progress(304, step=0.1) for rank in range(2)}, {0: 1, 1: None})
    recorder.end_start(305, before=None)
    recorder.end(exit_code=0, summary=None, peaks={})
    run = history.read(tmp_path / "run")
    assert run.series[0].columns["steps"][-1] == (304, 304)
    assert run.steps == 305, "as the ranks have counted"


def test_a_note_that_is_not_whole_comes_later(tmp_path: Path) -> None:
    found = notes.Notes(tmp_path)
    assert found.take() == []
    (tmp_path / "notes").write_text('{"is": "log", "path": "a"}\n{"is": "lo')
    assert found.take() == [{"is": "log", "path": "a"}]
    with open(tmp_path / "notes", "a") as file:
        file.write('g", "path": "b"}\n')
    assert found.take() == [{"is": "log", "path": "b"}]
    with open(tmp_path / "notes", "a") as file:  # the disk was full in the middle of a note
        file.write('{"is": "lo{"is": "log", "path": "c"}\n{"is": "log", "path": "d"}\n')
    assert found.take() == [{"is": "log", "path": "d"}]


def test_a_run_whose_launcher_is_gone_was_killed(tmp_path: Path, clock: _Clock) -> None:
    _record(tmp_path / "run", clock, step=0.1, end=False)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**about, "launcher_began": 1}))
    run = history.read(tmp_path / "run")
    assert (run.ending, round(run.seconds)) == ("killed", 30)


def test_a_run_of_another_machine_may_go_on_there(tmp_path: Path, clock: _Clock) -> None:
    _record(tmp_path, clock, step=0.01, end=False)
    about = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(about | {"host": "node7", "program": ["a\nb\x1b[2J", "\udcff é"]}))
    run = history.read(tmp_path)
    assert (run.is_alive, run.ending) == (False, "not known: on node7")
    with pytest.raises(UnknownRun, match="was started on node7: run the same command there"):
        run.refuse_unless_alive()
    assert run.program == "a\\nb\\x1b[2J ? é"


def test_a_disk_that_is_full_ends_the_record_and_not_the_run(tmp_path: Path) -> None:
    told: list[str] = []

    def full() -> Path:
        raise OSError(28, "No space left on device")

    recorder = Recorder(full, program=["train.py"], tell=told.append)
    recorder.begin(number=0, node=0, world_size=1, ranks=range(1), job_folder=tmp_path)
    for steps in (1, 2):
        recorder.add({0: _progress(steps, step=0.1)}, {0: None})
    recorder.end(exit_code=0, summary=None, peaks={})
    assert told == ["the record of this run ends here, but the run continues: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no run was recorded there"),
        ("{", "not a record of a run"),
        ("[]", "not a record of a run"),
        ('{"run": 2, "lockstep": "9.0"}', "written by lockstep 9.0, which this lockstep can't read"),
        ('{"run": 1}', "the record is damaged: began, events, launcher, program, starts missing"),
        (
            '{"run": 1, "began": null, "events": [], "launcher": 1, "program": [], "starts": []}',
            "the record is damaged: began is a NoneType",
        ),
    ],
)
def test_what_is_no_record(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UnknownRun, match=text):
        history.read(tmp_path)


def test_runs_are_found_by_number_name_and_folder(tmp_path: Path, clock: _Clock) -> None:
    for number, name in enumerate(["20260101-000000-train-aaaaaa", "20260102-000000-train-bbbbbb"]):
        _record(tmp_path / name, clock, step=0.1)
        about = json.loads((tmp_path / name / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps({**about, "began": 100.0 + number}))
    (tmp_path / "logs only").mkdir()
    homes = [tmp_path, tmp_path / "nowhere"]
    newest, oldest = history.runs(homes)
    assert newest.name.endswith("bbbbbb")
    assert history.find(None, homes).path == newest.path
    assert history.find("2", homes).path == oldest.path
    assert history.find("aaaa", homes).path == oldest.path
    assert history.find(str(oldest.path.parent), []).path == oldest.path
    with pytest.raises(UnknownRun, match="could be any of"):
        history.find("train", homes)
    with pytest.raises(UnknownRun, match="2 recorded here"):
        history.find("3", homes)
    with pytest.raises(UnknownRun, match="no run of this name"):
        history.find("cccc", homes)


def test_a_look_at_ranks_takes_the_newest_run_that_goes_on(tmp_path: Path, clock: _Clock) -> None:
    """A short run may begin after one that goes on, and end: its ranks can't be looked at."""
    for number, name in enumerate(["goes on", "has ended"]):
        _record(tmp_path / name, clock, step=0.1)
        about = {**json.loads((tmp_path / name / "run.json").read_text()), "began": 100.0 + number}
        if number == 0:
            del about["ended"]
            about |= {"launcher": os.getpid(), "launcher_began": _proc.started(os.getpid())}
        (tmp_path / name / "run.json").write_text(json.dumps(about))
    assert history.find(None, [tmp_path]).name == "has ended"
    assert history.find(None, [tmp_path], going_on=True).name == "goes on"
    assert history.find("1", [tmp_path], going_on=True).name == "has ended", "a number is a place in the list"
    (tmp_path / "goes on" / "run.json").unlink()
    assert history.find(None, [tmp_path], going_on=True).name == "has ended", "which is then said"


@pytest.mark.parametrize("moment", ["before it is asked for", "after that"])
def test_a_run_that_ends_while_it_is_looked_at_was_not_killed(
    tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its launcher writes how it ended, and is gone, between a look at the record and one at the process."""
    file = tmp_path / "run.json"
    _record(tmp_path, clock, step=0.1)
    ended, began = json.loads(file.read_text()), _proc.started(os.getpid())
    going_on = {name: value for name, value in ended.items() if name not in ("ended", "exit_code", "end", "summary")}
    file.write_text(json.dumps(going_on | {"launcher": os.getpid(), "launcher_began": began}))
    answers = [None] if moment == "before it is asked for" else [began, None]

    def started(_: int) -> int | None:
        answer = answers.pop(0)
        if answer is None:
            file.write_text(json.dumps(ended))
        return answer

    monkeypatch.setattr(_proc, "started", started)
    run = history.read(tmp_path)
    if moment == "before it is asked for":
        assert (run.is_alive, run.ending, run.end) == (False, "done", RunEnd.DONE)
    else:
        assert (run.is_alive, run.ending, run.end) == (True, "runs", RunEnd.RUNNING), "as the record says that was read"
        assert history.read(tmp_path).ending == "done"


def test_a_number_means_the_same_to_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("lockstep.cli.runs"), "homes", lambda: [tmp_path / "home"])
    for folder, began in (("home/older", 100.0), ("home/newer", 200.0), ("elsewhere/run", 300.0)):
        write_series(write_record(tmp_path / folder, began=began, ended=began + 62) / "series-0.bin")

    def listed(*folders: Path) -> list[tuple[str, str]]:
        done = CliRunner().invoke(main, ["runs", "ls", *map(str, folders)])
        return [(line.split()[0], line.split()[-1]) for line in done.stdout.splitlines()[1:]]

    assert listed() == [("1", "newer"), ("2", "older")]
    assert listed(tmp_path / "elsewhere", tmp_path / "home") == [
        ("-", str(tmp_path / "elsewhere" / "run")),
        ("1", "newer"),
        ("2", "older"),
    ]
    told = CliRunner().invoke(main, ["runs", "explain", "2"]).stdout
    assert told.startswith("older: ")


def test_a_record_that_lies_elsewhere_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for folder, told in (
        (tmp_path / "lockstep/logs/train-1", ""),
        (tmp_path / "elsewhere", str(tmp_path / "elsewhere")),
    ):
        folder.mkdir(parents=True)
        recorder = Recorder(functools.partial(Path, folder), program=["train.py"], tell=print)
        assert recorder.elsewhere == "", "nothing is written yet"
        recorder.make_folder()
        assert recorder.elsewhere == told


def test_the_advice_on_a_run_names_it(tmp_path: Path) -> None:
    write_series(write_record(tmp_path / "older") / "series-0.bin", slow=None)
    told = CliRunner().invoke(main, ["runs", "explain", str(tmp_path / "older")]).stdout
    run = tmp_path / "older"  # a name is found only where runs leave their records by themselves
    assert f"next: lockstep runs report {run} draws the run; lockstep runs plan {run} estimates more ranks" in told


def _replace(folder: Path, old: bytes, new: bytes) -> None:
    for name in ("run.json", "series-0.bin"):
        (folder / name).write_bytes((folder / name).read_bytes().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"series": 1', b'"series": 2', "its steps are not known: {folder}/series-0.bin: a series of version 2"),
        (b'"ranks": [0, 1]', b'"ranks": []', "its steps are not known: {folder}/series-0.bin: a series of no rank"),
        (b'"series-0.bin"', b'"series-9.bin"', "its steps are not known: [Errno 2] No such file"),
        (b'"steps"', b'"paces"', ""),
    ],
)
def test_a_damaged_run_does_not_hide_the_others(
    tmp_path: Path, clock: _Clock, old: bytes, new: bytes, said: str
) -> None:
    for name in ("good", "damaged"):
        _record(tmp_path / name, clock, step=0.1)
    _replace(tmp_path / "damaged", old, new)
    listed = CliRunner().invoke(main, ["runs", "ls", str(tmp_path)])
    assert listed.exit_code == 0, listed.output
    assert [Path(line.split()[-1]).name for line in listed.stdout.splitlines()[1:]] == ["damaged", "good"]
    assert (said.format(folder=tmp_path / "damaged") in listed.stderr) if said else not listed.stderr


_DAMAGES: dict[str, Any] = {
    "starts[0] world_size missing": {"starts": [{"number": 0, "at": 0.0}]},
    "checkpoints[0] step missing": {"checkpoints": [{"at": 1.0}]},
    "checkpoints[0].at is inf": {"checkpoints": [{"at": float("inf"), "step": 3}]},
    "end.text is a dict": {"end": {"code": "run-done", "text": {}}},
    "events[0].ranks[0] is a str": {"events": [{"at": 1.0, "kind": "late", "ranks": ["a"]}]},
    "events[0].failure.rank is a str": {"events": [{"at": 1.0, "kind": "failed", "failure": {"rank": "a"}}]},
    "summary headline, remarks, samples_per_second, straggler, stretches, verdict, watched missing": {
        "summary": {"step": 0.1, "ranks": {}}
    },
    "summary is a list": {"summary": []},
    "program[0] is a int": {"program": [3]},
    "launcher_began is a str": {"launcher_began": "now"},
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_every_command_says_a_damaged_record_in_one_line_and_goes_on_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(importlib.import_module("lockstep.cli.runs"), "homes", lambda: [tmp_path])
    for name in ("good", "damaged"):
        write_series(write_record(tmp_path / name, **(_DAMAGES[damage] if name == "damaged" else {})) / "series-0.bin")
    if damage.startswith("starts"):
        about = json.loads((tmp_path / "damaged" / "run.json").read_text())
        about["starts"][0].pop("world_size")
        (tmp_path / "damaged" / "run.json").write_text(json.dumps(about))
    why = f"{tmp_path}/damaged/run.json: the record is damaged: {damage}"

    def say(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(main, ["runs", *words])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr

    code, out, err = say("ls")
    assert (code, err) == (0, f"lockstep runs ls: {why}\n")
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["good"]
    code, out, err = say("explain")
    assert (code, err, out.split(":")[0]) == (0, f"lockstep runs explain: {why}\n", "good")
    code, out, err = say("report", "1", "-o", str(tmp_path / "out.html"))
    assert (code, err) == (0, f"lockstep runs report: {why}\n")
    for words in (
        ("explain", "damaged"),
        ("explain", str(tmp_path / "damaged"), "--json"),
        ("report", "damaged", "-o", str(tmp_path / "out.html")),
        ("compare", "good", "damaged"),
        ("top", "damaged", "--once"),
        ("stack", "damaged"),
    ):
        code, out, err = say(*words)
        assert (code, err) == (2, f"lockstep runs {words[0]}: {why}\n")


def test_a_program_whose_words_are_no_utf8_is_listed(tmp_path: Path, clock: _Clock) -> None:
    _record(tmp_path / "run", clock, step=0.1)
    _replace(tmp_path / "run", b'"0.1"', json.dumps(os.fsdecode(b"\xff0.1")).encode())
    assert history.read(tmp_path / "run").program == "train.py --lr ?0.1"


def test_a_run_that_has_taken_no_step_yet_is_one_sentence(tmp_path: Path) -> None:
    """Its trace may have made the folder, and an event the record, before that."""
    recorder = Recorder(lambda: tmp_path, program=["train.py"], tell=print)
    recorder.make_folder()
    recorder.event("late", "rank 1")
    run = history.read(tmp_path)
    assert run.is_alive
    for look in (lambda: Live(run), lambda: next(stacks_of(run, None))):
        with pytest.raises(UnknownRun, match="its ranks have taken no step yet"):
            look()


@pytest.mark.parametrize("is_used_again", [False, True])
def test_what_is_shown_live_goes_on_with_ranks_that_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_used_again: bool
) -> None:
    """Also where a later process has the number of a rank that has ended."""
    recorder = Recorder(lambda: tmp_path, program=["train.py"], tell=print)
    ranks: list[subprocess.Popen[bytes]] = []
    used_again: set[int] = set()
    started = _proc.started
    monkeypatch.setattr(_proc, "started", lambda pid: started(os.getpid() if pid in used_again else pid))

    def start(number: int, steps: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        pages = Pages(folder, 1)
        pages.set(0, Cell.STEPS, steps + 1)
        pages.close()
        ranks.append(subprocess.Popen(["sleep", "60"]))
        recorder.begin(number=number, node=0, world_size=1, ranks=[0], job_folder=folder)
        recorder.add({0: _progress(steps, step=0.1)}, {0: ranks[-1].pid})

    def end() -> None:
        ranks[-1].kill()
        ranks[-1].wait(timeout=LIMIT)
        used_again.update({ranks[-1].pid} if is_used_again else ())

    start(0, 300)
    live = Live(history.read(tmp_path))
    try:
        live.look()
        assert [(row.steps, row.doing) for row in live.rows()] == [(300, "start")]
        end()
        live.look()
        assert live.goes_on, "the launcher is there"
        assert [(row.steps, row.doing) for row in live.rows()] == [(300, "has ended")]
        start(1, 7)
        live.look()
        assert [(row.steps, row.doing) for row in live.rows()] == [(7, "start")]
        recorder.end(exit_code=0, summary=None, peaks={})
        assert live.goes_on, "the rank is there"
        end()
        assert not live.goes_on
    finally:
        live.close()
        end()


# Two runs ------------------------------------------------------------------------------------------------------------


def _compared(tmp_path: Path, clock: _Clock, **other: Any) -> comparison.Comparison:
    _record(tmp_path / "a", clock, step=0.01, of=lambda second: 1 + 0.02 * (second % 3))
    _record(tmp_path / "b", clock, **other)
    return comparison.compare(history.read(tmp_path / "a"), history.read(tmp_path / "b"))


def test_a_run_that_is_slower_by_a_tenth(tmp_path: Path, clock: _Clock) -> None:
    found = _compared(tmp_path, clock, step=0.011, of=lambda second: 1 + 0.02 * (second % 3))
    assert found.change == pytest.approx(0.1, abs=0.01)
    assert found.differs
    assert found.is_slower_by(5)
    assert not found.is_slower_by(15)
    text = found.describe()
    assert "the median step of B takes 1" in text
    assert "longer, more than chance within each run" in text


def test_what_differs_besides_the_steps(tmp_path: Path, clock: _Clock) -> None:
    found = _compared(tmp_path, clock, step=0.011)
    assert "\ncores" not in found.describe()
    found.b.about["environment"] |= {"cores": 96, "variables": {"LOCKSTEP_BACKEND": "gloo"}}
    shown = [line.split() for line in found.describe().splitlines()]
    assert ["cores", str(found.a.about["environment"]["cores"]), "96"] in shown
    assert ["LOCKSTEP_BACKEND", "-", "gloo"] in shown


def test_runs_that_differ_by_chance(tmp_path: Path, clock: _Clock) -> None:
    found = _compared(tmp_path, clock, step=0.01, of=lambda second: 1 + 0.02 * ((second + 1) % 3))
    assert not found.differs
    assert not found.is_slower_by(0)
    assert found.describe().endswith("no difference between their steps that is more than chance")


def test_a_run_of_few_steps_is_not_compared(tmp_path: Path, clock: _Clock) -> None:
    with pytest.raises(UnknownRun, match=r"b: too short to be compared: 3 steps in [0-9]+ s, where 7 seconds or more"):
        _compared(tmp_path, clock, step=10.0)


def test_a_run_of_before_there_was_a_phase_is_compared(tmp_path: Path, clock: _Clock) -> None:
    for name in ("a", "b"):
        _record(tmp_path / name, clock, step=0.01)
    _replace(tmp_path / "a", b'"evaluate"', b'"somewhat"')
    assert "no difference" in comparison.compare(*(history.read(tmp_path / name) for name in ("a", "b"))).describe()


@pytest.mark.parametrize(("text", "number"), [("5%", 5.0), ("2.5", 2.5), ("0%", 0.0)])
def test_a_percentage(text: str, number: float) -> None:
    assert comparison.parse_percent(text) == number


@pytest.mark.parametrize("text", ["", "five", "-1%", "nan"])
def test_no_percentage(text: str) -> None:
    with pytest.raises(ValueError, match="expected a percentage, such as 5%"):
        comparison.parse_percent(text)


def test_what_ranks_wait_in_leaves_the_numbers_their_room(tmp_path: Path, clock: _Clock) -> None:
    _record(tmp_path, clock, step=0.01)
    rows = [
        Row(rank, 1000 + rank, f"waits in all_reduce {'#' * 200}", 1234, 56.7, 0.25, 0.1, 300 << 20)
        for rank in range(2)
    ]
    with io.StringIO() as file:
        Console(file=file, width=80).print(_now(history.read(tmp_path), rows, "step 3: loss 0.5", Throughput(1.0, 1.0)))
        _, head, *shown, logged = file.getvalue().splitlines()
    assert logged.strip() == "step 3: loss 0.5"
    assert head.split() == ["rank", "pid", "step", "steps/s", "waits", "data", "memory", "now"]
    assert [line.split()[:8] for line in shown] == [
        [str(rank), str(1000 + rank), "1,234", "56.7", "25%", "10%", "300", "MiB"] for rank in range(2)
    ]
    assert all(len(line) == 80 and "…" in line for line in shown), shown
