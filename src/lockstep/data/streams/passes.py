"""Passes over streams of samples: datasets that can only be iterated.

Note [Streams]
~~~~~~~~~~~~~~
An iterable dataset can't be indexed. Where it says nothing else, all of it is read, and each rank gets its contiguous
share of each global batch. One rank of each machine reads, and hands the others their shares (Note [Read once a
machine] in ``shared.py``); where it can't, every rank reads the whole stream and keeps its share: exact as well, at the
price of reading everything on each rank. With worker processes torch gives each worker a copy of the dataset, which the
dataset splits by ``get_worker_info()``; the number of workers then decides which samples share a batch. So it is not
divided among the ranks: W workers of the rank that reads take the same batches as W workers in one process.

A stream that splits itself by rank would be split twice, silently. It is read in parts instead: Note [Parts of a
stream] in ``parts.py``. That it does is known from itself or from the user (``self_splitting.py``), and in either
case the ranks compare the first batch that each has read: of a whole stream it must be the same, of parts it must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.comm.exchange import all_gather_records
from lockstep.comm.world import World
from lockstep.data.cursor import Cursor, LoaderState
from lockstep.data.fetch import PASSED_OVER, Fetched, Pass
from lockstep.data.inner import passing_errors_on
from lockstep.data.source import Shardable
from lockstep.data.streams.dataset import StreamDataset
from lockstep.data.streams.marks import StreamMarks, read_marks
from lockstep.data.streams.parts import PartPass
from lockstep.errors import LockstepError


class StreamEpochs:
    """The epochs of a loader over a stream, which is read as it comes.

    Args:
        source: the DataLoader's settings.
        world: the ranks.
        loader: the number of the loader, the same on all ranks.
        inner: the DataLoader that fetches for this rank.
    """

    #: The number of batches of an epoch, which nobody knows.
    length: int | None = None
    count: int | None = None

    def __init__(self, source: Shardable, world: World, *, loader: int, inner: DataLoader[Any]) -> None:
        self._source, self._world, self._loader, self._inner = source, world, loader, inner
        self._marks = StreamMarks(world, in_parts=source.split_by is not None)

    def begin(self, cursor: Cursor, *, seed: int, drawn: str | None) -> Pass:  # noqa: ARG002  (as for other epochs)
        """Return a pass over the cursor's epoch, of which the batches before the cursor are passed over."""
        stream, marks = self._inner.dataset, self._marks
        assert isinstance(stream, StreamDataset)  # inner_loader has made it
        if not cursor.batches:
            marks.by_worker.clear()
        stream.begin(cursor.epoch, seed=seed, marks={**marks.by_worker})
        if self._source.is_read_whole:
            return WholePass(self._world, epoch=cursor.epoch, marks=marks)
        return PartPass(self._source, self._world, place=(self._loader, cursor.epoch), marks=marks)

    def state(self, *, in_epoch: bool) -> dict[str, Any]:
        """Return what is kept of the stream in a :class:`~lockstep.data.cursor.LoaderState`."""
        return {"stream": self._marks.to_json() if in_epoch else None}

    def load(self, saved: LoaderState) -> None:
        """Begin the next pass where a saved position says."""
        marks, rank = read_marks(saved.stream)
        self._marks.load(marks, rank=rank)


class WholePass:
    """A pass over a stream that every rank reads whole; see Note [Streams].

    Args:
        world: the ranks.
        epoch: that of the pass.
        marks: those of the loader's position.
    """

    #: See :class:`~lockstep.data.fetch.Pass`.
    drawn: str | None = None
    order: torch.Tensor | None = None

    def __init__(self, world: World, *, epoch: int, marks: StreamMarks) -> None:
        self._world, self._epoch, self._marks = world, epoch, marks

    def beside(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:
        """Yield a stream without its first ``number`` batches, after the ranks have compared its first global batch.

        Raises:
            LockstepError: the ranks read different streams; on every rank.
        """
        first = next(fetched, None)
        # (A rank whose stream is empty compares as well: the others wait for it.)
        with passing_errors_on(fetched):
            self._compare_first(None if first is None else first.fingerprint)
        if first is None:
            return
        fetched = chain([first], fetched)
        del first  # (A batch lives no longer than the loop holds it.)
        for item in self._marks.unused(fetched, number):
            self._marks.note(item)
            yield item

    def _compare_first(self, fingerprint: str | None) -> None:
        prints = all_gather_records(fingerprint, self._world.group)
        # (What is passed over by a state has been compared with what came when the state was saved.)
        if len({each for each in prints if each != PASSED_OVER}) > 1:
            read_once = (
                ". Standard input is rank 0's alone, and a pipe or a connection can be read only once: save what it "
                "gives to a file, and read that"
            )
            raise LockstepError(
                f"rank {self._world.rank}: the ranks read different streams: the first global batch of epoch "
                f"{self._epoch} is not the same everywhere (fingerprints by rank, None for an empty stream: "
                f"{prints}). If the dataset gives each rank a part of its own, say so: lockstep.shard(loader, "
                'stream="parts"). If every rank is to read all of it and keep its share of each batch, let nothing in '
                f"it depend on the rank{read_once if None in prints else ''}"
            )
