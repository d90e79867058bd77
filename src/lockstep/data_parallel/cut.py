"""How a batch is cut into one piece for each replica. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """What one replica gets of the batch."""

    #: The replica, counted in the order of ``device_ids``.
    replica: int
    #: The first sample.
    start: int
    #: Samples.
    size: int


def cut(batch: int, replicas: int, chunk_sizes: Sequence[int] | None = None) -> list[Piece]:
    """Return the pieces of a batch, in order of replica; a small batch uses fewer replicas, and always the first.

    Without ``chunk_sizes`` the pieces are those of :func:`torch.chunk`. With them, a batch of as many samples as they
    sum to is cut as they say, and any other in the same proportion.
    """
    if chunk_sizes is None:
        step = max(1, -(-batch // replicas))
        bounds = [min(batch, step * index) for index in range(replicas + 1)]
    else:
        total = sum(chunk_sizes)
        bounds = [0, *(-(-batch * upto // total) for upto in accumulate(chunk_sizes))]
    pieces = [Piece(index, bounds[index], bounds[index + 1] - bounds[index]) for index in range(replicas)]
    return [piece for piece in pieces if piece.size or (piece.replica == 0 and batch == 0)]


def checked_chunk_sizes(given: Sequence[int] | None, replicas: int) -> tuple[int, ...] | None:
    """Return ``chunk_sizes`` as a tuple.

    Raises:
        ValueError: there is not one for each replica, or one is not a positive whole number.
    """
    if given is None:
        return None
    sizes = tuple(given)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"chunk_sizes={list(sizes)!r}: expected whole numbers from 1 up, the samples of each replica")
    if len(sizes) != replicas:
        raise ValueError(f"chunk_sizes={list(sizes)!r} has {len(sizes)} entries for {replicas} replicas")
    return sizes
