"""Read a DataLoader's settings and check them before a sharded loader is built from it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from lockstep.data.contents import contents_of
from lockstep.data.costs import SampleCosts, read_costs
from lockstep.data.order import read_shares, share_bounds
from lockstep.data.seeding import parts_of_sampler
from lockstep.data.split import Split
from lockstep.data.streams.self_splitting import read_stream_option

#: Fact that differs between ranks -> the remedy; "" for all facts about the dataset's contents.
REMEDIES = {
    **dict.fromkeys(("the kind of order", "the batch size", "drop_last", "the seed", "num_workers"), ""),
    **dict.fromkeys(("slices", "shares", "balance", "threads", "who splits the stream"), ""),
    "costs": ": each rank would divide the batches in its own way. Make the costs alike on every rank",
    "": (
        ". The ranks hold different data of the same kind, so that some samples would be trained on twice and others "
        "never. If it was split or shuffled at random, use the same seed on every rank: random_split(…, "
        "generator=torch.Generator().manual_seed(0)), train_test_split(…, random_state=0); lockstep.init() seeds all "
        "ranks' generators alike, unless the script seeds them by rank or draws on one rank alone. If files were "
        "listed, sort them. An attribute that is not part of the data is left out if its name begins with an underscore"
    ),
}

#: The source of an epoch's order: lockstep, shuffled or not; the user's sampler on rank 0; the user's batch sampler
#: there, which draws whole batches; or the stream itself.
Order = Literal["shuffled", "sequential", "sampler", "batches", "stream"]


@dataclass(frozen=True)
class Shardable:
    """A DataLoader that can be sharded, with its settings."""

    loader: DataLoader[Any]
    order: Order
    #: The number of samples of a global batch; None: a batch sampler decides it for each.
    batch_size: int | None
    seed: int
    #: Loaders for which this is equal would all have this seed: see Note [Seeds of loaders] in ``loader_seeds.py``.
    #: None: the user gave the seed.
    counted_by: Hashable = None
    #: Each rank's proportion of each global batch; None: all are equal.
    shares: tuple[float, ...] | None = None
    #: What samples cost, if the parts of a batch are to cost the same.
    costs: SampleCosts | None = None
    #: The one who said that each rank reads a part of the stream; None: each reads all of it, or it is no stream.
    split_by: str | None = None

    def with_stream(self, said: object, *, rank: int, world_size: int) -> Shardable:
        """Return the same with how the ranks read its stream: see Note [Parts of a stream] in ``streams/parts.py``.

        Args:
            said: the user's argument.
            rank: this rank.
            world_size: the number of ranks.

        Raises:
            TypeError, ValueError: it is none of the words, or the dataset is no stream, or is split for other ranks.
        """
        if self.order != "stream":
            if said is None:
                return self
            raise ValueError(
                f"stream={said!r}: the dataset {type(self.loader.dataset).__name__} is not a stream (IterableDataset): "
                "leave it out"
            )
        split_by = read_stream_option(said, self.loader.dataset, rank=rank, world_size=world_size)
        return replace(self, split_by=split_by)

    def with_costs(self, costs: object) -> Shardable:
        """Return the same with the costs that a user gave.

        Raises:
            TypeError, ValueError: they are no costs, or not for this loader.
        """
        is_stream, draws_batches = self.order == "stream", self.order == "batches"
        known = read_costs(costs, self.loader.dataset, is_stream=is_stream, draws_batches=draws_batches)
        return replace(self, costs=known)

    @property
    def sampler(self) -> Any:
        """The sampler that orders the samples, or draws whole batches."""
        return self.loader.batch_sampler if self.order == "batches" else _settings(self.loader).sampler

    @property
    def drop_last(self) -> bool:
        """True if a last batch of fewer samples is dropped."""
        return self.order != "batches" and bool(_settings(self.loader).drop_last)

    @property
    def length(self) -> int | None:
        """The number of samples of an epoch; with a batch sampler, of the dataset. None: it is unknown, as is that of
        a stream in parts: some libraries mean a part by it, and others all."""
        if self.split_by is not None:
            return None
        counted = self.sampler if self.order == "sampler" else self.loader.dataset
        if self.order not in ("stream", "batches"):
            return len(counted)  # type: ignore[arg-type]  # checked by read_source
        try:
            return len(counted)  # type: ignore[arg-type]  # there may be none
        except (TypeError, NotImplementedError):  # (a __len__ that knows none says so by either)
            return None

    @property
    def is_read_whole(self) -> bool:
        """True for a stream that has all samples on every rank."""
        return self.order == "stream" and self.split_by is None

    @property
    def is_cut_by_number(self) -> bool:
        """True if the order and the numbers of samples say which samples a rank has of each batch."""
        return self.order != "batches" and self.costs is None

    def facts(self, *, contents: bool) -> dict[str, Any]:
        """Return the facts that must be the same on all ranks; with ``contents``, also the dataset's contents."""
        settings = {
            "the kind of order": self.order,
            "the length of the dataset": self.length,
            "the batch size": self.batch_size,
            "drop_last": self.drop_last,
            "the seed": self.seed,
            "shares": None if self.shares is None else list(self.shares),
            "costs": None if self.costs is None else self.costs.fact,
            # A stream is split by its workers, so their number decides which samples make a batch.
            "num_workers": self.loader.num_workers if self.order == "stream" else None,
            "who splits the stream": self.split_by,
        }
        # For a stream, the first global batch is compared instead; see Note [Streams] in streams/passes.py.
        return settings | (contents_of(self.loader.dataset) if contents and self.order != "stream" else {})


