"""Seed each sample, so that random augmentation does not depend on which process fetches it.

Note [Sample seeds]
~~~~~~~~~~~~~~~~~~~
The numbers that a sample draws from the generators of torch (CPU), Python and NumPy's legacy interface are decided by
(seed, epoch, position of the sample in the epoch's order). So a sample is augmented the same way on any rank, in any
worker process, in a world of any size, and after a resume in the middle of an epoch; and differently in the next epoch,
or when a sampler draws it twice in one. The last case is why the position is used, not the sample's index.

Seeding the three takes longer than many a dataset takes for a sample, and most draw from one of them or from none. So a
generator is seeded for each sample only once a sample was seen to draw from it. Until then it rests, in a state that
(seed, epoch) decide, and is looked at after each batch: if it has moved, the batch is fetched once more, with it seeded
before each sample. Of the first batch of all the first sample is looked at alone, so that a dataset that always draws
is asked twice for that one (unless it fetches whole batches, which is worth more). The samples are the same as if all
three were always seeded. A dataset can read a generator without moving it (``torch.initial_seed()``, or drawing within
a context that restores the state afterwards): it then finds the resting state, the same for all samples of the epoch,
at any number of ranks.

The samples of a stream can't be asked for twice. So all three are seeded before its first two, and looked at after the
second and after each batch. One that has moved is seeded before each sample from then on; the others rest in the state
that they had before the second sample. A stream that draws from one for the first time in a later batch draws all
numbers of that batch from there, one after the other. So its numbers are decided by (seed, epoch, position), and by
which samples share a batch, which all who read the stream agree on; a reader that goes on by a state is told which
generators were seeded. Where the user wants no seeds, they are seeded when a pass opens the stream and before its first
two samples, and are its own from there on: what it draws depends on nothing else that draws, and changes nothing else,
so that all who read a stream read the same. A collate_fn of the user's is seeded for each batch in either case: ranks
have shares of different sizes, and draw differently often.

A worker process uses its generators for nothing else. In the main process (``num_workers=0``) their states are
restored after each batch, so that fetching data does not affect the model's dropout.

A ``numpy.random.Generator`` that a dataset holds itself is out of reach: seed a new one from ``numpy.random.randint``.

Note [Random numbers of a sampler]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Only rank 0 asks a user's sampler for its order, and an interrupted epoch has to be drawn the same again. So while it
draws, the common generators are seeded from (seed, epoch), and so are those that it holds itself, or that samplers it
is made of hold: ``torch.Generator``, ``random.Random``, and NumPy's of both kinds. Between two portions of an epoch,
and after it, all of them are back in the states that they had: a script that shares one with a sampler draws from it
the same numbers on every rank. A generator that a sampler makes in ``__iter__`` is left alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from lockstep.data.dead_workers import tells_of_a_death
from lockstep.data.mixing import mix, mixed
from lockstep.step.generators import GENERATORS

Sample = TypeVar("Sample")

#: All generators, a bit for each, as :attr:`StreamSeeds.seen`.
ALL_GENERATORS = (1 << len(GENERATORS)) - 1
#: Samples of a stream before each of which all generators are seeded.
_ALONE = 2
#: The deepest sampler within samplers whose generators are seeded.
_DEEPEST = 4


def seed_generators(seed: int) -> None:
    """Seed torch's CPU generator, Python's and NumPy's from one 64-bit number. This takes about 13 µs."""
    for generator in GENERATORS:
        generator.seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators of torch (CPU), Python and NumPy after the block."""
    before = _states()
    try:
        yield
    finally:
        _restore(before)


class SampleSeeds:
    """Fetches samples whose random numbers are those of their positions; see Note [Sample seeds].

    A dataset's workers share it, over all epochs.

    Args:
        looks_at_first: whether the first sample is fetched and looked at alone, rather than with its batch.
    """

    def __init__(self, *, looks_at_first: bool) -> None:
        #: 1 for each generator that a sample was seen to draw from, and 1 at the end once a sample was looked at.
        self._seen = torch.zeros(len(GENERATORS) + 1, dtype=torch.uint8, device="cpu").share_memory_()
        self._seen[-1] = not looks_at_first
        #: The epoch's key and the state in which each generator rests.
        self._rest: tuple[int, list[Any]] = (-1, [])

    def fetch(
        self,
        epoch_key: int,
        positions: Sequence[int],
        one: Callable[[int], Sample],
        several: Callable[[range], list[Sample]],
    ) -> list[Sample]:
        """Return the samples at ``positions`` of the epoch's order.

        Afterwards the generators are in any state: the caller restores them.

        Args:
            epoch_key: a number for the seed and the epoch, unlike those of all others.
            positions: one for each sample.
            one: fetches a sample, given its place in ``positions``.
            several: fetches samples, given their places, where no generator has to be seeded.
        """
        places = range(len(positions))
        if self._seen[-1]:
            return self._watched(epoch_key, positions, places, one, several)
        first = self._watched(epoch_key, positions, places[:1], one, several)
        self._seen[-1] = 1
        return first + (self._watched(epoch_key, positions, places[1:], one, several) if places[1:] else [])

    def _watched(
        self,
        epoch_key: int,
        positions: Sequence[int],
        places: range,
        one: Callable[[int], Sample],
        several: Callable[[range], list[Sample]],
    ) -> list[Sample]:
        while True:
            resting = self._let_rest(epoch_key)
            try:
                if len(resting) < len(GENERATORS):
                    samples = self._seeding(epoch_key, positions, places, one, resting)
                else:
                    samples = several(places)
            except Exception as error:
                if not self._have_moved(resting) or tells_of_a_death(error):
                    raise
            else:
                if not self._have_moved(resting):
                    return samples

    def _seeding(
        self,
        epoch_key: int,
        positions: Sequence[int],
        places: range,
        one: Callable[[int], Sample],
        resting: Mapping[int, Any],
    ) -> list[Sample]:
        """Return the samples, with the generators that do not rest seeded before each."""
        seeded = [generator for number, generator in enumerate(GENERATORS) if number not in resting]
        samples = []
        for place, seed in zip(places, mixed(epoch_key, positions[places.start : places.stop]).tolist(), strict=True):
            for generator in seeded:
                generator.seed(seed)
            samples.append(one(place))
        return samples

    def _have_moved(self, resting: Mapping[int, Any]) -> bool:
        """Return whether one of these generators has left its state, and note which."""
        moved = [number for number, state in resting.items() if not GENERATORS[number].is_at(state)]
        if moved:
            self._seen[moved] = 1
        return bool(moved)

    def _let_rest(self, epoch_key: int) -> dict[int, Any]:
        """Put the generators that no sample was seen to draw from into the epoch's state; return it, by their
        number."""
        if self._rest[0] != epoch_key:
            seed_generators(epoch_key)
            self._rest = (epoch_key, _states())
        seen = self._seen.tolist()
        resting = {number: state for number, state in enumerate(self._rest[1]) if not seen[number]}
        for number, state in resting.items():
            GENERATORS[number].set_state(state)
        return resting


def following(iterator: Iterator[Sample], count: int) -> Iterator[Sample]:
    """Return the next items of an iterator, fewer at its end, by ``next()`` alone.

    What a user's ``__iter__`` returns may begin anew at each ``iter()`` (it sets itself back and returns itself), which
    islice, chain and loops call.
    """
    return map(next, repeat(iterator, count))


class StreamSeeds:
    """Takes samples out of a stream whose random numbers are those of their positions; see Note [Sample seeds].

    Args:
        key_at: the number from which the numbers at a position are seeded, besides the position: one for the first
            sample, and one for all that follow.
        seeded: False: only the first two samples are seeded.
    """

    def __init__(self, key_at: Callable[[int], int], *, seeded: bool) -> None:
        self._key_at, self._seeded = key_at, seeded
        #: The generators that samples were seen to draw from, a bit for each.
        self.seen = 0
        #: The state in which each generator rests, once it is known.
        self._rest: list[Any] = []

    def begin(self, seen: int) -> None:
        """Begin with a stream of which earlier samples were seen to draw from some generators, a bit for each."""
        self.seen, self._rest = seen, []

    def take(self, stream: Iterator[Sample], position: int, count: int) -> list[Sample]:
        """Return the next samples, fewer at the end of the stream.

        Afterwards the generators are in any state: the caller restores them.

        Args:
            stream: what they are taken from.
            position: that of the first of them.
            count: how many.
        """
        taken: list[Sample] = []
        for place in range(position, min(_ALONE, position + count)):
            self._seed(place)
            taken += following(stream, 1)
            if position + len(taken) == place:
                return taken
            if place:
                self._look()
        left = count - len(taken)
        if not self._seeded:
            taken += following(stream, left)
        elif left:
            self._take_seeded(taken, stream, position + len(taken), left)
            self._look()
        return taken

    def _take_seeded(self, taken: list[Sample], stream: Iterator[Sample], position: int, count: int) -> None:
        if not self._rest:  # (it goes on by a state)
            self._seed(1)
        seed: list[Callable[[int], object]] = []
        for number, (generator, state) in enumerate(zip(GENERATORS, self._rest, strict=True)):
            if self.seen >> number & 1:
                seed.append(generator.seed)
            else:
                generator.set_state(state)
        if not seed:
            taken += following(stream, count)
            return
        for number in mixed(self._key_at(position), range(position, position + count)).tolist():
            for each in seed:
                each(number)
            try:
                taken.append(next(stream))
            except StopIteration:
                return

    def _seed(self, position: int) -> None:
        """Seed all generators for one of the first samples; they rest in the state for the second one."""
        seed_generators(mix(self._key_at(position), position))
        if position:
            self._rest = _states()

    def _look(self) -> None:
        """Note which generators have left the state in which they rest."""
        for number, (generator, state) in enumerate(zip(GENERATORS, self._rest, strict=True)):
            if not self.seen >> number & 1 and not generator.is_at(state):
                self.seen |= 1 << number


class OwnNumbers:
    """Random numbers that continue where they were: other draws in between do not change them, nor do they change other
    draws.

    The code that draws them seeds the common generators itself when it begins.
    """

    def __init__(self) -> None:
        self._own: list[Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context in which the common generators continue where they were at the end of the last one."""
        before = _states()
        try:
            if self._own is not None:
                _restore(self._own)
            yield
        finally:
            self._own = _states()
            _restore(before)


