"""How a loader's global batches are cut into slices, and which rank has which slices: fixed, by shares, or by pace.

Note [Slices by pace]
~~~~~~~~~~~~~~~~~~~~~
With ``balance`` the ranks tell each other at the end of each step how many seconds their slices took. So all ranks know
the same paces, and each computes the number of slices for every rank with which all finish at the same time. The
results of slices are added up in an order that does not depend on ranks, so nothing else changes. Each rank's workers
fetch its slices ahead, so a change takes effect at a batch that no rank has asked for yet. The pace is the median of a
few steps: one slow step (a checkpoint, another process) moves nothing.

Note [Small last batches]
~~~~~~~~~~~~~~~~~~~~~~~~~
The last batch of an epoch may be so small that slices would have one sample, of which batch norm has no statistics: a
run would end with torch's error after its first epoch. So a batch has only as many non-empty slices as get two samples
each, if full batches have that many; the others are empty. This depends on the batch alone, not on the ranks, and the
tree stays the same, so the bits are the same on any number of ranks. Slices of one sample remain if full batches have
them, as the user asked, or if the last batch is a single sample: users of batch norm are warned of both in advance.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.data.order import cut_in_slices, read_shares, share_bounds
from lockstep.data.source import Shardable
from lockstep.step import deterministic

#: The number of steps whose paces count, and the fewest that must be known before slices move.
_STEPS, _FEWEST = 9, 3
#: The least fraction by which the slowest rank's time must shrink for slices to move.
_WORTH = 0.04

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slices:
    """The number of slices of global batches, and their division among ranks, for :func:`lockstep.shard`.

    Only the numbers of slices and of threads affect the bits of the results: docs/exactness.md.

    Args:
        count: slices of each global batch, at every world size; ``"auto"``: as many as there are ranks, rounded up to
            a power of two, and twice as many each time that memory runs out in
            :meth:`Step.attempt <lockstep.Step.attempt>`.
        shares: each rank's proportion of the slices, one positive number for each: ``[2, 1]`` for a rank that is twice
            as fast as the other.
        balance: measure the ranks, and move slices from slow ranks to fast ones between steps.
        threads: the number of threads that this process computes with from now on: the bits of sums that threads share
            depend on it.
    """

    count: int | Literal["auto"]
    shares: Sequence[float] | None = None
    balance: bool = False
    threads: int = 1


@dataclass(frozen=True)
class SliceOptions:
    """The user's choice of slices, checked."""

    slices: int
    #: True if lockstep may choose a larger number.
    chooses: bool
    shares: tuple[float, ...]
    balance: bool
    threads: int

    @classmethod
    def of(cls, slices: object, *, world_size: int) -> SliceOptions | None:
        """Return the checked options; None if the batches are not to be sliced.

        Raises:
            TypeError, ValueError: an option is invalid.
        """
        if slices is None:
            return None
        given = slices if isinstance(slices, Slices) else Slices(slices)  # type: ignore[arg-type]  # looked at below
        chooses = given.count == "auto"
        count = 1 << (world_size - 1).bit_length() if chooses else given.count
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f'slices={given.count!r}: expected a number of slices, "auto" or lockstep.Slices(…)')
        if count < 1:
            raise ValueError(f"slices={count}: expected at least one")
        threads = given.threads
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads={threads!r}: expected a number of threads, at least 1")
        equal = (1.0,) * world_size
        shares = equal if given.shares is None else read_shares(given.shares, world_size=world_size)
        if given.shares is not None and given.balance:
            raise ValueError("shares= sets each rank's share, and balance=True measures it: give one of them")
        return cls(count, chooses, shares, bool(given.balance), threads)

    def refuse_unfit(self, source: Shardable) -> None:
        """Refuse a ``source`` that can't be cut in this way.

        Raises:
            ValueError: ``source`` is a stream, and slices would have to move or be fetched again; or each rank reads a
                part of it.
        """
        if source.split_by is not None:
            raise ValueError(
                f"slices={self.facts()['slices']!r}: {source.split_by} gives each rank a part of this stream, so which "
                "samples share a slice depends on the number of ranks, and so would the bits. Let every rank read the "
                'whole stream (do not split it, and say stream="whole"), or leave slices= out'
            )
        if source.order == "stream" and (self.balance or self.chooses):
            what = "balance=True" if self.balance else 'slices="auto"'
            raise ValueError(
                f"{what}: the workers that read a stream can't change its slices, nor return samples again: give a "
                "number of slices, or shares="
            )

    def facts(self) -> dict[str, Any]:
        """Return the options that must be the same on every rank."""
        return {
            "slices": "auto" if self.chooses else self.slices,
            "shares": list(self.shares),
            "balance": self.balance,
            "threads": self.threads,
        }

    def switch_on(self) -> None:
        """Make this process compute the same bits each time for the same slice."""
        torch.set_num_threads(self.threads)
        # A script that has asked for warnings only keeps that setting.
        deterministic.switch_on(warn_only=torch.is_deterministic_algorithms_warn_only_enabled())

    def slicing(self, source: Shardable) -> Slicing:
        """Return the slices of ``source``."""
        workers = source.loader.num_workers
        ahead = 2 + workers * (source.loader.prefetch_factor or 0)
        return Slicing(
            self.slices, shares=self.shares, ahead=ahead, balance=self.balance, batch_size=source.batch_size or 0
        )


