"""A look at sums while they are made: at values that are not finite, without another pass over memory.

A backend that adds up in its ranks' own time has every piece of the sum in the processor's cache once, and there it
costs next to nothing to look. "shm" does so for memory that it reduces in place (comm/memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: A number of elements that no cache near the processor can hold.
_MANY = 1 << 18
_DOTTED = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


def total_of(values: Tensor) -> Tensor:
    """Return a number (0-dim) that is infinite or NaN if one of ``values`` is; also if all are finite and huge.

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
        ends: where each part of the tensor ends that is told from the others, in elements.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        #: True if any rank has seen a value that is not finite; the same on all ranks.
        self.is_suspicious = False
        #: Rank -> the parts in which its values were not finite, as far as this rank has seen them.
        self.found: dict[int, set[int]] = {}
        #: The parts in which rank 0's values may have been so as well: the sum has replaced them, and with another
        #: rank's it is not finite in any case.
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
            return  # huge values
        self.is_suspicious = True
        left = bad.clone()
        for rank, piece in enumerate(pieces[1:], 1):
            theirs = bad & ~piece.isfinite()
            self._note(rank, theirs, start)
            left &= ~theirs
        self._note(0, left, start)  # whose own values the sum has replaced
        self.unclear |= self._parts(bad & ~left, start)

    def _note(self, rank: int, bad: Tensor, start: int) -> None:
        parts = self._parts(bad, start)
        if parts:
            self.found.setdefault(rank, set()).update(parts)

    def _parts(self, bad: Tensor, start: int) -> set[int]:
        positions = bad.nonzero().view(-1) + start
        return {*torch.bucketize(positions, torch.tensor(self._ends), right=True).unique().tolist()}
