"""What runs where samples are fetched, in a worker process or the main one: keys in, this rank's batches out."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from lockstep import knobs
from lockstep.data.nested import fingerprint, nothing_of
from lockstep.data.order import mix, slice_bounds
from lockstep.data.seeding import preserved_generators, seed_generators
from lockstep.job.workers import AtWork

Collate = Callable[[list[Any]], Any]

# What mix() tells apart within one epoch, beside the positions of samples (0 and up).
_COLLATE = 2**62
_OPEN_STREAM = 2**62 + 1

_loaders = count()


class SliceKey(NamedTuple):
    """Everything a worker needs to know to fetch one slice. It travels with each request, since a worker that
    persists over epochs holds a copy of the dataset as it was at its start."""

    #: Indices of this rank's samples; if it has none, the index of the global batch's first sample, as a pattern.
    indices: list[int]
    #: The place of the first of them in the epoch's order.
    position: int
    #: How many of them are this rank's.
    samples: int
    #: How many the global batch has.
    global_samples: int
    #: mix(seed, epoch); see Note [Sample seeds].
    epoch_key: int


class Fetched(NamedTuple):
    """One slice, fetched and collated."""

    batch: Any
    samples: int
    global_samples: int
    #: Of a stream's first global batch, to compare between ranks; otherwise None.
    fingerprint: str | None = None


class SliceDataset(Dataset[Fetched]):
    """A map-style dataset of slices, so that collating and seeding happen where the samples are fetched."""

    def __init__(self, dataset: Any, collate: Collate, *, seeded: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seeded = seeded
        # The same batch that default_collate would stack sample by sample, bit for bit, at a fraction of the time.
        self._at_once = type(dataset) is TensorDataset and collate is default_collate
        #: In a worker of a job that lockstep started: told which sample is fetched.
        self.at_work: AtWork | None = None

    def __getitem__(self, key: SliceKey) -> Fetched:
        if self._at_once:
            rows = torch.tensor(key.indices[: key.samples], dtype=torch.int64)
            batch: Any = [tensor[rows] for tensor in self.dataset.tensors]
        else:
            with _own_generators(self._seeded):
                batch = self._fetch(key)
        return Fetched(batch, key.samples, key.global_samples)

    def _fetch(self, key: SliceKey) -> Any:
        seed = mix(key.epoch_key, key.position, _COLLATE) if self._seeded else None
        if self.at_work is not None:
            self.at_work.note(key.indices[0])
        if self._seeded:
            samples = []
            for offset, index in enumerate(key.indices):
                seed_generators(mix(key.epoch_key, key.position + offset))
                samples.append(self._sample(index))
        elif callable(getattr(self.dataset, "__getitems__", None)):
            samples = self.dataset.__getitems__(key.indices)
        else:
            samples = [self._sample(index) for index in key.indices]
        return collated(samples, self._collate, empty=key.samples == 0, seed=seed)

    def _sample(self, index: int) -> Any:
        if self.at_work is not None:
            self.at_work.note(index)
        return self.dataset[index]


class StreamDataset(IterableDataset[Fetched]):
    """This rank's slices of a stream of samples; see Note [Streams]."""

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Collate,
        *,
        batch_size: int,
        drop_last: bool,
        place: tuple[int, int],
        seeded: bool,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank, self._world_size = place
        self._seeded = seeded
        #: mix(seed, epoch), int64 of shape (1,), owned here and shared with the workers: a worker that persists is
        #: told of a new epoch by nothing else.
        self._epoch_key = torch.zeros(1, dtype=torch.int64).share_memory_()
        #: In a worker of a job that lockstep started: told which sample is read.
        self.at_work: AtWork | None = None

    def begin(self, epoch_key: int) -> None:
        """Choose the epoch of the next pass; called in the main process before it begins."""
        self._epoch_key[0] = epoch_key >> 1  # 63 bits fit an int64

    def __iter__(self) -> Iterator[Fetched]:
        worker = get_worker_info()
        key = mix(int(self._epoch_key[0]), worker.id if worker else 0)
        with _own_generators(self._seeded):
            if self._seeded:
                seed_generators(mix(key, _OPEN_STREAM))
            stream = iter(self.dataset)
        position = 0
        while True:
            with _own_generators(self._seeded):
                samples = list(islice(self._seeding(stream, key, position), self._batch_size))
                short = len(samples) < self._batch_size
                if not samples or (short and self._drop_last):
                    return
                item = self._cut(samples, first=position == 0, seed=mix(key, position, _COLLATE))
            yield item
            if short:
                return
            position += len(samples)

    def _seeding(self, stream: Iterator[Any], key: int, position: int) -> Iterator[Any]:
        """The stream, with the generators seeded before each sample."""
        while True:
            if self._seeded:
                seed_generators(mix(key, position))
            if self.at_work is not None:
                self.at_work.note(position)
            try:
                sample = next(stream)
            except StopIteration:
                return
            yield sample
            position += 1

    def _cut(self, samples: list[Any], *, first: bool, seed: int) -> Fetched:
        print_ = fingerprint(samples) if first else None
        start, stop = slice_bounds(len(samples), rank=self._rank, world_size=self._world_size)
        mine = samples[start:stop] or samples[:1]
        batch = collated(mine, self._collate, empty=start == stop, seed=seed if self._seeded else None)
        return Fetched(batch, stop - start, len(samples), print_)


class WorkerStart:
    """A worker_init_fn: the user's own, called with the user's own dataset in ``get_worker_info()``.

    A Ctrl-C at the terminal reaches workers, too. It is not theirs: their rank decides what becomes of it, and may
    need more batches to finish a step.
    """

    def __init__(self, then: Callable[[int], None] | None, *, rank: int) -> None:
        self._then = then
        self._rank = rank
        #: Tells the workers of this loader from those of another one.
        self._loader = next(_loaders)

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, (SliceDataset, StreamDataset)):
            folder = knobs.job_dir()
            if folder is not None:
                info.dataset.at_work = AtWork(folder, rank=self._rank, name=f"{self._loader}-{worker_id}")
            # torch's documentation tells users to split a stream through worker_info.dataset, which is a frozen record.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(worker_id)


def naming_dead_workers(slices: Iterable[Fetched]) -> Iterator[Fetched]:
    """Yield ``slices`` as they come.

    A worker that dies while it hands over a batch is at first no more than a lost connection. torch's handler for
    SIGCHLD says which worker it was and what killed it, a moment later.
    """
    try:
        yield from slices
    except (ConnectionError, EOFError):
        for _ in range(50):
            time.sleep(0.01)  # the handler raises in here
        raise


def as_is(fetched: Fetched) -> Fetched:
    """Return the collate_fn of the inner DataLoader: a slice comes collated."""
    return fetched


def collated(samples: list[Any], collate: Collate, *, empty: bool, seed: int | None) -> Any:
    """Return the samples as a batch; if ``empty``, the batch of no samples of their kind."""

    def once(group: list[Any]) -> Any:
        if seed is not None:
            seed_generators(seed)
        return collate(group)

    if not empty:
        return once(samples)
    return nothing_of(once(samples[:1]), once([samples[0], samples[0]]))


def _own_generators(seeded: bool) -> AbstractContextManager[None]:
    """Leave the main process's generators alone; a worker's serve nothing else."""
    return preserved_generators() if seeded and get_worker_info() is None else nullcontext()
