"""A run resumed at any step goes on with the same bits, with replicas; elsewhere with the same batches."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import lockstep
from tests.backends import EACH_BACKEND
from tests.digests import digest_of
from tests.harness import run_ranks

pytestmark = EACH_BACKEND

EPOCHS, STEPS = 3, 9


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Noise from all three generators, and the seed that the DataLoader gave its workers."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        worker = get_worker_info()
        seed = 0.0 if worker is None else (worker.seed - worker.id) % 1000 / 1000
        noise = 0.1 * torch.randn(6) + random.random() + float(np.random.rand())
        return torch.linspace(index, index + 1, 6) + noise + seed, index % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layers(inputs))


class Run:
    """Everything that a training run is made of."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.model = lockstep.replicate(Net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        data = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers)
        self.loader = lockstep.shard(data)
        self.saved = lockstep.Checkpointer(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            extra={"scaler": self.scaler, "average": self.average},
            keep=None,
        )

    def train(self, *, save: bool, beside: bool = False) -> dict[str, dict[str, str]]:
        """What there is behind every step and every epoch. ``beside``: saved while training goes on."""
        seen = {}
        for epoch in self.saved.epochs(EPOCHS):
            for images, labels in self.loader:
                loss = nn.functional.cross_entropy(self.model(images), labels)
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.average.update_parameters(self.model)
                seen[f"step {self.saved.step}"] = {**self.state(), "loss": digest_of(loss)}
                if save and beside:
                    self.saved.async_save()
                elif save:
                    self.saved.save()
            torch.rand(2)  # whatever a script draws between epochs
            if save and epoch != 1:  # so that the last checkpoint of epoch 1 is one from within its loop
                self.saved.save()
            seen[f"epoch {epoch}"] = self.state()
        return seen

    def state(self) -> dict[str, str]:
        parts: dict[str, Any] = {
            "model": self.model.state_dict(),
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict(),
            "loader": self.loader.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [str(part) for part in np.random.get_state()],
        }
        return {name: digest_of(part) for name, part in parts.items()}


def _interrupted_everywhere(
    folder: str, workers: int, steps: list[int], beside: bool
) -> tuple[Any, list[tuple[int, Any]]]:
    """What the whole run saw, and what the runs saw that go on from each of its checkpoints."""
    world = lockstep.init(seed=3)
    root = Path(folder)
    whole = Run(root / "whole", workers).train(save=True, beside=beside)
    resumed = []
    for step in steps:
        one = root / f"from-{step}"
        if world.is_main:
            shutil.copytree(next((root / "whole").glob(f"step-{step:08d}*")), one / f"step-{step:08d}")
        world.barrier()
        for seed in (torch.manual_seed, random.seed, np.random.seed):  # nothing is right by chance
            seed(1000 * step + world.rank)
        resumed.append((step, Run(one, workers).train(save=False)))
    return whole, resumed


@pytest.mark.parametrize(("workers", "steps", "beside"), [(0, list(range(1, STEPS + 1)), False), (2, [2, 6, 7], True)])
def test_a_run_goes_on_with_the_same_bits_from_any_step(
    tmp_path: Path, workers: int, steps: list[int], beside: bool
) -> None:
    ranks = run_ranks(_interrupted_everywhere, 2, str(tmp_path), workers, steps, beside)
    for whole, resumed in ranks:
        assert [step for step, _ in resumed] == steps
        for step, seen in resumed:
            # An epoch whose last step was saved within its loop is gone on with behind that step, to its end.
            left = {f"step {number}": whole[f"step {number}"] for number in range(step + 1, STEPS + 1)} | {
                f"epoch {epoch}": whole[f"epoch {epoch}"] for epoch in range(EPOCHS) if 3 * (epoch + 1) > step
            }
            if step == 6:
                left["epoch 1"] = {**whole["epoch 1"], "gradients": seen["epoch 1"]["gradients"]}
            assert seen == left, f"resumed behind step {step}"
    states = [whole[f"step {STEPS}"] for whole, _ in ranks]
    assert states[0]["model"] == states[1]["model"]
    assert states[0]["torch"] != states[1]["torch"], "each rank has generators of its own"
    scales = {ranks[0][0][f"step {step}"]["scaler"] for step in range(1, STEPS + 1)}
    assert len(scales) > 4, "the scale grows in this run"


def _batches(folder: str, stop_at: list[int], start: int) -> tuple[list[list[int]], list[float], list[str]]:
    """The samples of this rank's slices from one stop to the next, saving at the last; and the weights then."""
    lockstep.init(seed=3)
    torch.manual_seed(1)
    model = lockstep.replicate(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = TensorDataset(torch.randn(23, 3, generator=torch.Generator().manual_seed(7)), torch.arange(23))
    loader = lockstep.shard(DataLoader(data, batch_size=8, shuffle=True))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    seen: list[list[int]] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in saved.epochs(EPOCHS):
            for inputs, indices in loader:
                optimizer.zero_grad()
                (model(inputs).flatten() - indices / 23.0).square().mean().backward()
                optimizer.step()
                seen.append(indices.tolist())
                if saved.step == stop_at[start]:
                    saved.save()
                    return seen, _weights(model), [str(warning.message) for warning in said]
    raise AssertionError("the run was to stop before its end")


def _weights(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


@pytest.mark.parametrize("world_sizes", [(2, 3, 1, 4), (4, 1, 3, 2)])
def test_at_other_world_sizes_a_run_goes_on_with_the_same_global_batches(
    tmp_path: Path, world_sizes: tuple[int, ...]
) -> None:
    stops = [1, 2, 5, 9]  # in mid-epoch three times
    alone = run_ranks(_batches, 1, str(tmp_path / "alone"), [9], 0)[0]
    batches: list[list[int]] = []
    for turn, world_size in enumerate(world_sizes):
        ranks = run_ranks(_batches, world_size, str(tmp_path / "moved"), stops, turn)
        slices = zip(*(seen for seen, _, _ in ranks), strict=True)
        batches += [[index for part in parts for index in part] for parts in slices]
        said = " ".join(ranks[0][2])
        assert ("the random number generators" in said) == (turn > 0), "what is not as it was is said"
        assert all(not others for _, _, others in ranks[1:])
        weights = ranks[0][1]
    assert batches == alone[0]
    for epoch in range(EPOCHS):
        used = [index for batch in batches[3 * epoch : 3 * epoch + 3] for index in batch]
        assert sorted(used) == list(range(23)), "each sample once"
    assert weights == pytest.approx(alone[1], rel=1e-5)
