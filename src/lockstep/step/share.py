"""A rank's share of a global batch: what makes a mean over unequal shares exact.

Note [Exact mean]
~~~~~~~~~~~~~~~~~
A global batch of n samples is cut into W shares; rank r has n_r samples and takes the mean of its own losses. The
gradient of the global mean is then

    sum over r of (n_r / n) * g_r   =   mean over r of  w_r * g_r,      w_r = n_r * W / n.

So a plain average over ranks is exact when every rank first scales its gradient by its weight ``w_r``. Equal shares
have w_r = 1 and cost nothing. The weights of all ranks sum to W, so a term that every rank adds in full (a penalty on
the parameters, say) comes out unchanged. A rank with an empty share has weight 0, and what it holds is discarded
rather than multiplied: the mean over no samples is NaN, and 0 * NaN is NaN.

Note [Counted items]
~~~~~~~~~~~~~~~~~~~~
Where a loss is a mean over something that the loader knows nothing of (tokens), the rank knows n_r, how many of them it
has, and n is not known. ``World.weigh(n_r)`` says so, and the replica adds up n where an averaged backward begins: Note
[Items of all ranks] in ``ddp/items.py``. Until then what is in hand is :class:`Items`, a share whose whole is not
known. A backward takes the count

- that was said since the last forward with gradients, or else
- that its own forward found (it was said before the forward, and the loop may have gone on to another batch since), or
  else
- that is in hand: several forwards and backwards of one batch need it said once.

A count is of the batch that was in hand when it was said, and goes with it, unless a forward with gradients waits for
its backward still.

Note [Batches in hand]
~~~~~~~~~~~~~~~~~~~~~~
A loop may hold batches of several loaders. The share that counts is that of the batch handed out last (for loops that
read ahead see Note [Batches read ahead] in ``ahead.py``), which is right where one loop runs inside another (an
evaluation in mid-epoch): when the inner pass ends, the outer batch's share is back. It is not right where two loaders
are read side by side (``zip``) and one backward goes through both batches: if their shares weigh differently, no one
weight makes that mean exact, so it is refused. So it matters which batches meet in a backward. They are those that had
come since the last one when a forward with gradients took the share (a batch that comes between the forward and its
backward has no part in it), less

- those in whose hands a loop over another began: a pass that is asked for while a batch of another loader is out runs
  inside that loader's. Unless that one hands out its next batch during the inner pass: then the two are read
  side by side, and are remembered as such;
- those that a forward without gradients has had, once another loader hands out a batch: an evaluation between two steps
  (``model(next(validation))`` under ``torch.no_grad``) is over then;
- those of other loaders than the one whose batch a forward with gradients is given, known by the batch's first tensor:
  another module than the replica may have had them (an average of its weights that is evaluated between two steps).
  That holds for this forward: another one of the same backward may be given them.

Which batches a step has is also compared between the ranks (Note [Batches compared] in ``ddp/batches.py``). There a
batch of another loader than the last one counts only if batches of both have come in each of the last two steps: one
rank alone may look into a loader from time to time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from threading import get_ident
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor

from lockstep import callsite
from lockstep.errors import LockstepError
from lockstep.step.ahead import ReadAhead
from lockstep.text import joined
from lockstep.trees import leaves

#: The number of a loader, the epoch, the number of the batch in it, from 0, and the number of samples that the epoch's
#: order has on this rank; 0: it is not each rank's own.
BatchNumber = tuple[int, int, int, int]
#: The batches that gradients come from, by their loaders; empty: no batch.
BatchId = tuple[BatchNumber, ...]

#: Upper limit of the ranks' item counts, below which sums are exact.
MOST_ITEMS = 2**48

#: The most different shares of batches read ahead that are kept, for a warning.
_MOST_SHARES = 8


@dataclass(frozen=True)
class BatchShare:
    """This rank's share of the current global batch, in samples or in another unit of the mean (docs/weights.md)."""

    #: Samples in this rank's share.
    local_samples: float
    #: Samples in the global batch.
    global_samples: float
    #: Each rank's proportion of the batch, if it was not cut evenly.
    proportions: tuple[float, ...] = ()

    def weight(self, world_size: int) -> float:
        """Return the factor that makes a plain average over ranks exact; see Note [Exact mean].

        Raises:
            ValueError: the whole world has nothing, so there is no mean.
        """
        if not self.global_samples:
            raise ValueError(
                f"BatchShare({self.local_samples}, {self.global_samples}): no rank has anything to take a mean of, so "
                "leave this step out, on all ranks"
            )
        return self.local_samples * world_size / self.global_samples

    def is_even(self, world_size: int) -> bool:
        """Return whether all ranks have equal shares of the batch."""
        return len(set(self.proportions)) <= 1 and self.global_samples % world_size == 0

    def exact_parts(self, world_size: int) -> list[Fraction]:
        """Return each rank's exact fraction of the global batch, before it is rounded to samples."""
        proportions = [*map(Fraction, self.proportions or (1,) * world_size)]
        return [each / sum(proportions) for each in proportions]

    def words(self) -> str:
        """Say it in words: ``3 of 7 samples``."""
        return f"{self.local_samples} of {self.global_samples} samples"


