"""lockstep.Log on real ranks: exact means, when lines are due, what is wrong on one rank, and a run that is resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.comm.peers import OverGroup
from tests.backends import EACH_BACKEND, ON_GPUS, OVER_ALL
from tests.harness import collect_outcomes, run_ranks
from tests.launching import run

pytestmark = EACH_BACKEND


def _lines(folder: Path | str, name: str = "metrics.jsonl") -> list[Any]:
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


# Exact means, at the right steps.


def _log_batches(folder: str, every: int) -> None:
    """Batches of 7 of 31 samples; the last one has 3, fewer than some worlds have ranks."""
    lockstep.init()
    values = torch.arange(31, dtype=torch.float64).square()
    with lockstep.Log(folder, every=every) as log:
        for (batch,) in lockstep.shard(DataLoader(TensorDataset(values), batch_size=7)):
            log({"square/mean": batch.mean()}, largest=float(batch.mean()), phase="train", lr=0.1, epoch=3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@ON_GPUS
def test_lines_are_means_over_the_samples_of_all_ranks(tmp_path: Path, world_size: int) -> None:
    run_ranks(_log_batches, world_size, str(tmp_path), 2)
    lines = _lines(tmp_path)
    squares = [float(i * i) for i in range(31)]
    means = [sum(part) / len(part) for part in (squares[:14], squares[14:28], squares[28:])]
    assert [line["step"] for line in lines] == [2, 4, 5]
    for key in ("square/mean", "largest"):
        assert [line[key] for line in lines] == pytest.approx(means, rel=1e-15)
    assert [(line["phase"], line["lr"], line["epoch"]) for line in lines] == [("train", 0.1, 3)] * 3
    assert list(lines[0]) == ["step", "time", "square/mean", "largest", "phase", "lr", "epoch"]
    assert time.time() - 300 < lines[0]["time"] <= lines[2]["time"] <= time.time() + 1
    assert stat.S_IMODE((tmp_path / "metrics.jsonl").stat().st_mode) == 0o600


def _log_weighted(folder: str) -> None:
    world = lockstep.init()
    log = lockstep.Log(f"{folder}/own.jsonl", every=3)
    for step in range(3):
        log(said=float(world.rank), samples=world.rank * 3 + 1)
        with torch.no_grad():
            log({"val": torch.tensor(10 * world.rank + step)}, step=log.step)  # an evaluation: no step of its own
    world.share = lockstep.BatchShare(world.rank, 1)
    log(tokens=torch.tensor(float("nan") if world.rank == 0 else 7.0))
    log.line()
    log.line()  # nothing was logged: no line
    log.close()
    log.close()


def _log_counted(folder: str, late: bool) -> list[str]:
    from lockstep.metrics import series

    series._READS_AT_HAND = not late  # as on any other device
    world = lockstep.init()
    log = lockstep.Log(folder, every=5)
    mask = torch.arange(4) < world.rank * 2 + 1  # of 1 and 3 elements
    count = mask.sum()
    plain = torch.Tensor.item

    def reading(*_: Any) -> Any:
        raise AssertionError("a tensor was read")

    if late:
        torch.Tensor.item = reading  # type: ignore[assignment,method-assign]
    for samples in (count, mask.sum().float()[None], int(mask.numpy().sum()), mask.numpy().sum()):
        log(loss=float(world.rank), acc=torch.tensor(float(world.rank)), samples=samples)
        count += 100  # (what counts is what it was)
    torch.Tensor.item = plain  # type: ignore[method-assign]
    log(loss=float(world.rank), samples=np.float32(world.rank * 2 + 1))
    log.line()
    said = []
    for wrong in (torch.tensor(-1), torch.tensor([1, 2]), np.int64(-1), torch.tensor(float("nan")), "2"):
        try:
            log(loss=1.0, samples=wrong)
            log.line()
        except (ValueError, lockstep.LockstepError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("late", [False, True])
def test_what_weighs_may_be_a_number_of_any_kind(tmp_path: Path, late: bool) -> None:
    for said in run_ranks(_log_counted, 2, str(tmp_path), late):
        assert len(said) == 5
        assert all("samples=" in words and "expected" in words for words in said), said
    line = _lines(tmp_path, "metrics.jsonl")[0]
    assert (line["step"], line["loss"], line["acc"]) == (5, 0.75, 0.75)


@OVER_ALL
def test_what_weighs_may_be_said(tmp_path: Path) -> None:
    run_ranks(_log_weighted, 2, str(tmp_path))
    first, second = _lines(tmp_path, "own.jsonl")
    assert (first["step"], first["said"]) == (3, 0.8)
    assert first["val"] == pytest.approx(5.5)  # 0, 1, 10, 11: those before the line
    assert (second["step"], second["tokens"], second["val"]) == (4, 7.0, 7.0)


class _Counting:
    """A recorder of one kind of a sink."""

    def __init__(self, folder: str, rank: int) -> None:
        self.path = f"{folder}/sink-{rank}"

    def log(self, values: dict[str, Any], step: int) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps([step, values]) + "\n")


def _log_silently(folder: str) -> dict[str, int]:
    """Count collectives and reads of tensors in calls at which no line is due."""
    from lockstep.metrics import series

    series._READS_AT_HAND = False  # as on any other device
    world = lockstep.init()
    counted = {"gathers": 0, "reads": 0}
    gather = OverGroup.gather

    def counting(self: OverGroup, record: Any) -> list[Any]:
        counted["gathers"] += 1
        return gather(self, record)

    OverGroup.gather = counting  # type: ignore[method-assign]
    log = lockstep.Log(folder, every=10, sinks=[lambda: _Counting(folder, world.rank)])
    loss = torch.ones(()) * world.rank
    log(loss=loss)  # the first one compares and opens
    counted["gathers"] = 0
    plain = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy")}

    def reading(*_: Any) -> Any:
        counted["reads"] += 1
        raise AssertionError("a tensor was read")

    for name in plain:
        setattr(torch.Tensor, name, reading)
    for _ in range(8):
        log(loss=loss, acc=loss * 2)
    for name, method in plain.items():
        setattr(torch.Tensor, name, method)
    silent = dict(counted)
    log(loss=loss, acc=loss * 2)
    assert counted["gathers"] == 1
    log.close()
    return silent


def test_a_call_sends_and_reads_nothing_and_rank_0_alone_has_sinks(tmp_path: Path) -> None:
    assert run_ranks(_log_silently, 2, str(tmp_path)) == [{"gathers": 0, "reads": 0}] * 2
    assert _lines(tmp_path, "sink-0") == [[10, {"loss": 0.5, "acc": 1.0}]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "sink-0"]


def _log_by_the_clock(folder: str) -> list[int]:
    """Clocks are the ranks' own: rank 1's stands still, and rank 0's goes on by a second a call, later by ten."""
    world = lockstep.init()
    from lockstep.metrics import lines

    now = [0.0]

    class Clock:
        time = staticmethod(time.time)
        monotonic = staticmethod(lambda: now[0])

    vars(lines)["time"] = Clock
    log = lockstep.Log(folder, seconds=20)
    for step in range(120):
        now[0] += (1.0 if step < 80 else 10.0) if world.is_main else 0.0
        log(step_was=step + 1)
    log.close()
    return [line["step"] for line in _lines(folder)] if world.is_main else []


