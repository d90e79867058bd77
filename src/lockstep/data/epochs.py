"""Begin the epochs of a loader: where their global batches come from, and what is remembered from one to the next."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.world import World
from lockstep.data.batches import (
    BatchSamplerDrawing,
    CostedOrder,
    CutOrder,
    DrawnBatches,
    EpochBatches,
    Shipping,
    length_of,
)
from lockstep.data.cursor import Cursor, LoaderState
from lockstep.data.order import EpochOrder, digest_of, draw_order, epoch_order, sequential_order
from lockstep.data.sampler_watch import SamplerWatch
from lockstep.data.seeding import preserved_generators
from lockstep.data.source import Shardable
from lockstep.errors import CheckpointMismatch

#: Batches that a rank asks for beyond those of its workers: the next one, and one that is copied to a GPU meanwhile.
_BESIDE_WORKERS = 2


class Epochs:
    """The epochs of a loader over a dataset with indices.

    **Collective** to make where rank 0 draws whole batches, or knows what samples cost.

    Args:
        source: the DataLoader's settings.
        world: the ranks.
        loader: the number of the loader, the same on all ranks.
        inner: the DataLoader that fetches for this rank.
    """

    def __init__(self, source: Shardable, world: World, *, loader: int, inner: DataLoader[Any]) -> None:
        self._source, self._world = source, world
        self._now: DrawnBatches | None = None
        #: The state that the batch sampler has to be put into before the next epoch; None: it is in the right one.
        self._pending: Any = None
        #: The way in which rank 0 ships batches; None: each rank cuts them itself.
        self._shipping: Shipping | None = None
        self._length: int | None = None
        costs = source.costs
        ships = source.order == "batches" or (costs is not None and costs.is_told_by_rank_0)
        #: What compares the ranks' samplers, if rank 0's draws for all, or its dataset decides.
        self._watch: SamplerWatch | None = None
        if ships or source.order == "sampler":
            self._watch = SamplerWatch(source.sampler, source.loader.dataset, world)
        if ships:
            assert self._watch is not None
            mine = _BESIDE_WORKERS + inner.num_workers * (inner.prefetch_factor or 0)
            _, told = together(OverGroup(world), lambda: [mine, self._ask_length()], list, what="lockstep.shard")
            self._shipping = Shipping(world, loader, max(ahead for ahead, _ in told), costs, self._watch)
            self._length = told[0][1]

    def begin(self, cursor: Cursor, *, seed: int, drawn: str | None) -> EpochBatches:
        """**Collective** unless lockstep orders the samples. Return the batches from the cursor on.

        Args:
            cursor: where the pass begins.
            seed: that of the loader.
            drawn: a digest of what the user's sampler drew, if the pass goes on; None: it begins.

        Raises:
            LockstepError: a sampler failed; on every rank.
            CheckpointMismatch: a sampler drew something else than before; on every rank.
        """
        source = self._source
        if source.order == "batches":
            return self._begin_drawing(cursor, seed=seed, drawn=drawn)
        order, drawn = self._order(cursor, seed=seed, drawn=drawn)
        assert source.batch_size is not None  # only a batch sampler decides it
        cut = CutOrder(
            order,
            batch_size=source.batch_size,
            drop_last=source.drop_last,
            cursor=cursor,
            costs=source.costs,
            drawn=drawn,
        )
        shipping, costs = self._shipping, source.costs
        if shipping is None or costs is None:
            return cut
        batches = cut.from_number(cursor.batches)
        return DrawnBatches(
            shipping,
            lambda: CostedOrder(batches, begins_at=cursor.batches, costs=costs),
            cursor=cursor,
            drawn=drawn,
            is_chained=False,
        )

    @property
    def length(self) -> int | None:
        """The number of batches of an epoch by the word of rank 0's batch sampler; None: it does not say."""
        return self._length if self._now is None or self._now.length is None else self._now.length

    @property
    def count(self) -> int | None:
        """The number of batches of the epoch that was begun last, once all of them are drawn; None: not known."""
        return None if self._now is None else self._now.count

    def state(self, *, in_epoch: bool) -> dict[str, Any]:
        """Return what is kept in a :class:`~lockstep.data.cursor.LoaderState`: the state of a batch sampler that has
        one; the same on all ranks.

        Args:
            in_epoch: before the epoch that was begun last, since a resume draws it again; else after it.
        """
        if self._now is None:
            return {"sampler": self._pending}
        return {"sampler": self._now.before if in_epoch else self._now.after}

    def load(self, saved: LoaderState) -> None:
        """Put the batch sampler into its saved state before the next epoch."""
        self._now, self._pending = None, saved.sampler

    def _begin_drawing(self, cursor: Cursor, *, seed: int, drawn: str | None) -> DrawnBatches:
        source, shipping = self._source, self._shipping
        assert shipping is not None  # made for every batch sampler
        state, self._pending = self._pending, None
        begin = partial(
            BatchSamplerDrawing, source.sampler, seed=seed, epoch=cursor.epoch, state=state, costs=source.costs
        )
        self._now = DrawnBatches(shipping, begin, cursor=cursor, drawn=drawn, is_chained=True)
        return self._now

    def _order(self, cursor: Cursor, *, seed: int, drawn: str | None) -> tuple[EpochOrder, str | None]:
        """Return the order of the cursor's epoch, and its digest if a sampler drew it."""
        source, epoch = self._source, cursor.epoch
        if source.order == "sampler":
            order = draw_order(source.sampler, self._world, seed=seed, epoch=epoch, watch=self._watch)
            digest = digest_of(order)
            if drawn is not None and digest != drawn:
                raise CheckpointMismatch(
                    f"rank {self._world.rank}: the sampler {type(source.sampler).__name__} drew another order "
                    f"for epoch {epoch} than before it was interrupted, so the {cursor.samples} samples already "
                    "used are not known: let it draw from generators that it holds in attributes, or from torch's, "
                    "Python's or NumPy's global generators, which are seeded for each epoch"
                )
            return order, digest
        length = source.length or 0
        is_shuffled = source.order == "shuffled"
        return epoch_order(length, seed=seed, epoch=epoch) if is_shuffled else sequential_order(length), None

    def _ask_length(self) -> int | None:
        if self._source.order != "batches" or not self._world.is_main:
            return None
        with preserved_generators():  # (some samplers draw an epoch to find out)
            return length_of(self._source.sampler)
