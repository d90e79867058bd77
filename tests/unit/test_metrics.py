"""The parts of lockstep.Log that need no ranks: numbers of one key, the file, the sinks."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.metrics import series
from lockstep.metrics.file import LogFile
from lockstep.metrics.series import Numbers, SeriesSummary, merged, summary_of, weight_of
from lockstep.metrics.sinks import Sink, make
from tests.device import simulation


def test_a_mean_is_weighted_and_rounded_once() -> None:
    numbers = [(0.1 * i, float(1 + i % 3)) for i in range(1000)]
    exact = math.fsum(x * w for x, w in numbers) / math.fsum(w for _, w in numbers)
    value = summary_of(numbers).value
    assert value == pytest.approx(exact, rel=1e-15)
    halves = merged([summary_of(numbers[:300]), summary_of(numbers[300:])])
    assert halves.value == pytest.approx(exact, rel=1e-15)
    assert SeriesSummary.from_json(json.loads(json.dumps(halves.to_json()))) == halves


def test_equal_numbers_stay_what_they_are() -> None:
    assert summary_of([(0.1, 3.0), (0.1, 4.0), (0.1, 0.7)]).value == 0.1
    epoch = merged([summary_of([(3, 2.0)]), summary_of([(3, 1.0)])]).value
    assert epoch == 3
    assert type(epoch) is int


def test_what_is_not_finite_is_counted_apart_and_what_weighs_nothing_not_at_all() -> None:
    summary = summary_of([(1.0, 1.0), (math.nan, 1.0), (-math.inf, 2.0), (3.0, 1.0), (math.nan, 0.0)])
    assert (summary.value, summary.weight, summary.nonfinite) == (2.0, 2.0, 2)
    assert summary_of([(math.nan, 0.0)]) == SeriesSummary(0.0, 0.0, 0.0, 0.0, 0)
    assert merged([summary_of([]), summary_of([(5.0, 2.0)])]).value == 5.0
    assert merged([]).value is None


@pytest.mark.parametrize("at_hand", [True, False])
def test_the_step_of_the_first_that_is_not_finite_is_known(monkeypatch: pytest.MonkeyPatch, at_hand: bool) -> None:
    monkeypatch.setattr(series, "_READS_AT_HAND", at_hand)
    numbers = Numbers()
    for step in range(1, 20):
        value = torch.tensor(math.nan if step in (7, 9) else 1.0)
        if not numbers.add_at_hand(value, float(step != 7), step):
            numbers.add_tensor(value, float(step != 7), step)
    summary = numbers.take()
    assert (summary.nonfinite, summary.since) == (1, 9), "that of step 7 counts for nothing"
    assert merged([summary, summary_of([(1.0, 1.0)])]).since == 9
    assert SeriesSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    assert numbers.take().since is None


def test_means_have_no_digits_of_their_making() -> None:
    halves = [summary_of([(0.25, 4.0), (0.5, 4.0)]), summary_of([(0.375, 3.0), (0.0, 1.0), (0.75, 1.0)])]
    assert merged(halves).value == 0.375 * 13 / 13


def test_numbers_too_large_to_be_added_are_counted_apart() -> None:
    summary = summary_of([(1.7e308, 1000.0), (-1.7e308, 1.0), (2.0, 1.0)])
    assert (summary.value, summary.nonfinite) == (2.0, 2)


_TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(params=[True, False], ids=["at hand", "on a device"])
def at_hand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of Note [Read at a line]."""
    monkeypatch.setattr(series, "_READS_AT_HAND", request.param)


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize("dtype", _TYPES, ids=str)
def test_tensors_of_any_dtype_are_read_exactly(dtype: torch.dtype) -> None:
    numbers = Numbers()
    for value in (1, 0, 1, 1):
        numbers.add_tensor(torch.tensor([value]).to(dtype), 1.0)
    summary = numbers.take()
    assert summary.value == 0.75
    assert json.loads(json.dumps(summary.to_json())) == summary.to_json()


