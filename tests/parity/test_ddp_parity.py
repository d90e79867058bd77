"""Twenty steps on 1 to 4 ranks: lockstep, one process on the global batch, and torch's DDP end with the same model.

Where the global batch does not divide by the ranks, lockstep still equals one process. torch's DDP does not: it takes
the plain mean over ranks, in which a sample on a rank with few samples counts more. That is expected, and asserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from tests.backends import BOTH, EACH_BACKEND
from tests.harness import run_ranks
from tests.selection import each_value

pytestmark = [
    pytest.mark.internals,  # run on other versions of torch and Python, too
    EACH_BACKEND,
]

STEPS = 20
TOLERANCE = 1e-6


def _model(kind: str) -> nn.Module:
    torch.manual_seed(11)
    if kind == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    elif kind == "convolution":
        model = nn.Sequential(
            nn.Unflatten(1, (1, 2, 4)),
            nn.Conv2d(1, 4, 2),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, 3),
        )
    else:
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        model = nn.Sequential(
            nn.Unflatten(1, (2, 4)),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    return model.double()


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _global_batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (size,), generator=generator)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sequence[int], rank: int, world_size: int
) -> Tensor:
    """Train on this rank's contiguous slice of each global batch; the parameters, flattened."""
    loss_of = nn.CrossEntropyLoss()
    world = lockstep.world()
    for step, size in enumerate(sizes):
        images, labels = _global_batch(step, size)
        begin, end = rank * size // world_size, (rank + 1) * size // world_size
        world.share = lockstep.BatchShare(end - begin, size)  # as the sharded loader does
        optimizer.zero_grad()
        loss_of(model(images[begin:end]), labels[begin:end]).backward()
        optimizer.step()
    world.share = None
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def _compare(kind: str, optimizer_kind: str, sizes: Sequence[int]) -> dict[str, float]:
    """Largest differences of parameters from those of one process on the global batch."""
    w = lockstep.init()
    reference = _model(kind)
    alone = _train_alone(reference, _optimizer(optimizer_kind, reference), sizes)
    ways: dict[str, Any] = {
        "replicate": lambda model: lockstep.replicate(model, first_bucket_mb=1e-4, bucket_cap_mb=1e-3),
        "wrapper": lockstep.DistributedDataParallel,
    }
    if min(sizes) >= w.world_size:  # torch's DDP makes NaN of an empty slice
        ways["torch"] = nn.parallel.DistributedDataParallel
    differences = {}
    for way, attach in ways.items():
        model = attach(_model(kind))
        optimizer = _optimizer(optimizer_kind, model)
        differences[way] = float((_train(model, optimizer, sizes, w.rank, w.world_size) - alone).abs().max())
    return differences


def _train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sequence[int]) -> Tensor:
    loss_of = nn.CrossEntropyLoss()
    for step, size in enumerate(sizes):
        images, labels = _global_batch(step, size)
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@each_value(kind=("mlp", "convolution", "transformer"), optimizer=("SGD", "AdamW"), world_size=(4, 2, 3, 1))
def test_equal_slices(kind: str, optimizer: str, world_size: int) -> None:
    for differences in run_ranks(_compare, world_size, kind, optimizer, [12] * STEPS):
        assert differences.keys() == {"replicate", "wrapper", "torch"}
        assert max(differences.values()) < TOLERANCE, differences


@each_value(optimizer=("SGD", "AdamW"), world_size=(2, 3, 4))
def test_unequal_slices_and_a_small_last_batch(optimizer: str, world_size: int) -> None:
    sizes = ([11] * 9 + [5]) * 2  # two epochs of 104 samples, 11 at a time
    for differences in run_ranks(_compare, world_size, "mlp", optimizer, sizes):
        assert differences["replicate"] < TOLERANCE, differences
        assert differences["wrapper"] < TOLERANCE, differences
        assert differences["torch"] > 100 * TOLERANCE, "torch's DDP is expected to differ here"


@each_value(each_backend=BOTH, world_size=(3, 4))
def test_a_last_batch_smaller_than_the_world(world_size: int) -> None:
    sizes = ([8] * 9 + [2]) * 2
    for differences in run_ranks(_compare, world_size, "mlp", "SGD", sizes):
        assert differences.keys() == {"replicate", "wrapper"}
        assert max(differences.values()) < TOLERANCE, differences
