"""Runs whose parameters become NaN: their sound checkpoints stay, and the next start resumes from one of them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.checkpoint.blocks import BLOCK
from lockstep.checkpoint.read import read_manifest
from lockstep.step.local_training import local_training_of
from tests import launching
from tests.harness import run_ranks


class _Net(nn.Module):
    """Parameters, one of them infinite on purpose and one frozen that is NaN, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.forbidden = nn.Parameter(torch.tensor([0.0, -math.inf]))
        self.unread = nn.Parameter(torch.tensor([math.nan, 1.0]), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), -math.inf))
        self.register_buffer("mean", torch.full((2,), math.nan))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(inputs) + self.forbidden, dim=1)


def _start(folder: str, **options: Any) -> tuple[_Net, torch.optim.Optimizer, lockstep.Checkpointer]:
    torch.manual_seed(3)
    model = _Net()
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, lockstep.Checkpointer(folder, model=model, optimizer=optimizer, **options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def _become_nan(folder: str, in_background: bool) -> dict[str, Any]:
    lockstep.init()
    model, optimizer, saved = _start(folder)

    def save() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if in_background:
                saved.async_save()
                saved.wait()
            else:
                saved.save()
        return [str(one.message) for one in caught]

    said = []
    for step in range(1, 9):
        _step(model, optimizer)
        if step == 5:
            model.layer.bias.data[1] = math.nan
        said.append(save())
    return {"said": said, "kept": sorted(path.name for path in Path(folder).glob("step-*"))}


def _resume(folder: str, only_sound: bool) -> tuple[int, tuple[str, ...], bool, list[str]]:
    lockstep.init()
    model, _, saved = _start(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = saved.restore(only_sound=only_sound)
    assert found is not None
    said = [str(one.message) for one in caught if "resuming" in str(one.message)]
    return found.step, found.unsound, bool(model.layer.bias.isnan().any()), said


@pytest.mark.parametrize("in_background", [False, True])
def test_saves_of_nan_warn_and_leave_what_is_sound_and_a_resume_takes_that(tmp_path: Path, in_background: bool) -> None:
    main, other = run_ranks(_become_nan, 2, str(tmp_path), in_background)
    assert main["kept"] == [f"step-0000000{step}" for step in (2, 3, 4, 8)], "keep=3, and the newest of the others"
    assert main["said"][:4] == [[]] * 4, "neither infinities in a mask nor what was not finite from the start count"
    assert other["said"] == [[]] * 8, "on rank 0 alone"
    for step, said in enumerate(main["said"][4:], 5):
        assert len(said) == 1, said
        assert said[0].startswith(f"the checkpoint step-0000000{step} holds values that are NaN or infinite, in ")
        assert "layer.bias" in said[0]
        assert "a run resumes from the newest sound one" in said[0]
    named = read_manifest(tmp_path / "step-00000008").not_finite
    assert named is not None
    assert "layer.bias" in named["model.safetensors"]

    (step, passed, is_nan, said), second = run_ranks(_resume, 2, str(tmp_path), True)
    assert (step, is_nan) == (4, False)
    assert second == (4, passed, False, []), "the same on every rank, said by rank 0"
    assert passed[0].startswith("step-00000008 holds values that are NaN or infinite, in ")
    assert "skipped newer checkpoints: step-00000008 holds values that are NaN" in said[0]

    (step, passed, is_nan, said), _ = run_ranks(_resume, 2, str(tmp_path), False)
    assert (step, passed, is_nan) == (8, (), True), "asked for by name"
    assert "resuming from" in said[0]
    assert "step-00000008 holds values that are NaN" in said[0]


def _only_nan(folder: str) -> tuple[list[str], str]:
    lockstep.init()
    model, optimizer, saved = _start(folder)
    model.layer.weight.data[0, 0] = math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            _step(model, optimizer)
            saved.save()
    *_, again = _start(folder)
    with pytest.raises(lockstep.CheckpointError) as refused:
        next(again.epochs(3))
    return sorted(path.name for path in Path(folder).glob("step-*")), str(refused.value)


def test_without_a_finite_one_retention_is_as_ever_and_a_resume_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_only_nan, 2, str(tmp_path))
    assert first == second
    kept, words = first
    assert kept == ["step-00000003", "step-00000004", "step-00000005"]
    assert words.startswith(f"no checkpoint in {tmp_path} is complete and sound: step-00000005 holds")
    assert words.endswith("restore(only_sound=False) resumes from the newest nevertheless; or begin in another folder")


def _seen_by_one_rank(folder: str) -> dict[str, list[str]] | None:
    lockstep.init()
    model = nn.Sequential(*(nn.Linear(BLOCK // 16, 4, bias=False) for _ in range(4)))
    saved = lockstep.Checkpointer(folder, model=model)
    if lockstep.world().rank == 1:  # where rank 0 has sound values, which it does not write
        list(model.parameters())[3].data[3, -1] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = saved.save()
    assert len(caught) == (1 if lockstep.world().is_main else 0)
    return read_manifest(path).not_finite


def test_what_only_another_rank_writes_is_known_to_all(tmp_path: Path) -> None:
    assert run_ranks(_seen_by_one_rank, 2, str(tmp_path)) == [{"model.safetensors": ["3.weight"]}] * 2


def _thawed(folder: str) -> list[dict[str, list[str]] | None]:
    lockstep.init()
    model, optimizer, saved = _start(folder)
    found = []
    for is_trained in (False, True):
        model.unread.requires_grad_(is_trained)
        _step(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(read_manifest(saved.save()).not_finite)
    return found


def test_nan_of_a_frozen_parameter_counts_once_it_trains(tmp_path: Path) -> None:
    assert run_ranks(_thawed, 2, str(tmp_path)) == [[None, {"model.safetensors": ["unread"]}]] * 2


def _beside_the_model(folder: str) -> list[dict[str, list[str]] | None]:
    lockstep.init()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    critic = torch.optim.Adagrad(nn.Linear(2, 1).parameters())
    extra: dict[str, Any] = {"average": average, "critic": critic, "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, extra=extra, keep=None)
    found = []

    def save() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(read_manifest(saved.save()).not_finite)

    save()
    averaged = next(average.module.parameters())
    averaged.data[0, 0] = math.nan
    save()
    averaged.data[0, 0] = 1.0
    next(iter(critic.state.values()))["sum"][0] = math.inf
    save()
    next(iter(critic.state.values()))["sum"][0] = 1.0
    optimizer.state[model.bias]["momentum_buffer"][0] = math.nan
    model.bias.requires_grad_(False)
    save()
    return found


def test_modules_and_optimizers_given_as_extra_count_too(tmp_path: Path) -> None:
    (found,) = run_ranks(_beside_the_model, 1, str(tmp_path))
    assert found[0] is None
    assert found[1] == {"extra.safetensors": ["extra.average.module.weight"]}
    assert found[2] == {"extra.safetensors": ["extra.critic.state.0.sum"]}
    assert found[3] is not None
    assert "optimizer.state.state.1.momentum_buffer" in found[3]["optimizer.safetensors"]


def _apart(folder: str) -> list[str]:
    world = lockstep.init()
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    lockstep.replicate(model, sync=lockstep.LocalSteps(every=2))
    optimizer = torch.optim.AdamW(model.parameters())
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved.between_steps()
    assert read_manifest(saved.save()).not_finite is None
    if world.rank == 1:  # what this rank holds alone
        optimizer.state[model.bias]["exp_avg"][0] = math.nan
    training = local_training_of(model)
    assert training is not None
    next(iter(training.outer.state.values()))["momentum_buffer"].view(-1)[0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = read_manifest(saved.save()).not_finite
    assert named is not None
    return [name for names in named.values() for name in names]


def test_the_outer_optimizer_and_each_ranks_own_state_count(tmp_path: Path) -> None:
    names, _ = run_ranks(_apart, 2, str(tmp_path))
    assert any(name.startswith("local_steps.outer.state") for name in names), names
    assert any(name.startswith("ranks.1.optimizer") for name in names), names
    assert not any(name.startswith("ranks.0.") for name in names), names


class _Watching(nn.Module):
    """A normalised layer, with buffers that hold every kind of value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.zeros(2, 4))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("running_peak", torch.tensor([math.inf, 1.0]))
        self.register_buffer("unread", torch.tensor([math.nan]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.layer(inputs))
        return hidden


def _in_buffers(folder: str) -> list[dict[str, list[str]] | None]:
    lockstep.init()
    model: Any = _Watching()
    model.register_buffer("adjacent", torch.eye(2).to_sparse() * math.inf, persistent=False)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    saved = lockstep.Checkpointer(folder, model=model, extra={"average": average}, keep=None)
    found = []

    def save(buffer: torch.Tensor | None = None, value: float = 0.0) -> None:
        before = None if buffer is None else buffer.clone()
        if buffer is not None:
            buffer.view(-1)[0] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(read_manifest(saved.save()).not_finite)
        if buffer is not None and before is not None:
            buffer.copy_(before)

    inner: Any = average.module
    save()
    save(model.norm.running_mean, math.nan)
    save(model.norm.running_mean, math.inf)
    save(model.queue, math.nan)
    save(model.queue, math.inf)
    save(model.mask, math.nan)
    save(model.running_peak, math.nan)
    save(inner.norm.running_var, math.nan)
    save(inner.norm.running_var, -math.inf)
    save(inner.queue, math.inf)
    return found


def test_buffers_count_as_what_they_hold(tmp_path: Path) -> None:
    (found,) = run_ranks(_in_buffers, 1, str(tmp_path))
    of_average = {"extra.safetensors": ["extra.average.module.norm.running_var"]}
    assert found == [
        None,
        {"model.safetensors": ["norm.running_mean"]},
        {"model.safetensors": ["norm.running_mean"]},
        {"model.safetensors": ["queue"]},
        None,
        {"model.safetensors": ["mask"]},
        {"model.safetensors": ["running_peak"]},
        of_average,
        of_average,
        None,
    ]


def _poisoned(folder: str, way: str) -> dict[str, Any]:
    """Train six steps of which the fourth has a sample that is NaN, on rank 0."""
    world = lockstep.init()
    torch.manual_seed(1)
    bare = _Watching()
    net = lockstep.replicate(bare, check_finite="skip" if way == "skip" else "step")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(24, 3)
    data[12] = math.nan
    loader = lockstep.shard(DataLoader(TensorDataset(data), batch_size=4), slices=2 if way == "slices" else None)
    saved = lockstep.Checkpointer(folder, model=net, optimizer=optimizer, loader=loader, keep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in loader.steps() if way == "slices" else ([each] for each in loader):
            for (inputs,) in step:
                net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.save()
    said = [str(each.message) for each in caught]
    return {
        "left out": [each for each in said if "The forward has also left NaN in" in each],
        "not sound": [each for each in said if "holds values that are NaN" in each],
        "kept": sorted(path.name for path in Path(folder).glob("step-*")),
        "weights": all(bool(param.isfinite().all()) for param in net.parameters()),
        "rank": world.rank,
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("way", ["step", "skip", "slices"])
def test_statistics_that_a_sample_made_nan_are_named_and_no_sound_checkpoint_is_lost(
    tmp_path: Path, way: str, world_size: int
) -> None:
    main, *_ = run_ranks(_poisoned, world_size, str(tmp_path), way)
    assert main["weights"], "the step itself was left out"
    (said,) = main["left out"]
    assert "The forward has also left NaN in 'norm.running_mean', 'norm.running_var', where it stays" in said
    assert [each[:29] for each in main["not sound"]] == [f"the checkpoint step-0000000{n} " for n in (4, 5, 6)]
    assert main["kept"] == [f"step-0000000{step}" for step in (2, 3, 6)], "keep=2, and the newest of the others"
    (found, *_) = run_ranks(_resumes_from, 1, str(tmp_path))
    assert found == 3


def _resumes_from(folder: str) -> int:
    lockstep.init()
    model = _Watching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=_any_loader())
        found = saved.restore()
    assert found is not None
    return found.step


def _any_loader() -> lockstep.ShardedLoader:
    return lockstep.shard(DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4))


_STOPPED = """
import math, os, signal, sys, torch, lockstep
from torch.utils.data import DataLoader, TensorDataset
lockstep.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2))
saved = lockstep.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, loader=loader)
for _ in saved.epochs(2):
    for inputs, in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        if saved.step == 2:
            saved.save()
            model.weight.data.fill_(math.nan)
            os.kill(os.getpid(), signal.SIGTERM)
print("whole", bool(torch.isfinite(model.weight).all()), flush=True)
"""


def test_a_save_at_a_stop_says_that_a_resume_begins_earlier(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_STOPPED)
    stopped = launching.run(["lockstep", "run", "-n", "2", str(script), str(tmp_path / "run")], tmp_path, torch=True)
    assert stopped.code == 75, stopped.err
    assert "which is not sound: a run resumes from the newest one that is" in stopped.err
    assert "holds values that are NaN or infinite, in weight" in stopped.err