class Slicing:
    """The slices of one loader's batches, and their division among ranks.

    Args:
        slices: the number of slices of each global batch.
        shares: each rank's proportion of the slices.
        ahead: the most batches that any rank may have asked for beyond the one in hand.
        balance: move slices by pace.
        batch_size: samples of a full global batch; 0: any number of samples is cut into as many slices as can be.
    """

    def __init__(
        self, slices: int, *, shares: Sequence[float], ahead: int, balance: bool = False, batch_size: int = 0
    ) -> None:
        self.slices, self._shares, self._ahead, self.balances = slices, tuple(shares), ahead, balance
        self._batch_size = batch_size
        #: Pairs of a batch number and the ranks' slices from that batch on, in order of batches.
        self._changes: list[tuple[int, Runs]] = [(0, runs(slices, shares))]
        self._paces: list[deque[float]] = [deque(maxlen=_STEPS) for _ in shares]

    def cut(self, count: int) -> Sequence[tuple[int, int]]:
        """Return the bounds of each slice of a batch of ``count`` samples; see Note [Small last batches]."""
        return cut_in_slices(count, self.slices, least=max(1, min(2, self._batch_size // self.slices)))

    def smallest(self, length: int | None, *, drop_last: bool) -> int:
        """Return the size of the smallest non-empty slice in an epoch of batches of one size; without a length, in a
        full batch.

        Args:
            length: the number of samples of the epoch.
            drop_last: whether a last batch of fewer samples is dropped.
        """
        last = 0 if length is None or drop_last else length % self._batch_size
        counts = [each for each in (self._batch_size, last) if each]
        return min(size for count in counts for size in sizes_in(self.cut(count)) if size)

    def runs_at(self, batch: int) -> Runs:
        """Return the first slice of each rank in a batch, and the one after its last."""
        return next(found for begin, found in reversed(self._changes) if begin <= batch)

    def begin_epoch(self) -> None:
        """Count batches from 0 again; the latest division stays."""
        self._changes = [(0, self._changes[-1][1])]

    def double(self) -> None:
        """Cut the batches into twice as many slices from now on. Every rank keeps its part of them."""
        self.slices *= 2
        self._changes = [(0, tuple((2 * first, 2 * end) for first, end in self._changes[-1][1]))]
        for paces in self._paces:
            paces.clear()

    def cut_into(self, slices: int) -> None:
        """Cut the batches into ``slices`` slices from the next pass on, in proportion to the shares."""
        self.slices = slices
        self._changes = [(0, runs(slices, self._shares))]
        for paces in self._paces:
            paces.clear()

    def note(self, batch: int, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Record how long a batch took on each rank, and move slices if it is worth it. The same on all ranks.

        Args:
            batch: the batch's number.
            seconds: the seconds that each rank spent on its slices.
            counts: the number of slices of each rank.
        """
        if not self.balances:
            return
        for paces, spent, count in zip(self._paces, seconds, counts, strict=True):
            if count:
                paces.append(spent / count)
        if any(len(paces) < _FEWEST for paces in self._paces) or self._changes[-1][0] > batch:
            return
        pace = [max(statistics.median(each), 1e-9) for each in self._paces]
        have = [end - first for first, end in self._changes[-1][1]]
        best = counts_for(self.slices, pace)
        now, then = _longest(have, pace), _longest(best, pace)
        if then < (1 - _WORTH) * now:
            ends = [sum(best[: rank + 1]) for rank in range(len(best))]
            found = tuple(zip([0, *ends[:-1]], ends, strict=True))
            self._changes = [self._changes[-1], (batch + 1 + self._ahead, found)]
            for each in self._paces:
                each.clear()


def sizes_in(bounds: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of samples of each slice."""
    return [end - begin for begin, end in bounds]


def runs(slices: int, shares: Sequence[float]) -> Runs:
    """Return the first slice of each rank, and the one after its last, in proportion to ``shares``."""
    ranks = len(shares)
    return tuple(share_bounds(slices, rank=rank, world_size=ranks, shares=tuple(shares)) for rank in range(ranks))


def counts_for(slices: int, paces: Sequence[float]) -> list[int]:
    """Return the number of slices for each rank with which the slowest finishes soonest; at least one if there are
    enough, since a rank without slices has no pace.

    Args:
        slices: the total number of slices.
        paces: the seconds per slice, by rank.
    """
    counts = [1 if slices >= len(paces) else 0] * len(paces)
    for _ in range(slices - sum(counts)):
        soonest = min(range(len(paces)), key=lambda rank: ((counts[rank] + 1) * paces[rank], rank))
        counts[soonest] += 1
    return counts


def _longest(counts: Sequence[int], paces: Sequence[float]) -> float:
    return max(count * pace for count, pace in zip(counts, paces, strict=True))
