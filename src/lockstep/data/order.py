"""The order of the samples, and their ranks: arithmetic, except for the order that a user's own sampler draws.

Note [Global order]
~~~~~~~~~~~~~~~~~~~
An epoch has one order of samples, made from (seed, epoch, length). The order is cut into global batches, and each
global batch into one contiguous share per rank. Nothing above the last cut knows how many ranks there are, so a job
takes the same batches with 1 rank or 64, and a position in the order means the same after the world has changed size.

Note [Long epochs]
~~~~~~~~~~~~~~~~~~
A list of all indices takes eight bytes a sample on every rank, and the first batch waits until it is shuffled. So above
:data:`LISTED` samples the order is a function: a permutation of the places, of which a block is computed when one of
its places is asked for. The places are laid out in a rectangle that is about a square, and a place is its row and
column. Each round adds a number that is drawn from the column (by ``mixed``, with a key of the round) to the row,
modulo the number of rows, and swaps the two. A round can be undone by whoever knows its key, so the rounds together are
a permutation of the rectangle: a Feistel network for two halves of unequal size (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002). The rectangle has up to a row more places than the epoch has samples; what
leads there is permuted again until it leads to a sample, which leaves a permutation of the samples (cycle walking, in
the same paper).

It depends on (seed, epoch, length) alone, as the list does, so it is the same on every rank and in a run that is
resumed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lockstep import callsite
from lockstep.comm.exchange import group_device
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.world import World
from lockstep.data.dead_workers import tells_of_a_death
from lockstep.data.mixing import mix, mixed
from lockstep.data.sampler_watch import SamplerWatch
from lockstep.data.seeding import SamplerNumbers, following
from lockstep.errors import LockstepError, named
from lockstep.text import counted

#: Longer epochs are not shuffled as a list: see Note [Long epochs].
LISTED = 2**22
#: Rounds of the permutation of a long epoch.
_ROUNDS = 8
#: Places that are looked up at a time: 64 KB of indices.
_BLOCK = 8192


class EpochOrder(Protocol):
    """The order of an epoch's samples, the same on every rank: a tensor of indices, or what can be sliced as one is."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, places: slice) -> torch.Tensor:
        """Return the indices of the samples at these places, which follow each other: int64."""
        ...


