"""A rank's share of a global batch: what makes a mean over unequal slices exact.

Note [Exact mean]
~~~~~~~~~~~~~~~~~
A global batch of n samples is cut into W slices; rank r has n_r of them and takes the mean of its own losses. The
gradient of the global mean is then

    sum over r of (n_r / n) * g_r   =   mean over r of  w_r * g_r,      w_r = n_r * W / n.

So a plain average over ranks is exact when every rank first scales its gradient by its weight ``w_r``. Equal slices
have w_r = 1 and cost nothing. The weights of all ranks sum to W, so a term that every rank adds in full (a penalty on
the parameters, say) comes out unchanged. A rank with an empty slice has weight 0, and what it holds is discarded
rather than multiplied: the mean over no samples is NaN, and 0 * NaN is NaN.

Note [Counted items]
~~~~~~~~~~~~~~~~~~~~
Where a loss is a mean over something that the loader knows nothing of (tokens), the rank knows n_r, how many of them it
has, and nobody knows n. ``World.weigh(n_r)`` says so, and the gradient engine adds up n where an averaged backward
begins: Note [Items of all ranks] in ``ddp/items.py``. Until then what is in hand is :class:`Items`, a share whose whole
is not known. A backward takes the count

- that was said since the last forward with gradients, or else
- that its own forward found (it was said before the forward, and the loop may have gone on to another batch since), or
  else
- that is in hand: several forwards and backwards of one batch need it said once.

A count is of the batch that was in hand when it was said, and goes with it, unless a forward with gradients waits for
its backward still.

Note [Batches in hand]
~~~~~~~~~~~~~~~~~~~~~~
A loop may hold batches of several loaders. The share that counts is that of the batch handed out last, which is right
where one loop runs inside another (an evaluation in mid-epoch): when the inner pass ends, the outer batch's share is
back. It is not right where two loaders are read side by side (``zip``) and one backward goes through both batches: if
their shares weigh differently, no one weight makes that mean exact, so it is refused. So it matters which batches meet
in a backward. They are those that had come since the last one when a forward with gradients took the share (a batch
that comes between the forward and its backward has no part in it), less

- those in whose hands a loop over another began: a pass that is asked for while a batch of another loader is out runs
  inside that loader's. Unless that one hands out its next batch during the inner pass: then the two are read
  side by side, and are remembered as such;
- those that a forward without gradients has had, once another loader hands out a batch: an evaluation between two steps
  (``model(next(validation))`` under ``torch.no_grad``) is over then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from threading import get_ident
from weakref import WeakKeyDictionary, WeakSet

from lockstep.errors import LockstepError

#: Which batch: the number of its loader, its epoch, and its number in it, from 0; empty: none.
Place = tuple[int, ...]

#: Items that the ranks' counts can say exactly are fewer.
MOST_ITEMS = 2**48


@dataclass(frozen=True)
class BatchShare:
    """How much of the current global batch this rank has: samples, or what else makes the mean (docs/weights.md)."""

    #: Samples in this rank's slice.
    local_samples: float
    #: Samples in the global batch.
    global_samples: float
    #: How much of it each rank has, in proportion, if it was not cut evenly.
    proportions: tuple[float, ...] = ()

    def weight(self, world_size: int) -> float:
        """Return the factor that makes a plain average over ranks exact; see Note [Exact mean].

        Raises:
            ValueError: the whole world has nothing, and a mean over nothing is none.
        """
        if not self.global_samples:
            raise ValueError(
                f"BatchShare({self.local_samples}, {self.global_samples}): no rank has anything to take a mean of, so "
                "leave this step out, on all ranks"
            )
        return self.local_samples * world_size / self.global_samples

    def exact_parts(self, world_size: int) -> list[Fraction]:
        """Return by rank which part of the global batch its slice is before it is rounded to samples."""
        proportions = [*map(Fraction, self.proportions or (1,) * world_size)]
        return [each / sum(proportions) for each in proportions]

    def words(self) -> str:
        """Say it in words: ``3 of 7 samples``."""
        return f"{self.local_samples} of {self.global_samples} samples"


class Items(BatchShare):
    """How many items this rank has of a batch whose whole nobody knows yet; see Note [Counted items]."""

    def __init__(self, count: int) -> None:
        super().__init__(count, math.nan)
        #: This rank's items.
        self.count = count
        #: Whether a forward with gradients has found it; and whether a backward has taken it, or an evaluation has.
        self.is_found = False
        self.is_taken = False

    def weight(self, world_size: int) -> float:
        """Refuse: the whole is known when the buckets come back.

        Raises:
            LockstepError: always.
        """
        raise LockstepError(f"{self.words()} on one of {world_size} ranks have no weight while the whole is not known")

    def words(self) -> str:
        """Say it in words."""
        return f"{self.count} items"


class BatchesInHand:
    """The shares of the batches that a rank's loops hold, by the loader they came from; see Note [Batches in hand]."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: Outside of all passes.
        self._base: BatchShare | None = None
        #: By loader, the batch that came last at the end.
        self._held: dict[object, BatchShare | None] = {}
        #: By loader, which batch that is, and the thread that it was handed out to.
        self._places: dict[object, tuple[Place | None, int]] = {}
        #: Loaders so far.
        self._loaders = 0
        #: The loaders whose batch has come since the last backward.
        self._fresh: dict[object, BatchShare] = {}
        #: Those of them that a forward without gradients has had.
        self._evaluated: set[object] = set()
        #: Those of them that were there when a forward with gradients took the share.
        self._read: dict[object, BatchShare] = {}
        #: For each loader with a pass under way, those in whose batches' hands it began.
        self._around: WeakKeyDictionary[object, set[object]] = WeakKeyDictionary()
        #: Loaders that were read side by side once.
        self._beside: WeakKeyDictionary[object, WeakSet[object]] = WeakKeyDictionary()
        #: Whether items were ever counted here: who does not must not pay for it.
        self._counts = False
        #: Items of a batch that is gone, for a backward that is still to come; and whether one is.
        self._left_over: Items | None = None
        self._awaits_backward = False

    @property
    def share(self) -> BatchShare | None:
        """The share of the batch handed out last, or what was set in its place."""
        return next(reversed(self._held.values())) if self._held else self._base

    def say(self, share: BatchShare | None) -> None:
        """Put ``share`` in the place of that of the batch in hand, until its loader continues."""
        if self._held:
            self._held[next(reversed(self._held))] = share
            self.used()
        else:
            self._base = share
        self._counts |= isinstance(share, Items)

    @property
    def items(self) -> Items | None:
        """What was counted of the batch in hand, if no backward has taken it yet."""
        share = self.share if self._counts else None
        return share if isinstance(share, Items) and not share.is_taken else None

    def is_outside(self, items: Items) -> bool:
        """Return whether ``items`` were counted outside of all passes, so that no batch to come ends them."""
        return items is self._base

    def items_for(self, found: Items | None) -> Items | None:
        """Return what the backward under way is to be weighed by; None: by the share.

        Args:
            found: what :meth:`read` returned to its forward.
        """
        if not self._counts:
            return None
        share = self.share
        if isinstance(share, Items):
            return share if found is None or not share.is_found else found
        left_over = self._left_over
        return left_over if left_over is not None and not left_over.is_found else found

    def samples(self) -> float | None:
        """Return how much of the batch in hand is this rank's, 1 where there is none; None: :meth:`contested` must say.

        (Asked in each step by a log: no more is called here than must be.)
        """
        if len(self._fresh) > 1:
            return None
        held = self._held
        share = next(reversed(held.values())) if held else self._base
        return 1.0 if share is None else share.local_samples

    def number_loader(self) -> int:
        """Return the number of a loader that is made, on all ranks in the same order; from 0."""
        self._loaders += 1
        return self._loaders - 1

    def place(self) -> Place | None:
        """Return which batch was handed out last, empty if none is in hand; None: another thread has got it."""
        if not self._held:
            return ()
        place, thread = self._places[next(reversed(self._held))]
        return place if thread == get_ident() else None

    def begin_pass(self, loader: object) -> None:
        """Note where a pass over ``loader`` begins, when its iterator is made."""
        self._around[loader] = {other for other in self._held if other is not loader} - set(
            self._beside.get(loader, ())
        )

    def hand_out(self, loader: object, share: BatchShare, place: Place | None = None) -> None:
        """Note that ``loader`` hands out a batch: which one, if that is to be the same on all ranks."""
        over = self._evaluated - {loader}
        for other in self._held:
            if loader in self._around.get(other, ()) and other not in over:
                self._read_beside(loader, other)
        for other in over:
            self._fresh.pop(other, None)
        self._evaluated.clear()
        before = self._held.pop(loader, None)
        if self._counts:
            awaited = self._awaits_backward and isinstance(before, Items) and not before.is_taken
            self._left_over = before if awaited and isinstance(before, Items) else None
        self._held[loader] = self._fresh[loader] = share
        self._places[loader] = place, get_ident()

    def read(self, *, for_backward: bool) -> Items | None:
        """Note that a forward takes the share, and whether a backward may come through it.

        Returns:
            what was counted for this forward; None if nothing was, or an earlier backward took it.
        """
        items = self.items
        if not for_backward:
            self._evaluated.update(self._fresh)
            if items is not None:
                items.is_taken = True
            return None
        self._read |= self._fresh
        self._awaits_backward = True
        if self._left_over is not None and self._left_over.is_taken:
            self._left_over = None
        if items is not None:
            items.is_found = True
        return items

    def take_back(self, loader: object) -> None:
        """Note that the pass over ``loader`` is over."""
        self._held.pop(loader, None)
        self._places.pop(loader, None)
        self._fresh.pop(loader, None)
        self._evaluated.discard(loader)
        self._read.pop(loader, None)
        self._around.pop(loader, None)

    def contested(self, *, of_backward: bool = False) -> list[tuple[object, BatchShare]]:
        """Return the batches that meet in one mean with different weights: empty, or at least two. The same on every
        rank.

        Args:
            of_backward: in the mean that a backward goes through, and not in one that is taken now.
        """
        batches = self._read if of_backward and self._read else self._fresh
        if len(batches) < 2:
            return []
        inner = {loader: self._around.get(loader, set()) for loader in batches}
        met = [loader for loader in batches if not any(loader in around for around in inner.values())]
        for loader in met[1:]:
            self._read_beside(met[0], loader)
        shares = [(loader, batches[loader]) for loader in met]
        return shares if any(self._weigh_differently(shares[0][1], other) for _, other in shares[1:]) else []

    def take(self, items: Items | None) -> None:
        """Note that a backward has begun, weighed by ``items`` or by the share."""
        self._awaits_backward = False
        if items is not None:
            items.is_taken = True
        self.used()

    def used(self) -> None:
        """Note that a backward has begun, or that the script has said what weighs."""
        self._fresh.clear()
        self._evaluated.clear()
        self._read.clear()

    def _read_beside(self, one: object, two: object) -> None:
        for first, second in ((one, two), (two, one)):
            self._beside.setdefault(first, WeakSet()).add(second)
            self._around.get(first, set()).discard(second)

    def _weigh_differently(self, one: BatchShare, two: BatchShare) -> bool:
        # Slices are rounded to whole samples, so the weights of two sizes of global batches are the same on every rank
        # only if the sizes are, or if nothing had to be rounded in either; and if both are cut in the same proportion.
        if one.global_samples == two.global_samples and one.proportions == two.proportions:
            return False
        cuts = [each.exact_parts(self._world_size) for each in (one, two)]
        return cuts[0] != cuts[1] or any(
            (Fraction(each.global_samples) * part).denominator != 1 for each in (one, two) for part in cuts[0]
        )