@pytest.mark.usefixtures("at_hand")
def test_a_tensor_counts_as_it_was_when_it_was_logged() -> None:
    numbers, total = Numbers(), torch.zeros((), requires_grad=True)
    with torch.no_grad():
        for i in range(600):  # more than are stacked at once
            total += 1
            numbers.add_tensor(total if i % 2 else total.detach().double(), 1.0)
    assert len(numbers) == 600
    assert numbers.take().value == 300.5
    assert len(numbers) == 0
    assert numbers.take().value is None


def test_logging_reads_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(series, "_READS_AT_HAND", False)  # as on any other device
    numbers = Numbers()
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
            patched.setattr(torch.Tensor, name, refuse)
        for i in range(300):
            numbers.add_tensor(torch.full((), float(i)), 1.0)
    assert numbers.take().value == 149.5


@pytest.mark.usefixtures("at_hand")
def test_whole_numbers_beyond_float64_stay_whole() -> None:
    numbers = Numbers()
    numbers.add_tensor(torch.tensor(2**62 + 1), 3.0)
    assert numbers.take().value == 2**62 + 1


# The file.


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, steps: range, after: int | None = None) -> None:
    file = LogFile(path, after=after)
    for step in steps:
        file.append({"step": step})
    file.sync()
    file.close()


def test_the_file_and_its_folders_are_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "metrics.jsonl"
    _write(path, range(3))
    assert [line["step"] for line in _lines(path)] == [0, 1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path.parent.parent)} == {0o700}


def test_a_resumed_run_cuts_off_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(10))
    with path.open("a") as file:
        file.write('{"step": 9, "lo')
    _write(path, range(20, 22), after=6)
    assert [line["step"] for line in _lines(path)] == [*range(7), 20, 21]
    path.write_text('{"step": 1}\n{"st')
    _write(path, range(2, 3), after=5)
    assert [line["step"] for line in _lines(path)] == [1, 2]


