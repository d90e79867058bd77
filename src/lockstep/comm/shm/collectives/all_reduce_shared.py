"""All-reduce of a tensor that lies in shared memory on every rank: nothing is copied in or out.

One round says that every rank's elements are there (and compares fingerprints); each rank combines the part that it
owns, piece by piece within the cache, and writes the result into every rank's memory; one round says that all parts
are. Bytes per rank: n read, n written (W parts of n/W each way).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.shm.layout import part
from lockstep.comm.shm.reduction import Reduction
from lockstep.comm.shm.rounds import Rounds

#: Bytes of a piece: the result is copied to the other ranks while it is in the first-level or second-level cache.
_PIECE = 128 * 1024


def all_reduce_shared(rounds: Rounds, views: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Combine ``views`` (the ranks' memory, in order of rank) element by element, into each of them."""
    rounds.sync()
    first, end = part(views[0].numel(), rounds.rank, rounds.size)
    step = _PIECE // reduction.dtype.itemsize
    for start in range(first, end, step):
        pieces = [view[start : min(end, start + step)] for view in views]
        if reduction.factor != 1:
            for piece in pieces:
                piece.mul_(reduction.factor)
        reduction.over(pieces, pieces[0])
        for piece in pieces[1:]:
            piece.copy_(pieces[0])
    rounds.sync()