def read_source(
    loader: object,
    *,
    world_size: int,
    default_seed: int,
    seed: int | None,
    slices: int | None = None,
    shares: object = None,
) -> Shardable:
    """Return ``loader`` with its settings, if it can be sharded.

    Args:
        loader: the user's argument.
        world_size: the number of ranks.
        default_seed: the seed of the world.
        seed: the user's argument.
        slices: the number of slices of each batch, of which a rank may have none; None: batches are not sliced.
        shares: the user's argument: each rank's proportion of each batch; not with ``slices``.

    Raises:
        TypeError: ``loader`` is not a DataLoader, or its dataset has no length.
        ValueError: a setting of it can't be divided among ranks; the message says what to do instead.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"lockstep.shard takes a torch.utils.data.DataLoader, not {type(loader).__name__}"
            + ("; this one is sharded already" if hasattr(loader, "batches_left") else "")
        )
    _refuse_what_cannot_be_cut(loader)
    settings = _settings(loader)
    order = _order(loader)
    batch_size = None if order == "batches" else int(settings.batch_size or 0)
    if batch_size is not None:
        _refuse_small(batch_size, slices=slices, world_size=world_size)
    counted_by = None
    if seed is None:
        given = getattr(settings.sampler, "generator", None) if order == "shuffled" else loader.generator
        given = given if isinstance(given, torch.Generator) else None
        seed = default_seed if given is None else given.initial_seed()
        counted_by = order if order in ("sequential", "stream") else "drawn", given, seed
    elif not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected 0 <= seed < 2**63")
    return Shardable(loader, order, batch_size, seed, counted_by, _read_shares(shares, batch_size, world_size))


def _refuse_small(batch_size: int, *, slices: int | None, world_size: int) -> None:
    if slices is not None and batch_size < slices:
        raise ValueError(
            f"batch_size={batch_size} with slices={slices}: a global batch has fewer samples than slices; use at most "
            f"slices={batch_size}"
        )
    if slices is None and batch_size < world_size:
        raise ValueError(
            f"batch_size={batch_size} is smaller than the world of {world_size} ranks, so some rank would never get "
            "a sample: lockstep.shard takes the batch size of all ranks together; use at least "
            f"batch_size={world_size}, or fewer ranks"
        )


def _settings(loader: DataLoader[Any]) -> DataLoader[Any] | BatchSampler:
    """Return the object with the sampler, the batch size and drop_last: the loader, or a plain batch sampler of it.

    A plain batch sampler, unlike a subclass, cuts its sampler's order into batches as the loader itself would.
    """
    given = loader.batch_sampler
    return given if loader.batch_size is None and type(given) is BatchSampler else loader


def _draws_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a batch sampler of the user's own chooses whole batches."""
    return _settings(loader).batch_size is None and loader.batch_sampler is not None


