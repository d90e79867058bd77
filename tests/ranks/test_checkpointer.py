"""Checkpointer on real ranks: what is saved, what is refused, and that ranks fail together."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.checkpoint.locks import RunLock
from tests.harness import collect_outcomes, run_ranks


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(torch.relu(self.norm(self.body(inputs)))))


def _bench(folder: str, *, width: int = 4, momentum: bool = True, **options: Any) -> tuple[Any, ...]:
    """A model, an optimizer with state, a loader and their Checkpointer."""
    torch.manual_seed(5)
    model = Net(width)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(model.parameters()) if momentum else torch.optim.SGD(model.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.arange(36.0).reshape(12, 3)), batch_size=6, shuffle=True))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader, **options)
    return model, optimizer, loader, saved


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    """The same step on every rank."""
    optimizer.zero_grad()
    model(torch.full((4, 3), value) + torch.arange(4.0)[:, None]).square().sum().backward()
    optimizer.step()


def _save_some(folder: str, steps: int = 5, keep: int | None = 3) -> list[str]:
    lockstep.init()
    model, optimizer, _, saved = _bench(folder, keep=keep)
    names = []
    for _ in range(steps):
        _step(model, optimizer)
        names.append(saved.save().name)
    return names


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_is_a_private_folder_that_other_tools_open(tmp_path: Path, world_size: int) -> None:
    names = run_ranks(_save_some, world_size, str(tmp_path / "run"))
    assert all(rank == [f"step-{step:08d}" for step in range(1, 6)] for rank in names)
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert kept == ["step-00000003", "step-00000004", "step-00000005"], "the last three, and nothing else"
    folder = tmp_path / "run" / kept[-1]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"]) == (5, world_size)
    assert set(manifest["files"]) == {file.name for file in folder.iterdir()} - {"manifest.json"}
    model = Net()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert len(json.loads((folder / "rng.json").read_text())) == world_size


def _given_urls(here: str) -> list[str]:
    world = lockstep.init()
    os.chdir(here)
    refused = []
    for folder in ("s3://", "nothing://bucket/run", "file:///data/run"):
        with pytest.raises((ValueError, lockstep.CheckpointError)) as error:
            lockstep.Checkpointer(folder, model=nn.Linear(1, 1))
        refused.append(str(error.value))
    for run in ("s3://bucket/run", Path("s3://bucket/run"), "file:///data/run"):
        with pytest.raises(ValueError, match=r"run=.*expected a path|run=.*this is a URL"):
            lockstep.Log(run)
    world.barrier()
    return refused


def test_urls_are_refused_on_every_rank_before_anything_is_made(tmp_path: Path) -> None:
    first, second = run_ranks(_given_urls, 2, str(tmp_path))
    assert first == second
    assert first[0].startswith("folder=s3://: expected a bucket and a place in it")
    assert first[1].startswith("rank 0: nothing://: fsspec knows no store of this kind")
    assert first[2].startswith("folder=file:///data/run: expected a path, not a URL: give /data/run itself")
    assert os.listdir(tmp_path) == []


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    run_ranks(_save_some, 1, str(tmp_path), 5, None)
    assert len(list(tmp_path.iterdir())) == 5


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = optimizer.state_dict()
    return [
        *(value.tolist() for value in model.state_dict().values()),
        *(entry[name].tolist() for entry in state["state"].values() for name in sorted(entry)),
        state["param_groups"],
    ]


def _restore(folder: str) -> dict[str, Any]:
    lockstep.init()
    model, optimizer, loader, saved = _bench(folder)
    fresh = saved.restore()
    _step(model, optimizer)
    next(iter(loader))
    optimizer.param_groups[0]["lr"] = 0.123
    for (_,) in loader:
        _step(model, optimizer, 2.0)
        path = saved.save()  # in the middle of an epoch
        position = loader.state_dict()
        torch.rand(lockstep.world().rank + 3)  # of the rank's own numbers, of which nothing is kept
        break
    before = _everything(model, optimizer), torch.rand(3).tolist(), position
    other, other_optimizer, other_loader, other_saved = _bench(folder)
    restored = other_saved.restore()
    after = _everything(other, other_optimizer), torch.rand(3).tolist()
    assert restored is not None
    return {
        "fresh": fresh,
        "same": after == before[:2],
        "folder": restored.folder == path,
        "place": (restored.step, restored.epoch, restored.in_epoch, restored.world_size, restored.skipped),
        "step": other_saved.step,
        "loader": other_loader.state_dict() == before[2],
    }


def test_everything_comes_back(tmp_path: Path) -> None:
    for rank in run_ranks(_restore, 2, str(tmp_path)):
        assert rank == {
            "fresh": None,
            "same": True,
            "folder": True,
            "place": (2, 1, True, 2, ()),
            "step": 2,
            "loader": True,
        }


def _damage(folder: Path, what: str) -> None:
    file = folder / ("optimizer.safetensors" if what == "flip" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if what == "flip":
        content[-5] ^= 4
    file.write_bytes(content if what == "flip" else content[:-7])
    if what == "missing":
        file.unlink()


def _resume(folder: str, strict: bool = False, expect_warning: bool = True) -> tuple[int, list[str], list[str]]:
    world = lockstep.init()
    _, _, _, saved = _bench(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = saved.restore(strict=strict)
    assert bool(caught) == (world.is_main and expect_warning)
    assert all(warning.filename == __file__ for warning in caught), "they point at the user's line"
    assert restored is not None
    return restored.step, list(restored.skipped), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("what", "words"), [("flip", "its content has changed"), ("truncate", "bytes found,"), ("missing", "No such file")]
)
def test_a_damaged_checkpoint_is_skipped_by_name_or_refused(tmp_path: Path, what: str, words: str) -> None:
    run_ranks(_save_some, 1, str(tmp_path), 3)
    _damage(tmp_path / "step-00000003", what)
    step, skipped, said = run_ranks(_resume, 2, str(tmp_path))[0]
    assert step == 2
    assert words in skipped[0]
    assert "step-00000003" in said[0]
    for outcome in collect_outcomes(_resume, 2, str(tmp_path), True):
        assert outcome.error == "CheckpointCorrupt"
        assert outcome.message is not None
        assert words in outcome.message
    for number in (1, 2):
        _damage(tmp_path / f"step-0000000{number}", what)
    for outcome in collect_outcomes(_resume, 2, str(tmp_path)):
        assert outcome.error == "CheckpointCorrupt"
        assert outcome.message is not None
        assert "no checkpoint there is complete" in outcome.message


def _resume_other(folder: str, case: str) -> None:
    lockstep.init()
    if case == "model":
        model, optimizer, _, saved = _bench(folder, width=5)
    elif case == "dtype":
        model = Net().double()
        optimizer = torch.optim.AdamW(model.parameters())
        saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    elif case == "optimizer":
        model, optimizer, _, saved = _bench(folder, momentum=False)
    elif case == "groups":
        model = Net()
        optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
        saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    elif case == "scheduler":
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    else:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = lockstep.shard(DataLoader(TensorDataset(torch.arange(13)), batch_size=6, shuffle=True))
        saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    before = _everything(model, optimizer)
    try:
        saved.restore()
    finally:
        assert _everything(model, optimizer) == before, "nothing may be changed"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("model", "body.weight: shape [4, 3] in the checkpoint, [5, 3] in the model"),
        ("dtype", "body.weight: torch.float32 in the checkpoint, torch.float64 in the model"),
        ("optimizer", "is of the optimizer AdamW, this one is SGD"),
        ("groups", "parameter groups of [6] parameters, this one of [1, 1, 1, 1, 1, 1]"),
        ("scheduler", "was saved without scheduler=, but there is one now"),
        ("loader", "the saved loader has length=12, this one 13"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_unchanged(tmp_path: Path, case: str, message: str) -> None:
    run_ranks(_save_some, 1, str(tmp_path), 1)
    for outcome in collect_outcomes(_resume_other, 2, str(tmp_path), case):
        assert outcome.error == "CheckpointMismatch", outcome.traceback
        assert outcome.message is not None
        assert message in outcome.message


def test_another_world_size_is_said(tmp_path: Path) -> None:
    run_ranks(_save_some, 1, str(tmp_path), 1)
    ranks = run_ranks(_resume, 3, str(tmp_path))
    assert [rank[0] for rank in ranks] == [1, 1, 1]
    assert "written by 1 rank and there are 3 now" in ranks[0][2][0]
    assert ranks[1][2] == []


def _restore_from_a_folder_that_went(folder: str) -> None:
    world = lockstep.init()
    _, _, _, saved = _bench(folder)
    world.barrier()
    if world.is_main:
        shutil.rmtree(folder)
    saved.restore()


def test_a_folder_that_went_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for outcome in collect_outcomes(_restore_from_a_folder_that_went, 2, str(tmp_path / "run")):
        assert outcome.error == "CheckpointError", outcome.traceback
        assert "rank 0: " in str(outcome.message)
        assert "No such file or directory" in str(outcome.message)


def _unwritable(folder: str) -> None:
    lockstep.init()
    _bench(folder)


def test_a_folder_that_cannot_be_made_is_noticed_at_once_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        for outcome in collect_outcomes(_unwritable, 2, str(folder)):
            assert outcome.error == "CheckpointError"
            assert outcome.message is not None
            assert "rank 0: " in outcome.message
            assert "a file, not a folder: choose another folder" in outcome.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_noticed_at_once_on_every_rank(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for outcome in collect_outcomes(_unwritable, 2, str(tmp_path / "run")):
        assert outcome.error == "CheckpointError"
        assert outcome.message is not None
        assert "Permission denied" in outcome.message


def _disk_full(folder: str) -> tuple[str, int, list[str]]:
    world = lockstep.init()
    model, optimizer, _, saved = _bench(folder, width=2000)
    _step(model, optimizer)
    saved.save()
    _step(model, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    with pytest.raises(lockstep.CheckpointError) as caught:
        saved.save()
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    there = sorted(path.name for path in Path(folder).iterdir() if path.name != "run.lock")
    world.barrier()
    _step(model, optimizer)  # training goes on
    saved.save()
    return str(caught.value), saved.step, there


def test_a_save_that_fails_fails_on_every_rank_and_leaves_the_last_one(tmp_path: Path) -> None:
    for message, step, there in run_ranks(_disk_full, 2, str(tmp_path)):
        assert "rank 0: " in message
        assert "File too large" in message
        assert "limits allow" in message
        assert there == ["step-00000001"]
        assert step == 3
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def _killed_in_save(folder: str, fault: str) -> None:
    world = lockstep.init()
    model, optimizer, _, saved = _bench(folder)
    _step(model, optimizer)
    saved.save()
    _step(model, optimizer)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if world.is_main:
        setattr(os, fault, die)
    saved.save()


@pytest.mark.parametrize("fault", ["rename", "fsync"])
def test_rank_0_killed_in_a_save_leaves_the_last_one_whole(tmp_path: Path, fault: str) -> None:
    outcomes = collect_outcomes(_killed_in_save, 2, str(tmp_path), fault)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert not outcomes[1].ok, "the other rank must not wait for ever"
    (leftover,) = [path for path in tmp_path.iterdir() if ".tmp-" in path.name]
    assert run_ranks(_resume, 2, str(tmp_path), False, False)[0][0] == 1
    assert leftover.exists()
    run_ranks(_resume_and_save, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def _resume_and_save(folder: str) -> None:
    lockstep.init()
    model, optimizer, _, saved = _bench(folder)
    for _ in saved.epochs(1):
        _step(model, optimizer)
        saved.save()


class Unsayable:
    def state_dict(self) -> dict[str, Any]:
        return {"inner": [object()]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _refused_saves(folder: str, case: str) -> None:
    world = lockstep.init(timeout=20)
    extra = {"odd": Unsayable()} if case == "unsayable" else {}
    model, optimizer, _, saved = _bench(folder, extra=extra)
    if case != "steps" or world.rank == 0:
        _step(model, optimizer)
    if case == "anew":
        list(saved.epochs(1, resume=False))
    saved.save()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unsayable", "extra.odd.inner.0 is a builtins.object, which a checkpoint can't hold"),
        ("steps", "the ranks are not at the same step, so their states do not belong together; by rank: [1, 0]"),
        ("foreign", "holds the checkpoints of an earlier run (the newest is step-00000001)"),
        ("anew", "holds the checkpoints of an earlier run (the newest is step-00000001)"),
    ],
)
def test_saves_that_make_no_sense_are_refused_on_every_rank(tmp_path: Path, case: str, message: str) -> None:
    if case in ("foreign", "anew"):
        run_ranks(_save_some, 1, str(tmp_path), 1)
    for outcome in collect_outcomes(_refused_saves, 2, str(tmp_path), case):
        assert outcome.error == "CheckpointError", outcome.traceback
        assert outcome.message is not None
        assert message in outcome.message
    assert [path for path in tmp_path.iterdir() if ".tmp-" in path.name] == []


def _epochs(folder: str, stop_after: int | None) -> list[tuple[int, int]]:
    """(epoch, batches seen in it) of each turn; stops after that many batches in all, having saved."""
    lockstep.init()
    model, optimizer, loader, saved = _bench(folder)
    turns: list[tuple[int, int]] = []
    seen = 0
    for epoch in saved.epochs(4):
        batches = 0
        for (_,) in loader:
            _step(model, optimizer)
            batches += 1
            seen += 1
            if seen == stop_after and batches < 2:
                saved.save()
                return [*turns, (epoch, batches)]
        if seen == stop_after:
            saved.save(epoch_done=False)
            return [*turns, (epoch, batches)]
        saved.save()
        turns.append((epoch, batches))
    return turns


def test_epochs_go_on_where_the_last_run_stopped(tmp_path: Path) -> None:
    assert run_ranks(_epochs, 1, str(tmp_path), 3)[0] == [(0, 2), (1, 1)]
    assert run_ranks(_epochs, 2, str(tmp_path), 2)[0] == [(1, 1), (2, 1)], "the rest of epoch 1 comes first"
    assert run_ranks(_epochs, 2, str(tmp_path), None)[0] == [(2, 1), (3, 2)]
    assert run_ranks(_epochs, 2, str(tmp_path), None)[0] == []


def test_an_epoch_that_is_not_done_comes_again(tmp_path: Path) -> None:
    assert run_ranks(_epochs, 1, str(tmp_path), 2)[0] == [(0, 2)]
    assert [epoch for epoch, _ in run_ranks(_epochs, 1, str(tmp_path), None)[0]] == [0, 1, 2, 3]


class DistributedDataParallel(nn.Module):
    """Keeps its module as torch's class does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _wrapped(folder: str) -> list[str]:
    lockstep.init()
    trained = Net()
    lockstep.Checkpointer(folder, model=DistributedDataParallel(trained)).save()
    names = list(load_file(Path(folder) / "step-00000000" / "model.safetensors"))
    other = Net()
    lockstep.Checkpointer(folder, model=other).restore()
    assert torch.equal(other.head.weight, trained.head.weight)
    again = lockstep.Checkpointer(folder, model=DistributedDataParallel(Net()))
    restored = again.restore()
    assert restored is not None
    assert again.save().name == "step-00000001", "without an optimizer a save counts up"
    return names


