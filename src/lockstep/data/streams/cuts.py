"""What a rank makes of the samples that it reads of a stream: its share of them, its slices, or all of them."""

from __future__ import annotations

from typing import Any

from lockstep.data.collate import Collate, collated, collated_to_keep
from lockstep.data.contents import fingerprint
from lockstep.data.fetch import PASSED_OVER, Fetched
from lockstep.data.mixing import mix
from lockstep.data.order import share_bounds
from lockstep.data.slicing import Slicing, sizes_in
from lockstep.data.source import Shardable
from lockstep.data.streams.dataset import StreamCut
from lockstep.data.streams.reading import StreamBatch

#: The key that makes mix() give the samples of ranks that read parts other seeds.
_PART = 2**62 + 3


def stream_cut(source: Shardable, *, rank: int, world_size: int, sliced: Slicing | None) -> StreamCut | None:
    """Return what a rank makes of the samples of ``source``; None: they are no stream.

    Args:
        source: the settings.
        rank: the rank.
        world_size: the number of ranks.
        sliced: the slices of each batch; None: each rank has one part of it.
    """
    if source.order != "stream":
        return None
    assert source.batch_size is not None  # only a batch sampler decides it
    start, stop = share_bounds(source.batch_size, rank=rank, world_size=world_size, shares=source.shares)
    if not source.is_read_whole:
        return PartCut(stop - start, rank=rank)
    if sliced is not None:
        return SliceCut(source.batch_size, rank=rank, sliced=sliced)
    return ShareCut(source.batch_size, rank=rank, world_size=world_size, shares=source.shares)


def _begun(read: StreamBatch) -> Fetched:
    """Return a batch without its contents: what the ranks compare, and how to go on after it.

    To be called before the samples are collated, since a ``collate_fn`` may change them.
    """
    if not read.samples:
        return Fetched(None, 0, 0, fingerprint=PASSED_OVER)
    print_ = fingerprint(read.samples) if read.position == 0 else None
    return Fetched(None, 0, len(read.samples), fingerprint=print_, mark=read.mark, warning=read.warning)


class _WholeBatch:
    """Reads the samples of all ranks: random numbers are the same on all of them, and batches end on all at once."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def key_at(self, key: int, position: int) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.data.streams.dataset.StreamCut`."""
        return key

    def after_last(self, sample: Any, collate: Collate) -> Fetched | None:  # noqa: ARG002
        """See :class:`~lockstep.data.streams.dataset.StreamCut`."""
        return None


class ShareCut(_WholeBatch):
    """A rank's contiguous share of each global batch.

    Args:
        samples: of a global batch.
        rank: whose share it is.
        world_size: the number of shares.
        shares: each rank's proportion; None: all are equal.
    """

    def __init__(self, samples: int, *, rank: int, world_size: int, shares: tuple[float, ...] | None) -> None:
        super().__init__(samples)
        self._rank, self._world_size, self._shares = rank, world_size, shares

    def batch(self, read: StreamBatch, collate: Collate, *, seed: int | None) -> Fetched:
        """See :class:`~lockstep.data.streams.dataset.StreamCut`."""
        begun, samples = _begun(read), read.samples
        if not samples:
            return begun
        start, stop = share_bounds(len(samples), rank=self._rank, world_size=self._world_size, shares=self._shares)
        batch = collated(samples[start:stop] or samples[:1], collate, empty=start == stop, seed=seed)
        return begun._replace(batch=batch, samples=stop - start)


class SliceCut(_WholeBatch):
    """A rank's slices of each global batch.

    Args:
        samples: of a global batch.
        rank: whose slices they are.
        sliced: how batches are cut, and who has which slices.
    """

    def __init__(self, samples: int, *, rank: int, sliced: Slicing) -> None:
        super().__init__(samples)
        self._rank, self._sliced = rank, sliced

    def batch(self, read: StreamBatch, collate: Collate, *, seed: int | None) -> Fetched:
        """See :class:`~lockstep.data.streams.dataset.StreamCut`."""
        begun, samples = _begun(read), read.samples
        if not samples:
            return begun
        batches, numbers, count = [], [], 0
        bounds = self._sliced.cut(len(samples))
        for number in range(*self._sliced.runs_at(0)[self._rank]):
            start, stop = bounds[number]
            if start < stop:
                own_seed = None if seed is None else mix(seed, number)
                batches.append(collated_to_keep(samples[start:stop], collate, seed=own_seed))
                numbers.append(number)
                count += stop - start
        return begun._replace(batch=batches, samples=count, numbers=numbers, sizes=sizes_in(bounds))


class PartCut:
    """All that a rank reads of its own part of a stream; see Note [Parts of a stream] in ``parts.py``.

    Args:
        samples: this rank's share of a full global batch.
        rank: whose part it is.
    """

    def __init__(self, samples: int, *, rank: int) -> None:
        self.samples = samples
        self._rank = rank

    def key_at(self, key: int, position: int) -> int:
        """See :class:`~lockstep.data.streams.dataset.StreamCut`.

        Before its first sample a stream may shuffle what it then splits by rank, so the ranks draw alike there.
        """
        return mix(key, self._rank, _PART) if self._rank and position else key

    def batch(self, read: StreamBatch, collate: Collate, *, seed: int | None) -> Fetched:
        """See :class:`~lockstep.data.streams.dataset.StreamCut`.

        How many samples all ranks have is not known here yet.
        """
        begun, samples = _begun(read), read.samples
        if not samples:
            return begun
        return begun._replace(batch=collated_to_keep(samples, collate, seed=seed), samples=len(samples))

    def after_last(self, sample: Any, collate: Collate) -> Fetched | None:
        """See :class:`~lockstep.data.streams.dataset.StreamCut`.

        It is a batch of zero samples, for the steps that only others have samples for.
        """
        return Fetched(collated([sample], collate, empty=True, seed=None), 0, 0)
