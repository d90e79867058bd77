"""Parts of equal cost: every sample once, in order, and about as even as can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.costs import ByCost, CostTable, as_costs, parts_of_equal_cost, read_costs

_costs = st.lists(st.floats(0, 1e6, allow_nan=False), max_size=60)


def _parts(costs: Sequence[float], number: int) -> list[list[int]]:
    return parts_of_equal_cost(costs, may_have=[True] * number, shares=[1.0] * number)


@given(costs=_costs, number=st.integers(1, 9))
def test_every_sample_is_in_one_part_in_order_and_no_part_is_much_dearer_than_the_mean(
    costs: list[float], number: int
) -> None:
    parts = _parts(costs, number)
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    dearest = max(math.fsum(costs[place] for place in part) for part in parts)
    assert dearest <= (math.fsum(costs) / number + max(costs, default=0.0)) * (1 + 1e-9)
    if len(costs) >= number:
        assert all(parts), "as many samples as parts: none is empty"


@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=8), number=st.integers(1, 3))
def test_the_dearest_part_is_at_most_four_thirds_of_the_best(costs: list[int], number: int) -> None:
    def dearest(parts: Sequence[Sequence[int]]) -> int:
        return max(sum(costs[place] for place in part) for part in parts)

    best = min(
        dearest([[place for place, part in enumerate(chosen) if part == each] for each in range(number)])
        for chosen in itertools.product(range(number), repeat=len(costs))
    )
    assert 3 * number * dearest(_parts(costs, number)) <= (4 * number - 1) * best


def test_ties_are_broken_alike_everywhere() -> None:
    assert _parts([2, 2, 2, 2, 2], 3) == [[0, 3], [1, 4], [2]]
    assert _parts([0, 0, 0, 0, 7], 2) == [[4], [0, 1, 2, 3]]
    assert _parts([0, 0, 0, 0], 3) == [[0, 3], [1], [2]]
    assert _parts([1, 9, 4, 4], 2) == [[1], [0, 2, 3]]


def test_shares_say_what_part_of_the_cost_each_has() -> None:
    parts = parts_of_equal_cost([1.0] * 30, may_have=[True] * 2, shares=[2.0, 1.0])
    assert [len(part) for part in parts] == [20, 10]
    parts = parts_of_equal_cost([1.0] * 30, may_have=[True, False, True], shares=[1.0] * 3)
    assert [len(part) for part in parts] == [15, 0, 15]


def test_what_is_won_is_added_up_in_cost() -> None:
    division = ByCost(2, None)
    costs = torch.tensor([9.0, 7.0, 1.0, 1.0], dtype=torch.float64)
    assert division.among_ranks(4, costs, rank=0) == ([0], [1, 3])
    assert division.in_slices([(0, 1), (1, 2), (2, 3), (3, 4)], costs, runs=[(0, 3), (3, 4)]) == [[0], [1], [2], [3]]
    taken = division.balance.take()
    # By number: 16 and 2; then 17 on three slices and 1 on one, of 18 in all.
    assert taken == pytest.approx({"batches": 2, "by_number": 16 + 17 / 3, "by_cost": 9 + 17 / 3, "exact": 9 + 18 / 4})
    assert division.balance.batches == 0


@pytest.mark.parametrize(
    "given", [[1, 2.5, 0], (1, 2.5, 0), np.array([1, 2.5, 0], dtype=np.float32), torch.tensor([1, 2.5, 0])], ids=type
)
def test_costs_are_numbers_in_any_sequence(given: Any) -> None:
    costs = as_costs(given, "costs= has")
    assert costs.dtype == torch.float64
    assert costs.tolist() == [1.0, 2.5, 0.0]


def test_a_table_is_kept_as_it_was_given() -> None:
    given = torch.ones(3, dtype=torch.float64)
    table = read_costs(given, range(3), is_stream=False, draws_batches=False)
    assert isinstance(table, CostTable)
    fact = table.fact
    given += 1
    assert table.of(torch.tensor([0, -1])).tolist() == [1.0, 1.0]
    assert read_costs([1, 1, 1], range(3), is_stream=False, draws_batches=False).fact == fact  # type: ignore[union-attr]
    assert read_costs([1, 1, 2], range(3), is_stream=False, draws_batches=False).fact != fact  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="costs= has 3 costs, and the sampler gave the index 3"):
        table.of(torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("costs", "error", "words"),
    [
        ([1, -2, 3], ValueError, r"costs= has -2.0 for sample 1: expected costs of 0 or more"),
        ([1, float("nan"), 3], ValueError, "costs= has nan for sample 1"),
        ([1, float("inf"), 3], ValueError, "costs= has inf for sample 1"),
        ([1, 2], ValueError, "costs= has 2 costs, and the dataset 3 samples"),
        ([[1], [2], [3]], ValueError, r"costs of shape \(3, 1\)"),
        (["1", "2", "3"], TypeError, "costs= has something else than numbers"),
        ([1, None, 3], TypeError, "costs= has something else than numbers"),
        (7, TypeError, "costs=7: expected one cost for each sample"),
        ("tokens", ValueError, "costs='tokens'"),
        ("sampler", ValueError, "and this DataLoader has none of its own"),
    ],
    ids=str,
)
def test_costs_that_make_no_sense(costs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_costs(costs, range(3), is_stream=False, draws_batches=False)


def test_a_stream_has_no_costs() -> None:
    with pytest.raises(ValueError, match="costs= needs samples with indices"):
        read_costs([1.0], object(), is_stream=True, draws_batches=False)