class Items(BatchShare):
    """This rank's number of items in a batch whose total is not known yet; see Note [Counted items]."""

    def __init__(self, count: int) -> None:
        super().__init__(count, math.nan)
        #: This rank's items.
        self.count = count
        #: True if a forward with gradients has found the count; True if a backward, or an evaluation, has taken it.
        self.is_found = False
        self.is_taken = False

    def weight(self, world_size: int) -> float:
        """Refuse: the total is known only where an averaged backward begins; see Note [Counted items].

        Raises:
            LockstepError: always.
        """
        raise LockstepError(f"{self.words()} on one of {world_size} ranks have no weight while the whole is not known")

    def words(self) -> str:
        """Say it in words."""
        return f"{self.count} items"


class Taken(NamedTuple):
    """What a forward takes from the batch in hand."""

    #: The factor of this rank's gradients; see Note [Exact mean].
    weight: float
    #: The items counted for it, unless an earlier backward took them; see Note [Counted items].
    items: Items | None
    #: The batches in hand, empty if there is none; None: they are not known.
    batch: BatchId | None


def latest_of(one: BatchId, two: BatchId) -> BatchId:
    """Return the batches of both, of each loader the latest."""
    found: dict[int, BatchNumber] = {}
    for each in (*one, *two):
        found[each[0]] = max(each, found.get(each[0], each))
    return tuple(found[loader] for loader in sorted(found))


class _BatchAhead:
    """A batch that a loader has handed out in a pass that reads ahead."""

    __slots__ = ("__weakref__", "_loader", "number", "share")

    def __init__(self, loader: object, share: BatchShare, number: BatchNumber | None) -> None:
        self._loader = ref(loader)  # a list of batches keeps no loader alive
        self.share, self.number = share, number

    @property
    def loader(self) -> object:
        """The loader; None: it is gone."""
        return self._loader()

    def __str__(self) -> str:
        return "<sharded loader that is gone>" if self.loader is None else str(self.loader)


class _AheadOfModel:
    """What is known of a pass whose loop reads ahead; see Note [Batches read ahead] in ``ahead.py``."""

    def __init__(self) -> None:
        #: Some different shares of its batches, and whether they weigh differently.
        self.shares: list[BatchShare] = []
        self.weighs_differently = False
        #: The batch in hand, if a forward was given that.
        self.known: _BatchAhead | None = None


