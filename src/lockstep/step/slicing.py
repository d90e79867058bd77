"""A step in slices: where those meet that hand out slices of a global batch and those that add up what comes of them.

``data`` cuts the batches, ``ddp`` averages gradients, ``metrics`` adds up numbers, and none knows the others. They meet
here: there is at most one :class:`SlicedStep` in hand, which tells its members where it is.

Note [A step in slices]
~~~~~~~~~~~~~~~~~~~~~~~
Within a step the ranks hold different numbers of slices, or none, so nothing in there may be collective. At its end all
ranks meet once and tell each other what they did: which members had anything to do, how much each slice weighs, whether
memory ran out. Then each member that any rank had work for puts it together, in the order in which the members came to
be, which is the same on all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from lockstep import accelerator
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.job import flight
from lockstep.step import lengths
from lockstep.step import tree_sum as order
from lockstep.step.share import BatchShare


@dataclass(frozen=True)
class Cut:
    """How a global batch is cut into slices, and which rank has which: the same on all ranks."""

    #: Samples of each slice.
    sizes: Sequence[int]
    #: For each rank its first slice, and the one after its last.
    runs: Sequence[tuple[int, int]]
    #: The fewest samples that a slice of the epoch has.
    smallest: int = 2

    @property
    def slices(self) -> int:
        """Into how many slices the batch is cut."""
        return len(self.sizes)

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return sum(self.sizes)

    @property
    def filled(self) -> list[int]:
        """The numbers of the slices that have samples."""
        return [number for number, size in enumerate(self.sizes) if size]

    def share_of(self, rank: int) -> BatchShare:
        """Return how much of the batch a rank has."""
        first, end = self.runs[rank]
        return BatchShare(sum(self.sizes[first:end]), self.samples)

    def nodes(self) -> list[list[order.Node]]:
        """Return what sums each rank is left with at the end; see Note [One tree] in ``step/tree_sum.py``."""
        return [order.nodes_of(first, end, self.slices) for first, end in self.runs]


class Ranks(Protocol):
    """What a step needs of the world that it is taken in."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class Gather(Protocol):
    """How ranks tell each other something."""

    def __call__(self, record: Any, what: str) -> list[Any]:
        """**Collective.** Return every rank's ``record``, in JSON types; ``what`` names the exchange in errors."""
        ...


class Member(Protocol):
    """What takes part in steps in slices: a replica, a log."""

    def step_begins(self, step: SlicedStep) -> None:
        """**Collective** if the member has anything to agree on. A step begins, or begins anew."""
        ...

    def slice_ends(self, step: SlicedStep, number: int) -> None:
        """Take what has come of slice ``number``, which this rank has been through."""
        ...

    def step_ends(self, step: SlicedStep) -> None:
        """**Collective.** Put together what the ranks have; called if any rank had work for this member."""
        ...

    def forget(self) -> None:
        """Throw away what has come of the step so far, as if it had not begun."""
        ...


_members: WeakValueDictionary[int, Any] = WeakValueDictionary()
#: The number of members that have joined so far.
_made = 0
#: The step in slices that is in hand on this rank.
current: SlicedStep | None = None
#: True if the ranks have exchanged a record of full length, so that there is memory for it at the end of a step.
_has_met = False
_FIRST_MESSAGE = 1 << 14


def join(member: Member) -> int:
    """**Collective.** Let ``member`` take part in all steps in slices to come; return its number, alike on all ranks.

    It is held weakly.
    """
    global _made
    _made += 1
    _members[_made] = member
    return _made


def leave(number: int) -> None:
    """Take no part any more."""
    _members.pop(number, None)


def in_slice() -> bool:
    """Return whether a slice is in hand, so that nothing may be collective here."""
    return current is not None and current.number is not None


def here() -> tuple[int, ...] | None:
    """Return the slice in hand: of which step, and its number; None outside of slices."""
    return None if current is None or current.number is None else (*current.key, current.number)


def refuse_in_slice(what: str) -> None:
    """Raise if a slice is in hand.

    Raises:
        LockstepError: there is one.
    """
    if current is not None and current.number is not None:
        world = current.world
        raise LockstepError(
            f"rank {world.rank} of {world.world_size}: {what} needs all ranks, and was called inside a slice. "
            "Each rank has another number of slices: call it after the inner loop"
        )


