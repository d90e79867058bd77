"""Move a forward's inputs to the device of the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move_to(device: torch.device, value: Any) -> Any:
    """**Local.** ``value`` with every tensor in it on ``device``; tuples, lists and mappings are followed."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_to(device, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(move_to(device, part) for part in value)
    if isinstance(value, Mapping):
        moved = {key: move_to(device, part) for key, part in value.items()}
        return moved if type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
    return value