class _Pass:
    """A pass over a loader: its batch in hand, and what became of that since the last backward."""

    __slots__ = (
        "ahead", "beside", "came", "evaluated", "is_over", "is_said", "is_used", "loader", "number", "read", "share",
        "thread", "trail", "unread",
    )  # fmt: skip

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.share: BatchShare | None = None
        self.number: BatchNumber | None = None
        #: Identifier of the thread that got the batch.
        self.thread = 0
        #: True if a batch has come; True if a forward without gradients has had it.
        self.came = self.evaluated = False
        #: In how many steps in a row batches of another loader came as well.
        self.beside = 0
        #: The share of the batch that was there when a forward with gradients came.
        self.read: BatchShare | None = None
        #: True if the script has said what the batch weighs; True if a backward has begun since.
        self.is_said = self.is_used = False
        #: The batch itself, until a forward comes; None if no loop may read ahead.
        self.unread: object = None
        #: The last two batches: the first tensor of each, its share and its number.
        self.trail: list[tuple[ref[object] | None, BatchShare, BatchNumber | None]] = []
        #: What is known of a loop that reads ahead; None: it does not.
        self.ahead: _AheadOfModel | None = None
        #: True if the pass is over, and a batch of it is in hand since a forward was given that.
        self.is_over = False

    @property
    def first(self) -> object:
        """The first tensor of the batch in hand; None: it is gone, or not known."""
        reference = self.trail[-1][0] if self.trail else None
        return None if reference is None else reference()


