"""How a program hands its numbers to the test, and the data that all programs train on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def hand_over(folder: str, named: Iterable[tuple[str, torch.Tensor]], **more: float) -> None:
    """**Local.** Write a rank's tensors, and the backend of its process group."""
    backend = dist.get_backend() if dist.is_initialized() else "none"
    print(f"backend {backend}", flush=True)
    numbers = {name: tensor.detach().clone().numpy() for name, tensor in named}
    extra = {name: np.array(value, dtype=np.float64) for name, value in more.items()}
    # savez takes its file first, under the name "file".
    np.savez(Path(folder) / f"rank-{os.environ.get('RANK', '0')}.npz", **numbers, **extra)  # type: ignore[arg-type]


def samples(count: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [count, 12] in float64 and classes [count]."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 12, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (count,), generator=generator)


def net() -> torch.nn.Sequential:
    """A small classifier, the same in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4)).double()
