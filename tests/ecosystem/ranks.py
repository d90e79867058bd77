"""What the rows have in common on a rank: where it is, which part of a batch is its own, and what it hands back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

import lockstep

Arrays = dict[str, npt.NDArray[Any]]
Batch = tuple[torch.Tensor, torch.Tensor]


def join(backend: str | None) -> tuple[int, int]:
    """**Collective.** Rank and world size; without a backend this is one process that knows nothing of lockstep."""
    if backend is None:
        return 0, 1
    world = lockstep.init(backend, timeout=60)
    return world.rank, world.world_size


def net() -> nn.Sequential:
    """A small classifier of 12 numbers in float64, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)).double()


def batches(steps: int = 6, samples: int = 12) -> list[Batch]:
    """Global batches: inputs [samples, 12] and classes [samples]."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 12, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def part(batch: Batch, rank: int, size: int) -> Batch:
    """This rank's share."""
    inputs, targets = batch
    return inputs.tensor_split(size)[rank], targets.tensor_split(size)[rank]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    size: int = 1,
    *,
    data: Iterable[Batch] | None = None,
) -> None:
    """The loop that everybody writes."""
    for batch in data or batches():
        inputs, targets = part(batch, rank, size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def arrays(named: Iterable[tuple[str, torch.Tensor]]) -> Arrays:
    """Tensors by name as arrays: a tensor would travel to the test as a descriptor, which ends with its rank.

    Of copies: FSDP1 frees a parameter's storage by resizing it, which torch refuses once an array has shared it.
    """
    return {name: tensor.detach().clone().numpy() for name, tensor in named}


def weights(model: nn.Module) -> Arrays:
    """A model's parameters and buffers, without the prefixes of wrappers."""
    return arrays(
        (name.replace("module.", "").replace("_orig_mod.", ""), tensor)
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    )
