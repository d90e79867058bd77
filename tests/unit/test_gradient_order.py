"""Buckets that are laid out by the order in which gradients come, and whether that is worth it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ddp.bucket import ParameterSpec, plan_buckets
from lockstep.ddp.gradient_order import is_worth

#: Three layers of a weight of 100 elements and a bias of 1, and a head like them.
SIZES = [100, 1, 100, 1, 100, 1, 100, 1]
SPECS = [ParameterSpec(size, 4, "float32") for size in SIZES]


def _plan(order: list[int] | None) -> list[tuple[int, ...]]:
    return plan_buckets(SPECS, caps=[400], order=order)


def _is_worth(order: list[int]) -> bool:
    return is_worth(_plan(None), _plan(order), order=order, sizes=[4 * size for size in SIZES])


def test_buckets_are_filled_in_the_order_that_was_learned() -> None:
    assert _plan(None) == [(7, 6), (5, 4), (3, 2), (1, 0)]
    assert _plan([*range(7, -1, -1)]) == _plan(None)
    assert _plan([4, 5, 2, 3, 0, 1, 6, 7]) == [(4,), (5, 2), (3, 0), (1, 6), (7,)]


def test_two_kinds_are_cut_apart_and_ordered_by_their_last_member() -> None:
    specs = [ParameterSpec(10, 4, kind) for kind in ("a", "b", "a", "b")]
    assert plan_buckets(specs, caps=[80], order=[1, 0, 2, 3]) == [(0, 2), (1, 3)]
    assert plan_buckets(specs, caps=[80], order=[0, 1, 3, 2]) == [(1, 3), (0, 2)]


@pytest.mark.parametrize(
    ("order", "worth"),
    [
        ([7, 6, 5, 4, 3, 2, 1, 0], False),
        ([6, 7, 4, 5, 2, 3, 0, 1], False),  # each weight before its bias
        ([5, 4, 3, 2, 1, 0, 7, 6], True),  # the layer that was registered last comes last
        ([0, 1, 2, 3, 4, 5, 6, 7], True),
    ],
)
def test_a_new_layout_is_worth_it_where_buckets_wait(order: list[int], worth: bool) -> None:
    assert _is_worth(order) is worth


@given(st.permutations(range(8)))
def test_the_order_that_was_learned_is_never_left_for_the_one_of_registration(order: list[int]) -> None:
    learned = _plan(order)
    assert sorted(index for bucket in learned for index in bucket) == [*range(8)]
    assert not is_worth(learned, _plan(order), order=order, sizes=[4 * size for size in SIZES])
