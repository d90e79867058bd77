"""Generators are seeded from one number and put back as they were."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.data import seeding
from lockstep.data.mixing import mix
from lockstep.data.seeding import OwnNumbers, SampleSeeds, StreamSeeds, preserved_generators, seed_generators
from lockstep.step.generators import GENERATORS, NUMPY
from tests.launching import LIMIT


def _draw() -> tuple[float, float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand()), torch.randn(()).item()


def test_a_seed_decides_all_three_generators() -> None:
    with preserved_generators():
        seed_generators(2**63 + 5)
        first = _draw()
        seed_generators(7)
        other = _draw()
        seed_generators(2**63 + 5)
        again = _draw()
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_generators_are_put_back_even_after_an_error() -> None:
    def fail() -> None:
        with preserved_generators():
            seed_generators(1)
            _draw()
            raise KeyError("x")

    with preserved_generators():
        seed_generators(99)
        undisturbed = _draw()
        seed_generators(99)
        with pytest.raises(KeyError):
            fail()
        assert _draw() == undisturbed


#: What a sample of a data set draws from, in an order that shows a generator that was seeded for another one.
_DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(()).item(),
    "python": lambda: random.gauss(0.0, 1.0),  # keeps a second number for the next call
    "numpy": lambda: float(np.random.randn()),  # likewise
}


class _Samples(Dataset[list[object]]):
    """Draws from ``names``, from sample ``first`` on; samples before draw nothing."""

    def __init__(self, *names: str, first: int = 0) -> None:
        self._names, self._first = names, first
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[object]:
        self.asked.append(index)
        return [index, *(_DRAWS[name]() for name in self._names if index >= self._first)]


def _always_seeded(dataset: _Samples, epoch_key: int, positions: Sequence[int]) -> list[list[object]]:
    samples = []
    with preserved_generators():
        for position in positions:
            seed_generators(mix(epoch_key, position))
            samples.append(dataset[position])
    return samples


def _one(dataset: _Samples, part: range, place: int) -> list[object]:
    return dataset[part[place]]


def _several(dataset: _Samples, part: range, places: range) -> list[list[object]]:
    return [dataset[part[place]] for place in places]


def _fetched(dataset: _Samples, *, parts: Sequence[range], epochs: Sequence[int] = (5,)) -> list[list[object]]:
    """All samples in these epochs, a batch for each of ``parts``; each position is its own index."""
    seeds, samples = SampleSeeds(looks_at_first=True), []
    for epoch_key in epochs:
        for part in parts:
            random.random()  # the process draws between batches, too
            np.random.randn()
            with preserved_generators():
                samples += seeds.fetch(epoch_key, part, partial(_one, dataset, part), partial(_several, dataset, part))
    return samples


#: (Not in NumPy's stubs.)
_bits: Any = np.random

_PARTS = [range(7), range(7, 8), range(8, 30), range(30, 64)]


@pytest.mark.parametrize("first", [0, 1, 33])
@pytest.mark.parametrize("names", [[], ["torch"], ["python"], ["numpy"], ["numpy", "torch", "python"]], ids="+".join)
def test_samples_are_those_of_generators_that_are_always_seeded(names: list[str], first: int) -> None:
    dataset = _Samples(*names, first=first)
    expected = [sample for key in (5, 6) for sample in _always_seeded(dataset, key, range(64))]
    assert _fetched(dataset, parts=_PARTS, epochs=(5, 6)) == expected


def test_a_sample_that_begins_to_draw_is_all_that_is_fetched_twice() -> None:
    always = _Samples("torch", "numpy")
    _fetched(always, parts=_PARTS, epochs=(5, 6))
    assert always.asked == [0, *range(64), *range(64)]
    late = _Samples("python", first=20)
    _fetched(late, parts=_PARTS)
    assert late.asked == [*range(30), *range(8, 30), *range(30, 64)]
    never = _Samples()
    _fetched(never, parts=_PARTS)
    assert never.asked == [*range(64)]


class _Fails(_Samples):
    """Fails where it draws a small number."""

    def __getitem__(self, index: int) -> list[object]:
        drawn = random.random()
        if drawn < 0.2:
            raise ValueError(f"sample {index} drew {drawn}")
        return [index]


def test_an_error_is_that_of_a_seeded_sample() -> None:
    def said(fetch: Callable[[], object]) -> str:
        with pytest.raises(ValueError, match="drew") as raised:
            fetch()
        return str(raised.value)

    assert said(lambda: _fetched(_Fails(), parts=_PARTS)) == said(lambda: _always_seeded(_Fails(), 5, range(64)))


class _Restores(_Samples):
    """Reads generators and leaves them as they were."""

    def __getitem__(self, index: int) -> list[object]:
        with preserved_generators():
            drawn = [draw() for draw in _DRAWS.values()]
        return [torch.initial_seed(), *drawn]


def test_what_does_not_move_a_generator_depends_on_the_epoch_alone() -> None:
    whole = _fetched(_Restores(), parts=[range(64)])
    assert all(sample == whole[0] for sample in whole)
    torch.manual_seed(8)  # another process
    assert _fetched(_Restores(), parts=_PARTS) == whole
    assert _fetched(_Restores(), parts=_PARTS, epochs=(6,)) != whole


def test_the_workers_of_all_epochs_know_what_one_has_seen() -> None:
    seeds = SampleSeeds(looks_at_first=True)
    pid = os.fork()
    if pid == 0:  # a worker
        seeds.fetch(5, [0], lambda _: random.random(), lambda _: [random.random()])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    dataset = _Samples("python")
    with preserved_generators():
        seeds.fetch(5, [1, 2], partial(_one, dataset, range(1, 3)), partial(_several, dataset, range(1, 3)))
    assert dataset.asked == [1, 2]


def _stream(draws: Callable[[int], Sequence[str]], length: int, first: int = 0) -> Iterator[list[object]]:
    """Samples that draw from the generators of these names, by position."""
    for position in range(first, length):
        yield [_DRAWS[name]() for name in draws(position)]


def _taken(draws: Callable[[int], Sequence[str]], count: int, *, length: int = 30, stop: int = 0) -> list[list[object]]:
    """The samples of a stream by batches of ``count``; ``stop``: the batch from which on another reader goes on."""
    taken: list[list[object]] = []
    with preserved_generators():
        seeds, stream = StreamSeeds(lambda position: 7 if position else 5, seeded=True), _stream(draws, length)
        for number, position in enumerate(range(0, length, count)):
            if stop and number == stop:
                seen, seeds = seeds.seen, StreamSeeds(lambda position: 7 if position else 5, seeded=True)
                stream = _stream(draws, length, position)
                seeds.begin(seen)
            seed_generators(number + 1000)  # whatever else draws in between
            _draw()
            taken += seeds.take(stream, position, count)
    assert len(taken) == length
    return taken


def _seeded(position: int, name: str) -> object:
    with preserved_generators():
        seed_generators(mix(7 if position else 5, position))
        return _DRAWS[name]()


@pytest.mark.parametrize("name", _DRAWS)
@pytest.mark.parametrize("count", [1, 4, 30, 40])
def test_samples_of_a_stream_that_always_draws_are_seeded_by_their_positions(name: str, count: int) -> None:
    assert _taken(lambda _: [name], count) == [[_seeded(position, name)] for position in range(30)]


@pytest.mark.parametrize("name", _DRAWS)
def test_a_stream_that_begins_to_draw_is_seeded_from_the_next_batch_on(name: str) -> None:
    taken = _taken(lambda position: [name] if position > 13 else [], 5)
    with preserved_generators():
        seed_generators(mix(7, 1))
        together = [_DRAWS[name]()]
    assert taken[:15] == [[]] * 14 + [together]
    assert taken[15:] == [[_seeded(position, name)] for position in range(15, 30)]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_stream_that_goes_on_by_a_state_draws_as_if_it_had_not_stopped(stop: int) -> None:
    def draws(position: int) -> list[str]:
        return ["torch"] + ["python"] * (position > 7) + ["numpy"] * (position % 11 == 10)

    assert _taken(draws, 5, stop=stop) == _taken(draws, 5)


def test_a_stream_that_draws_nothing_is_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []

    def noting(seed: int) -> None:
        seeded.append(seed)
        seed_generators(seed)

    monkeypatch.setattr(seeding, "seed_generators", noting)
    assert _taken(lambda _: [], 5) == [[]] * 30
    assert seeded == [mix(5, 0), mix(7, 1)]


def test_own_numbers_go_on_beside_all_others() -> None:
    def _drawn(other: bool) -> tuple[list[Any], tuple[float, float, float, float]]:
        seed_generators(7)
        numbers, drawn = OwnNumbers(), []
        for turn in range(3):
            with numbers.drawing():
                if not turn:
                    seed_generators(3)
                drawn.append([_draw(), float(np.random.standard_normal())])  # (of two of these NumPy keeps one)
            if other:
                seed_generators(turn)
        if other:
            seed_generators(7)
        return drawn, _draw()

    with preserved_generators():
        seed_generators(3)
        expected = [[_draw(), float(np.random.standard_normal())] for _ in range(3)]
        seed_generators(7)
        untouched = _draw()
        assert _drawn(False) == _drawn(True) == (expected, untouched)


def test_own_numbers_are_kept_after_an_error() -> None:
    with preserved_generators():
        numbers = OwnNumbers()
        seed_generators(7)
        drawn = []

        def draw_and_fail() -> None:
            with numbers.drawing():
                seed_generators(3)
                drawn.append(_draw())
                raise ValueError("damaged")

        with pytest.raises(ValueError, match="damaged"):
            draw_and_fail()
        outside = _draw()
        with numbers.drawing():
            drawn.append(_draw())
        seed_generators(7)
        assert _draw() == outside
        seed_generators(3)
        assert [_draw(), _draw()] == drawn


# --- reading and setting the generators -------------------------------------------------------------------------------


def test_the_words_of_generators_are_found() -> None:
    _, python, numpy = GENERATORS
    assert isinstance(python.state()[0], bytes)
    assert isinstance(numpy.state()[0], bytes)


def _unfound(monkeypatch: pytest.MonkeyPatch) -> None:
    _, python, numpy = GENERATORS
    monkeypatch.setattr(python, "_words", None)
    monkeypatch.setattr(numpy, "_normal", None)


@pytest.mark.parametrize("found", [True, False], ids=["memory", "functions"])
@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1249])
def test_a_state_is_all_that_decides_what_is_drawn(monkeypatch: pytest.MonkeyPatch, draws: int, found: bool) -> None:
    if not found:
        _unfound(monkeypatch)
    for generator, draw in zip(GENERATORS, _DRAWS.values(), strict=True):
        generator.seed(123 << 32)
        for _ in range(draws):
            draw()
        state = generator.state()
        assert generator.is_at(state)
        drawn = [draw() for _ in range(1000)]
        assert not generator.is_at(state)
        generator.set_state(state)
        assert generator.is_at(state)
        assert [draw() for _ in range(1000)] == drawn


@pytest.mark.parametrize("found", [True, False], ids=["memory", "functions"])
def test_a_single_normal_number_moves_a_generator(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    if not found:
        _unfound(monkeypatch)
    for generator, draw in zip(GENERATORS[1:], [*_DRAWS.values()][1:], strict=True):
        draw()
        state = generator.state()
        draw()  # one of the two takes the number that was kept, and none of the generator's words
        assert not generator.is_at(state)


def test_states_are_those_of_the_libraries() -> None:
    for draw in _DRAWS.values():
        draw()
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    drawn = [draw() for draw in _DRAWS.values()]
    states = [generator.state() for generator in GENERATORS]
    for _ in range(2000):
        random.random()
        np.random.rand()
    for generator, state in zip(GENERATORS, states, strict=True):
        generator.set_state(state)
    after = random.getstate(), np.random.get_state(legacy=False)
    random.setstate(python)
    np.random.set_state(legacy)
    assert [draw() for draw in [*_DRAWS.values()][1:]] == drawn[1:]
    assert random.getstate() == after[0]
    assert str(np.random.get_state(legacy=False)) == str(after[1])


def test_a_generator_in_place_of_numpys_own_is_preserved() -> None:
    before = _bits.get_bit_generator()
    _bits.set_bit_generator(np.random.PCG64(3))
    try:
        np.random.rand()
        with preserved_generators():
            drawn = np.random.rand()
        assert np.random.rand() == drawn
        state = GENERATORS[2].state()
        assert GENERATORS[2].is_at(state)
        np.random.rand()
        assert not GENERATORS[2].is_at(state)
    finally:
        _bits.set_bit_generator(before)


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64, np.random.MT19937])
def test_any_generator_in_place_of_numpys_own_is_seeded(kind: Callable[[int], Any]) -> None:
    before = _bits.get_bit_generator()
    _bits.set_bit_generator(kind(3))
    try:
        drawn = []
        for seed in (2**40, 2**41, 2**40):
            NUMPY.seed(seed)
            drawn.append([float(np.random.standard_normal()) for _ in range(3)])  # (of each two, one may be kept)
    finally:
        _bits.set_bit_generator(before)
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("act", ["read", "set"])
def test_numpys_generator_is_left_alone_while_another_thread_draws(act: str) -> None:
    state = NUMPY.state()
    thread = threading.Thread(target=NUMPY.state if act == "read" else partial(NUMPY.set_state, state), daemon=True)
    with _bits.get_bit_generator().lock:  # as NumPy has it while it draws
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(LIMIT)
    assert not thread.is_alive()