def test_lines_every_so_many_seconds_come_at_the_same_call_on_all_ranks(tmp_path: Path) -> None:
    steps, _ = run_ranks(_log_by_the_clock, 2, str(tmp_path))
    early = [step for step in steps if step <= 80]
    assert all(19 <= after - before <= 22 for before, after in itertools.pairwise(early)), steps
    assert len(early) >= 3
    late = [step for step in steps if step > 101]
    assert all(after - before <= 3 for before, after in itertools.pairwise(late)), steps
    assert steps[-1] == 120


# What is wrong.


def _log_wrongly(folder: str, how: str) -> str:
    world = lockstep.init(timeout=20)
    log = lockstep.Log(folder, every=4)
    kinds: dict[str, dict[str, Any]] = {
        "shape": {"loss": torch.ones(2)},
        "type": {"loss": [1.0]},
        "complex": {"loss": torch.ones((), dtype=torch.complex64)},
        "kind": {"phase": 1.0},
        "name": {"time": 1.0},
        "missing": {},
        "more": {"loss": 1.0, "extra": 2.0},
        "samples": {"loss": 1.0, "samples": -1},
        "huge": {"loss": 1 << 5000},
        "none": {"loss": None},
    }
    bad = kinds[how]
    raised = ""
    for step in range(1, 9):
        values: dict[str, Any] = (
            {"loss": float(step), "phase": "warm"} if step != 2 or world.rank != 1 else {"phase": "warm"} | bad
        )
        if step == 2 and world.rank == 1 and "loss" not in values and how == "missing":
            del values["phase"]
        try:
            log(**values)
        except (TypeError, ValueError) as error:
            assert step == 4
            raised = f"{type(error).__name__}: {error}"
    log.close()
    return raised