class SamplerNumbers:
    """The random numbers of a sampler that draws an epoch in portions; see Note [Random numbers of a sampler].

    Args:
        sampler: the user's.
        seed: one 64-bit number, from which all of its generators are seeded when it draws first.
    """

    def __init__(self, sampler: object, seed: int) -> None:
        self._held = [held for part in parts_of_sampler(sampler) for held in _held_by(part)]
        self._seed = seed
        self._own: list[Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context in which the sampler draws, and continues where its last numbers ended."""
        before = self._all()
        try:
            if self._own is None:
                seed_generators(self._seed)
                for held in self._held:
                    held.seed(self._seed)
            else:
                self._set(self._own)
            yield
        finally:
            self._own = self._all()
            self._set(before)

    def _all(self) -> list[Any]:
        return [_states(), *(held.get() for held in self._held)]

    def _set(self, states: list[Any]) -> None:
        common, *own = states
        _restore(common)
        for held, state in zip(self._held, own, strict=True):
            held.set(state)


def parts_of_sampler(sampler: object) -> list[Any]:
    """Return a sampler and the samplers that it holds in its attributes, and those that these hold."""
    found: list[Any] = []
    within: Sequence[Any] = [sampler]
    for _ in range(_DEEPEST):
        found += (new := [each for each in within if not any(each is known for known in found)])
        within = [value for each in new for value in _attributes(each) if isinstance(value, Sampler)]
    return found


class _Seedable(NamedTuple):
    """A generator that a sampler holds, of whatever kind."""

    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _held_by(sampler: object) -> Iterator[_Seedable]:
    for value in _attributes(sampler):
        if isinstance(value, torch.Generator):
            yield _Seedable(value.manual_seed, value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            yield _Seedable(value.seed, value.getstate, value.setstate)
        elif isinstance(value, np.random.RandomState):
            yield _Seedable(_seed_legacy(value), value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            yield _held_bits(value.bit_generator)


def _seed_legacy(state: np.random.RandomState) -> Callable[[int], object]:
    return lambda seed: state.seed(seed >> 32)


def _held_bits(bits: Any) -> _Seedable:
    def seed(number: int) -> None:
        bits.state = type(bits)(number).state

    return _Seedable(seed, lambda: bits.state, lambda state: setattr(bits, "state", state))


def _attributes(thing: object) -> list[Any]:
    return list(vars(thing).values()) if hasattr(thing, "__dict__") else []


def _states() -> list[Any]:
    return [generator.state() for generator in GENERATORS]


def _restore(states: Sequence[Any]) -> None:
    for generator, state in zip(GENERATORS, states, strict=True):
        generator.set_state(state)
