"""Numbers in few bytes: how an outer gradient travels over a slow link. Pure functions of tensors.

Note [Error feedback]
~~~~~~~~~~~~~~~~~~~~~
A block of :data:`BLOCK` values is sent as its largest magnitude s, divided by 127, and one byte for each value: the
nearest multiple of s / 127. A value that is small beside others of its block may be rounded to zero in every round, and
would never arrive. So a rank keeps what it has not sent, and adds it to what it sends in the next round (F. Seide et
al., "1-bit stochastic gradient descent", Interspeech 2014; S. P. Karimireddy et al., "Error feedback fixes SignSGD",
ICML 2019). The sum over all rounds of what has arrived then differs from the sum of what was to be sent by one round's
rounding at most.

The average is rounded once more, by the rank that has added up its chunk. That rank keeps this error too, times the
number of ranks that are averaged over, because what it adds to its own values next time counts for one rank only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Compression = Literal["int8"]

#: Number of values that share a scale; its four bytes are 1.6 % more.
BLOCK = 256
_LARGEST = 127


def encode(rows: Tensor, compression: Compression | None) -> Tensor:
    """Return rows of numbers as bytes.

    Args:
        rows: float32 [n, length], finite; ``length`` is a multiple of :data:`BLOCK`.
        compression: None: the numbers themselves.

    Returns:
        uint8 [n, bytes]; a row has ``4 * length``, and compressed ``length + 4 * length / BLOCK``.
    """
    if compression is None:
        return rows.contiguous().view(torch.uint8)
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(dim=2, keepdim=True) / _LARGEST
    # A scale is zero if all values are zero, or so small that a 127th of them underflows.
    steps = torch.where(scales > 0, blocks / scales, 0.0).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    parts = steps.view(len(rows), -1).view(torch.uint8), scales.view(len(rows), -1).view(torch.uint8)
    return torch.cat(parts, dim=1)


def decode(rows: Tensor, compression: Compression | None) -> Tensor:
    """Return the numbers that :func:`encode` encoded: float32 [n, length]."""
    if compression is None:
        return rows.contiguous().view(torch.float32)
    length = rows.shape[1] * BLOCK // (BLOCK + 4)
    steps = rows[:, :length].contiguous().view(torch.int8).view(len(rows), -1, BLOCK)
    scales = rows[:, length:].contiguous().view(torch.float32).unsqueeze(2)
    return (steps * scales).view(len(rows), length)
