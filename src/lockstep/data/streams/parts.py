"""A pass over a stream of which each rank reads a part of its own.

Note [Parts of a stream]
~~~~~~~~~~~~~~~~~~~~~~~~
webdataset's ``split_by_node``, Hugging Face's ``split_dataset_by_node``, MosaicML's and LitData's datasets give each
rank other samples, so that no rank reads what another trains on. Of each global batch a rank takes as many samples as
its share of a full one has, from its own part. Which samples are in a batch therefore depends on the number of ranks;
that each step is a mean over the samples of its batch does not.

Parts are rarely equal. A rank whose part has come to its end goes on with batches of zero samples, of the right shapes,
while others have some, so that all ranks take the same steps; the pass ends when no rank has any. Global batches are
smaller from there on. With ``drop_last`` it ends with the first rank that has no full share. (A worker process whose
part of the part has come to its end gives a small batch as well, in whatever step its turn is.)

So nobody knows beforehand how many samples a batch has. The ranks tell each other, for a *portion* of batches that each
has read: while the loop is given the batches of one, those of the next are read, and when it is given the last of them,
the numbers of samples of the next are on their way to the other ranks. They are waited for when the loop asks for the
next batch: by then all ranks have averaged their gradients, so they have long arrived. The first portion is one batch,
so that no loop waits for more when it begins, and each has one more than the last, as far as they are small in memory,
and sixteen at most. The message names the loader, the epoch and the number of the batch as well, so that ranks whose
loops are at different batches find out there; and a rank that could not read its part says so, so that all raise the
same error in the same step.

A rank without a single sample has no batch to take shapes from, and is nearly always a mistake (more ranks than files),
so it is named on all ranks. Two ranks whose first batches are the same read the same, and are named, too (unless
samples are objects of which nothing can be read).

A position counts the global batches. At a resume each rank passes over as many of its own, so it must be the same rank
of as many, with as many workers and the same share of a full batch. The states of datasets that have one (Note [States
of streams] in ``reading.py``) are each rank's own, and only a shorter way to the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.comm.exchange import group_device, issue_gather
from lockstep.comm.labels import labelled
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.waiting import wait_for
from lockstep.comm.world import World
from lockstep.data.collate import copied
from lockstep.data.fetch import PASSED_OVER, Fetched
from lockstep.data.order import share_bounds
from lockstep.data.source import Shardable
from lockstep.data.streams.marks import StreamMarks
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.text import which_ranks
from lockstep.trees import dense_parts, leaves

#: What a rank says instead of a number of samples: its part has come to its end; it could not be read.
_ENDED, _FAILED = -1, -2
#: The most batches of a portion, and bytes of tensors that it may have.
_MOST, _BYTES = 16, 4 << 20


class Own(NamedTuple):
    """A batch of a rank's own, if there is one, and what the rank says of it."""

    item: Fetched | None
    samples: int
    #: The bytes of its tensors.
    size: int = 0


class _PortionCounts(NamedTuple):
    """What a rank has told of a portion."""

    #: The most batches that its next portion may have.
    most: int
    #: The number of samples of each batch, or the reason why there is none.
    samples: list[int]


