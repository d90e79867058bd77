"""shard(): a DataLoader whose batch size is that of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch.utils.data import DataLoader

from lockstep import tracebacks
from lockstep.comm.calls import of_all_ranks
from lockstep.comm.init import current_world
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import agreed
from lockstep.data import empty_shares
from lockstep.data.loader import ShardedLoader
from lockstep.data.loader_seeds import seeds_of
from lockstep.data.slicing import SliceOptions, Slices
from lockstep.data.source import REMEDIES, Shardable, read_source
from lockstep.errors import LockstepError


@of_all_ranks("lockstep.shard()")
def shard(
    loader: DataLoader[Any],
    *,
    seed: int | None = None,
    seed_samples: bool = True,
    to_device: bool = True,
    slices: int | Literal["auto"] | Slices | None = None,
    shares: Sequence[float] | None = None,
    costs: Iterable[float] | Callable[[int], float] | Literal["sampler"] | None = None,
    stream: Literal["whole", "parts"] | None = None,
) -> ShardedLoader:
    """**Collective.** Return a loader that gives this rank its share of each batch of ``loader``.

    The DataLoader's ``batch_size`` becomes the *global* batch size: that of all ranks together. Each global batch is
    cut into contiguous shares, sizes differing by at most one. Every sample comes exactly once per epoch, the last
    small batch included (unless ``drop_last``); nothing is padded or repeated. The order is the same for every world
    size and is shuffled anew for each epoch automatically; ``set_epoch`` does nothing. While your loop holds a batch,
    ``world.share`` holds the number of the global batch's samples on this rank, which makes means over unequal shares
    exact. If the last global batch has fewer samples than there are ranks, some ranks get a batch of zero samples (of
    the right dtypes and trailing shapes), so that every rank takes every step.

    The DataLoader itself is left as it was. Its workers are divided among the ranks of a machine (rounded down, at
    least one each if there were any). The workers that read an iterable dataset are divided in this way if it splits
    itself; otherwise all workers belong to the one rank that reads it for the machine: see Note [Streams] in
    ``data/streams/passes.py``.

    Samplers: with ``shuffle=True`` and without shuffling, lockstep makes the order. With any other sampler rank 0 draws
    the order at the beginning of each epoch, with the sampler's generator seeded from (seed, epoch), and all ranks get
    that order; beginning a pass is then **Collective**. So is the first batch of a stream (later ones come from the
    rank that reads it), and every batch of a stream that splits itself.

    Batch samplers: a batch sampler of your own (buckets of lengths, a number of tokens, some of each class) draws the
    *global* batches, of any size, and each is cut into shares. Only rank 0 asks the sampler, for some hundred batches
    at a time, so that now and then asking for a batch is **Collective**: Note [Drawn batches] in ``data/batches.py``.

    Args:
        loader: the DataLoader to share among the ranks.
        seed: the seed of the order and of the samples' seeds, the same on all ranks. None: the initial seed of the
            ``generator=`` that the DataLoader was given, or else the world's seed; for another loader after the first
            of its kind one that is made from this and its number: Note [Seeds of loaders] in ``data/loader_seeds.py``.
        seed_samples: seed the generators of torch, Python and NumPy before each sample, so that random augmentation is
            the same at every world size and after a resume: Note [Sample seeds] in ``data/seeding.py``. Only the
            generators that samples draw from are seeded; a sample that draws for the first time, and those of its
            batch, are fetched twice. A dataset that can fetch a whole batch at once (``__getitems__``) is asked sample
            by sample once it draws. From a stream nothing is fetched twice; with False the generators are seeded only
            when a pass over a stream begins.
        to_device: on a CUDA rank, pin the memory and copy each batch to ``world.device`` while the one before it is in
            use. On a CPU rank batches are handed over as they are.
        slices: cut every global batch into this many slices at any world size; a rank goes through several, one after
            the other, or through none. Loop over :meth:`ShardedLoader.steps`; the results have the same bits on any
            number of ranks: docs/exactness.md. This switches deterministic algorithms on, and sets the number of
            threads to one. For ``"auto"`` and more options see :class:`lockstep.Slices`.
        shares: each rank's proportion of each global batch, one positive number for each:
            ``[2, 1]`` for a rank that is twice as fast as the other. Shares are still contiguous and in order of rank,
            each less than one sample from its exact part, and means are still exact. With slices, pass the proportions
            to them: ``slices=lockstep.Slices(8, shares=[2, 1])``.
        costs: what samples cost (the lengths of texts), so that the parts of a global batch cost the same, instead of
            having the same number of samples. The batch stays what it is and means are exact, but parts are not
            contiguous: Note [Parts of equal cost] in ``data/costs.py``. A number of 0 or more for each sample of the
            dataset, in any unit; a function from an index to that number, which rank 0 calls; or ``"sampler"``: each
            batch of the batch sampler is then a pair of its indices and their costs. With ``shares`` the costs are in
            their proportion; with ``slices`` each slice costs the same, on any number of ranks.
        stream: how an iterable dataset is read. ``"whole"``: all of it, once a machine, and each rank gets its share of
            every global batch. ``"parts"``: the dataset gives each rank a part of its own, of which a rank takes as
            many samples as its share of a batch has; parts may be unequal: Note [Parts of a stream] in
            ``data/streams/parts.py``. None: as the dataset itself says (those of webdataset, Hugging Face, MosaicML
            Streaming, LanceDB and LitData do), otherwise whole. The ranks compare their first batches in either case.

    Raises:
        LockstepError: ``lockstep.init()`` has not been called.
        TypeError: ``loader`` is not a DataLoader, or its dataset has no length; ``costs`` are not numbers.
        ValueError: the batch is smaller than the world; ``shares`` has not one positive number for each rank, or leaves
            one without a sample; ``costs`` has not one number of 0 or more for each sample, or the dataset is a stream;
            the DataLoader has a sampler that splits the data by rank, no batching, or in_order=False; ``stream`` is
            given for another dataset, or with ``slices``, or the dataset was split for other ranks; or the ranks
            differ in batch size, seed, costs, or contents of their datasets: Note [What ranks compare] in
            ``data/contents.py``. On every rank.
        LockstepError: the dataset or the DataLoader failed on another rank while it was inspected.
    """
    world = current_world()
    if world is None:
        raise LockstepError("lockstep.shard: no world yet; call lockstep.init() first")
    seeds = seeds_of(world)

    def read() -> tuple[Shardable, SliceOptions | None]:
        options = SliceOptions.of(slices, world_size=world.world_size)
        if options is not None and shares is not None:
            raise ValueError(
                "lockstep.shard(slices=…, shares=…): with slices, say there how many each rank has: "
                f"slices=lockstep.Slices({options.facts()['slices']!r}, shares={shares!r})"
            )
        count = None if options is None else options.slices
        source = read_source(
            loader,
            world_size=world.world_size,
            default_seed=world.seed,
            seed=seed,
            slices=count,
            shares=shares,
        ).with_costs(costs)
        source = seeds.give(source.with_stream(stream, rank=world.rank, world_size=world.world_size))
        if options is not None:
            options.refuse_unfit(source)
        return source, options

    source, options = agreed(
        OverGroup(world),
        "lockstep.shard",
        read,
        # A single rank has no other to compare with.
        lambda found: found[0].facts(contents=world.world_size > 1) | (found[1].facts() if found[1] else {}),
        remedies=REMEDIES,
    )
    seeds.count(source)
    device = world.device if to_device and world.device.type != "cpu" else None
    return ShardedLoader(source, world, device=device, seeded=seed_samples, options=options)


tracebacks.explainers.append(empty_shares.explain)
