"""One short text for a whole state: equal exactly if all its bits are."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def digest_of(tree: Any) -> str:
    """Of tensors and arrays in dicts, lists and tuples, with their dtypes and shapes; of anything else, its repr."""
    found = hashlib.blake2b(type(tree).__name__.encode(), digest_size=12)
    if isinstance(tree, np.ndarray):
        tree = torch.from_numpy(tree)
    if isinstance(tree, torch.Tensor):
        found.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
        found.update(tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            found.update(f"{key!r} {digest_of(value)}".encode())
    elif isinstance(tree, (list, tuple)):
        found.update("".join(map(digest_of, tree)).encode())
    else:
        found.update(repr(tree).encode())
    return found.hexdigest()
