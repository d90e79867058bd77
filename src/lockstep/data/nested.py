"""What can be told from a batch whose layout is the ``collate_fn``'s own affair: its digest, its size, itself empty."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.trees import leaves, parts_of, rebuilt


def nothing_of(one: Any, two: Any) -> Any:
    """Return the batch of no samples, from the batches of one sample and of that sample twice.

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
    """Return a digest of the contents of ``tree``: equal contents have equal fingerprints on every rank."""
    digest = hashlib.blake2b(digest_size=16)

    for leaf in leaves(tree):
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
    return digest.hexdigest()


def size_unlike(batch: Any, samples: int) -> int | None:
    """Return the size of a batch that seems to have been made of fewer samples than ``samples``, or None.

    A layout is the ``collate_fn``'s own affair, so this can only be guessed: None if anything in the batch has
    ``samples`` elements, or each tensor has that many along its second dimension (time before batch), or all sizes are
    multiples of ``samples`` (several views of each sample), or nothing is smaller.
    """
    if not samples or (isinstance(batch, (list, tuple)) and len(batch) == samples):
        return None
    arrays: list[Any] = []
    sizes = _leading_sizes(batch, arrays, outermost=True)
    if not sizes or samples in sizes or all(size and size % samples == 0 for size in sizes):
        return None
    if arrays and all(array.ndim > 1 and array.shape[1] == samples for array in arrays):
        return None
    return min((size for size in sizes if size < samples), default=None)


def _leading_sizes(node: Any, arrays: list[Any], *, outermost: bool) -> list[int]:
    if isinstance(node, (torch.Tensor, np.ndarray)):
        if node.ndim == 0:
            return []
        arrays.append(node)
        return [int(node.shape[0])]
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields") and not outermost:
        return [len(node)]
    parts = parts_of(node)
    return (
        [] if parts is None else [size for p in parts.values() for size in _leading_sizes(p, arrays, outermost=False)]
    )
