"""The DataLoader within a sharded one: it fetches for this rank, with the settings of the user's."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    get_worker_info,
)

from lockstep import _torch, accelerator, knobs
from lockstep.comm.world import World
from lockstep.data.dead_workers import death_among, naming_dead_workers
from lockstep.data.fetch import Fetched, FetchingDataset, Keys, TimedDataset, as_is
from lockstep.data.source import Shardable
from lockstep.data.streams.dataset import StreamCut, StreamDataset, TimedStream
from lockstep.job import stop
from lockstep.job.trace import BatchTimes
from lockstep.job.workers import AtWork

_loaders = count()


class WorkerStart:
    """A worker_init_fn: the user's own, called with the user's own dataset in ``get_worker_info()``.

    A Ctrl-C at the terminal reaches workers too, and they ignore it: their rank decides how to handle it, and may need
    more batches to finish a step.
    """

    def __init__(self, then: Callable[[int], None] | None, *, rank: int) -> None:
        self._then = then
        self._rank = rank
        #: The loader's number in this process, which distinguishes its workers from those of other loaders.
        self._loader = next(_loaders)

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, (FetchingDataset, StreamDataset)):
            folder = knobs.job_dir()
            if folder is not None:
                name = f"{self._loader}-{worker_id}"
                info.dataset.at_work = AtWork(folder, rank=self._rank, name=name)
                if isinstance(info.dataset, (TimedDataset, TimedStream)):
                    info.dataset.times = BatchTimes(folder, rank=self._rank, name=name)
            # torch's documentation tells users to split a stream through worker_info.dataset, which is a frozen record.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(worker_id)


class InnerLoader(DataLoader[Fetched]):
    """A loader whose workers leave the handling of Ctrl-C, or of the terminal's end, to their rank, and are named if
    they die."""

    #: The pass begun last, while it lasts, if workers read for it.
    _read_by_workers: Callable[[], object] = staticmethod(lambda: None)

    def __iter__(self) -> Any:
        return self._by_workers() if self.num_workers else self._begun()

    def _by_workers(self) -> Iterator[Fetched]:
        # (A generator: workers are started when a batch is asked for. Before, it may not be known which comes first.)
        batches = self._begun()
        self._read_by_workers = weakref.ref(batches)
        yield from naming_dead_workers(batches)

    def _begun(self) -> Any:
        with stop.spared():
            return super().__iter__()

    def death_of_worker(self) -> RuntimeError | None:
        """Return the error, in torch's words, of a worker that has died in the pass under way; None: none has."""
        return death_among(_torch.workers_of(self._read_by_workers()))


def inner_loader(
    source: Shardable,
    world: World,
    keys: Keys,
    generator: torch.Generator,
    *,
    pinned: bool,
    seeded: bool,
    cut: StreamCut | None,
) -> InnerLoader:
    """Return a DataLoader over the same dataset, with the same settings, whose items are this rank's of each batch.

    Args:
        source: the settings.
        world: the ranks.
        keys: tells which samples to fetch, unless the dataset is a stream.
        generator: for the workers' base seed.
        pinned: whether batches go to page-locked memory.
        seeded: whether samples are.
        cut: cuts the samples of a stream into shares; None: the dataset is not a stream.
    """
    given, traced = source.loader, knobs.trace() is not None
    dataset: FetchingDataset | StreamDataset
    if cut is not None:
        dataset = (TimedStream if traced else StreamDataset)(
            given.dataset,  # type: ignore[arg-type]  # an IterableDataset, or there would be no cut
            given.collate_fn,
            cut=cut,
            drop_last=source.drop_last,
            seeded=seeded,
        )
    else:
        dataset = (TimedDataset if traced else FetchingDataset)(
            given.dataset, given.collate_fn, seeded=seeded, tells_indices=not source.is_cut_by_number
        )
    workers = given.num_workers
    if not source.is_read_whole:  # (where each rank reads all of a stream, it needs the workers of one process)
        workers = max(1, workers // world.local_world_size) if workers else 0
    return InnerLoader(
        dataset,
        batch_size=None,
        sampler=None if isinstance(dataset, IterableDataset) else keys,
        num_workers=workers,
        collate_fn=as_is,  # type: ignore[arg-type]  # without a batch size it gets one item
        # Without an accelerator pinning is pointless, and torch would warn at each pass.
        pin_memory=pinned or (given.pin_memory and accelerator.kind() is not None),
        timeout=given.timeout,
        worker_init_fn=WorkerStart(given.worker_init_fn, rank=world.rank),
        multiprocessing_context=given.multiprocessing_context,
        generator=generator,
        prefetch_factor=given.prefetch_factor,
        persistent_workers=given.persistent_workers,
    )


def loader_like(loader: DataLoader[Fetched], dataset: StreamDataset, *, persistent: bool) -> InnerLoader:
    """Return an inner DataLoader over another stream, with the settings of ``loader``.

    Args:
        loader: from :func:`inner_loader`.
        dataset: the stream.
        persistent: whether its workers may live on after a pass, if those of ``loader`` do.
    """
    return InnerLoader(
        dataset,
        batch_size=None,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers and persistent,
    )


@contextmanager
def passing_errors_on(batches: Iterator[Fetched]) -> Iterator[None]:
    """A context whose errors are raised in ``batches`` as well, if that is a generator.

    While a rank is busy with a batch, torch may raise that one of its workers has died. If the rank reads for others,
    they are to hear of that, and not that it has left its loop, as a generator that is only closed tells them.
    """
    try:
        yield
    except Exception as error:
        if isinstance(batches, Generator):
            batches.throw(error)
        raise