def test_a_run_that_begins_leaves_the_lines_of_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start in (10, 20, 30):
        _write(path, range(start, start + 2))
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl"]
    assert [line["step"] for name in names for line in _lines(tmp_path / name)] == [10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("content", ["hello\n", '[1]\n{"step": 1}\n', '{"step": "1"}\n', '{"loss": 1}\n'])
def test_a_file_of_something_else_is_refused_and_left(tmp_path: Path, content: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(LockstepError, match=r"lockstep\.Log has not written line 1"):
        LogFile(path, after=3)
    assert path.read_text() == content


def test_two_logs_of_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LogFile(path, after=None)
    file.append({"step": 1})
    for after in (None, 5):
        with pytest.raises(LockstepError, match=r"metrics\.jsonl is being written by another lockstep\.Log"):
            LogFile(path, after=after)
    child = os.fork()
    if not child:  # another process, which has no part in this one's locks
        from lockstep.metrics import file as module

        module._open.clear()
        try:
            LogFile(path, after=5)
        except LockstepError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    file.close()
    LogFile(path, after=5).close()
    assert _lines(path) == [{"step": 1}]


_OTHER = """
import sys
from pathlib import Path
from lockstep.metrics.file import LogFile, add_lines, evaluation_line
path = Path(sys.argv[1])
if sys.argv[2] == "evaluation":
    print(add_lines(path, [evaluation_line("found", step=1, time=2.0, numbers={"eval/loss": 0.25})]), flush=True)
else:
    log = LogFile(path, after=9)
    print("open", flush=True)
    sys.stdin.read()
"""


def _other(path: Path, what: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", _OTHER, str(path), what]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_log_whose_lock_the_program_lost_overwrites_no_lines_of_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = LogFile(path, after=None)
    log.append({"step": 1})
    path.read_bytes()  # as an upload of the run's folder does: the kernel drops the lock
    assert _other(path, "evaluation").communicate()[0] == "1\n"
    log.append({"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 1, 2]
    assert log.evaluations == {("found", 2.0)}
    path.read_bytes()
    other = _other(path, "log")
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    log.append({"step": 3})
    assert "is being written by another lockstep.Log" in (log.failure or "")
    other.communicate("")
    log.write()
    assert log.failure is None
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 1, 2, 3]
    log.close()


def test_lines_that_could_not_be_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LogFile(path, after=None)
    file.append({"step": 1})
    write = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return write(fd, data[:-4], offset)

    monkeypatch.setattr(os, "pwrite", full)
    file.append({"step": 2})
    assert file.failure == f"{path}: No space left on device; the disk is full: free space, or choose another folder"
    file.append({"step": 3})
    assert file.failure is not None
    monkeypatch.setattr(os, "pwrite", write)
    file.sync()
    assert file.failure is None
    file.close()
    assert _lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


# The sinks.


class _Run:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.got.append((values, step))


class _Writer:
    def __init__(self) -> None:
        self.got: list[Any] = []
        self.flushed = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.got.append((tag, value, step))

    def add_text(self, tag: str, value: str, step: int) -> None:
        self.got.append((tag, value, step))

    def flush(self) -> None:
        self.flushed += 1


class _Mlflow:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def log(self) -> None:
        raise AssertionError("not this one")

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.got.append((values, step))


def test_each_sink_gets_a_line_in_its_own_way() -> None:
    run, writer, mlflow = _Run(), _Writer(), _Mlflow()
    sinks = make([run, None, lambda: writer, mlflow, _Writer])
    for sink in sinks:
        sink.write({"loss": 0.5, "phase": "warm-up"}, 3)
        sink.close()
    assert run.got == [({"loss": 0.5, "phase": "warm-up"}, 3)]
    assert writer.got == [("loss", 0.5, 3), ("phase", "warm-up", 3)]
    assert writer.flushed == 1
    assert mlflow.got == [({"loss": 0.5}, 3)]
    sinks[0].write({"loss": None}, 4)
    assert math.isnan(run.got[1][0]["loss"])


@pytest.mark.parametrize("given", [3, "wandb", object(), sys.intern, lambda: 5])
def test_what_takes_no_lines_is_refused(given: Any) -> None:
    with pytest.raises(TypeError):
        Sink(given)


def test_a_sink_that_raises_is_a_warning_and_gets_the_next_line() -> None:
    class Broken(_Run):
        def log(self, values: dict[str, Any], *, step: int) -> None:
            if step < 3:
                raise ConnectionError("no route to host")
            super().log(values, step=step)

    broken = Broken()
    sink = Sink(broken)
    with pytest.warns(RuntimeWarning, match=r"sink Broken did not take the line of step 1 \(ConnectionError: no route"):
        sink.write({"loss": 1.0}, 1)
    sink.write({"loss": 1.0}, 2)  # said once
    sink.write({"loss": 1.0}, 3)
    assert broken.got == [({"loss": 1.0}, 3)]
    with pytest.warns(RuntimeWarning, match="has missed 2 of 3 lines"):
        sink.close()


def test_numpy_numbers_are_numbers() -> None:
    from lockstep.metrics.lines import _plain

    assert json.dumps([_plain(np.float32(0.5)), _plain(np.int64(3)), _plain(True)]) == "[0.5, 3, 1]"
    with pytest.raises(ValueError, match="4097 bits"):
        _plain(1 << 4096)


@pytest.mark.gpu
def test_logging_waits_for_no_gpu() -> None:
    numbers = Numbers()
    values = torch.arange(600.0, device="cuda")
    torch.cuda.synchronize()
    with simulation.refused_waits():
        for value in values:
            numbers.add_tensor(value, 1.0)
    assert numbers.take().value == 299.5


@pytest.mark.gpu
def test_weights_wait_for_no_gpu() -> None:
    numbers = Numbers()
    weights = torch.arange(4, device="cuda")
    torch.cuda.synchronize()
    with simulation.refused_waits():
        for number in range(4):
            numbers.add(float(number), weight_of(weights[number]))
            numbers.add_tensor(weights[number], weight_of(weights[number]))
        weights.fill_(100)  # what counts is what they were
    assert numbers.take().value == (1 + 4 + 9) / (1 + 2 + 3)
