"""The arithmetic of orders and slices."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.data.batches import CutOrder
from lockstep.data.cursor import Cursor
from lockstep.data.mixing import mix, mixed
from lockstep.data.order import EpochOrder, Permuted, Sequential, batch_count, epoch_order, share_bounds

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


def _whole(order: EpochOrder) -> list[int]:
    return order[:].tolist()


def test_an_order_is_a_permutation_of_its_own() -> None:
    orders = {(seed, epoch): _whole(epoch_order(50, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    # Not only unequal: seed 0 in epoch 1 must not be seed 1 in epoch 0, as it is where the two are added.
    assert len({tuple(order) for order in orders.values()}) == 4


def test_an_order_is_pinned() -> None:
    # A checkpoint taken in mid-epoch relies on these numbers staying as they are.
    assert mix(0, 0) == 0xA706DD2F4D197E6F
    assert _whole(epoch_order(8, seed=3, epoch=2)) == [5, 2, 0, 3, 6, 4, 7, 1]
    assert epoch_order(2**22 + 1, seed=3, epoch=2)[:4].tolist() == [254708, 294814, 2734352, 1536407]


@given(length=st.integers(2, 3000), key=st.integers(0, 2**64 - 1))
def test_an_order_that_is_computed_is_a_permutation(length: int, key: int) -> None:
    assert sorted(_whole(Permuted(length, key))) == list(range(length))


@given(begin=st.integers(0, 30_000), size=st.integers(0, 20_000))
@example(begin=8191, size=2)
@example(begin=8192, size=8192)
def test_a_part_is_that_of_the_whole(begin: int, size: int) -> None:
    orders: list[EpochOrder] = [Permuted(25_000, 7), Sequential(25_000), torch.arange(25_000).flip(0)]
    for order in orders:
        part = order[begin : begin + size]
        assert part.dtype == torch.int64
        assert part.tolist() == _whole(order)[begin : begin + size]


def test_a_computed_order_is_as_random_as_one_that_is_drawn() -> None:
    length, keys = 5000, range(40)
    orders = torch.stack([Permuted(length, mix(key, 0))[:] for key in keys]).double()
    drawn = torch.stack([torch.randperm(length, generator=torch.Generator().manual_seed(key)) for key in keys]).double()
    statistics: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda order: (order[:, 1:] - order[:, :-1]).abs().mean(1),  # of neighbours: length / 3
        lambda order: (order - torch.arange(length)).abs().mean(1),  # how far a sample has gone: length / 3
        lambda order: order.reshape(len(keys), -1, 50).mean(2).std(1),  # of the means of batches
        lambda order: (order == torch.arange(length)).double().sum(1),  # that stay: 1
        lambda order: (order[:, 1:] > order[:, :-1]).double().sum(1),  # ascents: length / 2
    ]
    for statistic in statistics:
        computed, expected = statistic(orders), statistic(drawn)
        error = (computed.var() / len(keys) + expected.var() / len(keys)).sqrt()
        assert abs(computed.mean() - expected.mean()) < 4 * error
    places = orders.long()[:, :100].flatten()  # what comes first, in 50 equal parts of the data set
    counts = torch.bincount(places * 50 // length, minlength=50).double()
    expected_count = len(places) / 50
    assert ((counts - expected_count) ** 2 / expected_count).sum() < 95  # chi-squared of 49 degrees: 1 in 10,000


def test_a_long_epoch_takes_no_list() -> None:
    order = epoch_order(10**15, seed=1, epoch=2)
    part = order[10**15 - 3 : 10**15 + 5]
    assert part.shape == (3,)
    assert (part >= 0).all()
    assert (part < 10**15).all()


@given(key=st.integers(0, 2**64 - 1), numbers=st.lists(st.integers(0, 2**63 - 1)))
def test_numbers_are_mixed_alike_one_by_one_and_at_once(key: int, numbers: list[int]) -> None:
    assert mixed(key, numbers).tolist() == [mix(key, number) for number in numbers]


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    epoch_order(10, seed=0, epoch=0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("numbers", [(0,), (0, 0), (0, 0, 0), (1,), (2**64,), (0, 1), (1, 0)])
def test_mix_stays_within_64_bits(numbers: tuple[int, ...]) -> None:
    assert 0 <= mix(*numbers) < 2**64
