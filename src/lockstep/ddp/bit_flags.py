"""A small number of each rank's in the flags of a bucket, by which one sum tells whether the ranks' numbers differ.

Each bit has a flag for "it is 1" and one for "it is 0", one after the other, as in Note [Replicas compared] in
``drift.py``: where both sums are more than 0, ranks differ in that bit. A rank that sets no flag differs from no other.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: Bits of a number, and flags for it.
BITS = 12
FLAGS = 2 * BITS


@lru_cache(maxsize=8)
def flags_of_numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the flags of all numbers of :data:`BITS` bits: those of number n in row n."""
    bits = torch.arange(1 << BITS, device="cpu").unsqueeze(1) >> torch.arange(BITS, device="cpu") & 1
    return torch.stack([bits, 1 - bits], dim=2).view(-1, FLAGS).to(dtype).to(device)
