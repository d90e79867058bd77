"""Batches are tensors in containers: walk them, move them, empty them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.containers import parts_of, rebuilt


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """**Local.** Every tensor in ``tree``."""
    found: list[torch.Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_leaves(tree, note)
    return found


def to_device(tree: Any, device: torch.device) -> Any:
    """**Local.** ``tree`` with its tensors on ``device``, copied without waiting where the memory is pinned.

    Objects that know how to move themselves (``.to``: a packed sequence, a graph batch) are asked to.
    """
    return map_leaves(
        tree,
        lambda leaf: leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf,
        is_leaf=lambda node: hasattr(node, "to"),
    )


def map_leaves(tree: Any, fn: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """**Local.** ``tree`` with ``fn`` applied to everything that is not a container, container types kept."""
    parts = None if is_leaf is not None and is_leaf(tree) else parts_of(tree)
    if parts is None:
        return fn(tree)
    return rebuilt(tree, {key: map_leaves(part, fn, is_leaf) for key, part in parts.items()})


def nothing_of(one: Any, two: Any) -> Any:
    """**Local.** The batch of no samples, from the batches of one sample and of that sample twice.

    What the number of samples changes is extended to none: a dimension that grew from n to n + k has size n - k, a
    sequence of one element per sample is empty, a count of samples is 0. What it does not change stays. So any layout
    that a ``collate_fn`` may choose comes out right, batch dimension first or not.
    """
    if isinstance(one, torch.Tensor):
        return _empty_tensor(one, two)
    if isinstance(one, np.ndarray):
        return _empty_tensor(torch.from_numpy(one), torch.from_numpy(two)).numpy()
    if isinstance(one, int) and not isinstance(one, bool):
        return max(0, 2 * one - two)
    if isinstance(one, (str, bytes)):
        return one
    if isinstance(one, Sequence) and len(one) != len(two):
        return one[: max(0, 2 * len(one) - len(two))]
    parts, doubled = parts_of(one), parts_of(two)
    if parts is None or doubled is None:
        return one
    return rebuilt(one, {key: nothing_of(part, doubled[key]) for key, part in parts.items()})


def _empty_tensor(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    for dim, (single, double) in enumerate(zip(one.shape, two.shape, strict=False)):
        if single != double:
            one = one.narrow(dim, 0, max(0, 2 * single - double))
    return one


def fingerprint(tree: Any) -> str:
    """**Local.** A digest of the contents of ``tree``: equal contents have equal fingerprints on every rank."""
    digest = hashlib.blake2b(digest_size=16)

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if leaf.numel() and leaf.layout == torch.strided:
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcSU":
            digest.update(f"{leaf.dtype.str}{leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, (bytes, str, int, float, complex, np.generic, type(None))):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__qualname__.encode())  # an address in a repr would differ from rank to rank
        return leaf

    map_leaves(tree, note)
    return digest.hexdigest()