def test_a_wrapper_leaves_no_trace_in_the_names(tmp_path: Path) -> None:
    assert not any(name.startswith("module.") for name in run_ranks(_wrapped, 1, str(tmp_path))[0])


def _extras(folder: str) -> tuple[Any, ...]:
    lockstep.init()

    def make() -> tuple[Any, ...]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
        average = torch.optim.swa_utils.AveragedModel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        sampler = lockstep.DistributedSampler(TensorDataset(torch.arange(12)))
        saved = lockstep.Checkpointer(
            folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=sampler,
            extra={"average": average, "scaler": scaler},
        )  # fmt: skip
        return model, optimizer, scheduler, average, scaler, sampler, saved

    model, optimizer, scheduler, average, scaler, sampler, saved = make()
    _step(model, optimizer)
    scheduler.step()
    average.update_parameters(model)
    scaler.scale(torch.ones(1))
    scaler.update(2.0)
    sampler.set_epoch(4)
    next(iter(sampler))
    saved.save()
    first = saved.save()  # nothing has moved, but it is a save of its own
    others = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others[-1].restore()
    assert torch.equal(others[3].module.head.weight, average.module.head.weight)
    assert others[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.02
    assert others[2].state_dict() == scheduler.state_dict()
    assert others[4].state_dict() == scaler.state_dict()
    assert others[5].state_dict() == sampler.state_dict()
    alone = lockstep.Checkpointer(folder, model=Net())
    with pytest.warns(RuntimeWarning, match=r"also holds optimizer, scheduler, loader, extra 'average', extra 'scal"):
        alone.restore()
    return first.name, sorted(path.name for path in Path(folder).glob("step-*"))


def test_schedulers_samplers_and_extra_objects_come_back(tmp_path: Path) -> None:
    assert run_ranks(_extras, 1, str(tmp_path)) == [("step-00000001-r2", ["step-00000001-r2"])]


def _wrong_arguments() -> list[str]:
    model: Any = Net()
    said = []
    cases: list[dict[str, Any]] = [
        {"model": 3},
        {"model": model, "optimizer": "sgd"},
        {"model": model, "loader": DataLoader(TensorDataset(torch.ones(1)))},
        {"model": model, "keep": 0},
        {"model": model},
    ]
    for case in cases:
        with pytest.raises((TypeError, ValueError, lockstep.LockstepError)) as caught:
            lockstep.Checkpointer("/nowhere", **case)
        said.append(str(caught.value))
    return said


def test_wrong_arguments_are_refused() -> None:
    said = _wrong_arguments()
    assert "expected a torch.nn.Module" in said[0]
    assert "expected a torch.optim.Optimizer" in said[1]
    assert "becomes one by lockstep.shard(loader)" in said[2]
    assert "keep=0" in said[3]
    assert "call lockstep.init() first" in said[4]


def _kept_by_a_rule(folder: str) -> list[str]:
    lockstep.init()
    rule = lockstep.Retention(last=1, every=4, best=1, mode="max")
    model, optimizer, _, saved = _bench(folder, keep=rule)
    for accuracy in (0.1, 0.7, 0.5, math.nan, math.inf, 0.6):
        _step(model, optimizer)
        saved.save(metric=accuracy)
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_the_last_every_fourth_and_the_best_stay(tmp_path: Path) -> None:
    expected = [f"step-0000000{step}" for step in (2, 4, 6)]
    assert run_ranks(_kept_by_a_rule, 2, str(tmp_path))[0] == expected


def _saves_behind_a_damaged_one(folder: str) -> list[str]:
    lockstep.init()
    model, optimizer, _, saved = _bench(folder, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = saved.restore()
    assert restored is not None
    assert restored.step == 3
    for _ in range(2):
        _step(model, optimizer)
        _step(model, optimizer)
        saved.save()
    return sorted(path.name for path in Path(folder).glob("step-*"))


def _saves_behind_damaged_ones(folder: str) -> list[str]:
    lockstep.init()
    model, optimizer, _, saved = _bench(folder, keep=2)
    for _ in range(3):
        _step(model, optimizer)
        saved.save()
    for step in (2, 3):
        _damage(Path(folder) / f"step-0000000{step}", "flip")
    with pytest.raises(lockstep.CheckpointCorrupt, match="no checkpoint there is complete"):
        saved.restore()
    _step(model, optimizer)
    saved.save()
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_what_a_failed_restore_found_damaged_does_not_count_either(tmp_path: Path) -> None:
    # 2 and 3 were kept, and go, because 4 is the only one that is good.
    assert run_ranks(_saves_behind_damaged_ones, 1, str(tmp_path)) == [["step-00000004"]]


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path: Path) -> None:
    run_ranks(_save_some, 1, str(tmp_path), 4, None)
    _damage(tmp_path / "step-00000004", "flip")
    # 3 was good, 4 is damaged, then 5 and 7 are saved.
    assert run_ranks(_saves_behind_a_damaged_one, 1, str(tmp_path)) == [["step-00000005", "step-00000007"]]


def _open_folder(folder: str) -> None:
    lockstep.init()
    _bench(folder)


def test_a_second_job_is_refused_on_every_rank_with_the_owners_name(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    for outcome in collect_outcomes(_open_folder, 2, str(tmp_path)):
        assert outcome.error == "CheckpointError", outcome.traceback
        assert f"rank 0: {tmp_path} belongs to another job, process {os.getpid()} on " in str(outcome.message)
    held.release()
    run_ranks(_open_folder, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "let go of with the Checkpointer"


def _die_holding_it(folder: str) -> None:
    world = lockstep.init()
    _, _, _, saved = _bench(folder)
    world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    saved.save()


def test_the_folder_of_a_killed_job_is_free(tmp_path: Path) -> None:
    outcomes = collect_outcomes(_die_holding_it, 2, str(tmp_path))
    assert {outcome.exit_code for outcome in outcomes} == {-signal.SIGKILL}
    assert (tmp_path / "run.lock").exists()
    run_ranks(_save_some, 2, str(tmp_path), 1)


def _shared_by_one_job(folder: str) -> tuple[int, int]:
    lockstep.init()
    model, optimizer, _, saved = _bench(folder)
    another = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    _step(model, optimizer)
    del saved
    another.save()
    steps = another.step
    del another
    _step(model, optimizer)  # nobody counts any more
    return steps, len(list(Path(folder).glob("run.lock")))


def test_a_jobs_own_checkpointers_share_its_folder(tmp_path: Path) -> None:
    assert run_ranks(_shared_by_one_job, 1, str(tmp_path)) == [(1, 0)]


@pytest.mark.parametrize("keep", [True, 2.5, "all"])
def test_a_keep_that_is_no_rule_is_refused(keep: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a number of checkpoints, None, or a lockstep\.Retention"):
        lockstep.Checkpointer("/nowhere", model=Net(), keep=keep)