def _read_shares(given: object, batch_size: int | None, world_size: int) -> tuple[float, ...] | None:
    if given is None:
        return None
    shares = read_shares(given, world_size=world_size)
    for rank in range(world_size if batch_size is not None else 0):
        assert batch_size is not None
        start, stop = share_bounds(batch_size, rank=rank, world_size=world_size, shares=shares)
        if start == stop:
            raise ValueError(
                f"shares={list(shares)} of batch_size={batch_size} leave rank {rank} without a sample in every batch: "
                "give it a larger share, or the loader a larger batch_size"
            )
    return None if len(set(shares)) == 1 else shares


def _refuse_what_cannot_be_cut(loader: DataLoader[Any]) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"{type(loader).__name__} iterates in its own way (it overrides DataLoader.__iter__), which lockstep.shard "
            "would bypass: pass a plain DataLoader over the same dataset"
        )
    if isinstance(loader.dataset, Split):
        raise ValueError(
            "this DataLoader is over a lockstep.split, which is one rank's part already; lockstep.shard would divide "
            "each part again. Shard a DataLoader over all items, or use this one as it is, without lockstep.shard"
        )
    settings = _settings(loader)
    draws_batches = _draws_batches(loader)
    if not draws_batches:
        _refuse_unbatched(settings)
    for sampler in parts_of_sampler(loader.batch_sampler if draws_batches else settings.sampler):
        _refuse_split_by_rank(sampler, draws_batches=draws_batches)
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "this DataLoader has in_order=False: the ranks would hold shares of different global batches; "
            "leave in_order at True"
        )


def _refuse_unbatched(settings: DataLoader[Any] | BatchSampler) -> None:
    if settings.batch_size is None:
        raise ValueError(
            "this DataLoader has batch_size=None (no batching), so there is nothing to divide among the ranks: pass "
            "batch_size= (of all ranks together)"
        )


def _refuse_split_by_rank(sampler: Any, *, draws_batches: bool) -> None:
    replicas = getattr(sampler, "num_replicas", 1)
    if not isinstance(replicas, int) or replicas <= 1:
        return
    if isinstance(sampler, TorchDistributedSampler) and not draws_batches:
        raise ValueError(
            "this DataLoader has a DistributedSampler, which splits the data among the ranks already; lockstep.shard "
            "would split each part again. Drop the sampler (use shuffle=True) and pass the global batch size, or use "
            "the DataLoader as it is, without lockstep.shard"
        )
    raise ValueError(
        f"this DataLoader has a {type(sampler).__name__} with num_replicas={replicas}, which splits the data among the "
        "ranks already; lockstep.shard would split each part again. Make it with num_replicas=1, rank=0, so that it "
        "draws for all ranks together, or use the DataLoader as it is, without lockstep.shard"
    )


def _order(loader: DataLoader[Any]) -> Order:
    if _draws_batches(loader):
        return "batches"
    dataset, sampler = loader.dataset, _settings(loader).sampler
    if isinstance(dataset, IterableDataset):
        return "stream"
    if not hasattr(dataset, "__len__") and isinstance(sampler, (RandomSampler, SequentialSampler)):
        raise TypeError(f"the dataset {type(dataset).__name__} has no length; a map-style dataset needs __len__")
    if type(sampler) is SequentialSampler and _covers(sampler, dataset):
        return "sequential"
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and _covers(sampler, dataset)
        and sampler.num_samples == len(dataset)  # type: ignore[arg-type]  # checked above
    ):
        return "shuffled"
    if not hasattr(sampler, "__len__"):
        raise ValueError(
            f"the sampler {type(sampler).__name__} has no length, so an epoch of it has no end that all ranks could "
            "agree on: give it a __len__ (the number of samples of an epoch)"
        )
    return "sampler"


def _covers(sampler: RandomSampler | SequentialSampler, dataset: Any) -> bool:
    return len(sampler.data_source) == len(dataset)
