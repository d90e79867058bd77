"""Operations on batches, inputs and outputs as trees: take them apart, rebuild them, move their tensors.

Their leaves are held in tuples, lists, dicts, named tuples and dataclasses. A sparse tensor is a leaf that has parts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Moves = TypeVar("Moves")


def parts_of(tree: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf. Strings are leaves."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # A field that __init__ does not take may have no value yet.
        return {
            field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        }
    return None


def rebuilt(tree: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like ``tree`` with other children under the same keys.

    ``tree`` stays as it is. A mapping that can neither be copied nor made from a dict becomes a dict, as in torch's own
    ``default_collate``.
    """
    if type(tree) is dict:
        return parts
    if isinstance(tree, dict) or (isinstance(tree, MutableMapping) and hasattr(type(tree), "__copy__")):
        return _copied_mapping(tree, parts)
    if isinstance(tree, Mapping):  # a plain copy of such an object would share its items with it
        try:
            return type(tree)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*parts.values())
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts.values())
    clone = copy.copy(tree)
    for name, value in parts.items():
        object.__setattr__(clone, name, value)  # also for a frozen dataclass, and fields that __init__ does not take
    return clone


def _copied_mapping(tree: MutableMapping[Any, Any], parts: dict[Any, Any]) -> MutableMapping[Any, Any]:
    """Copy a mapping with all that a subclass holds besides its items, and keep attributes that mirror items."""
    clone = copy.copy(tree)
    for key, value in parts.items():
        clone[key] = value  # not update(), which some classes of outputs refuse
    if getattr(tree, "__dict__", None) is tree:
        clone.__dict__ = clone  # type: ignore[assignment]
        return clone
    attributes = getattr(clone, "__dict__", {})
    for key in attributes.keys() & parts.keys():
        if attributes[key] is tree[key]:
            attributes[key] = parts[key]
    return clone


def map_leaves(tree: Any, fn: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return ``tree`` with ``fn`` applied to every leaf; container types are kept."""
    parts = None if is_leaf is not None and is_leaf(tree) else parts_of(tree)
    if parts is None:
        return fn(tree)
    return rebuilt(tree, {key: map_leaves(part, fn, is_leaf) for key, part in parts.items()})


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of ``tree``: everything that is not a container."""
    parts = parts_of(tree)
    if parts is None:
        yield tree
        return
    for part in parts.values():
        yield from leaves(part)


def is_packed(value: Any) -> bool:
    """Return whether ``value`` is a :class:`torch.nn.utils.rnn.PackedSequence`, which is a named tuple."""
    return isinstance(value, PackedSequence)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with its tensors on ``device``; copies from pinned memory to a GPU are asynchronous.

    Objects with a ``.to`` of their own (a packed sequence, a graph batch) are moved by it; modules stay.
    """
    return map_leaves(tree, lambda leaf: moved(leaf, device) if _moves(leaf) else leaf, is_leaf=_moves)


def moved(values: Moves, device: torch.device) -> Moves:
    """Return ``values``, a tensor or an object with a ``.to``, on ``device``. Only copies to the host are waited for.

    An accelerator's later work waits for what is copied to it; for what is copied to the host nothing does. With
    ``non_blocking`` torch would take pinned memory for it, and return before the values are there.
    """
    found: Moves = values.to(device, non_blocking=device.type != "cpu")  # type: ignore[attr-defined]
    return found


def _moves(node: Any) -> bool:
    return hasattr(node, "to") and not isinstance(node, torch.nn.Module)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that make up a sparse tensor; a dense one is its own part."""
    if tensor.layout == torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # without underscore they refuse uncoalesced tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def path_text(path: tuple[Any, ...]) -> str:
    """Return the path of a leaf as it is written in Python: ``[0]['mask']``."""
    return "".join(f"[{key!r}]" for key in path)
