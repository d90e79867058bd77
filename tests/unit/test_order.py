"""The arithmetic of orders and slices."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.batches import CutOrder
from lockstep.data.cursor import Cursor
from lockstep.data.order import batch_count, epoch_order, mix, share_bounds

_sizes = st.integers(0, 300)


@given(count=_sizes, world_size=st.integers(1, 17))
def test_slices_are_contiguous_complete_and_larger_ones_first(count: int, world_size: int) -> None:
    bounds = [share_bounds(count, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


_shares = st.lists(
    st.one_of(st.integers(1, 10**6), st.floats(1e-3, 1e3)),
    min_size=1,
    max_size=9,
).map(tuple)


@given(count=_sizes, shares=_shares)
def test_slices_in_proportion_are_contiguous_complete_and_nearly_exact(count: int, shares: tuple[float, ...]) -> None:
    world_size = len(shares)
    bounds = [share_bounds(count, rank=rank, world_size=world_size, shares=shares) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    for (start, stop), share in zip(bounds, shares, strict=True):
        assert abs(stop - start - count * Fraction(share) / sum(map(Fraction, shares))) < 1


@given(count=_sizes, world_size=st.integers(1, 17), share=st.floats(1e-3, 1e3))
def test_equal_shares_cut_as_none_do(count: int, world_size: int, share: float) -> None:
    for rank in range(world_size):
        cut = share_bounds(count, rank=rank, world_size=world_size, shares=(share,) * world_size)
        assert cut == share_bounds(count, rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("count", "shares", "sizes"),
    [
        (9, (2, 1), [6, 3]),
        (8, (2, 1), [5, 3]),
        (2, (2, 1), [1, 1]),
        (1, (2, 1), [1, 0]),
        (1, (1, 2), [0, 1]),
        (0, (2, 1), [0, 0]),
        (30, (0.1, 0.2), [10, 20]),
        (4, (0.5, 3.0, 0.5), [1, 3, 0]),
        (8, (1, 1, 2), [2, 2, 4]),
    ],
    ids=str,
)
def test_slices_in_proportion(count: int, shares: tuple[float, ...], sizes: list[int]) -> None:
    bounds = [share_bounds(count, rank=rank, world_size=len(shares), shares=shares) for rank in range(len(shares))]
    assert [stop - start for start, stop in bounds] == sizes


@given(length=_sizes, batch_size=st.integers(1, 40), drop_last=st.booleans(), start=_sizes)
def test_batches_cover_the_rest_of_the_epoch_once(length: int, batch_size: int, drop_last: bool, start: int) -> None:
    order = torch.arange(1000, 1000 + length)
    cut = CutOrder(order, batch_size=batch_size, drop_last=drop_last, cursor=Cursor(samples=start, batches=3))
    batches = list(cut.from_number(3))
    assert len(batches) == batch_count(length, batch_size=batch_size, drop_last=drop_last, start=start)
    covered = [index for batch in batches for index in batch.indices.tolist()]
    whole = list(range(1000 + start, 1000 + length))
    assert covered == (whole[: len(whole) // batch_size * batch_size] if drop_last else whole)
    assert all(len(batch.indices) == batch_size for batch in batches[:-1])
    assert all(batch.position == batch.indices[0] - 1000 for batch in batches)
    assert [batch.number for batch in batches] == list(range(3, 3 + len(batches)))
    assert all(cut.batch(batch.number).indices.equal(batch.indices) for batch in batches)


def test_an_order_is_a_permutation_of_its_own() -> None:
    orders = {(seed, epoch): epoch_order(50, seed=seed, epoch=epoch).tolist() for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    # Not only unequal: seed 0 in epoch 1 must not be seed 1 in epoch 0, as it is where the two are added.
    assert len({tuple(order) for order in orders.values()}) == 4


def test_an_order_is_pinned() -> None:
    # A checkpoint taken in mid-epoch relies on these numbers staying as they are.
    assert mix(0, 0) == 0xA706DD2F4D197E6F
    assert epoch_order(8, seed=3, epoch=2).tolist() == [5, 2, 0, 3, 6, 4, 7, 1]


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    epoch_order(10, seed=0, epoch=0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("numbers", [(0,), (0, 0), (0, 0, 0), (1,), (2**64,), (0, 1), (1, 0)])
def test_mix_stays_within_64_bits(numbers: tuple[int, ...]) -> None:
    assert 0 <= mix(*numbers) < 2**64