class SlicedStep:
    """One global batch, cut into slices, of which this rank has some.

    Args:
        world: the ranks.
        gather: how they tell each other how their slices went.
        key: identifies the step on all ranks: the epoch, the number of the batch, and of the pass over it, and the
            samples of the epoch's order, where each rank makes that for itself (else 0).
        cut: its slices.
        measures: count how long a GPU is at the slices, and not how long it takes to launch them; it is waited for at
            the step's end.
        may_fail: memory may run out, and the step be taken again: what its end needs is to be there at its beginning.
    """

    def __init__(
        self,
        world: Ranks,
        gather: Gather,
        *,
        key: Sequence[int],
        cut: Cut,
        measures: bool = False,
        may_fail: bool = False,
    ) -> None:
        self.world, self.key, self.cut, self.may_fail = world, tuple(key), cut, may_fail
        self._gather = gather
        #: The slice in hand.
        self.number: int | None = None
        #: Tokens that were counted for the optimizer's step to come before this one began.
        self._tokens_before = flight.current.tokens
        #: Slice -> its number of items, if the script has told; of this rank's slices, at the end of all slices.
        self.items: dict[int, int] = {}
        #: The sum of the weights of all slices; known at the end.
        self.total = 0.0
        #: Seconds that each rank spent on its slices; known at the end.
        self.seconds: list[float] = []
        self._spent = 0.0
        measures = measures and world.device.type != "cpu"
        #: The time that a GPU was at each slice; None: not measured, or by waiting for each where events tell no time.
        self._stopwatches: list[accelerator.Stopwatch] | None = None
        if measures and accelerator.has_times(world.device):
            self._stopwatches = []
        self._waits = measures and self._stopwatches is None
        #: Number of a member that took part -> its record: of this rank, at the end of all ranks.
        self.said: dict[int, Any] = {}
        #: Number of a member -> its records of all ranks on which it took part; known at the end.
        self.says: dict[int, list[Any]] = {}
        #: The mistake in this rank's slices that makes the step worthless; told to all ranks at the end.
        self._mistake: str | None = None
        #: Slice -> its loss, as far as the script has told: of this rank.
        self._losses: dict[int, Any] = {}
        #: The mean of the losses over all slices of all ranks; known at the end.
        self.loss: float | None = None

    def weight(self, number: int) -> float | None:
        """Return what the mean over a slice is multiplied by before it is added to others; None: by nothing.

        Samples, or the items that the script has weighed; if no slice is weighed and all are of one size, there is
        nothing to multiply. The same decision for all slices of a step, whoever has them.
        """
        if number in self.items:
            return self.items[number]
        sizes = self.cut.sizes
        return None if min(sizes) == max(sizes) else sizes[number]

    def weigh(self, items: int) -> None:
        """Say that what comes of the slice in hand is a mean over so many items."""
        if self.number is not None:
            self.items[self.number] = items

    def add_loss(self, loss: Any) -> None:
        """Add to the loss of the slice in hand: a number, or a tensor with one element, read at the end."""
        assert self.number is not None  # asked for by Step.add_loss
        own = loss.detach().double() if isinstance(loss, torch.Tensor) else float(loss)
        before = self._losses.get(self.number)
        self._losses[self.number] = own if before is None else before + own

    def note_mistake(self, words: str) -> None:
        """Have the step end with an error on all ranks, and not on this one alone; the first one counts."""
        self._mistake = self._mistake or f"{self.whoami()}: {words}"

    def touch(self, member: int, say: Any = None) -> None:
        """Note that ``member`` had something to do in the slice in hand.

        Args:
            member: its number.
            say: what the member finds in :attr:`said` in the end, on all ranks: in JSON types, from the first rank that
                had something to do for it.
        """
        self.said[member] = say

    # How it goes ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """**Collective** if a member has anything to agree on, or the step may fail. Begin the step."""
        global current, _has_met
        if current is not None:
            raise LockstepError(
                f"rank {self.world.rank} of {self.world.world_size}: a step in slices begins inside another one: go "
                "through the steps() of one loader at a time"
            )
        for member in _living():
            member.step_begins(self)
        if self.may_fail and not _has_met:
            self._gather("." * _FIRST_MESSAGE, "the beginning of a step that may fail")
            _has_met = True
        current = self

    @contextmanager
    def slice(self, number: int) -> Iterator[None]:
        """Have slice ``number`` in hand."""
        self.number, begun = number, time.perf_counter()
        if self._stopwatches is not None:
            self._stopwatches.append(accelerator.Stopwatch(self.world.device))
        try:
            yield
            for member in _living():
                member.slice_ends(self, number)
            if self._waits:
                accelerator.synchronize(self.world.device)
        finally:
            self.number = None
            self._spent += time.perf_counter() - begun
            if self._stopwatches is not None:
                self._stopwatches[-1].stop()

    def abandon(self) -> None:
        """Leave the step: nothing of it stays."""
        global current
        if current is self:
            current = None
            flight.current.tokens = self._tokens_before  # the script counts them again when it takes the step again
            for member in _living():
                member.forget()

    def end(self, failure: str | None = None) -> str | None:
        """**Collective.** End the step: put together what the ranks have, unless there was a failure on any of them.

        Args:
            failure: what went wrong on this rank, so that the step can't be used.

        Returns:
            what went wrong, on the first rank where anything did; the step is abandoned then.

        Raises:
            CollectiveMismatch: the ranks are in different steps.
            LockstepError: some slices were weighed, and others not, or something was noted; on all ranks.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        global current
        told = self._tell(failure)
        failures = [f"rank {rank}: {each[1]}" for rank, each in enumerate(told) if each[1] is not None]
        if failures:
            self.abandon()
            return failures[0]
        mistakes = [each[6] for each in told if each[6] is not None]
        if mistakes:
            self.abandon()
            raise LockstepError(mistakes[0])
        self.seconds = [each[4] for each in told]
        self._take_weights([{int(number): items for number, items in each[2].items()} for each in told])
        self._take_losses([{int(number): loss for number, loss in each[7].items()} for each in told])
        for each in reversed(told):
            self.said.update((int(number), say) for number, say in each[3].items())
        for each in told:
            for number, say in each[3].items():
                self.says.setdefault(int(number), []).append(say)
        current = None
        ended: set[int] = set()
        try:
            for number in sorted(self.said):
                member = _members.get(number)
                if member is None:
                    raise LockstepError(
                        f"{self.whoami()}: another rank has trained a model or used a log that no longer exists here: "
                        "keep a reference to it on every rank"
                    )
                ended.add(number)
                member.step_ends(self)
        finally:  # also if the end of one has failed
            for number in sorted(set(_members) - ended):
                _members[number].forget()
        return None

    def _tell(self, failure: str | None) -> list[list[Any]]:
        losses = {number: float(loss) for number, loss in self._losses.items()} if failure is None else {}
        said = dict(self.said)
        spent = self._spent if self._stopwatches is None else sum(each.seconds() for each in self._stopwatches)
        mine = [self.key, failure, self.items, said, spent, _made, self._mistake, losses]
        if self.world.world_size == 1:
            return [mine]
        told = self._gather(mine, "the end of a step in slices")
        if any(each[5] != told[0][5] for each in told):
            made = ", ".join(f"rank {rank}: {each[5]}" for rank, each in enumerate(told))
            raise CollectiveMismatch(
                f"{self.whoami()}: the ranks have made different numbers of replicas and logs ({made}): make each "
                "lockstep.Log and call each lockstep.replicate on every rank, in the same order"
            )
        if any(each[0] != told[0][0] for each in told):
            is_apart = lengths.differ((each[0][0], each[0][3]) for each in told)
            steps = ", ".join(
                f"rank {rank}: {_words_of(each[0], with_length=is_apart)}" for rank, each in enumerate(told)
            )
            raise CollectiveMismatch(
                f"{self.whoami()}: the ranks are at the end of different steps ({steps})"
                + (f". {lengths.OTHER_LENGTHS}" if is_apart else "")
            )
        return told

    def _take_weights(self, items: Sequence[dict[int, int]]) -> None:
        self.items = {number: each[number] for each in items for number in each}
        there = self.cut.filled
        left_out = [number for number in there if number not in self.items]
        if self.items and left_out:
            self.abandon()
            raise LockstepError(
                f"{self.whoami()}: weigh() was called in slices {sorted(self.items)} and not in {left_out}: say in "
                "every slice what its loss is a mean of, or in none"
            )
        weights = [self.weight(number) for number in there]
        self.total = float(sum(1.0 if weight is None else weight for weight in weights))
        if not self.total:
            self.abandon()
            raise LockstepError(
                f"{self.whoami()}: the slices weigh nothing together: there is nothing to take a mean of, so leave "
                "such a batch out, on all ranks"
            )

    def _take_losses(self, losses: Sequence[dict[int, float]]) -> None:
        """Take their mean, in the order of the slices, whoever had them."""
        told = {number: each[number] for each in losses for number in each}
        if not told:
            return
        weights = {number: self.weight(number) for number in self.cut.filled}
        missing = [number for number in weights if number not in told]
        if missing:
            self.abandon()
            raise LockstepError(
                f"{self.whoami()}: add_loss() was called in slices {sorted(told)} and not in {missing}: call it in "
                "every slice, or in none"
            )
        parts = [
            told[number] if weight is None else told[number] * weight
            for number, weight in weights.items()
            if weight != 0  # the mean over nothing is NaN
        ]
        self.loss = math.fsum(parts) / self.total if all(map(math.isfinite, parts)) else sum(parts)

    def whoami(self) -> str:
        """Say which rank this is, and in which step."""
        return f"rank {self.world.rank} of {self.world.world_size}, {_words_of(self.key)}"


def _words_of(key: Sequence[int], *, with_length: bool = False) -> str:
    epoch, batch, its_pass, length = key
    again = f", pass {its_pass + 1}" if its_pass else ""
    return f"epoch {epoch}{f' of {length:,} samples' if with_length else ''}, batch {batch}{again}"


def _living() -> list[Any]:
    return [member for _, member in sorted(_members.items())]
