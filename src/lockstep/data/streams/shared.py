"""A plain stream, read once a machine: its leader reads, and hands the other ranks their shares.

Note [Read once a machine]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A stream that every rank reads is read as often as there are ranks. So the ranks of a machine share one reading: the
leader, which is the first of them, opens the stream, by its workers if the DataLoader has some, and cuts each global
batch into the shares of all of them. The shares of the others are packed into memory (Note [Parcels] in
``comm/parcels.py``) where they are collated, and handed over batch by batch (Note [Connected ranks] in
``comm/local_ranks.py``); nothing is copied on the way. What a rank gets is what it would have read: the same samples,
seeds and calls of the collate_fn. Each machine reads a copy of its own, and the machines compare their first batches.

Each pass has connections of its own, which its end closes, whatever ended it: a loop that was left leaves nothing to be
cleared away before the next. The leader hands a batch over when its own loop asks for it, at most ``_AHEAD`` before
another rank has taken its share, so a slow rank holds up the reading and memory does not grow.

A stream that splits itself by rank is not what this is for: the leader's part would be trained on, and the rest be
lost. So in the first pass of a loader each other rank reads one sample of the stream as well, and compares it with the
first that the leader has read; where they differ, the comparison of the first batches fails, as it does where all read.

All ranks read, each for itself, where the ranks can't be connected, and from the batch on that holds what can't be
packed: the others begin the stream anew, and pass over what they had. Their first batch must be that of the leader, or
a dataset that counts its passes by itself would go on with other samples on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lockstep import _torch, callsite, tracebacks
from lockstep.comm.local_ranks import LocalRanks, RankLine, connect
from lockstep.comm.parcels import Handed, Parcel, Unpackable, stacked
from lockstep.comm.together import class_name, class_named
from lockstep.comm.world import World
from lockstep.data.collate import Collate, copied
from lockstep.data.contents import fingerprint
from lockstep.data.fetch import Fetched
from lockstep.data.inner import InnerLoader, loader_like
from lockstep.data.seeding import preserved_generators
from lockstep.data.source import Shardable
from lockstep.data.streams.dataset import StreamCut, StreamDataset
from lockstep.data.streams.reading import StreamBatch, has_state, read_by_counting
from lockstep.errors import LockstepError
from lockstep.trees import map_leaves

#: Batches that the leader hands over before another rank has taken the first of them.
_AHEAD = 2
#: The most characters of a traceback that are handed over.
_LONGEST = 20_000


def shared(
    own: DataLoader[Fetched], world: World, source: Shardable, cut_of: Callable[..., StreamCut | None]
) -> DataLoader[Fetched] | SharedStream:
    """Return what reads a stream once a machine, or ``own`` where there is one rank, or no stream that is read whole.

    Args:
        own: the DataLoader by which a rank reads by itself.
        world: all ranks.
        source: the settings.
        cut_of: what ``rank=`` makes of the samples.
    """
    if world.world_size == 1 or source.order != "stream" or not source.is_read_whole:
        return own
    return SharedStream(own, world, cut_of, drop_last=source.drop_last)


class LeaderCut:
    """This rank's share of a batch, and with it those of other ranks, packed.

    Args:
        own: cuts this rank's.
        others: cut the other ranks'.
    """

    def __init__(self, own: StreamCut, others: Sequence[StreamCut]) -> None:
        self._own, self._others = own, others
        self.samples, self.key_at, self.after_last = own.samples, own.key_at, own.after_last
        #: The reason why the others read by themselves: something could not be packed. Their shares are not made then.
        self._why_not = ""

    def batch(self, read: StreamBatch, collate: Collate, *, seed: int | None) -> Fetched:
        """See :class:`~lockstep.data.streams.dataset.StreamCut`."""
        worker, begins = get_worker_info(), bool(read.samples) and not read.position
        # Of samples that no collate_fn has seen. The first one of worker 0 is the one that the other ranks look at.
        print_ = fingerprint(read.samples) if begins else None
        looked_at = fingerprint(read.samples[:1]) if begins and (worker is None or not worker.id) else None

        def share_of(cut: StreamCut, collate: Collate) -> Fetched:
            share = cut.batch(read, collate, seed=seed)
            return share._replace(fingerprint=print_) if begins else share

        parcel: Parcel | str = self._why_not
        if not parcel:
            packed = _collated_to_be_packed if collate is default_collate else collate
            try:
                parcel = Parcel.of((share_of(cut, packed), looked_at) for cut in self._others)
            except Unpackable as error:
                parcel = self._why_not = (
                    f"its batches have {error}, which can't be handed from process to process: let the collate_fn "
                    "return tensors, arrays, numbers and texts, and it is read once a machine"
                )
        # (At last, since a collate_fn may return each batch in the memory of the one before.)
        return share_of(self._own, collate)._replace(parcel=parcel)


def _collated_to_be_packed(samples: list[Any]) -> Any:
    """Do as ``default_collate``, which in a worker would put each tensor into shared memory of its own."""
    return _torch.default_collate_by(stacked, samples)


class FirstSample(StreamDataset):
    """The fingerprint of the first sample of a stream, or of worker 0's part of it, and no more.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: StreamDataset) -> None:
        vars(self).update(vars(stream), _cut=_OneSample(), _drop_last=False)

    def __iter__(self) -> Iterator[Fetched]:
        worker = get_worker_info()
        if worker is None or not worker.id:
            yield from islice(super().__iter__(), 1)

    def _batches(self, key: int, worker: int) -> Iterator[StreamBatch]:  # noqa: ARG002
        # (Of a dataset with a state a copy, as it would be in another one afterwards.)
        return read_by_counting(self._samples(key), copied(self.dataset) if has_state(self.dataset) else self.dataset)


