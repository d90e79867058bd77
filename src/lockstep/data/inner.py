"""The DataLoader inside a sharded loader: torch's machinery of workers and pinning, asked for slices by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.comm.world import World
from lockstep.data.fetch import Fetched, SliceDataset, SliceKey, StreamDataset, WorkerStart, as_is
from lockstep.data.order import global_batches, slice_bounds
from lockstep.data.source import Source


class Keys(Sampler[SliceKey]):
    """The sampler of the inner DataLoader: the keys of the pass that is about to begin."""

    def __init__(self) -> None:
        self.keys: Iterable[SliceKey] = ()

    def __iter__(self) -> Iterator[SliceKey]:
        return iter(self.keys)


def slice_keys(
    order: torch.Tensor, source: Source, *, start: int, place: tuple[int, int], epoch_key: int
) -> Iterator[SliceKey]:
    """Return one rank's keys from global sample ``start`` on: as many on every rank."""
    rank, world_size = place
    batches = global_batches(order.numel(), batch_size=source.batch_size, drop_last=source.drop_last, start=start)
    for begin, end in batches:
        first, last = slice_bounds(end - begin, rank=rank, world_size=world_size)
        samples = last - first
        position = begin + first if samples else begin
        indices = order[position : position + max(1, samples)].tolist()
        yield SliceKey(indices, position, samples, end - begin, epoch_key)


def inner_loader(
    source: Source, world: World, keys: Keys, generator: torch.Generator, *, pinned: bool, seeded: bool
) -> DataLoader[Fetched]:
    """Return a DataLoader over the same dataset, set up the same way, whose every item is one slice."""
    given = source.loader
    dataset: SliceDataset | StreamDataset
    if source.order == "stream":
        place = (world.rank, world.world_size)
        dataset = StreamDataset(
            given.dataset,  # type: ignore[arg-type]  # an IterableDataset, or the order would be another
            given.collate_fn,
            batch_size=source.batch_size,
            drop_last=source.drop_last,
            place=place,
            seeded=seeded,
        )
        workers = given.num_workers
    else:
        dataset = SliceDataset(given.dataset, given.collate_fn, seeded=seeded)
        workers = max(1, given.num_workers // world.local_world_size) if given.num_workers else 0
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=None if isinstance(dataset, IterableDataset) else keys,
        num_workers=workers,
        collate_fn=as_is,  # type: ignore[arg-type]  # without a batch size it gets one item
        # Without an accelerator there is nothing to pin for, and torch would warn at each pass.
        pin_memory=pinned or (given.pin_memory and torch.accelerator.is_available()),
        timeout=given.timeout,
        worker_init_fn=WorkerStart(given.worker_init_fn, rank=world.rank),
        multiprocessing_context=given.multiprocessing_context,
        generator=generator,
        prefetch_factor=given.prefetch_factor,
        persistent_workers=given.persistent_workers,
    )
