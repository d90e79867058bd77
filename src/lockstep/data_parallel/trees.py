"""Inputs and outputs are tensors in tuples, lists, dicts, named tuples and dataclasses: take apart, rebuild."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def parts_of(tree: Any) -> dict[Any, Any] | None:
    """**Local.** The children of a container by key, or None for a leaf. Strings and packed sequences are leaves."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if is_packed(tree):
        return None
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # A field that __init__ does not take may have no value yet.
        return {
            field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        }
    return None


def rebuilt(tree: Any, parts: dict[Any, Any]) -> Any:
    """**Local.** A container like ``tree`` with other children."""
    if type(tree) is dict:
        return parts
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, parts)
    if isinstance(tree, Mapping):
        return type(tree)(parts)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*parts.values())
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts.values())
    clone = copy.copy(tree)
    for name, value in parts.items():
        object.__setattr__(clone, name, value)  # a frozen dataclass as well; fields that __init__ does not take too
    return clone


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
