"""How a loader's global batches are cut into slices, and which rank has which: fixed, by shares, or by pace.

Note [Slices by pace]
~~~~~~~~~~~~~~~~~~~~~
With ``balance`` the ranks tell each other at the end of each step how many seconds they were at their slices, so all of
them know the same paces, and each reckons by itself how many slices each is to have so that all are done at the same
time. What the slices give is added up in an order that knows no ranks, so nothing else changes. Batches are fetched
ahead by workers, each rank its own slices of them, so a change holds from a batch on that nobody has asked for yet.
The pace is the median of a few steps: one slow step (a checkpoint, another process) moves nothing.

Note [Small last batches]
~~~~~~~~~~~~~~~~~~~~~~~~~
The last batch of an epoch may be so small that slices would have one sample, of which batch norm has no statistics: a
run would end with torch's error after its first epoch. So a batch has no more slices with samples than give each two of
them, if full batches do; the others have none. The batch alone decides that, not the ranks, and the tree stays as it
is, so the bits are the same on any number of ranks. Where full batches have slices of one sample, that is what was
asked for, and what is left is a last batch of a single sample: batch norm is warned of both before it meets them.
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

#: Steps whose paces count, and how many must be known before anything moves.
_STEPS, _FEWEST = 9, 3
#: How much shorter the slowest rank must become, as a part, for slices to move.
_WORTH = 0.04

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slices:
    """Into how many slices global batches are cut, and which rank has which, for :func:`lockstep.shard`.

    None of it but the number of slices and of threads changes a bit of what comes out: docs/exactness.md.

    Args:
        count: slices of each global batch, whatever the world; ``"auto"``: as many as there are ranks, rounded up to a
            power of two, and twice as many each time that memory runs out in
            :meth:`Step.attempt <lockstep.Step.attempt>`.
        shares: how many of the slices each rank has, in proportion, one positive number for each: ``[2, 1]`` for a rank
            that is twice as fast as the other.
        balance: find that out: move slices from slow ranks to fast ones between steps.
        threads: the threads that this process computes with from now on: sums that threads share have other bits with
            another number of them.
    """

    count: int | Literal["auto"]
    shares: Sequence[float] | None = None
    balance: bool = False
    threads: int = 1


@dataclass(frozen=True)
class SliceOptions:
    """What the user asked for, checked."""

    slices: int
    #: Whether lockstep may take more.
    chooses: bool
    shares: tuple[float, ...]
    balance: bool
    threads: int

    @classmethod
    def of(cls, slices: object, *, world_size: int) -> SliceOptions | None:
        """Check what was given; None if the batches are not to be cut.

        Raises:
            TypeError, ValueError: it makes no sense.
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
            raise ValueError("shares= says which rank has how much, and balance=True finds that out: give one of them")
        return cls(count, chooses, shares, bool(given.balance), threads)

    def refuse_unfit(self, source: Shardable) -> None:
        """Raise if ``source`` can't be cut so.

        Raises:
            ValueError: it is a stream, and slices would have to move, or be fetched again.
        """
        if source.order == "stream" and (self.balance or self.chooses):
            what = "balance=True" if self.balance else 'slices="auto"'
            raise ValueError(
                f"{what}: a stream is read by workers that can't be told of other slices, nor asked for samples "
                "again: give a number of slices, or shares="
            )

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on every rank."""
        return {
            "slices": "auto" if self.chooses else self.slices,
            "shares": list(self.shares),
            "balance": self.balance,
            "threads": self.threads,
        }

    def switch_on(self) -> None:
        """Have this process compute so that the same slice gives the same bits each time."""
        torch.set_num_threads(self.threads)
        # A script that has asked for warnings only is taken at its word.
        deterministic.switch_on(warn_only=torch.is_deterministic_algorithms_warn_only_enabled())

    def slicing(self, source: Shardable) -> Slicing:
        """Return the slices of ``source``."""
        workers = source.loader.num_workers
        ahead = 2 + workers * (source.loader.prefetch_factor or 0)
        return Slicing(self.slices, shares=self.shares, ahead=ahead, balance=self.balance, batch_size=source.batch_size)


class Slicing:
    """The slices of one loader's batches.

    Args:
        slices: of each global batch.
        shares: for each rank how much of them it has, in proportion.
        ahead: batches that any rank may have asked for beyond the one in hand.
        balance: move slices by pace.
        batch_size: samples of a full global batch; 0: any number of samples is cut into as many slices as can be.
    """

    def __init__(
        self, slices: int, *, shares: Sequence[float], ahead: int, balance: bool = False, batch_size: int = 0
    ) -> None:
        self.slices, self._shares, self._ahead, self.balances = slices, tuple(shares), ahead, balance
        self._batch_size = batch_size
        #: From which batch on which ranks have which slices, in order of batches.
        self._changes: list[tuple[int, Runs]] = [(0, runs(slices, shares))]
        self._paces: list[deque[float]] = [deque(maxlen=_STEPS) for _ in shares]

    def cut(self, count: int) -> Sequence[tuple[int, int]]:
        """Return where each slice of a batch of ``count`` samples begins and ends; Note [Small last batches]."""
        return cut_in_slices(count, self.slices, least=max(1, min(2, self._batch_size // self.slices)))

    def smallest(self, length: int | None, *, drop_last: bool) -> int:
        """Return the fewest samples that a slice of an epoch has; of a stream without a length, of a full batch.

        Args:
            length: samples of the epoch.
            drop_last: whether a last batch of fewer samples is dropped.
        """
        last = 0 if length is None or drop_last else length % self._batch_size
        counts = [each for each in (self._batch_size, last) if each]
        return min(size for count in counts for size in sizes_in(self.cut(count)) if size)

    def runs_at(self, batch: int) -> Runs:
        """Return for each rank its first slice of a batch, and the one after its last."""
        return next(found for begin, found in reversed(self._changes) if begin <= batch)

    def begin_epoch(self) -> None:
        """Begin to count batches anew; the last cut stays."""
        self._changes = [(0, self._changes[-1][1])]

    def double(self) -> None:
        """Cut the batches into twice as many slices from now on. Every rank keeps its part of them."""
        self.slices *= 2
        self._changes = [(0, tuple((2 * first, 2 * end) for first, end in self._changes[-1][1]))]
        for paces in self._paces:
            paces.clear()

    def cut_into(self, slices: int) -> None:
        """Cut the batches into so many slices from the next pass on, in proportion to the shares."""
        self.slices = slices
        self._changes = [(0, runs(slices, self._shares))]
        for paces in self._paces:
            paces.clear()

    def note(self, batch: int, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Take how long the ranks were at a batch, and move slices if it is worth it. The same on all ranks.

        Args:
            batch: its number.
            seconds: for each rank, at its slices.
            counts: for each rank, how many it had.
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
    """Return how many samples each slice has."""
    return [end - begin for begin, end in bounds]


def runs(slices: int, shares: Sequence[float]) -> Runs:
    """Return for each rank its first slice, and the one after its last, in proportion to ``shares``."""
    ranks = len(shares)
    return tuple(share_bounds(slices, rank=rank, world_size=ranks, shares=tuple(shares)) for rank in range(ranks))


def counts_for(slices: int, paces: Sequence[float]) -> list[int]:
    """Return how many slices each rank is to have so that the slowest is done soonest; at least one where there are
    enough, since a rank without any has no pace.

    Args:
        slices: in all.
        paces: seconds of a slice, by rank.
    """
    counts = [1 if slices >= len(paces) else 0] * len(paces)
    for _ in range(slices - sum(counts)):
        soonest = min(range(len(paces)), key=lambda rank: ((counts[rank] + 1) * paces[rank], rank))
        counts[soonest] += 1
    return counts


def _longest(counts: Sequence[int], paces: Sequence[float]) -> float:
    return max(count * pace for count, pace in zip(counts, paces, strict=True))