class BatchesInHand:
    """The shares of the batches that a rank's loops hold, one for each pass; see Note [Batches in hand]."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        #: The share that was set outside of all passes.
        self._base: BatchShare | None = None
        #: The passes, of which the last is the one that handed out a batch last.
        self._passes: list[_Pass] = []
        #: The number of loaders so far.
        self._loaders = 0
        #: For each loader with a pass under way, those in whose batches' hands it began.
        self._around: WeakKeyDictionary[object, set[object]] = WeakKeyDictionary()
        #: Loaders that were read side by side once.
        self._beside: WeakKeyDictionary[object, WeakSet[object]] = WeakKeyDictionary()
        #: Identifier of the thread in which the model computes.
        self._thread = get_ident()
        #: The batches of passes that read ahead; None: there was no such pass.
        self._ahead: ReadAhead[_BatchAhead] | None = None
        #: True from the end of such a pass to the next forward that is in no pass and knows no batch.
        self._has_ended_ahead = False
        #: The batch in hand when a loop was left before a forward had it, until one comes.
        self._unread: _BatchAhead | None = None
        #: True once such a pass has ended, so that a forward in no pass may be of a batch of it. (A loop that was left
        #: before a forward had its batch is none.)
        self._is_listed = False
        #: True while a forward that knew no batch waits for its backward.
        self._awaits_unknown = False
        #: The share of the batch that the last forward with gradients was given, if that was read ahead, while no other
        #: batch is handed out.
        self._given: BatchShare | None = None
        #: The loaders warned of.
        self._warned: WeakSet[object] = WeakSet()
        #: True if items were ever counted here: a job that does not count must not pay for it.
        self._counts = False
        #: The share of the last batch of a pass that is over, while no other has begun.
        self.over: BatchShare | None = None
        #: The same, if the loop was left before the pass had come to its end.
        self.left: BatchShare | None = None
        #: Items of a batch that is gone, for a backward that is still to come; and whether one is.
        self._left_over: Items | None = None
        self._awaits_backward = False

    @property
    def share(self) -> BatchShare | None:
        """The share of the batch handed out last, or what was set in its place."""
        return self._passes[-1].share if self._passes else self._base

    @property
    def share_of_forward(self) -> BatchShare | None:
        """The share that the last forward with gradients has taken, or what the script has said instead; that of the
        batch in hand if another one was handed out since."""
        return self.share if self._given is None or self.items is not None else self._given

    def say(self, share: BatchShare | None) -> None:
        """Put ``share`` in the place of that of the batch in hand, until its loader continues."""
        self._given = None
        self._passes = self._live()
        if self._passes:
            self._passes[-1].share, self._passes[-1].is_said = share, True
            self._begin_anew()
            self._passes[-1].is_used = False
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
        """Return how much of the batch in hand is this rank's, 1 where there is none; None: :meth:`refuse_contested`
        must say.

        (Asked in each step by a log: no more is called here than must be.)
        """
        passes = self._passes
        if len(passes) > 1 and sum(each.came for each in passes) > 1:
            return None
        share = passes[-1].share if passes else self._base
        return 1.0 if share is None else share.local_samples

    def number_loader(self) -> int:
        """Return the number of a loader that is made, on all ranks in the same order; from 0."""
        self._loaders += 1
        return self._loaders - 1

    # What loaders do --------------------------------------------------------------------------------------------------

    def begin_pass(self, loader: object) -> None:
        """Note where a pass over ``loader`` begins, when its iterator is made."""
        self.over = self.left = None
        self._passes = self._live()
        others = {each.loader for each in self._passes if each.loader is not loader}
        self._around[loader] = others - set(self._beside.get(loader, ()))

    def hand_out(
        self, loader: object, share: BatchShare, number: BatchNumber | None = None, content: object = None
    ) -> None:
        """Note that ``loader`` hands out a batch.

        Args:
            loader: the loader.
            share: this rank's of the batch.
            number: which one, if that is to be the same on all ranks.
            content: what it hands out, a tree; None: no other batch comes before it was used.
        """
        passes, self._given = self._passes, None
        mine = passes[0] if len(passes) == 1 and passes[0].loader is loader else self._come_forward(loader)
        if self._counts:
            before = mine.share
            awaited = self._awaits_backward and isinstance(before, Items) and not before.is_taken
            self._left_over = before if awaited and isinstance(before, Items) else None
        thread = get_ident()
        trail = mine.trail
        is_kept = len(trail) > 1 and (older := trail[0][0]) is not None and older() is not None
        if mine.ahead is None and (mine.unread is not None or is_kept or thread != self._thread):
            self._begin_ahead(mine)
        if mine.ahead is not None:
            self._remember(mine.ahead, _BatchAhead(loader, share, number), content)
            if mine.ahead.known is not None and thread != self._thread:
                return  # what the model computes with is in hand still
            mine.ahead.known = None
        elif content is not None:
            first = content
            if isinstance(content, dict):
                first = next(iter(content.values()), None)
            elif isinstance(content, (list, tuple)):
                first = content[0] if content else None
            mine.trail = [*trail[-1:], (ref(first) if isinstance(first, Tensor) else None, share, number)]
        mine.share, mine.number, mine.thread, mine.unread = share, number, thread, content
        mine.came, mine.evaluated, mine.is_said = True, False, False

    def _begin_ahead(self, mine: _Pass) -> None:
        """Note that a pass reads ahead; remember the last batches, as far as they live."""
        mine.ahead, trail, mine.trail = _AheadOfModel(), mine.trail, []
        batches = [
            (_BatchAhead(mine.loader, share, number), None if first is None else first())
            for first, share, number in trail
        ]
        for batch, first in batches:
            self._remember(mine.ahead, batch, first)
        if batches and mine.unread is not None:
            self._remember(mine.ahead, batches[-1][0], mine.unread)

    def _remember(self, ahead: _AheadOfModel, batch: _BatchAhead, content: object) -> None:
        self._ahead = self._ahead or ReadAhead()
        self._ahead.remember(batch, content, of=ahead)
        if len(ahead.shares) < _MOST_SHARES and batch.share not in ahead.shares:
            ahead.shares.append(batch.share)
            ahead.weighs_differently |= self._weigh_differently(ahead.shares[0], batch.share)

    def _come_forward(self, loader: object) -> _Pass:
        """Return the pass over ``loader``, which is the last one from now on."""
        mine = next((each for each in self._passes if each.loader is loader), None) or _Pass(loader)
        others = [each for each in self._passes if each is not mine]
        for other in others:
            if other.evaluated:  # that evaluation is over
                other.came = other.evaluated = False
            elif loader in self._around.get(other.loader, ()):
                self._read_beside(loader, other.loader)
        self._passes = [*others, mine]
        return mine

    def take_back(self, loader: object, *, is_whole: bool = False) -> None:
        """Note that the pass over ``loader`` is over; ``is_whole``: its loop has come to the end."""
        mine = next((each for each in self._passes if each.loader is loader), None)
        if mine is not None:
            self.over, self.left = mine.share, None if is_whole else mine.share
            self._is_listed |= mine.ahead is not None or (is_whole and mine.unread is not None)
            if mine.unread is not None and mine.ahead is None:
                self._begin_ahead(mine)
            self._has_ended_ahead |= mine.ahead is not None
            if mine.share is not None and mine.unread is not None and not is_whole:
                self._unread = _BatchAhead(loader, mine.share, mine.number)
            if mine.ahead is not None and mine.ahead.known is not None and get_ident() != self._thread:
                mine.is_over, mine.loader = True, mine.ahead.known  # what the model computes with is in hand still
        self._passes = [each for each in self._passes if each.loader is not loader]
        self._around.pop(loader, None)

    # What forwards and backwards do -----------------------------------------------------------------------------------

    def read(self, inputs: object, *, for_backward: bool) -> Taken:
        """Return what a forward takes, and note whether a backward may come through it.

        Args:
            inputs: the model's, a tree.
            for_backward: whether it computes gradients.

        Raises:
            ValueError: no rank has any sample.
        """
        thread = self._thread = get_ident()
        ahead = [] if self._ahead is None else self._ahead.find(inputs)
        known = None if self._ahead is None else self._take_up(ahead, inputs, for_backward)
        mine = self._passes[-1] if self._passes else None
        share = self._base if mine is None or mine.is_over else mine.share
        given = self._given_alone(inputs, ahead) if for_backward and len(self._passes) > 1 else None
        if known is None and given is not None:
            known = given.share
        if known is not None:  # (whatever a thread that reads ahead, or another loop, has put in hand meanwhile)
            share = known
        self._given = known if for_backward else None
        batch: BatchId | None
        if mine is None:
            batch = None if self._is_listed else ()
        elif mine.thread != thread or mine.number is None:
            batch = None
        elif mine.is_over and not self._is_listed:
            batch = ()
        else:
            batch = (mine.number,) if len(self._passes) == 1 else self._numbers(mine)
        items = self.items if self._counts else None
        for each in self._passes:
            each.unread = None
        if for_backward:
            for each in self._passes:
                if each.came and given in (None, each):
                    each.read = each.share
            self._awaits_backward = True
            if self._left_over is not None and self._left_over.is_taken:
                self._left_over = None
            if items is not None:
                items.is_found = True
        else:
            for each in self._passes:
                each.evaluated |= each.came
            if items is not None:
                items.is_taken, items = True, None
        weight = 1.0 if share is None or isinstance(share, Items) else share.weight(self._world_size)
        return Taken(weight, items, batch)

    def _given_alone(self, inputs: object, ahead: list[_BatchAhead]) -> _Pass | None:
        """Return the pass whose batch alone a forward is given, if it is known; see Note [Batches in hand].

        Args:
            inputs: the model's, a tree.
            ahead: the batches that were read ahead and are known by the inputs.
        """
        if self.items is not None:  # the script has said what weighs
            return None
        tensors = {id(leaf) for leaf in leaves(inputs) if isinstance(leaf, Tensor)}
        given = [
            each
            for each in self._passes
            if each.came and (id(each.first) in tensors or any(batch.loader is each.loader for batch in ahead))
        ]
        return given[0] if len(given) == 1 else None

    def _numbers(self, mine: _Pass) -> BatchId:
        """Return the batch of a pass and of those that are read beside it, by their loaders."""
        fresh = [each for each in self._passes if each.came and not each.evaluated] or self._passes
        others = [each.number for each in fresh if each.beside > 1 and each.thread == mine.thread]
        return tuple(sorted({each for each in (mine.number, *others) if each is not None}))

    def _take_up(self, batches: list[_BatchAhead], inputs: object, for_backward: bool) -> BatchShare | None:
        """Have batches in hand that a forward is given; see Note [Batches read ahead] in ``ahead.py``.

        Args:
            batches: those that are known by the inputs.
            inputs: the model's, a tree.
            for_backward: whether the forward computes gradients.

        Returns:
            The share that counts for the forward; None: that of the batch in hand.
        """
        live = self._live()
        if self._base is not None and not live:  # the script has said what weighs
            return None
        taken = None
        if for_backward and len(batches) > 1:
            self._refuse_two_of_one(batches, live)
        for batch in batches if not self._awaits_unknown else ():  # else one backward would meet two weights
            mine = next((each for each in live if each.loader is batch.loader), None)
            if mine is None:
                taken = batch.share
                if not live:
                    self._passes = [self._stand_in(batch)]
            elif mine.ahead is not None:  # else its batch is the one in hand, and this one is of an earlier pass
                if mine.is_used and mine.ahead.known is not batch:
                    mine.is_said = False  # it was said of an earlier batch
                if not mine.is_said:
                    mine.share = taken = batch.share
                mine.came, mine.ahead.known = True, batch
        if not batches:
            taken = self._share_of_unknown(live, inputs, for_backward)
        self._unread = None
        return taken

    def _refuse_two_of_one(self, batches: list[_BatchAhead], live: list[_Pass]) -> None:
        """Refuse a forward that is given several batches of one pass whose shares weigh differently."""
        if self.items is not None or any(each.is_said and not each.is_used for each in live):
            return
        passes = {each.loader: each for each in live}
        for one, two in combinations(batches, 2):
            mine = passes.get(one.loader)
            # (Objects that come again in each epoch are known by batches of earlier ones as well.)
            if one.number is None or two.number is None or one.number[:2] != two.number[:2]:
                continue
            if mine is not None and (mine.ahead is None or (mine.number or ())[:2] != one.number[:2]):
                continue
            if self._weigh_differently(one.share, two.share):
                raise LockstepError(
                    f"rank {self._rank} of {self._world_size}: this forward was given several batches of {one} whose "
                    f"shares weigh differently ({one.share.words()}, {two.share.words()}), so that no one weight makes "
                    "the mean exact. Use drop_last=True; or say what its loss is a mean of: world.weigh(this rank's "
                    "samples) before the forward"
                )

    def _live(self) -> list[_Pass]:
        """Return the passes that are not over."""
        return [each for each in self._passes if not each.is_over]

    def _stand_in(self, batch: _BatchAhead) -> _Pass:
        """Return what stands for the pass of a batch whose pass is over."""
        over = _Pass(batch)
        over.share, over.number, over.thread, over.came, over.is_over = (
            batch.share,
            batch.number,
            self._thread,
            True,
            True,
        )
        return over

    def _share_of_unknown(self, live: list[_Pass], inputs: object, for_backward: bool) -> BatchShare | None:
        """Return what counts for a forward that was given no known batch; warn if that may be wrong."""
        over = self._passes[-1] if len(live) < len(self._passes) else None
        if over is not None and ((over.came and not over.evaluated) or not (for_backward or over.is_used)):
            return over.share  # it goes on from a forward that knew its batch
        if over is not None:
            self.over = over.share
        self._passes = live
        self._awaits_unknown |= for_backward
        if for_backward:
            self._warn_of_unknown(live[-1] if live else None, inputs, is_seen=True)
        return None

    def _warn_of_unknown(self, mine: _Pass | None, inputs: object, *, is_seen: bool) -> None:
        """Warn if a backward seems to be of another batch than that in hand, which weighs otherwise.

        Args:
            mine: the pass whose batch is in hand; None: there is none.
            inputs: those of its forward, a tree.
            is_seen: False: it comes through no forward, and may be of any batch.
        """
        if mine is None:
            self._warn_of_list(inputs, is_seen=is_seen)
        elif mine.ahead is not None and mine.ahead.weighs_differently and mine.share is not None:
            others = {share.local_samples for share in mine.ahead.shares}
            if mine.is_said or mine.ahead.known is not None or mine.loader in self._warned:
                return
            if not is_seen or (mine.share.local_samples not in (lengths := _lengths(inputs)) and lengths & others):
                self._warn(mine.loader, mine.ahead.shares, is_seen=is_seen)

    def _warn_of_list(self, inputs: object, *, is_seen: bool) -> None:
        """Warn, at the first such backward after a pass that read ahead, if it seems to be of a batch, or of a list of
        batches, of it."""
        if self._ahead is None or not self._has_ended_ahead:
            return
        self._has_ended_ahead = False
        lists = {its_pass: batches for its_pass, batches in self._ahead.living().items() if len(batches) > 1}
        if self._unread is not None:
            lists[self._unread] = [self._unread]
        for its_pass, batches in lists.items():
            shares = [batch.share for batch in batches]
            is_uneven = not all(map(self._is_even, shares))
            if is_uneven and (not is_seen or _lengths(inputs) & {share.local_samples for share in shares}):
                loader, shares = batches[0].loader, list(dict.fromkeys(shares))[:_MOST_SHARES]
                self._warn(its_pass if loader is None else loader, shares, is_seen=is_seen)

    def _warn(self, loader: object, shares: list[BatchShare], *, is_seen: bool) -> None:
        """Warn of a loader, or of a pass of one that is gone, whose batches have these shares."""
        if loader in self._warned:
            return
        self._warned.add(loader)
        loader = "a sharded loader" if isinstance(loader, (_AheadOfModel, _BatchAhead)) else loader
        why = "The inputs of this forward are none of their tensors"
        remedy = "Give the model the loader's own tensors, which are on this rank's device already"
        if not is_seen:
            why = "The loss of this backward came by another method than the model's forward"
            remedy = "Call the model itself for the loss, with the loader's own tensors"
        callsite.warn(
            f"rank {self._rank} of {self._world_size}: batches of {loader} were taken before the model needed them (a "
            "list of them, a loop that reads ahead, or next(iter(loader))), and the shares of them weigh differently "
            f"(here {', '.join(share.words() for share in shares)}). {why}, so which batch it is of is not known, and "
            f"its mean may not be exact. {remedy}; or use drop_last=True; or call world.weigh(this rank's samples) "
            "before each backward"
        )

    def _is_even(self, share: BatchShare) -> bool:
        return share.is_even(self._world_size)

    def weigh_unseen(self) -> float:
        """Return what a backward through no forward is weighed by, unless items are counted.

        It is the batch in hand that counts, whose tensors nobody has seen in a model: a warning says so where it may be
        of another one, since the loop reads ahead, and their shares weigh differently.

        Raises:
            ValueError: no rank has any sample.
        """
        if self.items is None:
            self._warn_of_unknown(self._passes[-1] if self._passes else None, (), is_seen=False)
        for each in self._passes:
            each.unread = None  # the loop has had it
        return self._weight_by(self.share)

    @property
    def weight_of_forward(self) -> float:
        """What the backward of the forward under way is weighed by, unless items are counted.

        Raises:
            ValueError: no rank has any sample.
        """
        return self._weight_by(self.share_of_forward)

    def _weight_by(self, share: BatchShare | None) -> float:
        return 1.0 if share is None or isinstance(share, Items) else share.weight(self._world_size)

    def weigh(self, found: Items | None) -> Items | None:
        """Note that a backward begins, for which a batch's share is taken.

        Args:
            found: what :meth:`read` returned to its forward.

        Returns:
            What it is weighed by; None: by the share that its forward has found.

        Raises:
            LockstepError: as :meth:`refuse_contested`.
        """
        items = self.items_for(found) if self._counts else None
        if len(self._passes) > 1:
            self.refuse_contested("this backward", of_backward=True)
        self.take(items)
        return items

    def take(self, items: Items | None) -> None:
        """Note that a backward has begun, weighed by ``items`` or by the share, whatever else is in hand."""
        self._awaits_backward = self._awaits_unknown = False
        if items is not None:
            items.is_taken = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        """A backward has begun, or the script has said what weighs: what comes from now on is for the next one."""
        if len(self._passes) > 1:
            fresh = [each for each in self._passes if each.came and not each.evaluated]
            for each in self._passes if fresh else ():
                each.beside = each.beside + 1 if each in fresh and len(fresh) > 1 else 0
        for each in self._passes:
            each.came, each.evaluated, each.read, each.is_used = False, False, None, True

    def refuse_contested(self, what: str, *, of_backward: bool = False) -> None:
        """Refuse, alike on every rank, what takes one share for batches that have different ones.

        Args:
            what: what would take it, for the message.
            of_backward: look at the batches that were in hand when a forward took the share, not at those that are now.

        Raises:
            LockstepError: batches of several loaders are in hand, and they weigh differently.
        """
        contested = self._contested(of_backward=of_backward)
        if contested:
            batches = joined(f"{loader} ({share.words()})" for loader, share in contested)
            raise LockstepError(
                f"rank {self._rank} of {self._world_size}: {what} meets batches of several sharded loaders whose "
                f"shares weigh differently, so that no one weight makes the mean exact: {batches}. Give the loaders "
                f"the same batch size and length, or batch sizes that {self._world_size} ranks divide evenly with "
                "drop_last=True; or pass the weights: world.weigh(this rank's samples) before the backward, and call "
                "backward for each loader's loss by itself. If only one of the batches is trained on, give the model "
                "that loader's own tensors"
            )

    def _contested(self, *, of_backward: bool) -> list[tuple[object, BatchShare]]:
        """Return the batches that meet in one mean with different weights: empty, or at least two."""
        batches = {each.loader: each.read for each in self._passes if each.read is not None} if of_backward else {}
        batches = batches or {each.loader: each.share for each in self._passes if each.came and each.share is not None}
        if len(batches) < 2:
            return []
        inner = [self._around.get(loader, set()) for loader in batches]
        met = [loader for loader in batches if not any(loader in around for around in inner)]
        for loader in met[1:]:
            self._read_beside(met[0], loader)
        shares = [(loader, batches[loader]) for loader in met]
        return shares if any(self._weigh_differently(shares[0][1], other) for _, other in shares[1:]) else []

    def _read_beside(self, one: object, two: object) -> None:
        for first, second in ((one, two), (two, one)):
            self._beside.setdefault(first, WeakSet()).add(second)
            self._around.get(first, set()).discard(second)

    def _weigh_differently(self, one: BatchShare, two: BatchShare) -> bool:
        # Shares are rounded to whole samples, so the weights of two sizes of global batches are the same on every rank
        # only if the sizes are, or if nothing had to be rounded in either; and if both are cut in the same proportion.
        if one.global_samples == two.global_samples and one.proportions == two.proportions:
            return False
        cuts = [each.exact_parts(self._world_size) for each in (one, two)]
        return cuts[0] != cuts[1] or any(
            (Fraction(each.global_samples) * part).denominator != 1 for each in (one, two) for part in cuts[0]
        )


def _lengths(inputs: object) -> set[float]:
    """Return the first dimensions of the tensors in a tree."""
    return {len(leaf) for leaf in leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()}
