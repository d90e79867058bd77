"""Saving beside training: what is saved, what waits for what, and where failures come to light."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.plan import WritePlan
from lockstep.checkpoint.read import read
from lockstep.checkpoint.storage import Storage
from tests.backends import EACH_BACKEND, ON_GPUS, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import device_of

pytestmark = EACH_BACKEND


class Gate(Storage):
    """Writing waits until it is let through; what was done is noted in order. It fails if told to."""

    def __init__(self, *, open_: bool = True) -> None:
        self.open_gate = threading.Event()
        self.done: list[str] = []
        self.fail = 0
        if open_:
            self.open_gate.set()

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        if self.fail:
            raise OSError(self.fail, os.strerror(self.fail))
        assert self.open_gate.wait(30)
        super().write(file, data, offset)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.done.append(f"rename {new.name}")

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.done.append(f"make {path.name[:13]}")


def _bench(folder: str, gate: Gate, width: int = 50, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(lockstep.world().device)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, **options)
    saved._storage = gate
    return model, optimizer, saved


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4, device=device_of(model))).square().sum().backward()
    optimizer.step()


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _trains_on(folder: str) -> tuple[bool, bool, list[str], int]:
    world = lockstep.init()
    gate = Gate(open_=False)
    model, optimizer, saved = _bench(folder, gate)
    _step(model, optimizer)
    then, momentum = _weights(model), optimizer.state_dict()["state"][0]["exp_avg"].to("cpu", copy=True)
    saved.async_save()
    for _ in range(5):
        _step(model, optimizer)
    world.barrier()
    absent = not any(path.name == "step-00000001" for path in Path(folder).iterdir())
    gate.open_gate.set()
    whole = saved.wait()
    contents = read(whole)
    same = _same(contents.model, then)
    same &= torch.equal(contents.parts["optimizer"]["state"]["state"][0]["exp_avg"], momentum)
    assert saved.wait() is None, "nothing is under way any more"
    return absent, same, [whole.name], contents.manifest.step


@pytest.mark.parametrize("world_size", [1, 2, 3])
@ON_GPUS
def test_training_goes_on_and_what_was_is_saved(tmp_path: Path, world_size: int) -> None:
    for rank in run_ranks(_trains_on, world_size, str(tmp_path)):
        assert rank == (True, True, ["step-00000001"], 1)


def _many(folder: str) -> tuple[list[str], set[int], int, int, int]:
    lockstep.init()
    gate = Gate()
    model, optimizer, saved = _bench(folder, gate, width=50_000)
    places: set[int] = set()
    threads = 0
    for _ in range(6):
        _step(model, optimizer)
        saved.async_save()
        places.update(chunk.data_ptr() for chunk in saved._background._chunks._chunks)
        threads = max(threads, sum(thread.name.startswith("lockstep-save") for thread in threading.enumerate()))
    saved.wait()
    state = sum(value.nbytes for value in model.state_dict().values())
    return gate.done, places, threads, saved._background._chunks.nbytes, 3 * state  # two moments beside the weights


def test_one_save_is_under_way_at_most_and_memory_is_bounded(tmp_path: Path) -> None:
    ranks = run_ranks(_many, 2, str(tmp_path))
    done = [event for event in ranks[0][0] if "tmp" not in event or event.startswith("make")]
    expected = []
    for step in range(1, 7):
        expected += [f"make step-0000000{step}", f"rename step-0000000{step}"]
    assert done == expected, "one after the other"
    assert sum(len(places) for _, places, *_ in ranks) == 2, "one buffer for each rank, used again"
    assert {threads for _, _, threads, *_ in ranks} == {1}
    buffers, state = [rank[3] for rank in ranks], ranks[0][4]
    assert state <= sum(buffers) <= state + 10_000, "the state once more, divided among the ranks"
    assert max(buffers) < 0.6 * state


def _fails(folder: str, how: str) -> list[str]:
    world = lockstep.init()
    gate = Gate()
    model, optimizer, saved = _bench(folder, gate)
    _step(model, optimizer)
    saved.save()
    said: list[str] = []
    if world.rank == 1:
        gate.fail = errno.ENOSPC
    _step(model, optimizer)
    saved.async_save()
    if how == "async_save":
        with pytest.raises(lockstep.CheckpointError) as caught:
            saved.async_save()
        said.append(str(caught.value))
    elif how == "wait":
        with pytest.raises(lockstep.CheckpointError) as caught:
            saved.wait()
        said.append(str(caught.value))
    elif how == "restore":
        with pytest.raises(lockstep.CheckpointError) as caught:
            saved.restore()
        said.append(str(caught.value))
    elif how == "epochs":
        with pytest.raises(lockstep.CheckpointError) as caught:
            list(saved.epochs(2))
        said.append(str(caught.value))
    if saved._background._thread is not None:  # save() waits for it, but then it may write
        saved._background._thread.join()
    gate.fail = 0
    _step(model, optimizer)
    if how == "save":
        if world.is_main:
            with pytest.warns(RuntimeWarning) as warned:
                saved.save()
            said.append(str(warned[0].message))
        else:
            saved.save()
            said.append("saving step 2 in the background failed: rank 1: the disk is full")
    else:
        saved.async_save()
        assert saved.wait().name == "step-00000003", "training went on, and so does saving"
    return said


@pytest.mark.parametrize("how", ["async_save", "wait", "restore", "epochs", "save"])
@ON_GPUS
def test_a_failure_is_raised_on_all_ranks_by_the_next_call(tmp_path: Path, how: str) -> None:
    for (said,) in run_ranks(_fails, 2, str(tmp_path), how):
        assert "saving step 2 in the background failed: rank 1: " in said
        assert "the disk is full" in said
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def _cannot_copy(folder: str) -> str:
    world = lockstep.init()
    model, optimizer, saved = _bench(folder, Gate())
    _step(model, optimizer)
    copied = WritePlan.copied

    def no_memory(*_: Any) -> Any:
        raise MemoryError("no more")

    if world.rank == 1:
        WritePlan.copied = no_memory  # type: ignore[method-assign, assignment]
    saved.async_save()
    WritePlan.copied = copied  # type: ignore[method-assign]
    with pytest.raises(lockstep.CheckpointError) as caught:
        saved.wait()
    saved.async_save()
    assert cast(Path, saved.wait()).name == "step-00000001"
    return str(caught.value)


@OVER_BOTH
def test_a_rank_that_has_no_memory_for_the_copy_fails_all(tmp_path: Path) -> None:
    for said in run_ranks(_cannot_copy, 2, str(tmp_path)):
        assert said == "saving step 1 in the background failed: rank 1: MemoryError: no more"


def _killed_meanwhile(folder: str) -> None:
    world = lockstep.init()
    gate = Gate()
    model, optimizer, saved = _bench(folder, gate)
    _step(model, optimizer)
    saved.async_save()
    saved.wait()
    gate.open_gate.clear()
    _step(model, optimizer)
    saved.async_save()
    world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(folder: str) -> int:
    lockstep.init()
    model, optimizer, saved = _bench(folder, Gate())
    restored = saved.restore()
    _step(model, optimizer)
    saved.async_save()  # waited for by the process that ends
    return cast(int, restored.step)


def test_a_job_killed_in_the_background_leaves_the_last_whole_one(tmp_path: Path) -> None:
    outcomes = collect_outcomes(_killed_meanwhile, 2, str(tmp_path))
    assert {outcome.exit_code for outcome in outcomes} == {-signal.SIGKILL}
    assert run_ranks(_goes_on, 2, str(tmp_path)) == [1, 1]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]
    assert read(tmp_path / "step-00000002").manifest.step == 2