_WRONG = {
    "shape": r"ValueError: .*rank 1: loss: a tensor of shape \[2\], torch.float32, on cpu: expected one real number",
    "type": r"TypeError: .*rank 1: loss: expected a number, a text or a tensor with one element, not list",
    "complex": r"ValueError: .*loss: a tensor of shape \[\], torch.complex64",
    "kind": r"TypeError: .*rank 1: phase: a number here and a text before: use two names",
    "name": r"ValueError: .*rank 1: 'time': expected a name other than step, time",
    "samples": r"ValueError: .*rank 1: samples=-1: expected a number, 0 or more",
    "huge": r"ValueError: .*rank 1: an int of 5001 bits",
    "none": r"TypeError: .*rank 1: loss: expected a number, .* not NoneType",
    "more": r"ValueError: .*'extra' is not logged the same way on all ranks \(rank 0: not there, rank 1: a number\)",
}


@pytest.mark.parametrize("how", _WRONG)
def test_what_one_rank_logs_wrongly_is_an_error_on_all_and_the_rest_is_written(tmp_path: Path, how: str) -> None:
    for rank, raised in enumerate(run_ranks(_log_wrongly, 2, str(tmp_path), how)):
        assert re.match(_WRONG[how], raised), raised
        assert f"rank {rank} of 2: lockstep.Log: " in raised
        if how not in ("more",):
            assert re.search(r"\(logged at step 2 at .*test_log\.py:\d+ in _log_wrongly\)", raised), raised
    first, second = _lines(tmp_path)
    sums = 1 + 2 + 3 + 4 + 1 + 3 + 4
    expected = {"more": (10 + 8 + 1) / 8}.get(how, sums / 7)
    assert first["loss"] == pytest.approx(expected)
    assert second["loss"] == 6.5
    assert second["phase"] == "warm"


def test_a_key_that_is_left_out_once_is_no_error(tmp_path: Path) -> None:
    assert run_ranks(_log_wrongly, 2, str(tmp_path), "missing") == ["", ""]
    assert _lines(tmp_path)[0]["loss"] == pytest.approx(18 / 7)


def _log_otherwise_from_the_start(folder: str) -> None:
    world = lockstep.init(timeout=20)
    lockstep.Log(folder)({f"loss{world.rank}": 1.0})


def test_different_keys_are_an_error_at_the_first_call(tmp_path: Path) -> None:
    for outcome in collect_outcomes(_log_otherwise_from_the_start, 2, str(tmp_path)):
        assert outcome.error == "ValueError"
        assert "'loss0' is not logged the same way on all ranks (rank 0: a number, rank" in str(outcome.message)


def _log_steps_apart(folder: str) -> str:
    world = lockstep.init(timeout=20)
    log = lockstep.Log(folder, every=100)
    log(loss=1.0)
    log(loss=1.0, step=5 + world.rank)
    try:
        log.close()
    except lockstep.LockstepError as error:
        return str(error)
    return ""


def test_ranks_at_different_steps_are_told(tmp_path: Path) -> None:
    for message in run_ranks(_log_steps_apart, 2, str(tmp_path)):
        assert "the ranks are at different steps (rank 0: 5, rank 1: 6)" in message
    assert [line["loss"] for line in _lines(tmp_path)] == [1.0]