class _OneSample:
    """A sample as a batch, of which only the fingerprint is wanted."""

    samples = 1

    def key_at(self, key: int, position: int) -> int:  # noqa: ARG002  (as the protocol has it)
        return key

    def batch(self, read: StreamBatch, collate: Collate, *, seed: int | None) -> Fetched:  # noqa: ARG002
        return Fetched(None, 0, 0, fingerprint=fingerprint(read.samples))

    def after_last(self, sample: Any, collate: Collate) -> Fetched | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class Stopped:
    """The leader's message: there comes no batch any more, after so many."""

    #: "end": of the stream; "left": the leader's loop has ended; "failed"; "by all": from here on every rank reads.
    why: str
    batches: int
    #: The name of the class of the error, and what is to be said of it.
    error: str = ""
    text: str = ""

    @classmethod
    def by(cls, error: Exception, batches: int, text: str) -> Stopped:
        """Return the message that an error has ended the reading."""
        return cls("failed", batches, class_name(error), text)


@dataclass(frozen=True)
class Accepted:
    """Another rank's message: it has taken so many batches."""

    batches: int


class SharedStream:
    """The batches of a stream for one rank, as a DataLoader of them; see Note [Read once a machine].

    Args:
        own: the DataLoader by which this rank reads by itself.
        world: all ranks.
        cut_of: what ``rank=`` makes of the samples.
        drop_last: whether a last batch of fewer samples is dropped.
    """

    def __init__(
        self,
        own: DataLoader[Fetched],
        world: World,
        cut_of: Callable[..., StreamCut | None],
        *,
        drop_last: bool,
    ) -> None:
        assert isinstance(own.dataset, StreamDataset)
        self._own, self._world, self._cut_of = own, world, cut_of
        self._drop_last = drop_last
        self.dataset, self.num_workers, self.prefetch_factor = own.dataset, own.num_workers, own.prefetch_factor
        #: False once it is known that each rank has to read by itself.
        self._is_shared = True
        self._has_looked = False
        #: The leader's DataLoader, kept for workers that persist.
        self._reader: InnerLoader | None = None

    def __iter__(self) -> Iterator[Fetched]:
        """**Collective** when it is begun. Go through the stream.

        Raises:
            LockstepError: another rank, which reads, has failed, or its loop has ended.
            PeerLost: it is gone.
            CollectiveTimeout: it is late, or another rank has not taken its share.
        """
        local = connect(self._world, (Handed, Stopped, Accepted), wants=self._is_shared)
        if local.why_not:
            self._read_by_all(local, f"the ranks of this machine can't hand batches to each other: {local.why_not}")
        if not local.lines:
            yield from self._own
            return
        try:
            yield from self._lead(local) if local.leads else self._follow(local, local.lines[0])
        finally:
            local.close()

    def _read_by_all(self, local: LocalRanks, why: str) -> None:
        """Note that each rank of this machine reads the stream from now on, and say it once."""
        self._is_shared, self._reader = False, None
        if local.leads:
            callsite.warn(f"rank {local.rank}: every rank of this machine reads the whole stream, since {why}")

    # What the leader does.

    def _lead(self, local: LocalRanks) -> Iterator[Fetched]:
        number = 0
        taken = dict.fromkeys(local.members[1:], 0)
        ended: Stopped | None = None
        try:
            batches = iter(self._reader_for(local))  # (kept, so that the workers are there when the loop has ended)
            for fetched in batches:
                if ended is None and isinstance(fetched.parcel, str):
                    ended = Stopped("by all", number)
                    _tell(local, ended)
                    self._read_by_all(local, fetched.parcel)
                if ended is None and isinstance(fetched.parcel, Parcel):
                    for share, line in enumerate(local.lines):
                        self._make_room(line, taken, number)
                        line.send(Handed.of(fetched.parcel, share), [fetched.parcel.descriptor])
                number += 1
                yield fetched._replace(parcel=None)
            if ended is None:
                ended = Stopped("end", number)
                _tell(local, ended)
        except GeneratorExit:
            if ended is None:
                _tell(local, self._given_up_at(number))
            raise
        except Exception as error:
            if ended is None:
                text = f"Its traceback:\n{tracebacks.users_text(error)[-_LONGEST:]}"
                _tell(local, Stopped.by(error, number, text))
            raise

    def _given_up_at(self, number: int) -> Stopped:
        """Return what the others are told where this rank's loop has ended before the stream.

        torch raises the death of a worker wherever this rank is, so mostly in the body of the loop: that closes this
        generator, as a ``break`` does.
        """
        died = None if self._reader is None else self._reader.death_of_worker()
        return Stopped("left", number) if died is None else Stopped.by(died, number, str(died))

    def _reader_for(self, local: LocalRanks) -> InnerLoader:
        """Return what reads for all ranks of this machine."""
        if self._reader is None:
            own, *others = (cut for rank in local.members if (cut := self._cut_of(rank=rank)) is not None)
            self._reader = loader_like(self._own, self.dataset.with_cut(LeaderCut(own, others)), persistent=True)
        assert isinstance(self._reader.dataset, StreamDataset)
        self._reader.dataset.go_on_as(self.dataset)
        return self._reader

    def _make_room(self, line: RankLine[Accepted], taken: dict[int, int], number: int) -> None:
        """Wait until a rank has taken its shares but ``_AHEAD``. (One that has left its loop, or is gone, takes none;
        what all ranks do next finds out which it was.)"""
        while (come := line.receive()) is not None:
            taken[line.rank] = come[0].batches
        while line.is_open and number - taken[line.rank] >= _AHEAD:
            what = f"rank {line.rank} has not taken its share of batch {taken[line.rank]} of the stream"
            come = line.wait_unless_closed(what, self._world.timeout)
            if come is not None:
                taken[line.rank] = come[0].batches

    # What the others do.

    def _follow(self, local: LocalRanks, line: RankLine[Handed | Stopped]) -> Iterator[Fetched]:
        seen = None if self._has_looked else self._first_sample()
        number, began = 0, None
        while True:
            what = f"rank {local.leader}, which reads the stream for this machine, has not handed over batch {number}"
            message, descriptors = line.wait(what, self._world.timeout)
            if isinstance(message, Stopped):
                break
            fetched, first = message.taken(descriptors[0])
            began = began if number else fetched.fingerprint
            number += 1
            line.send(Accepted(number))
            if first is not None and not self._has_looked:
                self._has_looked = True
                if seen != first:  # so that the comparison of the first batches fails
                    fetched = fetched._replace(fingerprint=seen)
            yield self._pinned(fetched)
        if message.why == "by all":
            self._read_by_all(local, "")
            yield from self._own_from(message.batches, local, began)
        elif message.why == "end":
            if not number and seen is not None and not self._drop_last:
                yield Fetched(None, 0, 0, fingerprint=seen)  # which the leader lacks; the comparison fails
        else:
            self._raise(local, message)

    def _own_from(self, number: int, local: LocalRanks, began: str | None) -> Iterator[Fetched]:
        """Read by itself, from batch ``number`` on.

        Raises:
            LockstepError: the first batch has another fingerprint than ``began``, that of the leader's.
        """
        for place, fetched in enumerate(self._own):
            if number and not place and fetched.fingerprint != began:
                raise LockstepError(
                    f"rank {local.rank}: every rank reads the stream from batch {number} of this pass on, and the "
                    f"first batch of the pass differs from that on rank {local.leader}, which has read all "
                    "passes so far: the dataset seems to count its passes by itself. Give it a method set_epoch(epoch) "
                    "instead, which is called before each pass"
                )
            if place >= number:
                yield fetched

    def _first_sample(self) -> str | None:
        """Return the fingerprint of the first sample that this rank would read; None: there is none."""
        look = loader_like(self._own, FirstSample(self.dataset), persistent=False)
        with preserved_generators():  # (they are nobody's who reads by the leader)
            return next((each.fingerprint for each in look), None)

    def _pinned(self, fetched: Fetched) -> Fetched:
        if not self._own.pin_memory:
            return fetched
        pin = lambda leaf: leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        return fetched._replace(batch=map_leaves(fetched.batch, pin))

    def _raise(self, local: LocalRanks, message: Stopped) -> None:
        reader = f"rank {local.rank}: rank {local.leader}, which reads the stream for this machine,"
        if message.why == "left":
            raise LockstepError(
                f"{reader} has left its loop in batch {message.batches - 1}, or an error has ended it there, and this "
                "rank asks for another one: let all ranks leave a loop at the same batch (world.any tells them when)"
            )
        raise class_named(message.error)(f"{reader} failed to read batch {message.batches}. {message.text}")


def _tell(local: LocalRanks, message: Stopped) -> None:
    for line in local.lines:
        line.send(message)
