"""Seed each sample, so that random augmentation does not depend on which process fetches it.

Note [Sample seeds]
~~~~~~~~~~~~~~~~~~~
Before a sample is fetched, the generators of torch (CPU), Python and NumPy's legacy interface are seeded from (seed,
epoch, position of the sample in the epoch's order). So a sample is augmented the same way on any rank, in any worker
process, in a world of any size, and after a resume in the middle of an epoch; and differently in the next epoch, or
when a sampler draws it twice in one. The position is used rather than the sample's index for the sake of the latter.

A worker process uses its generators for nothing else. In the main process (``num_workers=0``) their states are
restored after each batch, so that fetching data does not affect the model's dropout.

A ``numpy.random.Generator`` that a dataset holds itself is out of reach: seed a new one from ``numpy.random.randint``.

Note [Random numbers of a sampler]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Only rank 0 asks a user's sampler for its order, and an interrupted epoch has to be drawn the same again. So while it
draws, the common generators are seeded from (seed, epoch), and so are those that it holds itself, or that samplers it
is made of hold: ``torch.Generator``, ``random.Random``, and NumPy's of both kinds. Between two portions of an epoch,
and after it, all of them are back in the states that they had: a script that shares one with a sampler draws from it
the same numbers on every rank. A generator that a sampler makes in ``__iter__`` is its own affair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

Item = TypeVar("Item")

#: The deepest sampler within samplers whose generators are seeded.
_DEEPEST = 4


def seed_generators(seed: int) -> None:
    """Seed torch's CPU generator, Python's and NumPy's from one 64-bit number. This takes about 13 µs."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed >> 32)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators of torch (CPU), Python and NumPy after the block. This takes about 150 µs."""
    before = _states()
    try:
        yield
    finally:
        _restore(before)


def without_drawing(items: Iterator[Item]) -> Iterator[tuple[Item | None, bool]]:
    """Yield each item with whether anything has been drawn from the common generators to make it, and at the end None
    with whether anything has been drawn to find it. This takes about 40 µs an item."""
    while True:
        before = _told_apart()
        item = next(items, None)
        yield item, _told_apart() != before
        if item is None:
            return


def _told_apart() -> tuple[Any, ...]:
    of_torch, of_python, of_numpy = _states()
    return of_torch.numpy().tobytes(), of_python, of_numpy[1].tobytes(), *of_numpy[2:]


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


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
