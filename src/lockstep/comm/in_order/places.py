"""Where each row of a rank's outputs belongs among those of all ranks. Arithmetic, without ranks.

Note [Places]
~~~~~~~~~~~~~
Items are handed out in *rounds*. A round's items are neighbours in the order, and each rank has a run of them, in order
of rank; a rank may have none. A sharded loader's round is a global batch; a list that is cut into contiguous parts is
one round; and where items are dealt out one by one, a round has as many as there are ranks. So the place of each row
follows from how many items each rank had of each round, whatever rule cut them, and a rank tells no more than that.
Where the order of places is not that of the items (a shuffled epoch), rank 0 knows which item is at each place. Where
no rule says which items a rank had (parts of equal cost, batches that a batch sampler draws), each rank tells the index
of each of its items, and rows go by these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lockstep.text import counted, joined

Indices = NDArray[np.int64]


class Counts:
    """The items that one rank had of each round, as runs of equal numbers: two for a loader of any length."""

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        #: Each is a number of items, and in how many rounds in a row it came.
        self.runs = [[items, rounds] for items, rounds in runs]

    @property
    def items(self) -> int:
        """The items of all rounds."""
        return sum(items * rounds for items, rounds in self.runs)

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return sum(rounds for _, rounds in self.runs)

    def by_round(self) -> Indices:
        """Return the items of each round: int64 [rounds]."""
        items, rounds = zip(*self.runs, strict=True) if self.runs else ((), ())
        return np.repeat(np.array(items, dtype=np.int64), np.array(rounds, dtype=np.int64))


@dataclass(frozen=True)
class HandedOut:
    """What one rank was given, and the order that it belongs to."""

    #: The source of the items, in words that are the same on all ranks; and the name of an item.
    source: str
    item: str
    #: The items of this rank by round; see Note [Places].
    counts: Counts
    #: The items of all ranks; None: as many as they were given.
    total: int | None
    #: The reason why not all of them were handed out; empty: they were.
    unfinished: str = ""
    #: The rows of each output: those of the batches; None: each output is of one item.
    batches: Sequence[int] | None = None
    #: The index in the data set of the item at each place, int64 [total], known on rank 0; None: they are in order.
    order: torch.Tensor | None = None
    #: The index of each of this rank's items: int64 [items]; None: they follow from the order.
    indices: torch.Tensor | None = None


@runtime_checkable
class HandsOut(Protocol):
    """A loader, or a list, of which each rank has a part."""

    def _handed_out(self) -> HandedOut:
        """Return what this rank was given, in the last pass over it."""
        ...


def handed_out_by(source: object) -> HandedOut:
    """Return what ``source`` has given to this rank.

    Raises:
        TypeError: it does not divide items among the ranks.
        ValueError: it is a DataLoader that changes their order or drops some.
    """
    if isinstance(source, HandsOut):
        return source._handed_out()
    if not isinstance(source, DataLoader) or not isinstance(source.dataset, HandsOut):
        raise TypeError(
            "World.gather_in_order() takes the loader from lockstep.shard, or the lockstep.split, that the outputs "
            f"are of (or a DataLoader over a split), not a {type(source).__name__}: any other does not tell which "
            "items this rank has"
        )
    settings = source.batch_sampler if type(source.batch_sampler) is BatchSampler else source
    if type(settings.sampler) is not SequentialSampler or settings.batch_size is None or settings.drop_last:
        raise ValueError(
            "World.gather_in_order(): this DataLoader over a lockstep.split shuffles, samples, drops or does not make "
            "batches, so that its outputs are not in the order of the items: give it batch_size= and leave shuffle, "
            "sampler, batch_sampler and drop_last at their defaults"
        )
    given = source.dataset._handed_out()
    items, size = given.counts.items, int(settings.batch_size)
    batches = [size] * (items // size) + [items % size] * bool(items % size)
    return HandedOut(given.source, given.item, given.counts, given.total, given.unfinished, batches, given.order)


def refuse_unfit(told: Sequence[Any]) -> None:
    """Check that what the ranks were given is one whole.

    Args:
        told: by rank, a dict of JSON types: ``source``, ``item``, ``runs``, ``total`` and ``unfinished``.

    Raises:
        ValueError: it is not; the same on all ranks.
    """
    call, item = "World.gather_in_order()", told[0]["item"]

    def compare(name: str, noun: str) -> None:
        if any(each[name] != told[0][name] for each in told):
            listed = "; ".join(f"rank {rank}: {each[name]}" for rank, each in enumerate(told))
            raise ValueError(f"{call}: the ranks' outputs are of {noun}, which have no common order: {listed}")

    compare("source", "different sources")
    for rank, each in enumerate(told):
        if each["unfinished"]:
            raise ValueError(f"{call}: rank {rank}: {each['unfinished']}")
    compare("total", f"different numbers of {item}s")
    total, had = told[0]["total"], [Counts(each["runs"]).items for each in told]
    if total is not None and sum(had) != total:
        by_rank = joined(f"{number:,} on rank {rank}" for rank, number in enumerate(had))
        raise ValueError(
            f"{call}: {told[0]['source']} has {counted(total, item)}, and the ranks were given {sum(had):,} of them "
            f"({by_rank}), so that the outputs of the others would be missing. A loader for predictions has "
            "drop_last=False, and its loop is not left or resumed in mid-epoch"
        )


def places_of(by_rank: Sequence[Counts], order: torch.Tensor | None) -> list[Indices]:
    """Return the place of each row of each rank, int64 [rows]; see Note [Places].

    Args:
        by_rank: what the ranks were given.
        order: the index of the item at each place, int64 [items of all ranks]: rows then go by these indices,
            ascending, and the rows of an item that was given more than once in the order in which it was.
    """
    ordered = None
    if order is not None:
        index = order.numpy()
        ordered = np.empty(len(index), dtype=np.int64)
        ordered[np.argsort(index, kind="stable")] = np.arange(len(index))
    items = np.zeros((max((each.rounds for each in by_rank), default=0)), dtype=np.int64)
    for each in by_rank:
        items[: each.rounds] += each.by_round()
    begins = np.cumsum(items) - items  # the place of the first item of each round that no lower rank has
    places = []
    for each in by_rank:
        mine = each.by_round()
        first = begins[: len(mine)]
        rows = np.repeat(first - (np.cumsum(mine) - mine), mine) + np.arange(mine.sum())
        first += mine  # (a view of ``begins``)
        places.append(rows if ordered is None else ordered[rows])
    return places


def places_by_index(by_rank: Sequence[Indices]) -> list[Indices]:
    """Return the place of each row of each rank, int64 [rows], by the indices of the items: ascending, those of an item
    that was given more than once next to each other, by rank.

    Args:
        by_rank: the indices of each rank's items, int64 [rows].
    """
    ordered = np.argsort(np.concatenate(by_rank), kind="stable")
    places = np.empty(len(ordered), dtype=np.int64)
    places[ordered] = np.arange(len(ordered))
    return np.split(places, np.cumsum([len(each) for each in by_rank])[:-1])