class OwnBatches:
    """The batches of this rank's own part, from the cursor on, and then batches of zero samples.

    Args:
        fetched: what is read, from the beginning of the epoch.
        skip: how many batches were used.
        marks: those of the loader's position.
    """

    def __init__(self, fetched: Iterator[Fetched], *, skip: int, marks: StreamMarks) -> None:
        self._fetched = marks.unused(self._noting_first(fetched), skip)
        #: A batch of zero samples; None: nothing was read.
        self._nothing: Fetched | None = None
        #: The reason why nothing more can be read.
        self.failure: Exception | None = None
        #: The fingerprint of the first batch, used or not; None: there was none.
        self.first: str | None = None

    def next(self) -> Own:
        """Return the next batch, and what to say of it: its number of samples, or why there is none."""
        if self.failure is not None:
            return Own(None, _FAILED)
        try:
            for each in self._fetched:
                if not each.is_end:
                    return Own(each, each.samples, _bytes_of(each.batch))
                self._nothing = each
            nothing = self._nothing
            # (A copy: a script may change what it is given.)
            return Own(None if nothing is None else nothing._replace(batch=copied(nothing.batch)), _ENDED)
        except Exception as error:  # noqa: BLE001  (the other ranks wait: they must get any failure)
            self.failure = error
            return Own(None, _FAILED)

    def _noting_first(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        for each in fetched:
            if self.first is None and not each.is_end:
                self.first = each.fingerprint
            yield each


class PartPass:
    """A pass over parts; see Note [Parts of a stream].

    Args:
        source: the loader's settings.
        world: the ranks.
        place: the numbers of the loader and of the epoch.
        marks: those of the loader's position.
    """

    #: See :class:`~lockstep.data.fetch.Pass`.
    drawn: str | None = None
    order: torch.Tensor | None = None

    def __init__(self, source: Shardable, world: World, *, place: tuple[int, int], marks: StreamMarks) -> None:
        self._world, self._place, self._marks = world, place, marks
        self._by, self._drop_last = source.split_by, source.drop_last
        ranks, size = world.world_size, source.batch_size or 0  # a stream has one
        bounds = [share_bounds(size, rank=rank, world_size=ranks, shares=source.shares) for rank in range(ranks)]
        #: The samples of each rank in a full batch.
        self._full = [stop - start for start, stop in bounds]
        #: The gather that is under way, and its tensors, which must stay until it is done.
        self._told: tuple[Any, torch.Tensor, torch.Tensor]

    def beside(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:
        """**Collective.** Return this rank's batches from ``number`` on, as many as every other rank's.

        Raises:
            LockstepError: a rank has no sample at all, or two ranks the same ones, or one could not read its part; on
                every rank.
            CollectiveMismatch: the ranks' loops are at different batches.
        """
        own = OwnBatches(fetched, skip=number, marks=self._marks)
        portion = [self._begin(own)]
        self._tell(number, portion)
        while True:
            told = self._read(number)
            size = min(len(portion) + 1, *(each.most for each in told))
            following: list[Own] = []
            for place, (item, *_) in enumerate(portion):
                counts = [each.samples[place] for each in told]
                if _FAILED in counts:
                    self._raise_together(own)
                if max(counts) < 0 or (self._drop_last and min(counts) < 0):
                    return
                is_last, number = place == len(portion) - 1, number + 1
                while len(following) < size and (is_last or len(following) <= place):
                    following.append(own.next())
                if is_last:
                    self._tell(number, following)
                assert item is not None  # every rank has had a sample
                sizes = [max(0, count) for count in counts]
                self._marks.note(item)
                yield item._replace(global_samples=sum(sizes), sizes=() if sizes == self._full else sizes)
            portion = following

    def _begin(self, own: OwnBatches) -> Own:
        """Return the first batch, after the ranks have compared the beginnings of their parts."""

        def attempt() -> Own:
            found = own.next()
            if own.failure is not None:
                raise own.failure
            return found

        found, prints = together(OverGroup(self._world), attempt, lambda _: own.first, what="reading the stream")
        without = [rank for rank, each in enumerate(prints) if each is None]
        if without and len(without) < len(prints):
            raise LockstepError(self._words_on_nothing(without))
        # (What is passed over by a state has been compared with what came when the state was saved; nothing is known of
        # what has an empty fingerprint.)
        known = [each for each in prints if each not in (None, PASSED_OVER, "")]
        repeated = next((each for each in known if known.count(each) > 1), None)
        if repeated is not None:
            same = [rank for rank, each in enumerate(prints) if each == repeated]
            raise LockstepError(
                f"{self._whoami()}: the parts of {which_ranks(same)} begin with the same samples, so they would be "
                f"trained on more than once: {self._by} says that the stream splits itself by rank, and it does not. "
                'Split it, or let every rank read all of it, of which it then has its share: stream="whole"'
            )
        return found

    def _words_on_nothing(self, without: list[int]) -> str:
        what = "full batch" if self._drop_last else "sample"
        have = "has" if len(without) == 1 else "have"
        return (
            f"{self._whoami()}: {which_ranks(without)} {have} no {what} of this stream, which {self._by} splits by "
            "rank. Are there fewer files or shards than ranks times workers, or does a shuffle or filter after the "
            "split leave some without any? Write more shards, take fewer workers or ranks, or let every rank read the "
            'whole stream: do not split it, and say stream="whole"'
        )

    def _tell(self, number: int, portion: Sequence[Own]) -> None:
        """**Collective.** Begin to tell all ranks how many samples this one has of the batches from ``number`` on."""
        group = self._world.group
        samples = [each.samples for each in portion]
        most = max(1, min(_MOST, _BYTES // max(1, *(each.size for each in portion))))
        numbers = [*self._place, number, most, *samples, *[_ENDED] * (_MOST - len(samples))]
        mine = torch.tensor(numbers, dtype=torch.int64, device=group_device(group))
        table = mine.new_empty(self._world.world_size, len(mine))
        with labelled("the numbers of samples of a stream's parts"):
            self._told = issue_gather(table, mine, group), table, mine

    def _read(self, number: int) -> list[_PortionCounts]:
        """Return by rank what it has told of the batches from ``number`` on.

        Raises:
            CollectiveMismatch: the ranks' loops are at different batches.
        """
        work, table, _ = self._told
        what = lambda: f"{self._whoami()}, learning how many samples each rank has of batch {number}"  # noqa: E731
        wait_for(work.wait, what, name="learning how many samples each rank has")
        rows = table.tolist()
        if any(row[:3] != [*self._place, number] for row in rows):
            words = ", ".join(
                f"rank {rank}: batch {batch} of epoch {epoch} of sharded loader {loader}"
                for rank, (loader, epoch, batch, *_) in enumerate(rows)
            )
            raise CollectiveMismatch(
                f"{self._whoami()}: the ranks are at different batches of a stream in parts ({words}). "
                "A rank has left its loop before the others, or skipped batches: decide this on all ranks together, "
                "with world.any(stop)"
            )
        return [_PortionCounts(most, samples) for _, _, _, most, *samples in rows]

    def _raise_together(self, own: OwnBatches) -> None:
        def attempt() -> None:
            if own.failure is not None:
                raise own.failure

        together(OverGroup(self._world), attempt, lambda _: None, what="reading the stream")

    def _whoami(self) -> str:
        world = self._world
        return f"rank {world.rank} of {world.world_size}, epoch {self._place[1]}"


def _bytes_of(batch: object) -> int:
    """Return the bytes of a batch's tensors and arrays."""
    found = [*leaves(batch)]
    # (A sparse tensor of coordinates does not say how many it has, other tensors do.)
    parts = [dense_parts(each) if getattr(each, "layout", None) == torch.sparse_coo else [each] for each in found]
    return sum(getattr(part, "nbytes", 0) for each in parts for part in each)
