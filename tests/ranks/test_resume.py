"""A run that was killed and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from tests.digests import digest_of
from tests.harness import collect_outcomes, run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Random crops and noise, drawn from all three generators, in the workers or not."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.linspace(index, index + 1, 9)
        start = random.randrange(3)
        return image[start : start + 6] + 0.1 * torch.randn(6) + float(np.random.rand()), index % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layers(inputs))


def _average_gradients(model: nn.Module, world: lockstep.World) -> None:
    """The exact mean over unequal shares; see Note [Exact mean]."""
    weight = 1.0 if world.share is None else world.share.weight(world.world_size)
    for parameter in model.parameters():
        assert parameter.grad is not None
        scaled = parameter.grad * weight if weight else torch.zeros_like(parameter)
        dist.all_reduce(scaled)
        parameter.grad = scaled / world.world_size


def _train(folder: str, optimizer_name: str, workers: int, kill_at: int | None, save_every: int) -> tuple[Any, ...]:
    """Three epochs of three steps, the last one uneven, saving within epochs and between them.

    All ranks die behind step ``kill_at``.
    """
    world = lockstep.init(seed=3)
    model = Net()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    loader = lockstep.shard(DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers))
    saved = lockstep.Checkpointer(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, keep=None
    )  # fmt: skip
    losses = []
    for _ in saved.epochs(3):
        for images, labels in loader:
            for buffer in model.buffers():  # as a replica does before each training forward
                dist.broadcast(buffer, src=0)
            loss = nn.functional.cross_entropy(model(images), labels)
            losses.append(world.mean(loss))
            optimizer.zero_grad()
            loss.backward()
            _average_gradients(model, world)
            optimizer.step()
            scheduler.step()
            if saved.step % save_every == 0:
                saved.save()
            if saved.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        torch.rand(2)  # whatever a script draws between epochs
        saved.save()
    generators = torch.get_rng_state(), random.getstate(), [str(part) for part in np.random.get_state()]
    final = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "loader": loader.state_dict(),
        "generators": generators,
    }
    return saved.step, {name: digest_of(state) for name, state in final.items()}, losses[-1]


@pytest.mark.parametrize(
    ("optimizer_name", "workers", "save_every", "kills"),
    [
        ("sgd", 0, 1, [1, 2, 3, 4, 8]),  # behind a save within an epoch, at its end, at its beginning
        ("adamw", 2, 2, [5]),  # between saves: the steps since the last one are done again
    ],
)
def test_a_killed_run_ends_with_the_same_bits(
    tmp_path: Path, optimizer_name: str, workers: int, save_every: int, kills: list[int]
) -> None:
    whole = run_ranks(_train, 2, str(tmp_path / "whole"), optimizer_name, workers, None, save_every)
    folder = str(tmp_path / "killed")
    for kill_at in kills:
        outcomes = collect_outcomes(_train, 2, folder, optimizer_name, workers, kill_at, save_every)
        assert not any(outcome.ok for outcome in outcomes)
        assert -signal.SIGKILL in [outcome.exit_code for outcome in outcomes]
    resumed = run_ranks(_train, 2, folder, optimizer_name, workers, None, save_every)
    assert resumed == whole
    assert whole[0][1]["generators"] == whole[1][1]["generators"], "behind the last step the ranks' generators agree"


def test_a_run_moves_to_another_world_size_without_losing_its_place(tmp_path: Path) -> None:
    folder = str(tmp_path)
    collect_outcomes(_train, 2, folder, "sgd", 0, 4, 1)
    (steps, *_), *_ = run_ranks(_train_elsewhere, 3, folder)
    assert steps == 9


def _train_elsewhere(folder: str) -> tuple[Any, ...]:
    import warnings

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return _train(folder, "sgd", 0, None, 1)