class Sequential:
    """The order of the data set itself."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> torch.Tensor:
        """See :class:`EpochOrder`."""
        begin, end, _ = places.indices(self._length)
        return torch.arange(begin, max(begin, end), device="cpu")


class Permuted:
    """A shuffled order of which each place is computed when it is asked for; see Note [Long epochs].

    Args:
        length: the number of samples, 2 to 2**62.
        key: the number that decides the permutation.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._width = math.isqrt(length - 1) + 1
        self._height = -(-length // self._width)
        self._keys = [mix(key, number) for number in range(_ROUNDS)]
        self._block: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64, device="cpu"))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> torch.Tensor:
        """See :class:`EpochOrder`."""
        begin, end, _ = places.indices(self._length)
        if begin >= end:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        blocks = [self._looked_up(number) for number in range(begin // _BLOCK, -(-end // _BLOCK))]
        first = begin // _BLOCK * _BLOCK
        return torch.cat(blocks)[begin - first : end - first] if blocks[1:] else blocks[0][begin - first : end - first]

    def _looked_up(self, number: int) -> torch.Tensor:
        if self._block[0] != number:
            begin = number * _BLOCK
            places = np.arange(begin, min(begin + _BLOCK, self._length), dtype=np.int64)
            self._block = number, torch.from_numpy(self._indices_at(places))
        return self._block[1]

    def _indices_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        indices = self._permuted(places)
        while (beyond := np.flatnonzero(indices >= self._length)).size:  # of the rectangle, but not of the epoch
            indices[beyond] = self._permuted(indices[beyond])
        return indices

    def _permuted(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers that the permutation of 0 to width * height - 1 has for these."""
        high, low = np.divmod(places, self._width)
        for number, key in enumerate(self._keys):
            size = self._width if number % 2 else self._height
            added = (mixed(key, low) % np.uint64(size)).astype(np.int64)
            high, low = low, (high + added) % size
        return high * self._width + low


def epoch_order(length: int, *, seed: int, epoch: int) -> EpochOrder:
    """Return a shuffled epoch: a permutation of ``range(length)``, the same on every rank."""
    key = mix(seed, epoch)
    if length > LISTED:
        return Permuted(length, key)
    generator = torch.Generator()
    generator.manual_seed(key)
    return torch.randperm(length, generator=generator, device="cpu")


def sequential_order(length: int) -> EpochOrder:
    """Return an epoch in the order of the data set."""
    return Sequential(length) if length > LISTED else torch.arange(length, device="cpu")


def share_bounds(count: int, *, rank: int, world_size: int, shares: tuple[float, ...] | None = None) -> tuple[int, int]:
    """Return where a rank's share of ``count`` samples begins and ends.

    The shares are contiguous and in order of rank. Without ``shares`` they differ in size by at most one, larger ones
    first.

    Args:
        count: samples of the global batch.
        rank: the rank of the share.
        world_size: the number of shares.
        shares: one positive number for each rank. The sizes are then in their proportion, each less than one sample
            from the exact part: they are rounded down, and the remaining samples go to the ranks that lost most by
            it, lower ranks first. Equal shares cut like none.
    """
    if shares is not None:
        cuts = _cuts(count, shares)
        return cuts[rank], cuts[rank + 1]
    base, larger = divmod(count, world_size)
    start = rank * base + min(rank, larger)
    return start, start + base + (rank < larger)


def read_shares(shares: object, *, world_size: int) -> tuple[float, ...]:
    """Return the shares that a user gave, checked.

    Raises:
        TypeError: ``shares`` is not a sequence of numbers.
        ValueError: there is not one share for each rank, or one is not positive and finite.
    """
    if isinstance(shares, (str, bytes)) or not isinstance(shares, Sequence):
        raise TypeError(f"shares={shares!r}: expected a list of numbers, one for each of the {world_size} ranks")
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"shares={shares!r}: expected numbers, not {share!r}")
        if not 0 < share < math.inf:
            raise ValueError(
                f"shares={shares!r}: expected positive numbers, not {share!r}; for a rank without samples, start one "
                "rank less"
            )
    if len(shares) != world_size:
        raise ValueError(f"shares={shares!r}: expected one for each of the {world_size} ranks, not {len(shares)}")
    return tuple(shares)


@lru_cache(maxsize=256)
def cut_in_slices(count: int, slices: int, *, least: int = 1) -> tuple[tuple[int, int], ...]:
    """Return the bounds of each slice of a global batch: contiguous, in order, sizes differing by at most one.

    Args:
        count: samples of the global batch; at least one.
        slices: the number of slices.
        least: the fewest samples that a slice may have. If there are too few samples for that, some slices, evenly
            spread among the others, have none, so that the ranks still have about equal parts.
    """
    filled = min(slices, max(1, count // least))
    numbers = {each * slices // filled: each for each in range(filled)}
    bounds, end = [], 0
    for number in range(slices):
        begin = end
        if number in numbers:
            begin, end = share_bounds(count, rank=numbers[number], world_size=filled)
        bounds.append((begin, end))
    return tuple(bounds)


@lru_cache(maxsize=256)
def _cuts(count: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    # Fractions hold floats exactly, so every rank computes the same bounds. (All batches but the last have the same
    # size, hence the cache.)
    whole = sum(map(Fraction, shares))
    exact = [count * Fraction(share) / whole for share in shares]
    sizes = [int(part) for part in exact]
    by_loss = sorted(range(len(shares)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in by_loss[: count - sum(sizes)]:
        sizes[rank] += 1
    return (0, *accumulate(sizes))


def batch_count(length: int, *, batch_size: int, drop_last: bool, start: int = 0) -> int:
    """Count the global batches from sample ``start`` to the end of an epoch of ``length`` samples."""
    left = max(0, length - start)
    return left // batch_size if drop_last else -(-left // batch_size)


def draw_order(sampler: Any, world: World, *, seed: int, epoch: int, watch: SamplerWatch | None = None) -> torch.Tensor:
    """**Collective.** Return the indices that ``sampler`` gives on rank 0, on every rank: int64, as many as its length.

    A weighted or custom sampler draws at random, so the ranks' own samplers could disagree. Rank 0 draws with
    the generators seeded from (seed, epoch), so that an interrupted epoch is drawn the same again: Note [Random numbers
    of a sampler] in ``data/seeding.py``. A ``set_epoch`` of the sampler is called first.

    Args:
        sampler: the user's.
        world: the ranks.
        seed: that of the loader.
        epoch: the one to draw.
        watch: compares the ranks' samplers; None: they are not compared.

    Raises:
        LockstepError: the sampler failed, or gave anything but whole numbers; on every rank.
        CollectiveMismatch: the ranks' datasets have become unlike; on every rank.
    """

    def attempt() -> tuple[torch.Tensor | None, dict[str, Any]]:
        looked = {} if watch is None else watch.look()
        try:
            return _draw(sampler, seed=seed, epoch=epoch) if world.is_main else None, looked
        except Exception as error:
            if tells_of_a_death(error):
                raise
            text = named(error)
            raise LockstepError(f"the sampler {type(sampler).__name__} could not draw epoch {epoch}: {text}") from error

    (order, _), told = together(
        OverGroup(world),
        attempt,
        lambda found: [None if found[0] is None else found[0].numel(), found[1]],
        what="drawing an epoch's order",
    )
    if watch is not None:
        watch.compare([looked for _, looked in told], epoch=epoch)
    device = group_device(world.group)
    shared = torch.empty(told[0][0], dtype=torch.int64, device=device) if order is None else order.to(device)
    dist.broadcast(shared, src=0, group=world.group)
    return shared.cpu()


def digest_of(order: torch.Tensor) -> str:
    """Return a short digest of an order, to detect that a sampler drew another one."""
    return hashlib.blake2b(order.numpy().data, digest_size=16).hexdigest()


def _draw(sampler: Any, *, seed: int, epoch: int) -> torch.Tensor:
    numbers = SamplerNumbers(sampler, mix(seed, epoch))
    with numbers.drawing():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        length = len(sampler)
        drawn = iter(sampler)
        indices = [*following(drawn, length)]  # a sampler may be endless; its length defines the epoch
        if next(drawn, None) is not None:
            callsite.warn(
                f"the sampler {type(sampler).__name__} has a length of {length} and yields more: an epoch has its "
                f"first {counted(length, 'sample')}, where torch's DataLoader would take all"
            )
    if len(indices) < length:
        raise ValueError(f"its length is {length}, but it yielded {len(indices)} samples")
    return as_indices(indices)


def as_indices(given: Iterable[Any]) -> torch.Tensor:
    """Return the indices that a sampler gave, checked: int64 of shape (number,).

    Raises:
        TypeError: one is not a whole number.
        ValueError: one does not fit into 64 bits.
    """
    indices = list(given)
    for index in indices:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"it gave {index!r}; lockstep.shard needs whole numbers as indices")
    numbers = [int(index) for index in indices]
    try:
        return torch.from_numpy(np.array(numbers, dtype=np.int64))
    except OverflowError:
        long = next(number for number in numbers if not -(2**63) <= number < 2**63)
        raise ValueError(f"it gave {long}; lockstep.shard sends indices as whole numbers of 64 bits") from None