def _log_nan(folder: str) -> list[str]:
    world = lockstep.init()
    with warnings.catch_warnings(record=True) as caught, lockstep.Log(folder, every=2) as log:
        warnings.simplefilter("always")
        for step in range(6):
            is_bad = world.rank == 1 and step in (1, 2, 3)
            log(loss=torch.tensor(float("nan") if is_bad else step + 1.0), inf=float("inf") if step > 3 else 0.5)
    return [str(each.message) for each in caught]


def test_numbers_that_are_not_finite_are_counted_and_said_once(tmp_path: Path) -> None:
    first, second = run_ranks(_log_nan, 2, str(tmp_path))
    assert len(first) == 2
    assert first[0].startswith("loss: up to step 2, 1 number infinite or NaN, the first at step 2, on rank 1.")
    assert first[1].startswith("inf: up to step 6, 4 numbers infinite or NaN, the first at step 5, on ranks 0 and 1.")
    assert second == []
    lines = _lines(tmp_path)
    assert [line["loss"] for line in lines] == [pytest.approx(4 / 3), 3.5, 5.5]
    assert [line.get("nonfinite") for line in lines] == [{"loss": 1}, {"loss": 2}, {"inf": 4}]
    assert [line["inf"] for line in lines] == [0.5, 0.5, None]


class _Broken:
    def add_scalar(self, *_: Any) -> None:
        raise ConnectionError("the server is gone")


def _log_to_a_broken_sink(folder: str) -> list[str]:
    lockstep.init(timeout=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lockstep.Log(folder, every=1, sinks=[_Broken()]) as log:
            for _ in range(5):
                log(loss=1.0)
    return [str(each.message) for each in caught]


def test_a_sink_that_raises_stops_nobody(tmp_path: Path) -> None:
    first, second = run_ranks(_log_to_a_broken_sink, 2, str(tmp_path))
    assert "_Broken did not take the line of step 1 (ConnectionError: the server is gone)" in first[0]
    assert first[1:] == ["the sink _Broken has missed 5 of 5 lines; metrics.jsonl has them all"]
    assert second == []
    assert len(_lines(tmp_path)) == 5


def _log_to(path: str, sinks: list[Any]) -> None:
    lockstep.init(timeout=20)
    lockstep.Log(path, sinks=sinks)(loss=1.0)


def test_what_rank_0_can_t_open_or_use_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for outcome in collect_outcomes(_log_to, 2, str(tmp_path / "file"), []):
        assert outcome.error == "LockstepError"
        assert "Not a directory; part of the path is a file" in str(outcome.message)
    for outcome in collect_outcomes(_log_to, 2, str(tmp_path / "run"), [3]):
        assert outcome.error == "TypeError"
        assert "sinks: a int takes no lines" in str(outcome.message)


def _log_on_a_full_disk(folder: str) -> list[str]:
    world = lockstep.init(timeout=20)
    log = lockstep.Log(folder, every=2)
    raised = []
    write = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for step in range(1, 9):
        if world.is_main:
            os.pwrite = full if step in (3, 4, 5, 6) else write
        try:
            log(loss=float(step))
        except lockstep.LockstepError as error:
            raised.append(f"{step}: {error}")
    log.close()
    return raised


def test_a_full_disk_is_an_error_on_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    for rank, raised in enumerate(run_ranks(_log_on_a_full_disk, 2, str(tmp_path))):
        assert len(raised) == 1
        assert raised[0].startswith(
            f"6: rank {rank} of 2: lockstep.Log: rank 0: {tmp_path}/metrics.jsonl: No space left"
        )
    assert [(line["step"], line["loss"]) for line in _lines(tmp_path)] == [(2, 1.5), (4, 3.5), (6, 5.5), (8, 7.5)]


def _wrong_arguments() -> None:
    with pytest.raises(lockstep.LockstepError, match=r"call lockstep\.init\(\) first"):
        lockstep.Log("run")
    lockstep.init()
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (TypeError, {"run": 3}),
        (TypeError, {"every": 2.5}),
        (ValueError, {"every": 0}),
        (ValueError, {"seconds": 0}),
        (ValueError, {"seconds": float("nan")}),
        (ValueError, {"after": -1}),
        (TypeError, {"sinks": "wandb"}),
        (TypeError, {"sinks": object()}),
    ]
    for error, arguments in wrong:
        with pytest.raises(error, match=next(iter(arguments))):
            lockstep.Log(**({"run": "run"} | arguments))


