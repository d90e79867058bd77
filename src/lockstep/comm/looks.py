"""A look at sums while they are made: at values that are not finite, without another pass over memory.

A backend that adds up in its ranks' own time has every piece of the sum in the processor's cache once, and there it
costs next to nothing to look. "shm" does so for memory that it reduces in place (comm/memory.py); other backends know
nothing of it, and then :attr:`SumLook.has_looked` stays False.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def total_of(values: Tensor) -> Tensor:
    """Return a number (0-dim) that is infinite or NaN if one of ``values`` is; also if all are finite and huge."""
    return values.sum(dtype=torch.float32) if values.dtype in _HALVES else values.sum()


class SumLook:
    """What was seen in one sum over the ranks.

    Used as a context: the all-reduce that this thread issues in it is looked at. All ranks look, or none.

    Args:
        ends: where each part of the tensor ends that is told from the others, in elements.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._before: SumLook | None = None
        #: Whether the backend has looked, and whether any rank has seen a value that is not finite: alike on all ranks.
        self.has_looked = self.is_suspicious = False
        #: By rank, the parts in which its values were not finite, as far as this rank has seen them.
        self.found: dict[int, set[int]] = {}

    def __enter__(self) -> SumLook:
        self._before, _current.look = _current.look, self
        return self

    def __exit__(self, *_: object) -> None:
        _current.look = self._before

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

    def _note(self, rank: int, bad: Tensor, start: int) -> None:
        positions = bad.nonzero().view(-1) + start
        if len(positions):
            parts = torch.bucketize(positions, torch.tensor(self._ends), right=True).unique().tolist()
            self.found.setdefault(rank, set()).update(parts)


class _Current(threading.local):
    look: SumLook | None = None


_current = _Current()


def current() -> SumLook | None:
    """Return what is to look at the all-reduce that this thread is about to issue."""
    return _current.look
