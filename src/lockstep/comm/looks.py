"""Look for values that are not finite in sums while they are made, without another pass over memory.

A backend whose ranks add up by themselves has every piece of the sum in the processor's cache once, and looking at it
there costs next to nothing. "shm" does so for memory that it reduces in place (comm/memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements from which on a tensor does not fit into a core's own caches.
_MANY = 1 << 18
_DOTTED = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


def total_of(values: Tensor) -> Tensor:
    """Return a number (0-dim) that is infinite or NaN if one of ``values`` is, or if all are finite but huge.

    Of many values, which come from memory, the products of one half with the other are added up: on a CPU that takes
    three quarters of the time of a sum.
    """
    count = values.numel()
    if count >= _MANY and values.is_cpu and values.dtype in _DOTTED and values.is_contiguous():
        flat, half = values.view(-1), count // 2
        return torch.dot(flat[:half], flat[count - half :]) + flat[half]
    return values.sum(dtype=torch.float32) if values.dtype in _HALVES else values.sum()


class SumLook:
    """What was seen in the latest of the sums of one tensor over the ranks. All ranks look, or none.

    Args:
        ends: the element at which each part of the tensor ends; values are found by part.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        #: True if any rank has seen a value that is not finite; the same on all ranks.
        self.is_suspicious = False
        #: Rank -> the parts in which its values were not finite, as far as this rank has seen them.
        self.found: dict[int, set[int]] = {}
        #: The parts in which rank 0's values may not have been finite either: the sum has replaced them, and it is not
        #: finite in any case where another rank's value is not.
        self.unclear: set[int] = set()

    def begin(self) -> None:
        """Forget the last sum."""
        self.is_suspicious = False
        self.found.clear()
        self.unclear.clear()

    def at(self, pieces: Sequence[Tensor], start: int) -> None:
        """Look at a piece of the sum.

        Args:
            pieces: the sum, in the place of rank 0's values, and the values of all other ranks.
            start: the element with which it begins.
        """
        if not math.isfinite(total_of(pieces[0]).item()):
            self._find(pieces, start)

    def _find(self, pieces: Sequence[Tensor], start: int) -> None:
        bad = ~pieces[0].isfinite()
        if not bool(bad.any()):
            return  # finite but huge values have overflowed in total_of
        self.is_suspicious = True
        left = bad.clone()
        for rank, piece in enumerate(pieces[1:], 1):
            theirs = bad & ~piece.isfinite()
            self._note(rank, theirs, start)
            left &= ~theirs
        self._note(0, left, start)  # rank 0's own values are replaced by the sum
        self.unclear |= self._parts(bad & ~left, start)

    def _note(self, rank: int, bad: Tensor, start: int) -> None:
        parts = self._parts(bad, start)
        if parts:
            self.found.setdefault(rank, set()).update(parts)

    def _parts(self, bad: Tensor, start: int) -> set[int]:
        positions = bad.nonzero().view(-1) + start
        return {*torch.bucketize(positions, torch.tensor(self._ends, device="cpu"), right=True).unique().tolist()}
