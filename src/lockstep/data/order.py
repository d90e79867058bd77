"""Which sample comes when, and on which rank: arithmetic alone, no ranks and no I/O.

Note [Global order]
~~~~~~~~~~~~~~~~~~~
An epoch has one order of samples, made from (seed, epoch, length). The order is cut into global batches, and each
global batch into one contiguous slice per rank. Nothing above the last cut knows how many ranks there are, so a job
takes the same batches with 1 rank or 64, and a position in the order means the same after the world has changed size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_MASK = 2**64 - 1


def mix(*numbers: int) -> int:
    """Return one 64-bit number from several, each bit depending on all of them; the same everywhere and always.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def epoch_order(length: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return a shuffled epoch: a permutation of ``range(length)`` as int64, the same on every rank."""
    generator = torch.Generator()
    generator.manual_seed(mix(seed, epoch))
    return torch.randperm(length, generator=generator)


def slice_bounds(count: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return where rank's slice of ``count`` samples begins and ends.

    The slices are contiguous, in order of rank, and differ in size by at most one, larger ones first.
    """
    base, larger = divmod(count, world_size)
    start = rank * base + min(rank, larger)
    return start, start + base + (rank < larger)


def batch_count(length: int, *, batch_size: int, drop_last: bool, start: int = 0) -> int:
    """Count the global batches from sample ``start`` to the end of an epoch of ``length`` samples."""
    left = max(0, length - start)
    return left // batch_size if drop_last else -(-left // batch_size)


def global_batches(length: int, *, batch_size: int, drop_last: bool, start: int = 0) -> Iterator[tuple[int, int]]:
    """Return the first and the past-the-end position of each global batch, from sample ``start`` on."""
    for number in range(batch_count(length, batch_size=batch_size, drop_last=drop_last, start=start)):
        begin = start + number * batch_size
        yield begin, min(begin + batch_size, length)
