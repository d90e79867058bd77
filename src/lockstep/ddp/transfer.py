"""Move a forward's inputs to the device of the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.containers import map_leaves


def move_to(device: torch.device, value: Any) -> Any:
    """**Local.** ``value`` with every tensor in it on ``device``, copied without waiting where the memory is pinned."""

    kinds: Any = (Tensor, PackedSequence)

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, kinds) else leaf

    return map_leaves(value, moved, is_leaf=lambda node: isinstance(node, PackedSequence))
