"""Inputs and outputs as trees: what is a leaf of them, where it is, and on which device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep import containers
from lockstep.containers import rebuilt


def parts_of(tree: Any) -> dict[Any, Any] | None:
    """**Local.** The children of a container by key, or None for a leaf, such as a packed sequence."""
    return None if is_packed(tree) else containers.parts_of(tree)


def moved(tree: Any, device: torch.device) -> Any:
    """**Local.** The tree with its tensors on ``device``."""
    if isinstance(tree, torch.Tensor) or is_packed(tree):
        return tree.to(device)
    parts = parts_of(tree)
    return rebuilt(tree, {key: moved(part, device) for key, part in parts.items()}) if parts else tree


def is_packed(value: Any) -> bool:
    """**Local.** Whether ``value`` is a :class:`torch.nn.utils.rnn.PackedSequence`, which is a named tuple."""
    return isinstance(value, PackedSequence)


def path_text(path: tuple[Any, ...]) -> str:
    """**Local.** Where a leaf is, as one would write it: ``[0]['mask']``."""
    return "".join(f"[{key!r}]" for key in path)
