"""A stream as a rank's DataLoader reads it: what the rank makes of its samples is an object of its own."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.utils.data import (
    IterableDataset,
    default_collate,
    get_worker_info,
)

from lockstep.data.collate import Collate, copied
from lockstep.data.fetch import COLLATE, Fetched, own_generators
from lockstep.data.mixing import mix
from lockstep.data.seeding import OwnNumbers
from lockstep.data.streams.reading import Samples, StatefulReading, StreamBatch, StreamMark, has_state, read_by_counting
from lockstep.job.trace import BatchTimes
from lockstep.job.workers import AtWork


class StreamCut(Protocol):
    """What a rank makes of the samples that it reads of a stream; see Note [Streams] in ``streams/passes.py``."""

    @property
    def samples(self) -> int:
        """The number of samples that are read for a batch."""
        ...

    def key_at(self, key: int, position: int) -> int:
        """Return what the random numbers at a position are seeded from, besides the position.

        Args:
            key: that of the epoch and the worker, the same on all ranks.
            position: that of a sample among those that are read here.
        """
        ...

    def batch(self, read: StreamBatch, collate: Collate, *, seed: int | None) -> Fetched:
        """Return what this rank has of a batch, collated, and how to go on after it.

        Args:
            read: what was read for it.
            collate: the DataLoader's.
            seed: what ``collate`` draws from; None: it does not.
        """
        ...

    def after_last(self, sample: Any, collate: Collate) -> Fetched | None:
        """Return what follows the last batch, if anything does.

        Args:
            sample: one of those that were read.
            collate: the DataLoader's.
        """
        ...


class StreamDataset(IterableDataset[Fetched]):
    """What this rank has of a stream of samples; see Note [Streams] in ``streams/passes.py``."""

    def __init__(
        self, dataset: Iterable[Any], collate: Collate, *, cut: StreamCut, drop_last: bool, seeded: bool
    ) -> None:
        self.dataset = dataset
        self._collate, self._cut = collate, cut
        self._drop_last = drop_last
        self._seeded = seeded
        #: mix(seed, epoch), the number of the pass, and the epoch: int64 of shape (3,), shared with the workers.
        #: Persistent workers learn of a new pass only from it.
        self._pass = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()
        #: The mark at which each worker goes on, and the pass in which it does.
        self._marks: Mapping[int, StreamMark] = {}
        self._marks_are_of = 0
        #: Told which sample is read; set in the workers of a job that lockstep started.
        self.at_work: AtWork | None = None

    def begin(self, epoch: int, *, seed: int, marks: Mapping[int, StreamMark]) -> None:
        """Choose the epoch of the next pass; called in the main process before the pass begins.

        A ``set_epoch`` of the dataset is called first.

        Args:
            epoch: the epoch.
            seed: that of the loader.
            marks: by worker, where it goes on.
        """
        self._tell_epoch(epoch)
        self._marks_are_of += 1
        self._marks = marks
        epoch_key = mix(seed, epoch) >> 1  # 63 bits fit an int64
        self._pass[0], self._pass[1], self._pass[2] = epoch_key, self._marks_are_of, epoch

    def _tell_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _is_of_earlier_pass(self) -> bool:
        """True in a worker that persists: it has the dataset and the marks of the pass for which it was started."""
        return int(self._pass[1]) != self._marks_are_of

    def __iter__(self) -> Iterator[Fetched]:
        if self._is_of_earlier_pass:
            self._tell_epoch(int(self._pass[2]))
        worker, cut = get_worker_info(), self._cut
        number = worker.id if worker else 0
        key = mix(int(self._pass[0]), number)
        batches, numbers = self._batches(key, number), OwnNumbers()
        kept: list[Any] = []
        while True:
            with own_generators(True):
                with nullcontext() if self._seeded else numbers.drawing():
                    read = next(batches, None)
                if read is None or (read.samples and self._drop_last and len(read.samples) < cut.samples):
                    break
                kept = kept or [*map(copied, read.samples[:1])]  # (before it is collated)
                item = cut.batch(read, self._collate, seed=self._seed_of_collate(key, read.position))
            yield item
        if kept and not self._drop_last:
            with own_generators(True):
                end = cut.after_last(kept[0], self._collate)
            if end is not None:
                yield end

    def _seed_of_collate(self, key: int, position: int) -> int | None:
        """Return what the collate_fn of a batch draws from, whose first sample has this position; None: it does not."""
        if self._collate is default_collate:
            return None
        return mix(self._cut.key_at(key, position), position, COLLATE)

    def with_cut(self, cut: StreamCut) -> StreamDataset:
        """Return the same stream, of which something else is made; :meth:`begin` is called on this one for both."""
        other = copy.copy(self)
        other._cut = cut
        return other

    def go_on_as(self, begun: StreamDataset) -> None:
        """Go on in the next pass where that one does, of which this is the same stream."""
        self._marks, self._marks_are_of = begun._marks, begun._marks_are_of

    def _samples(self, key: int) -> Samples:
        return Samples(self._cut, key=key, epoch_key=int(self._pass[0]), seeded=self._seeded, at_work=self.at_work)

    def _batches(self, key: int, worker: int) -> Iterator[StreamBatch]:
        samples = self._samples(key)
        if not has_state(self.dataset):
            return read_by_counting(samples, self.dataset)
        mark = None if self._is_of_earlier_pass else self._marks.get(worker)
        return StatefulReading(samples, self.dataset, worker=worker, mark=mark).batches()


class TimedStream(StreamDataset):
    """A :class:`StreamDataset` for a traced job; see :class:`TimedDataset`."""

    times: BatchTimes | None = None

    def __iter__(self) -> Iterator[Fetched]:
        slices, position = super().__iter__(), 0
        while True:
            begun = time.monotonic_ns()
            try:
                fetched = next(slices)
            except StopIteration:
                return
            if self.times is not None and fetched.global_samples:
                self.times.add(begun, position, fetched.samples)
            position += fetched.global_samples
            yield fetched
