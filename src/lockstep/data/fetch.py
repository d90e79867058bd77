"""Fetch batches in worker processes or the main one: a DataLoader that takes keys and returns this rank's shares."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import (
    Dataset,
    Sampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lockstep.comm.parcels import Parcel
from lockstep.data.batches import GlobalBatch
from lockstep.data.collate import Collate, collated, collated_to_keep
from lockstep.data.costs import Division
from lockstep.data.mixing import mix
from lockstep.data.order import EpochOrder
from lockstep.data.seeding import SampleSeeds, preserved_generators
from lockstep.data.slicing import Slicing
from lockstep.data.streams.reading import StreamMark
from lockstep.job.trace import BatchTimes
from lockstep.job.workers import AtWork

# Keys for mix() within one epoch, distinct from the positions of samples (0 and up).
COLLATE = 2**62


class BatchKey(NamedTuple):
    """All that a worker needs to fetch one batch: a rank's share of a global batch, or a slice of it.

    It is sent with each request, since a worker that persists over epochs holds a copy of the dataset as it was at the
    worker's start.
    """

    #: The indices of this rank's samples; if it has none, the index of the global batch's first sample, as a pattern.
    indices: list[int]
    #: The position of each index in the epoch's order.
    positions: Sequence[int]
    #: The number of this rank's samples.
    samples: int
    #: The number of samples in the global batch.
    global_samples: int
    #: mix(seed, epoch); see Note [Sample seeds].
    epoch_key: int
    #: The number of samples of each rank, if shares do not say it.
    sizes: Sequence[int] = ()

    @property
    def position(self) -> int:
        """The position of the first index."""
        return self.positions[0]


class SlicesKey(NamedTuple):
    """All that a worker needs to fetch a rank's slices of a global batch."""

    #: The keys of the rank's slices that have samples.
    slices: list[BatchKey]
    #: The number of each of these slices.
    numbers: list[int]
    #: The position of the batch's first sample in the epoch's order.
    position: int
    #: The number of samples of this rank, and of the global batch.
    samples: int
    global_samples: int
    #: The number of samples of each slice of the global batch.
    sizes: Sequence[int]


class Fetched(NamedTuple):
    """A rank's share of a global batch, fetched and collated, as one batch or as a list of slices."""

    batch: Any
    samples: int
    global_samples: int
    #: The numbers of the slices, if the batch is a list of slices.
    numbers: Sequence[int] = ()
    #: The number of samples of each slice of the global batch; without slices of each rank, if shares do not say it.
    sizes: Sequence[int] = ()
    #: The indices of the samples of one batch, if nothing else says them; empty for slices and streams.
    indices: Sequence[int] = ()
    #: The fingerprint of the first batch that is read of a stream, to compare between ranks; otherwise None.
    fingerprint: str | None = None
    #: The shares of the machine's other ranks, if this one reads a stream for them, or why they can't be packed.
    parcel: Parcel | str | None = None
    #: How to go on after a batch of a stream, if it has a state; and what the user must be told of it.
    mark: StreamMark | None = None
    warning: str = ""

    @property
    def is_passed_over(self) -> bool:
        """True in the place of a batch of a stream that was used before an interruption, and is not read again."""
        return self.fingerprint == PASSED_OVER

    @property
    def is_end(self) -> bool:
        """True for a batch of zero samples that follows the last one of a rank's part of a stream."""
        return not self.global_samples and not self.is_passed_over


#: The fingerprint of what is passed over.
PASSED_OVER = "passed over"