def test_wrong_arguments_are_refused() -> None:
    run_ranks(_wrong_arguments, 1)


def _log_after_the_end(folder: str) -> None:
    lockstep.init()
    log = lockstep.Log(folder, every=1)
    log(loss=1.0)
    log.close()
    for call in (log, log.line):
        with pytest.raises(lockstep.LockstepError, match=r"this lockstep\.Log is closed"):
            call()
    with contextlib.suppress(KeyError), lockstep.Log(folder + "/two", every=5) as other:
        other(loss=1.0)
        raise KeyError("the script's own")


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    run_ranks(_log_after_the_end, 2, str(tmp_path))
    assert _lines(tmp_path / "two") == []


# Alone, and forgotten.


_ALONE = """
import torch, lockstep
lockstep.init()
log = lockstep.Log("run", every=4)
for step in range(6):
    log(loss=torch.tensor(float(step)))
"""


def test_in_plain_python_what_is_left_is_written_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(_ALONE)
    done = run(["lockstep", "run", "-n", "1", "alone.py"], tmp_path, torch=True)
    assert done.code == 0, done
    assert [(line["step"], line["loss"]) for line in _lines(tmp_path / "run")] == [(4, 1.5), (6, 4.5)]


def test_ranks_that_forget_to_close_are_told(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(_ALONE)
    done = run(["lockstep", "run", "-n", "2", "alone.py"], tmp_path, torch=True)
    assert done.code == 0, done
    assert " lacks 2 values logged after step 4: call close()" in done.err
    assert [line["step"] for line in _lines(tmp_path / "run")] == [4]


# With a Checkpointer.

_TRAIN = """
import os, signal, sys
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world = lockstep.init()
restart = int(os.environ.get("LOCKSTEP_RESTART", 0))
model = lockstep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.arange(240.0).view(60, 4))
loader = lockstep.shard(DataLoader(data, batch_size=8, shuffle=True))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
log = lockstep.Log(saved, every=3)
for epoch in saved.epochs(2):
    for (batch,) in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss, first=batch.mean(), steps=saved.step)
        {trouble}
        if saved.step in (4, 11):
            saved.{save}()
    log(evaluated=epoch)
    log.line()
"""

_KILLS = "world.rank == (1, 0, 9, 9)[restart] and saved.step == (6, 13, 99, 99)[restart] and os.kill(os.getpid(), 9)"


def _train(
    folder: Path, *options: str, ranks: int = 2, trouble: str = "pass", save: str = "save", code: int = 0
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(_TRAIN.format(trouble=trouble, save=save))
    done = run(["lockstep", "run", "-n", str(ranks), *options, "train.py"], folder, torch=True)
    assert done.code == code, done
    return _lines(folder / "run")


def _without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_a_run_that_is_killed_and_restarted_has_the_lines_of_one_that_was_not(tmp_path: Path, save: str) -> None:
    calm = _train(tmp_path / "calm", save=save)
    steps = [line["step"] for line in calm if "loss" in line]
    assert steps == [3, 4, 6, 8, 9, 11, 12, 15, 16]
    assert [line["step"] for line in calm if "evaluated" in line] == [8, 16]
    killed = _train(tmp_path / "killed", "--max-restarts", "3", trouble=_KILLS, save=save)
    assert _without_time(killed) == _without_time(calm)
    # Every step is in one line, each with its weight: the mean of the steps' numbers says which.
    covered = [line["steps"] for line in killed if "steps" in line]
    assert covered == pytest.approx([2, 4, 5.5, (7 * 8 + 8 * 4) / 12, 9, 10.5, 12, 14, 16])  # the last batch has 4


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    calm = _train(tmp_path / "calm", ranks=1)
    killed = "world.rank == 1 and saved.step == 7 and os.kill(os.getpid(), 9)"
    lines = _train(tmp_path / "killed", ranks=3, trouble=killed, code=137)
    assert [line["step"] for line in lines][:3] == [3, 4, 6]
    lines = _train(tmp_path / "killed", ranks=2)
    assert [line["step"] for line in lines] == [line["step"] for line in calm]
    for ours, one in zip(lines, calm, strict=True):
        assert ours.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=1e-5)
        assert ours.get("first", 0) == pytest.approx(one.get("first", 0), rel=1e-6)
        assert ours.get("steps") == one.get("steps")


def test_a_run_killed_before_its_first_checkpoint_begins_a_file_and_keeps_the_other(tmp_path: Path) -> None:
    trouble = "restart == 0 and saved.step == 4 and os.kill(os.getpid(), 9)"
    lines = _train(tmp_path / "run", "--max-restarts", "1", trouble=trouble)
    assert [line["step"] for line in lines if "loss" in line] == [3, 4, 6, 8, 9, 11, 12, 15, 16]
    assert [line["step"] for line in _lines(tmp_path / "run" / "run", "metrics-1.jsonl")] == [3]


def test_a_run_that_is_stopped_by_a_signal_has_each_step_once(tmp_path: Path) -> None:
    stopped = (
        "world.rank == 1 and saved.step == 5 and not os.path.exists('term') and os.kill(os.getpid(), signal.SIGTERM)"
    )
    first = _train(tmp_path / "run", trouble=stopped, code=75)
    assert [(line["step"], line["steps"]) for line in first] == [(3, 2), (4, 4), (6, 5.5), (7, 7)]
    (tmp_path / "run" / "term").touch()
    lines = _train(tmp_path / "run", trouble=stopped)
    assert lines[:4] == first
    covered = [(line["step"], line["steps"]) for line in lines[4:] if "steps" in line]
    assert covered == [(8, 8), (9, 9), (11, 10.5), (12, 12), (15, 14), (16, 16)]


def _log_while_accumulating(folder: str) -> None:
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    with lockstep.Log(saved, every=2) as log:
        for part in range(16):
            with contextlib.ExitStack() as stack:
                if part % 4 < 3:
                    stack.enter_context(lockstep.no_sync(model))
                model(torch.ones(2, 2)).sum().backward()
            if part % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            log(part=part, rank=torch.tensor(world.rank))
    with torch.inference_mode(), lockstep.Log(saved.folder / "val.jsonl", every=1) as val:
        val(rank=torch.tensor(world.rank))


def test_parts_of_an_accumulated_step_count_together(tmp_path: Path) -> None:
    run_ranks(_log_while_accumulating, 2, str(tmp_path))
    lines = _lines(tmp_path)
    assert [(line["step"], line["part"], line["rank"]) for line in lines] == [(2, 3.5, 0.5), (4, 11.5, 0.5)]
    assert [line["rank"] for line in _lines(tmp_path, "val.jsonl")] == [0.5]


def _log_before_resuming(folder: str) -> str:
    lockstep.init(timeout=20)
    model = lockstep.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    log = lockstep.Log(saved, every=1)
    step()
    log(loss=1.0)
    step()
    saved.save()
    log(loss=2.0)
    del log
    step()
    del saved
    again = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    log = lockstep.Log(again, every=1)
    with pytest.raises(ValueError, match="the Checkpointer knows which step"):
        lockstep.Log(again, after=3)
    with pytest.raises(ValueError, match="has what is found of its checkpoints anyway"):
        lockstep.Log(again, evaluated=again)
    with pytest.raises(TypeError, match="evaluated=Linear: expected a lockstep"):
        lockstep.Log(f"{folder}/other", evaluated=model)  # type: ignore[arg-type]
    try:
        log(loss=1.0)
    except lockstep.CheckpointError as error:
        said = str(error)
    again.restore()
    log(loss=3.0)  # at step 2, which has a line
    step()
    log(loss=5.0)
    again.save()
    again.restore()
    log(loss=6.0)
    step()
    try:
        log(loss=8.0, step=7)
    except ValueError as error:
        said += str(error)
    log.close()
    return said


def test_a_log_follows_its_checkpointer(tmp_path: Path) -> None:
    for said in run_ranks(_log_before_resuming, 2, str(tmp_path)):
        assert "which this run has not resumed: call restore() or epochs() first" in said
        assert "step=7: the Checkpointer counts the steps; leave it out" in said
    lines = [(line["step"], line["loss"]) for line in _lines(tmp_path)]
    assert lines == [(1, 1.0), (3, 4.0), (4, 7.0)]
