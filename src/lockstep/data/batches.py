"""The global batches of an epoch: cut out of an order of samples, or drawn by rank 0 and shipped.

Note [Drawn batches]
~~~~~~~~~~~~~~~~~~~~
A batch sampler chooses whole batches, of any size, and as many as it likes. It may have a state, draw from any
generator, and have no length or no end, so it is never rebuilt, cut or asked for an epoch twice: rank 0 alone asks it,
as one process would, and ships the batches to the others, a portion at a time. A rank's part of a batch is cut out of
it afterwards; nothing in a batch depends on the number of ranks.

A portion is shipped where all ranks ask for a batch of the same number, before any rank can need it: the ranks' workers
fetch ahead, by a number of batches that is known to all. The first one is shipped before workers are started. Ranks
whose loops are at different batches find out there.

The position in such an epoch is the number of batches, and of samples, that the loop has been given. A sampler can be
asked for an epoch from its beginning only, so a resumed pass draws the used batches again, and passes them over. A
digest tells whether they are the same: that of 20 batches is made from that of 19 and the twentieth batch, so that
every rank has it at every position. Generators are seeded for each epoch (Note [Random numbers of a sampler] in
``data/seeding.py``) and ``set_epoch`` is called, which is enough for most samplers. For one with a memory of its own
(``state_dict`` and ``load_state_dict``) the position has its state too: as it was before the epoch under way, or after
the last one. A sampler that draws other batches at a resume is refused.

An empty batch has no mean, so it is left out, with one warning. A batch with fewer samples than there are ranks is
treated like any other: some ranks have none of it.

The costs of samples that only rank 0 knows (Note [Parts of equal cost] in ``data/costs.py``) are shipped in the same
way, also those of batches that are cut out of an order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from lockstep import callsite
from lockstep.comm.exchange import group_device
from lockstep.comm.labels import labelled
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.world import World
from lockstep.data.costs import CostsOfSampler, SampleCosts, as_costs
from lockstep.data.cursor import Cursor
from lockstep.data.dead_workers import tells_of_a_death
from lockstep.data.mixing import mix
from lockstep.data.order import EpochOrder, as_indices, batch_count
from lockstep.data.sampler_watch import SamplerWatch
from lockstep.data.seeding import SamplerNumbers, following, parts_of_sampler
from lockstep.errors import CheckpointMismatch, CollectiveMismatch, LockstepError, named

Fetched = TypeVar("Fetched")

#: Batches of a portion, unless ranks fetch further ahead.
_PORTION = 256


class GlobalBatch(NamedTuple):
    """The samples of one global batch."""

    #: The number of the batch in its epoch, and the position of its first sample.
    number: int
    position: int
    #: The indices of its samples: int64 of shape (samples,).
    indices: torch.Tensor
    #: What each of them costs: float64 of shape (samples,); None: the loader has no costs.
    costs: torch.Tensor | None = None


@runtime_checkable
class EpochBatches(Protocol):
    """The global batches of an epoch from the cursor on; the same on every rank."""

    @property
    def drawn(self) -> str | None:
        """A digest of what the user's sampler drew, to be found again at a resume; None: there is no such sampler."""
        ...

    @property
    def order(self) -> EpochOrder | None:
        """The order of the epoch's samples; None: they are drawn, and were not known before."""
        ...

    def from_number(self, number: int) -> Iterator[GlobalBatch]:
        """Return the batches from ``number`` on."""
        ...

    def beside(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:
        """Return a rank's fetched shares of the batches from ``number`` on, as its loop asks for them. **Collective**
        for some numbers, the same on all ranks: batches are drawn before any rank may fetch them."""
        ...

    def batch(self, number: int) -> GlobalBatch:
        """Return the batch that the loop has, which is that of ``number``."""
        ...


class CutOrder:
    """An order of samples, cut into batches of one size.

    Args:
        order: the epoch's.
        batch_size: samples of a batch.
        drop_last: whether a last batch of fewer samples is dropped.
        cursor: where the batches begin.
        costs: of the samples; None, or told by rank 0: batches have none.
        drawn: the digest of the order, if a sampler drew it.
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        batch_size: int,
        drop_last: bool,
        cursor: Cursor,
        costs: SampleCosts | None = None,
        drawn: str | None = None,
    ) -> None:
        self.order, self._batch_size, self._first = order, batch_size, cursor
        self._costs = None if costs is None or costs.is_told_by_rank_0 else costs
        count = batch_count(len(order), batch_size=batch_size, drop_last=drop_last, start=cursor.samples)
        self._end = cursor.batches + count
        self.drawn = drawn

    def from_number(self, number: int) -> Iterator[GlobalBatch]:
        """See :class:`EpochBatches`."""
        return map(self.batch, range(number, self._end))

    def beside(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:  # noqa: ARG002
        """See :class:`EpochBatches`."""
        return fetched

    def batch(self, number: int) -> GlobalBatch:
        """See :class:`EpochBatches`."""
        begin = self._first.samples + (number - self._first.batches) * self._batch_size
        indices = self.order[begin : begin + self._batch_size]
        return GlobalBatch(number, begin, indices, None if self._costs is None else self._costs.of(indices))


#: The indices of a batch and, where rank 0 tells them, the costs of its samples.
Drawn = tuple[torch.Tensor, torch.Tensor | None]


class Drawing(Protocol):
    """The source from which rank 0 draws the batches of an epoch."""

    @property
    def what(self) -> str:
        """The name of the sampler that draws, for messages."""
        ...

    @property
    def begins_at(self) -> int:
        """The number of the first batch that it draws."""
        ...

    def take(self, most: int) -> list[Drawn]:
        """Return the next ``most`` batches; fewer if the epoch is at its end."""
        ...

    def state(self) -> Any:
        """Return the state of the sampler, in JSON types; None if it has none."""
        ...

    def length(self) -> int | None:
        """Return the number of batches of an epoch by the sampler's own ``len()``; None: it has none."""
        ...


class BatchSamplerDrawing:
    """Draws with a user's batch sampler; see Note [Drawn batches].

    Args:
        sampler: the user's sampler.
        seed, epoch: what its generators are seeded from.
        state: the state to put it into first; None: it stays in the one that it has.
        costs: those of the loader.
    """

    begins_at = 0

    def __init__(self, sampler: Any, *, seed: int, epoch: int, state: Any, costs: SampleCosts | None) -> None:
        self.what = f"the batch sampler {type(sampler).__name__}"
        self._sampler, self._epoch = sampler, epoch
        self._takes_costs = isinstance(costs, CostsOfSampler)
        self._costs = costs if costs is not None and costs.is_told_by_rank_0 and not self._takes_costs else None
        self._numbers = SamplerNumbers(sampler, mix(seed, epoch))
        self._batches: Iterator[Any] | None = None
        self._drawn = 0
        with self._numbers.drawing():
            self._prepare(state)

    def _prepare(self, state: Any) -> None:
        if state is not None:
            self._load(state)
        for part in parts_of_sampler(self._sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)

    def _load(self, state: Any) -> None:
        if not hasattr(self._sampler, "load_state_dict"):
            raise CheckpointMismatch(
                f"the saved position has a state of the batch sampler, and {self.what} has no load_state_dict: give "
                "the loader the sampler that it was saved with"
            )
        self._sampler.load_state_dict(state)

    def take(self, most: int) -> list[Drawn]:
        """See :class:`Drawing`."""
        with self._numbers.drawing():
            if self._batches is None:
                self._batches = iter(self._sampler)
            return [self._read(each) for each in following(self._batches, most)]

    def _read(self, given: Any) -> Drawn:
        number = self._drawn
        self._drawn += 1
        indices, costs = given, None
        if self._takes_costs:
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise TypeError(f'batch {number} is no pair (indices, costs), which costs="sampler" needs: {given!r}')
            indices, costs = given
        if isinstance(indices, (str, bytes, dict)) or not isinstance(indices, Iterable):
            raise TypeError(f"batch {number} is {indices!r}; expected the indices of its samples")
        numbers = as_indices(indices)
        if costs is not None:
            costs = as_costs(costs, f"batch {number} has")
            if len(costs) != len(numbers):
                raise ValueError(f"batch {number} has {len(numbers)} samples and {len(costs)} costs")
        elif self._costs is not None:
            costs = self._costs.of(numbers)
        return numbers, costs

    def state(self) -> Any:
        """See :class:`Drawing`.

        Raises:
            TypeError: the sampler's state is not made of JSON types.
        """
        if not hasattr(self._sampler, "state_dict") or not hasattr(self._sampler, "load_state_dict"):
            return None
        state = self._sampler.state_dict()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"its state_dict() is kept with the position of the loader, and has to be made of JSON types: {error}"
            ) from None

    def length(self) -> int | None:
        """See :class:`Drawing`."""
        with self._numbers.drawing():
            return length_of(self._sampler)