class Pass(Protocol):
    """A pass over an epoch: over global batches that are known beforehand, or over a stream."""

    @property
    def drawn(self) -> str | None:
        """A digest of what the user's sampler drew, to be found again at a resume; None: there is no such sampler."""
        ...

    @property
    def order(self) -> EpochOrder | None:
        """The order of the epoch's samples; None: it is not known, or there is none."""
        ...

    def beside(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:
        """Return this rank's shares of the batches from ``number`` on, as its loop asks for them. **Collective** for
        some numbers, the same on all ranks: before a rank needs what others must tell it.

        Args:
            fetched: the batches of the inner DataLoader: those, or for a stream all of the epoch.
            number: the first batch that was not used yet.
        """
        ...


class FetchingDataset(Dataset[Fetched]):
    """A map-style dataset of shares, so that collating and seeding happen where the samples are fetched."""

    def __init__(self, dataset: Any, collate: Collate, *, seeded: bool, tells_indices: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._fetches_batches = callable(getattr(dataset, "__getitems__", None))
        self._seeds = SampleSeeds(looks_at_first=not self._fetches_batches) if seeded else None
        self._tells_indices = tells_indices
        # Indexing the tensors gives the same batch as default_collate, bit for bit, in a fraction of the time.
        self._at_once = type(dataset) is TensorDataset and collate is default_collate
        #: Told which sample is fetched; set in the workers of a job that lockstep started.
        self.at_work: AtWork | None = None

    def __getitem__(self, key: BatchKey | SlicesKey) -> Fetched:
        try:
            if isinstance(key, SlicesKey):
                batches = [self._fetched(each, sliced=True) for each in key.slices]
                return Fetched(batches, key.samples, key.global_samples, key.numbers, key.sizes)
            indices = key.indices[: key.samples] if self._tells_indices else ()
            return Fetched(self._fetched(key), key.samples, key.global_samples, sizes=key.sizes, indices=indices)
        except StopIteration as error:  # (this rank's loop would take it for the end of the epoch, and go on alone)
            raise RuntimeError(
                f"{type(self.dataset).__name__}.__getitem__ or the collate_fn raised StopIteration, which would end "
                "the epoch on this rank alone: a next() in it came to the end of its iterator"
            ) from error

    def _fetched(self, key: BatchKey, *, sliced: bool = False) -> Any:
        if self._at_once:
            rows = torch.tensor(key.indices[: key.samples], dtype=torch.int64, device="cpu")
            return [*map(itemgetter(rows), self.dataset.tensors)]
        # In slices a collate_fn that draws (mixup) is seeded whatever the user says: their bits depend on it.
        seeds_collate = self._collate is not default_collate and (self._seeds is not None or sliced)
        with own_generators(self._seeds is not None or seeds_collate):
            return self._fetch(key, seeds_collate=seeds_collate, sliced=sliced)

    def _fetch(self, key: BatchKey, *, seeds_collate: bool, sliced: bool) -> Any:
        seed = mix(key.epoch_key, key.position, COLLATE) if seeds_collate else None
        if self.at_work is not None:
            self.at_work.note(key.indices[0])
        if sliced and key.samples:
            return collated_to_keep(self._given(key), self._collate, seed=seed)
        return collated(self._given(key), self._collate, empty=key.samples == 0, seed=seed)

    def samples(self, key: BatchKey) -> list[Any]:
        """Return the samples of a batch as the dataset gives them, with the random numbers that they have in training,
        and not collated."""
        with own_generators(self._seeds is not None):
            return self._given(key)

    def _given(self, key: BatchKey) -> list[Any]:
        indices = key.indices
        if self._seeds is None:
            return self._samples(indices)
        return self._seeds.fetch(
            key.epoch_key,
            key.positions,
            lambda place: self._sample(indices[place]),
            lambda places: self._samples(indices[places.start : places.stop]),
        )

    def _samples(self, indices: list[int]) -> list[Any]:
        dataset = self.dataset
        if self._fetches_batches:
            at_once = dataset.__getitems__(indices)
            return [*at_once] if isinstance(at_once, Iterator) else at_once
        if self.at_work is None:
            return [dataset[index] for index in indices]
        return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Any:
        if self.at_work is not None:
            self.at_work.note(index)
        return self.dataset[index]


class TimedDataset(FetchingDataset):
    """A :class:`FetchingDataset` for a traced job: a worker records the times at which it makes each batch."""

    times: BatchTimes | None = None

    def __getitem__(self, key: BatchKey | SlicesKey) -> Fetched:
        if self.times is None:
            return super().__getitem__(key)
        begun = time.monotonic_ns()
        fetched = super().__getitem__(key)
        self.times.add(begun, key.position, fetched.samples)
        return fetched


def as_is(fetched: Fetched) -> Fetched:
    """Return ``fetched`` itself: the collate_fn of the inner DataLoader, whose batches are collated already."""
    return fetched


def own_generators(seeded: bool) -> AbstractContextManager[None]:
    """Return a context that preserves the main process's generators; a worker's serve nothing else."""
    return preserved_generators() if seeded and get_worker_info() is None else nullcontext()


class Keys(Sampler[BatchKey | SlicesKey]):
    """The sampler of the inner DataLoader, which holds the keys of the next pass."""

    def __init__(self) -> None:
        self.keys: Iterable[BatchKey | SlicesKey] = ()

    def __iter__(self) -> Iterator[BatchKey | SlicesKey]:
        return iter(self.keys)


def share_keys(batches: Iterable[GlobalBatch], division: Division, *, rank: int, epoch_key: int) -> Iterator[BatchKey]:
    """Return one rank's keys of the global batches; every rank gets the same number."""
    for batch in batches:
        count = len(batch.indices)
        places, sizes = division.among_ranks(count, batch.costs, rank=rank)
        yield _batch_key(batch, places or range(1), samples=len(places), epoch_key=epoch_key, sizes=sizes)


def slices_keys(
    batches: Iterable[GlobalBatch], division: Division, *, rank: int, epoch_key: int, sliced: Slicing
) -> Iterator[SlicesKey]:
    """Return one rank's keys of the sliced global batches; every rank gets the same number."""
    for batch in batches:
        yield slices_key(
            batch, division, rank=rank, runs=sliced.runs_at(batch.number), epoch_key=epoch_key, sliced=sliced
        )


def slices_key(
    batch: GlobalBatch,
    division: Division,
    *,
    rank: int,
    runs: Sequence[tuple[int, int]],
    epoch_key: int,
    sliced: Slicing,
) -> SlicesKey:
    """Return the key of a rank's slices of a global batch; ``runs`` says which each rank has."""
    count = len(batch.indices)
    parts = division.in_slices(sliced.cut(count), batch.costs, runs=runs)
    numbers = [number for number in range(*runs[rank]) if parts[number]]
    slices = [_batch_key(batch, parts[number], samples=len(parts[number]), epoch_key=epoch_key) for number in numbers]
    samples = sum(each.samples for each in slices)
    return SlicesKey(slices, numbers, batch.position, samples, count, [len(part) for part in parts])


def _batch_key(
    batch: GlobalBatch, places: Sequence[int], *, samples: int, epoch_key: int, sizes: Sequence[int] = ()
) -> BatchKey:
    """Return the key of the samples at these places of a global batch."""
    if isinstance(places, range):
        indices = batch.indices[places.start : places.stop].tolist()
        positions: Sequence[int] = range(batch.position + places.start, batch.position + places.stop)
    else:
        indices = batch.indices[torch.tensor(places, dtype=torch.int64, device="cpu")].tolist()
        positions = [batch.position + place for place in places]
    return BatchKey(indices, positions, samples, len(batch.indices), epoch_key, sizes)
