"""Generators are seeded from one number and put back as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from lockstep.data.contents import can_be_random
from lockstep.data.seeding import preserved_generators, seed_generators, without_drawing


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


class _Anything(Dataset[int]):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()), lambda: random.random(), lambda: np.random.rand(), lambda: np.random.standard_normal()],
    ids=["torch", "Python", "NumPy", "NumPy, a second number that is kept"],
)
def test_what_is_drawn_for_an_item_is_noticed_and_for_the_end(draw: Callable[[], object]) -> None:
    def items() -> Iterator[str]:
        yield "drawn for nobody"
        draw()
        yield "drawn"
        yield "not drawn"
        draw()

    with preserved_generators():
        seed_generators(3)
        np.random.standard_normal()  # of each second one NumPy has the next in hand
        found = []
        for item, has_drawn in without_drawing(items()):
            found.append((item, has_drawn))
            random.random()  # by whoever takes the items
    assert found == [("drawn for nobody", False), ("drawn", True), ("not drawn", False), (None, True)]


def test_only_known_datasets_are_trusted_not_to_be_random() -> None:
    tensors = TensorDataset(torch.arange(3))
    assert not can_be_random(tensors)
    assert not can_be_random(Subset(ConcatDataset([tensors, tensors]), [0]))
    assert not can_be_random(StackDataset(tensors, tensors))
    assert not can_be_random([1, 2])
    assert can_be_random(_Anything())
    assert can_be_random(ConcatDataset([tensors, _Anything()]))
    assert can_be_random(StackDataset(a=tensors, b=_Anything()))