class CostedOrder:
    """Draws only costs: those of batches that are cut out of an order.

    Args:
        batches: those from the cursor on.
        begins_at: the number of the first of them.
        costs: the user's function.
    """

    what = "the function costs="

    def __init__(self, batches: Iterator[GlobalBatch], *, begins_at: int, costs: SampleCosts) -> None:
        self._batches, self._costs = batches, costs
        self.begins_at = begins_at

    def take(self, most: int) -> list[Drawn]:
        """See :class:`Drawing`."""
        return [(batch.indices, self._costs.of(batch.indices)) for batch in following(self._batches, most)]

    def state(self) -> Any:
        """See :class:`Drawing`."""
        return None

    def length(self) -> int | None:
        """See :class:`Drawing`."""
        return None


def length_of(sampler: Any) -> int | None:
    """Return the number of batches by a batch sampler's own ``len()``; None: it has none."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class Shipping:
    """The facts that are the same for all epochs of a loader whose batches rank 0 ships."""

    world: World
    #: The number of the loader, the same on all ranks.
    loader: int
    #: The most batches that any rank asks for beyond the one that its loop has.
    ahead: int
    #: What samples cost, or None.
    costs: SampleCosts | None
    #: What compares the ranks' samplers.
    watch: SamplerWatch


class DrawnBatches:
    """Batches that rank 0 draws and ships; see Note [Drawn batches].

    Args:
        shipping: the loader and its ranks.
        begin: makes what rank 0 draws from; called on rank 0, when the first portion is due.
        cursor: where the batches begin.
        drawn: the digest of the batches before the cursor, if they are to be compared; else that of the order.
        is_chained: whether a digest goes on with each batch.
    """

    def __init__(
        self,
        shipping: Shipping,
        begin: Callable[[], Drawing],
        *,
        cursor: Cursor,
        drawn: str | None,
        is_chained: bool,
    ) -> None:
        self._world, self._loader, self._ahead = shipping.world, shipping.loader, shipping.ahead
        self._begin, self._cursor = begin, cursor
        self.drawn, self._is_chained = drawn, is_chained
        #: What compares the ranks' samplers before the first portion.
        self._watch: SamplerWatch | None = shipping.watch
        self.order: EpochOrder | None = None
        costs = shipping.costs
        self._costs = None if costs is None or costs.is_told_by_rank_0 else costs
        self._drawing: Drawing | None = None
        self._batches: dict[int, GlobalBatch] = {}
        #: The number of the batch that comes next, the position of its first sample, and whether there is none.
        self._next, self._position, self._is_over = cursor.batches, cursor.samples, False
        #: The state of the sampler before the epoch, and after what was drawn; how many batches there are by its word.
        self.before: Any = None
        self.after: Any = None
        self.length: int | None = None
        self._has_said = False

    def beside(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:
        """See :class:`EpochBatches`.

        Raises:
            LockstepError: the sampler failed, or drew something else than indices; on every rank.
            CheckpointMismatch: it draws other batches than before the interruption; on every rank.
            CollectiveMismatch: the ranks' loops are at different batches.
        """
        while True:
            self._draw(number)
            item = next(fetched, None)
            if item is None:
                return
            if self._is_chained:
                self.drawn = _chained(self.drawn, self._batches[number].indices)
            yield item
            number += 1

    def _draw(self, number: int) -> None:
        """Have batch ``number`` ready, and those after it that may be fetched ahead."""
        for past in range(min(self._batches, default=number), number):
            self._batches.pop(past, None)
        while not self._is_over and self._next <= number + self._ahead:
            self._ship(max(_PORTION, self._ahead + 1))

    def from_number(self, number: int) -> Iterator[GlobalBatch]:
        """See :class:`EpochBatches`."""
        while number < self._next:
            yield self._batches[number]
            number += 1
        if not self._is_over:
            raise LockstepError(f"{self._whoami()}: batch {number} was asked for before rank 0 had drawn it")

    def batch(self, number: int) -> GlobalBatch:
        """See :class:`EpochBatches`."""
        return self._batches[number]

    @property
    def count(self) -> int | None:
        """The number of batches of this epoch, once all are drawn; None until then."""
        return self._next if self._is_over else None

    def _ship(self, most: int) -> None:
        with labelled("global batches that rank 0 draws"):
            watch, self._watch = self._watch, None

            def attempt() -> tuple[dict[str, Any], _Portion | None]:
                looked = {} if watch is None else {"sampler": watch.look()}  # (before rank 0 draws)
                return looked, self._attempt(most)

            (_, drawn), told = together(
                OverGroup(self._world),
                attempt,
                lambda found: {**found[0], **self._tell(found[1])},
                what="drawing global batches",
            )
            self._refuse_apart([each["at"] for each in told])
            if watch is not None:
                watch.compare([each["sampler"] for each in told], epoch=self._cursor.epoch)
            facts = told[0]
            sizes_and_indices, costs = self._broadcast(drawn, facts)
        sizes = sizes_and_indices[: facts["batches"]].tolist()
        indices = sizes_and_indices[facts["batches"] :].split(sizes)
        parts = [None] * len(sizes) if costs is None else costs.split(sizes)
        for each, part in zip(indices, parts, strict=True):
            self._add(each, part)
        self._is_over = facts["is over"]
        if "before" in facts:
            self.before, self.length = facts["before"], facts["length"]
        self.after = facts["after"]

    def _add(self, indices: torch.Tensor, costs: torch.Tensor | None) -> None:
        if self._costs is not None:
            try:
                costs = self._costs.of(indices)
            except ValueError as error:
                raise ValueError(f"{self._whoami()}, batch {self._next}: {error}") from None
        self._batches[self._next] = GlobalBatch(self._next, self._position, indices, costs)
        self._next, self._position = self._next + 1, self._position + len(indices)

    def _tell(self, drawn: _Portion | None) -> dict[str, Any]:
        at = {"at": [self._loader, self._cursor.epoch, self._next]}
        return at if drawn is None else {**at, **drawn.facts}

    def _refuse_apart(self, places: list[list[int]]) -> None:
        if all(place == places[0] for place in places):
            return
        words = ", ".join(
            f"rank {rank}: batch {batch} of epoch {epoch} of sharded loader {loader}"
            for rank, (loader, epoch, batch) in enumerate(places)
        )
        raise CollectiveMismatch(
            f"{self._whoami()}: the ranks ask for the batches that rank 0 draws at different places ({words}). A rank "
            "has left its loop before the others, or skipped batches: decide this on all ranks together, with "
            "world.any(stop)"
        )

    def _broadcast(self, drawn: _Portion | None, facts: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        count = facts["batches"] + facts["samples"]
        numbers = self._shared(None if drawn is None else drawn.numbers, count, torch.int64)
        if not facts["costs"]:
            return numbers, None
        return numbers, self._shared(None if drawn is None else drawn.costs, facts["samples"], torch.float64)

    def _shared(self, mine: torch.Tensor | None, count: int, dtype: torch.dtype) -> torch.Tensor:
        device = group_device(self._world.group)
        shared = torch.empty(count, dtype=dtype, device=device) if mine is None else mine.to(device)
        if count:
            dist.broadcast(shared, src=0, group=self._world.group)
        return shared.cpu()

    # On rank 0 --------------------------------------------------------------------------------------------------------

    def _attempt(self, most: int) -> _Portion | None:
        """Return the next portion on rank 0; None on the others.

        Raises:
            LockstepError: the sampler failed.
            CheckpointMismatch: it draws other batches than before.
        """
        if not self._world.is_main:
            return None
        what = "the sampler"
        try:
            began: dict[str, Any] = {}
            if self._drawing is None:
                self._drawing = self._begin()
                what = self._drawing.what
                began = {"before": self._drawing.state(), "length": self._drawing.length()}
                self._pass_over(self._drawing)
            what = self._drawing.what
            batches, is_over = self._filled(self._drawing, most)
            return _Portion.of(batches, {**began, "is over": is_over, "after": self._drawing.state()})
        except LockstepError:
            raise
        except Exception as error:
            if tells_of_a_death(error):
                raise
            raise LockstepError(
                f"{what} could not draw the batches from {self._next} on of epoch {self._cursor.epoch}: {named(error)}"
            ) from error

    def _filled(self, drawing: Drawing, most: int) -> tuple[list[Drawn], bool]:
        """Return at most ``most`` batches that are not empty, and whether the epoch is over."""
        found: list[Drawn] = []
        while len(found) < most:
            asked = most - len(found)
            given = drawing.take(asked)
            filled = [each for each in given if len(each[0])]
            if len(filled) < len(given) and not self._has_said:
                self._has_said = True
                callsite.warn(
                    f"{drawing.what} has drawn an empty batch in epoch {self._cursor.epoch}. Empty batches are left "
                    "out: there is nothing to take a mean of"
                )
            found += filled
            if len(given) < asked:
                return found, True
        return found, False

    def _pass_over(self, drawing: Drawing) -> None:
        """Draw the batches again that were used before the interruption, and compare them."""
        left, samples, digest = self._cursor.batches - drawing.begins_at, 0, None
        while left > 0:
            batches, is_over = self._filled(drawing, min(left, _PORTION))
            for indices, _ in batches:
                digest, samples = _chained(digest, indices), samples + len(indices)
            left -= len(batches)
            if is_over and left:
                break
        if self._is_chained and (digest, samples) != (self.drawn, self._cursor.samples):
            raise CheckpointMismatch(
                f"{drawing.what} drew other batches for epoch {self._cursor.epoch} than before it was interrupted, so "
                f"the {self._cursor.samples} samples of the {self._cursor.batches} batches already used are not known. "
                "Let it draw from generators that it holds in attributes, or from torch's, Python's or NumPy's global "
                "ones, which are seeded for each epoch; if it remembers anything else, give it state_dict() and "
                "load_state_dict()"
            )

    def _whoami(self) -> str:
        world = self._world
        return f"rank {world.rank} of {world.world_size}, epoch {self._cursor.epoch}"


class _Portion(NamedTuple):
    """Batches on the way from rank 0 to the others."""

    #: The sizes of the batches, and then the indices of all: int64.
    numbers: torch.Tensor
    #: The costs of all samples: float64.
    costs: torch.Tensor | None
    #: What the others must know, in JSON types.
    facts: dict[str, Any]

    @classmethod
    def of(cls, batches: list[Drawn], facts: dict[str, Any]) -> _Portion:
        sizes = torch.tensor([len(indices) for indices, _ in batches], dtype=torch.int64, device="cpu")
        costs = [costs for _, costs in batches if costs is not None]
        facts = {**facts, "batches": len(batches), "samples": int(sizes.sum()), "costs": bool(costs)}
        return cls(torch.cat([sizes, *(indices for indices, _ in batches)]), torch.cat(costs) if costs else None, facts)


def _chained(digest: str | None, indices: torch.Tensor) -> str:
    """Return the digest of the batches so far, from that of all before and the last one's indices."""
    return hashlib.blake2b((digest or "").encode() + indices.numpy().tobytes(), digest_size=16).hexdigest()
