"""Batches of samples by a user's ``collate_fn``: also batches of zero samples, and those that have to be kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from lockstep.data.dead_workers import tells_of_a_death
from lockstep.data.seeding import seed_generators
from lockstep.trees import map_leaves, parts_of, rebuilt

Collate = Callable[[list[Any]], Any]


def collated(samples: list[Any], collate: Collate, *, empty: bool, seed: int | None) -> Any:
    """Return the samples as a batch; if ``empty``, a batch of zero samples of their kind."""

    def once(group: list[Any]) -> Any:
        if seed is not None:
            seed_generators(seed)
        return collate(group)

    if not empty:
        return once(samples)
    one, *two = (copied(samples[0]) for _ in range(3))
    return nothing_of(once([one]), once(two))


def collated_to_keep(samples: list[Any], collate: Collate, *, seed: int | None) -> Any:
    """Return the samples as a batch that outlives the next call of ``collate``, which may use its memory again.

    Tensors and arrays are copied, unless torch has collated them; those inside of a class of a user's own are not.
    """
    batch = collated(samples, collate, empty=False, seed=seed)
    return batch if collate is default_collate else map_leaves(batch, _own_copy)


def _own_copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf.copy("K") if isinstance(leaf, np.ndarray) else leaf


def copied(sample: Any) -> Any:
    """Return a copy for a ``collate_fn`` that may change it; an object that can't be copied is returned itself."""
    try:
        return copy.deepcopy(sample)
    except Exception as error:  # (whatever a class of a user's raises: most collate_fns leave samples as they are)
        if tells_of_a_death(error):
            raise
        return sample


def nothing_of(one: Any, two: Any) -> Any:
    """Return the batch of zero samples, from the batches of one sample and of that sample twice.

    All that depends on the number of samples is extrapolated to zero: a dimension that grew from n to n + k has size
    n - k, a sequence of one element per sample is empty, a count of samples is 0. The rest stays the same. So this is
    right for any layout that a ``collate_fn`` may choose, batch dimension first or not.
    """
    if isinstance(one, torch.Tensor):
        return _empty_tensor(one, two)
    if isinstance(one, np.ndarray):
        return _empty_array(one, two)
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
            cut = one.narrow_copy if one.layout == torch.sparse_coo else one.narrow
            one = cut(dim, 0, max(0, 2 * single - double))
    return one


def _empty_array(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kept: list[Any] = [slice(max(0, 2 * n - m) if n != m else n) for n, m in zip(one.shape, two.shape, strict=False)]
    index: Any = (*kept, ...)
    return cast(np.ndarray[Any, Any], one[index])


def size_unlike(batch: Any, samples: int) -> int | None:
    """Return the size of a batch that seems to hold fewer samples than ``samples``, or None.

    The ``collate_fn`` is free to choose a layout, so this is a guess: None if anything in the batch has
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
