"""This rank's share of every batch of a DataLoader whose batch size is that of all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from lockstep import callsite
from lockstep.comm.calls import of_all_ranks, refuse_apart
from lockstep.comm.in_order.places import HandedOut
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import agreed
from lockstep.comm.world import World
from lockstep.data.batches import EpochBatches, GlobalBatch
from lockstep.data.collate import size_unlike
from lockstep.data.costs import ByCost, ByNumber, Division
from lockstep.data.cursor import Cursor, LoaderState, PositionNow
from lockstep.data.device import on_device
from lockstep.data.epochs import Epochs
from lockstep.data.fetch import Fetched, FetchingDataset, Keys, Pass, share_keys, slices_key, slices_keys
from lockstep.data.inner import inner_loader
from lockstep.data.last_pass import LastPass
from lockstep.data.loop_hooks import LoopHooks
from lockstep.data.mixing import mix
from lockstep.data.order import batch_count, share_bounds
from lockstep.data.pass_notes import PassNotes
from lockstep.data.sampler import OrderedHere
from lockstep.data.seeding import preserved_generators
from lockstep.data.slicing import SliceOptions, sizes_in
from lockstep.data.source import Shardable
from lockstep.data.steps import Batches, Step, StepKey, Steps
from lockstep.data.streams.cuts import stream_cut
from lockstep.data.streams.marks import read_marks
from lockstep.data.streams.passes import StreamEpochs
from lockstep.data.streams.shared import shared
from lockstep.errors import LockstepError
from lockstep.job import flight, notes
from lockstep.job.page import Phase
from lockstep.step import streams
from lockstep.step.share import BatchShare
from lockstep.step.slicing import Cut
from lockstep.text import counted
from lockstep.trees import to_device

_log = logging.getLogger(__name__)
_DATA = int(Phase.DATA)


_AS_GIVEN = "lockstep.shard has taken it from the DataLoader that it was given, which has it still"
#: Attribute of torch's DataLoader that a sharded one lacks -> the reason, or the replacement.
_LOADERS = {
    "batch_sampler": "it cuts each global batch for this rank itself. The order is .sampler's, .batch_size is that of "
    "all ranks together, and loader.epoch and loader.batches_left say where it stands",
    "generator": "the order comes from .seed and .epoch alone",
    "pin_memory": "lockstep.shard(loader, to_device=True), the default, pins and copies to world.device by itself",
    **dict.fromkeys(
        ("worker_init_fn", "persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"), _AS_GIVEN
    ),
}


class ShardedLoader(LoopHooks):
    """This rank's share of a DataLoader's batches. Made by :func:`shard`; iterates, counts and resumes.

    Each ``iter()`` is a pass over the next epoch. Leaving the loop early ends the pass, and the next one is over
    the next epoch; a state saved *before* leaving the loop continues inside the epoch.
    """

    def __init__(
        self,
        source: Shardable,
        world: World,
        *,
        device: torch.device | None,
        seeded: bool,
        options: SliceOptions | None = None,
    ) -> None:
        super().__init__()
        self._options = options
        self._slicing = None if options is None else options.slicing(source)
        self._seeded = seeded
        self._has_told_of_epochs = False
        self._source = source
        self._world = world
        self._number = world._in_hand.number_loader()
        self._notes = PassNotes(self._number, tells=world.is_main)
        self._device = device
        #: The seed of the order and of the samples.
        self.seed = source.seed
        self._cursor = Cursor()
        #: True from load_state_dict to the next pass: that pass continues the cursor's epoch.
        self._resuming = False
        #: True if the pass of the cursor has nothing left to give: it has come to its end, its loop was left, or it was
        #: loaded so.
        self._is_over = False
        #: Digest of the order that the next pass must have if the user's sampler is to continue an epoch.
        self._drawn: str | None = None
        #: The pass under way; a newer one supersedes it.
        self._pass: object | None = None
        self._keys = Keys()
        #: The pass over the epoch under way, and True if its batches must be requested anew.
        self._now: Pass | None = None
        self._is_recut = False
        #: The samples of that epoch's order; 0: this rank has not made it.
        self._length = 0
        self._last_pass = LastPass(by_index=not source.is_cut_by_number)
        by = ByNumber if source.costs is None else ByCost
        self._division: Division = by(world.world_size, source.shares)
        if options is not None:
            options.switch_on()
        # The workers' base seed is drawn from here and not from the global generator, which a resumed run would then
        # find in another state.
        self._generator = torch.Generator()
        cut_of = partial(stream_cut, source, world_size=world.world_size, sliced=self._slicing)
        inner = inner_loader(
            source,
            world,
            self._keys,
            self._generator,
            pinned=device is not None,
            seeded=seeded,
            cut=cut_of(rank=world.rank),
        )
        self._inner = shared(inner, world, source, cut_of)
        make = StreamEpochs if source.order == "stream" else Epochs
        self._epochs = make(source, world, loader=self._number, inner=inner)
        #: True if a batch may have fewer samples than this rank's share: torch's own collate_fn drops none.
        self._may_drop = source.loader.collate_fn is not default_collate
        self._say_who_is_left_out()

    # What a DataLoader has.

    @property
    def dataset(self) -> Any:
        """The DataLoader's dataset."""
        return self._source.loader.dataset

    @property
    def sampler(self) -> Any:
        """The DataLoader's sampler, or its own batch sampler; lockstep orders the samples itself if it is torch's
        random or sequential one.

        If it has no ``set_epoch``, one is added that only warns.
        """
        sampler = self._source.sampler
        return sampler if hasattr(sampler, "set_epoch") else OrderedHere(sampler, self.set_epoch)

    @property
    def batch_sampler(self) -> Any:
        """The DataLoader's own batch sampler, which rank 0 asks for the global batches; the attribute exists only if
        there is one.

        If it has no ``set_epoch``, one is added that only warns.
        """
        if self._source.order != "batches":
            raise AttributeError("batch_sampler")  # __getattr__ says why
        return self.sampler

    @property
    def collate_fn(self) -> Any:
        """The DataLoader's collate_fn."""
        return self._source.loader.collate_fn

    @property
    def batch_size(self) -> int | None:
        """The number of samples of a global batch, of all ranks together. None: a batch sampler decides it for each
        batch."""
        return self._source.batch_size

    @property
    def drop_last(self) -> bool:
        """True if a last global batch of fewer samples is dropped."""
        return self._source.drop_last

    @property
    def num_workers(self) -> int:
        """The number of this rank's worker processes."""
        return self._inner.num_workers

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, and warn once that it does nothing: each pass moves to the next epoch by itself, also after a
        resume.

        The method exists because every script with a DistributedSampler calls it.
        """
        if not self._has_told_of_epochs:
            self._has_told_of_epochs = True
            callsite.warn(
                f"set_epoch({epoch}) does nothing here: a loader from lockstep.shard shuffles again in each pass "
                f"(this is epoch {self.epoch}). Remove the call"
            )

    def __getattr__(self, name: str) -> Any:
        # (Called only for missing attributes: torch's loader has more, which mean nothing here.)
        hint = f": {_LOADERS[name]}" if name in _LOADERS else ""
        raise AttributeError(f"a loader from lockstep.shard has no {name!r}{hint}", name=name, obj=self)

    def __len__(self) -> int:
        """Return the number of batches of a full epoch, the same on all ranks; an estimate if a stream has a length,
        and with a batch sampler what that of rank 0 says."""
        return self._count_batches(start=0)

    def _count_batches(self, *, start: int) -> int:
        """Return the number of batches from sample ``start`` to the end of an epoch."""
        if self.batch_size is None:
            length = self._epochs.length
            if length is None:
                raise TypeError(f"the batch sampler {type(self._source.sampler).__name__} has no length")
            return length
        length = self._source.length
        if length is None:
            raise TypeError(f"a stream of {type(self.dataset).__name__} has no length")
        return batch_count(length, batch_size=self.batch_size, drop_last=self.drop_last, start=start)

    # Where it stands.

    @property
    def epoch(self) -> int:
        """The epoch under way or, between passes, the one that comes next; from 0."""
        return self._cursor.epoch

    @property
    def in_epoch(self) -> bool:
        """True if a pass is under way, or was when the loaded state was saved."""
        return self._cursor.in_epoch

    @property
    def batches_left(self) -> int:
        """The number of batches left in the pass under way, or in the next one; with a batch sampler, the number that
        its ``len()`` implies until all batches are drawn."""
        if self._is_over:
            return 0
        if self.batch_size is not None:
            return self._count_batches(start=self._cursor.samples)
        drawn = self._epochs.count if self._cursor.in_epoch else None
        return max(0, (self._count_batches(start=0) if drawn is None else drawn) - self._cursor.batches)

    @property
    def ranks_left_out(self) -> int:
        """The number of ranks with a batch of zero samples at the end of each epoch; 0 if that is not known."""
        if self._slicing is not None or self.batch_size is None:  # a rank may have no slices in any batch
            return 0
        last = (self._source.length or 0) % self.batch_size
        if not last or self.drop_last:
            return 0
        ranks, shares = self._world.world_size, self._source.shares
        cuts = [share_bounds(last, rank=rank, world_size=ranks, shares=shares) for rank in range(ranks)]
        return sum(start == stop for start, stop in cuts)

    @property
    def slices(self) -> int | None:
        """The number of slices of each global batch; None if each rank has one part of it."""
        return None if self._slicing is None else self._slicing.slices

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position, in JSON types; the same on every rank, and valid for any world size.

        Inside an epoch of a stream that splits itself by rank, the position is valid for the same number of ranks and
        the same shares only; and if the dataset has a ``state_dict``, each rank's position holds its own: Note [States
        of streams] in ``data/streams/reading.py``.

        The batch in hand counts as done, batches fetched ahead do not. Between passes the position is the beginning of
        the next epoch.
        """
        return self._state().to_json()

    @of_all_ranks("ShardedLoader.load_state_dict()")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """**Collective.** Resume from a saved state: the next pass continues its epoch after its last batch.

        The loader takes over the state's seed. ``len()`` stays that of a full epoch; :attr:`batches_left` counts what
        remains of this one. On an error this loader stays as it was.

        Raises:
            CheckpointMismatch: the state is of another dataset length or kind of order, or inside an epoch of a stream
                that was read otherwise, or is not a loader's state.
            ValueError: the ranks loaded different states.
        """

        def check() -> LoaderState:
            saved = LoaderState.from_json(state)
            saved.refuse_unless_continued_by(self._state())
            read_marks(saved.stream)
            return saved

        saved = agreed(OverGroup(self._world), "ShardedLoader.load_state_dict", check, LoaderState.common)
        self._take_slices(saved)
        self.seed = saved.seed
        self._cursor = saved.cursor
        self._resuming = saved.cursor.in_epoch
        self._is_over = self._resuming and bool(saved.over)
        self._drawn, self._now = saved.drawn, None
        self._epochs.load(saved)
        self._pass = None

    def _state(self) -> LoaderState:
        drawn = self._drawn if self._now is None else self._now.drawn
        return self._state_at(self._cursor, drawn, self.slices, is_over=self._is_over)

    def _state_at(self, cursor: Cursor, drawn: str | None, slices: int | None, *, is_over: bool) -> LoaderState:
        return LoaderState(
            cursor=cursor,
            seed=self.seed,
            order=self._source.order,
            length=self._source.length,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers if self._source.order == "stream" else None,
            parts=None if self._source.split_by is None else self._world.world_size,
            shares=None if self._source.split_by is None else [*(self._source.shares or (1,) * self._world.world_size)],
            drawn=drawn if cursor.in_epoch else None,
            slices=slices,
            threads=None if self._options is None else self._options.threads,
            over=is_over or None,
            costs=None if self._slicing is None or self._source.costs is None else self._source.costs.fact,
            **self._epochs.state(in_epoch=cursor.in_epoch and not is_over),
        )

    def _position_now(self) -> PositionNow:
        """Return the position, from which the state can be made later. Costs a microsecond where lockstep orders."""
        cursor = self._cursor
        if self._source.order not in ("sequential", "shuffled"):  # others have a state of their own
            return PositionNow(cursor, self._state().to_json)
        slices, over = None if self._slicing is None else self._slicing.slices, self._is_over
        return PositionNow(cursor, lambda: self._state_at(cursor, None, slices, is_over=over).to_json())

    def _settings(self, *, batch: int) -> dict[str, Any]:
        """Return the settings that decide the samples of a global batch, and of each rank's part, in JSON's types."""
        source, slicing = self._source, self._slicing
        return {
            "order": source.order,
            "length": source.length,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
            "shares": None if source.shares is None else list(source.shares),
            "costs": None if source.costs is None else source.costs.fact,
            "slices": self.slices,
            "runs": None if slicing is None or slicing.balances else [list(each) for each in slicing.runs_at(batch)],
            "dataset": type(self.dataset).__name__,
            "drawn_by": type(source.sampler).__name__ if source.order in ("sampler", "batches") else None,
        }

    def _take_slices(self, saved: LoaderState) -> None:
        """Continue with the run's number of slices if lockstep chooses it; otherwise warn if it differs."""
        slicing, options = self._slicing, self._options
        if slicing is not None and options is not None and options.chooses and saved.slices is not None:
            slicing.cut_into(saved.slices)
        other = saved.other_bits_than(self._state())
        if other and self._world.is_main:
            callsite.warn(f"from here on the bits differ from those of an uninterrupted run: {other}")

    # A pass.

    def __repr__(self) -> str:
        batches = f"batch_size={self.batch_size}"
        if self.batch_size is None:
            batches = f"in batches of {type(self._source.sampler).__name__}"
        return f"<sharded loader of {type(self.dataset).__name__}, {batches}>"

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over the next epoch or the rest of a loaded one; :func:`shard` says when all ranks must.

        Raises:
            LockstepError: the batches are cut into slices, see :meth:`steps`; or a slice of another loader is in hand.
        """
        refuse_apart("a pass of a sharded loader")
        if self._slicing is not None:
            raise LockstepError(
                f"rank {self._world.rank}: this loader was sharded with slices={self.slices}, so its loop is over "
                "steps: for step in loader.steps(): for batch in step: …"
            )
        self._world._in_hand.begin_pass(self)
        return self._run_pass(self._hand_out)

    def steps(self) -> Steps:
        """Return the steps for a training loop whose batches are cut into slices: one :class:`Step` for each batch.

        ::

            for step in loader.steps():          # one global batch, one optimizer step
                for images, labels in step:      # this rank's slices, one after the other
                    loss(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

        Gradients are averaged when the inner loop ends. Each ``iter()`` of the result is a pass over the next epoch.

        Raises:
            LockstepError: the loader was sharded without ``slices``.
        """
        if self._slicing is None:
            raise LockstepError(
                f"rank {self._world.rank}: this loader was sharded without slices: iterate over it, or give "
                "lockstep.shard(loader, slices=8)"
            )
        return Steps(self)

    def _begin_steps(self) -> Iterator[Step]:
        """Begin a pass in steps, for :class:`Steps`."""
        self._world._in_hand.begin_pass(self)
        return self._run_pass(self._hand_out_step)

    def _hand_out(self, fetched: Fetched) -> Iterator[Any]:
        """Yield one batch, which is in hand meanwhile."""
        world, proportions = self._world, tuple(fetched.sizes) or self._source.shares or ()
        share = BatchShare(fetched.samples, fetched.global_samples, proportions)
        number = self._number, self._cursor.epoch, self._cursor.batches, self._length
        world._in_hand.hand_out(self, share, number, fetched.batch)
        self._advance(fetched)
        flight.current.batch += fetched.samples
        yield fetched.batch
        if self._may_drop and world.share is share:
            self._say_what_was_dropped(fetched)

    def _hand_out_step(self, fetched: Fetched) -> Iterator[Step]:
        slicing = self._slicing
        assert slicing is not None  # _begin_steps is only called with slices
        cursor = self._cursor
        key = StepKey(self.seed, cursor.epoch, cursor.batches, self._length)
        cut = Cut(fetched.sizes, slicing.runs_at(cursor.batches), self._smallest_slice(fetched))
        chooses = self._options is not None and self._options.chooses
        recut = partial(self._recut, cursor.batches) if chooses else None
        batches = [*zip(fetched.numbers, fetched.batch, strict=True)]
        step = Step(self, self._world, key=key, cut=cut, batches=batches, recut=recut, measures=slicing.balances)
        self._world._in_hand.hand_out(self, cut.share_of(self._world.rank))
        self._advance(fetched)
        flight.current.batch += fetched.samples
        yield step
        if not step.is_done:
            raise LockstepError(
                f"rank {self._world.rank} of {self._world.world_size}: the loop has left batch {key.batch} of epoch "
                f"{key.epoch} before its last slice, so nothing was averaged: go through all slices of each step"
            )
        slicing.note(key.batch, step.seconds, [end - first for first, end in slicing.runs_at(key.batch)])

    def _smallest_slice(self, fetched: Fetched) -> int:
        """Return the fewest samples that a slice of the epoch has, as far as it is known."""
        slicing = self._slicing
        assert slicing is not None  # asked where a step is handed out
        if self.batch_size is None or self._source.costs is not None:
            return min(filter(None, fetched.sizes))
        return slicing.smallest(self._source.length, drop_last=self.drop_last)

    def _recut(self, number: int) -> tuple[Cut, Batches]:
        """**Collective** in that all ranks do so. Cut batch ``number`` and all later ones into twice as many slices."""
        slicing, dataset, now = self._slicing, self._inner.dataset, self._now
        # A stream has neither a FetchingDataset nor batches with numbers, and is not cut again; see SliceOptions.
        assert slicing is not None
        assert isinstance(dataset, FetchingDataset)
        assert isinstance(now, EpochBatches)
        batch: GlobalBatch = now.batch(number)
        count = len(batch.indices)
        largest = max(sizes_in(slicing.cut(count)))
        while max(sizes_in(slicing.cut(count))) == largest > 1:  # otherwise the step would only fail again
            slicing.double()
        self._is_recut = True
        cursor = Cursor(self.epoch, batch.position, number, in_epoch=True)
        self._notes.begin(cursor, self._settings(batch=number), in_hand=True)
        runs, epoch_key = slicing.runs_at(number), mix(self.seed, self._cursor.epoch)
        key = slices_key(batch, self._division, rank=self._world.rank, runs=runs, epoch_key=epoch_key, sliced=slicing)
        fetched = dataset[key]
        if self._device is not None:
            fetched = fetched._replace(batch=to_device(fetched.batch, self._device))
        return Cut(fetched.sizes, runs, 1), [*zip(fetched.numbers, fetched.batch, strict=True)]

    def _batches(self) -> Iterator[Fetched]:
        """Yield the rest of the epoch's batches, requested anew after they are cut into other slices."""
        draws_here = self._slicing is not None and not self._seeded and not self.num_workers
        self._now = self._epochs.begin(self._cursor, seed=self.seed, drawn=self._drawn)
        order = self._last_pass.order = self._now.order
        self._length = 0 if order is None else len(order)
        while True:
            self._is_recut = False
            ahead = self._notes.watched(self._fetch())
            while not self._is_recut:
                # (A dataset that draws unseeded must not advance the common generators by this rank's fetches.)
                with preserved_generators() if draws_here else nullcontext():
                    fetched = next(ahead, None)
                if fetched is None:
                    return
                yield fetched

    def _run_pass(self, hand_out: Callable[[Fetched], Iterator[Any]]) -> Iterator[Any]:
        is_over = self._resuming and self._is_over
        mine = self._begin_pass()
        world, rank_stream = self._world, streams.current
        try:
            if not is_over:
                self._ask(rank_stream)
            for fetched in () if is_over else self._batches():
                flight.current.leave(_DATA)
                yield from hand_out(fetched)
                if self._pass is not mine:  # a hook would save the newer pass's position as that of this one
                    raise self._superseded()
                for hook in self._boundary_hooks.values():
                    hook()
                if self._pass is not mine:
                    raise self._superseded()
                self._ask(rank_stream)
            flight.current.leave(_DATA)
            self._is_over = self._last_pass.has_ended = True
            for hook in self._end_hooks.values():
                hook()
            self._end_pass(mine)
        except GeneratorExit:  # the loop was left early
            if self._pass is mine:
                self._is_over = True
                for hook in self._early_end_hooks.values():
                    hook()
            self._end_pass(mine)
            raise
        finally:
            if self._pass is mine or self._pass is None:  # otherwise a newer pass has the batch in hand
                rank_stream.finish(self)
                world._in_hand.take_back(self, is_whole=self._last_pass.has_ended)
            self._tell_balance()

    def _superseded(self) -> LockstepError:
        return LockstepError(
            f"rank {self._world.rank}: another pass over this loader has begun, or a state was loaded, and "
            "it has only one position; shard a second DataLoader to iterate over the data twice at once"
        )

    def _tell_balance(self) -> None:
        """Leave a note on rank 0 of the gain by parts of equal cost since the last note."""
        balance = self._division.balance
        if balance is not None and balance.batches and self._world.is_main:
            notes.tell(notes.COSTS, **balance.take())

    def _ask(self, rank_stream: streams.RandomStreams) -> None:
        """Mark the moment at which the loop asks for a batch."""
        if self._slicing is None:
            rank_stream.renew(self)
        flight.current.enter(_DATA)

    def _begin_pass(self) -> object:
        if self._cursor.in_epoch and not self._resuming:
            self._notes.end(self._cursor)
            self._cursor = Cursor(self._cursor.epoch + 1)
        if not self._resuming:
            self._drawn = None
        self._resuming, self._is_over, self._now = False, False, None
        if self._slicing is not None:
            self._slicing.begin_epoch()
        self._cursor = replace(self._cursor, in_epoch=True)
        self._last_pass.begin(self._cursor)
        self._notes.begin(self._cursor, self._settings(batch=self._cursor.batches))
        self._pass = object()
        return self._pass

    def _advance(self, fetched: Fetched) -> None:
        samples, batches = self._cursor.samples + fetched.global_samples, self._cursor.batches + 1
        self._cursor = replace(self._cursor, samples=samples, batches=batches)
        last = self._last_pass
        last.samples.append(fetched.samples)
        if last.indices is not None:
            last.indices.extend(fetched.indices)

    def _handed_out(self) -> HandedOut:
        """See :class:`~lockstep.comm.in_order.places.HandsOut`."""
        source = self._source
        if self._slicing is not None:
            why = "the loader was sharded with slices=, whose outputs come in pieces: shard one without for predictions"
        else:
            why = "drop_last=True leaves out the end of a stream" if self.drop_last and source.order == "stream" else ""
        return self._last_pass.handed_out(
            self._number,
            total=None if source.order in ("batches", "stream") else source.length,
            in_order=source.order == "sequential",
            unfinished=why,
        )

    def _end_pass(self, mine: object) -> None:
        if self._pass is mine:
            self._pass, self._is_over = None, False
            self._notes.end(self._cursor)
            self._cursor = Cursor(self._cursor.epoch + 1)

    def _fetch(self) -> Iterator[Fetched]:
        """Return this rank's share of the batches from the cursor to the end of its epoch."""
        epoch_key, now = mix(self.seed, self._cursor.epoch), self._now
        assert now is not None  # begun with the pass
        self._generator.manual_seed(mix(epoch_key, self._world.rank))
        if isinstance(now, EpochBatches):  # (all but streams)
            global_batches = now.from_number(self._cursor.batches)
            rank, division, sliced = self._world.rank, self._division, self._slicing
            self._keys.keys = (
                share_keys(global_batches, division, rank=rank, epoch_key=epoch_key)
                if sliced is None
                else slices_keys(global_batches, division, rank=rank, epoch_key=epoch_key, sliced=sliced)
            )
        batches: Iterable[Fetched] = self._inner
        if self._device is not None:
            batches = on_device(batches, self._device)
        return now.beside(iter(batches), self._cursor.batches)

    def _say_what_was_dropped(self, fetched: Fetched) -> None:
        size = size_unlike(fetched.batch, fetched.samples)
        if size is None:
            return
        self._may_drop = False  # say it once
        callsite.warn(
            f"rank {self._world.rank}: the collate_fn made a batch of size {size} from {fetched.samples} samples. If "
            f"it drops samples, means are not exact: this rank's counts as one of {fetched.samples}. Pass the number "
            "that remains before the backward: world.weigh(len(batch)). If it packs several samples into one, count "
            "what your loss is a mean of in the same way (docs/weights.md)"
        )

    def _say_who_is_left_out(self) -> None:
        if self._world.is_main and self.batch_size and self.ranks_left_out:
            _log.info(
                "the last of %d global batches has %d samples for %d ranks: a batch of zero samples, which counts with "
                "weight 0, goes to %s",
                len(self),
                (self._source.length or 0) % self.batch_size,
                self._world.world_size,
                counted(self.ranks_left_out, "rank"),
            )
