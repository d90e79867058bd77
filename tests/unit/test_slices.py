"""Slices of a global batch: one tree, whoever holds which of them; and which rank has how many."""

from __future__ import annotations

import statistics

import pytest

from lockstep.data.slicing import Slicing, counts_for, runs
from lockstep.step.tree_sum import Carries, Node, additions, nodes_of


def _tree(first: int, level: int, slices: int) -> str | None:
    """Write a node out, from its definition."""
    if first >= slices:
        return None
    if level == 0:
        return str(first)
    left, right = _tree(first, level - 1, slices), _tree(first + 2 ** (level - 1), level - 1, slices)
    return left if right is None else f"({left} {right})"


def _added_up(slices: int, shares: list[float]) -> str:
    """Write out what ranks come to that add up their own slices, and then what is above."""
    sums: list[str] = []
    nodes: list[Node] = []
    for first, end in runs(slices, shares):
        carries, own = Carries(slices), []
        for number in range(first, end):
            own.append(str(number))
            for _ in range(carries.push(Node(0, number))):
                last = own.pop()
                own[-1] = f"({own[-1]} {last})"
        assert carries.nodes == nodes_of(first, end, slices)
        assert len(own) == len(carries.nodes) <= 2 * slices.bit_length()
        sums += own
        nodes += carries.nodes
    for target, source in additions(nodes, slices):
        sums[target] = f"({sums[target]} {sums[source]})"
    return sums[0]


@pytest.mark.parametrize("slices", range(1, 35))
def test_the_tree_knows_no_ranks(slices: int) -> None:
    expected = _tree(0, (slices - 1).bit_length(), slices)
    for ranks in range(1, 10):
        assert _added_up(slices, [1.0] * ranks) == expected
        assert _added_up(slices, [1.0 + rank % 3 for rank in range(ranks)]) == expected


def test_slices_come_in_order() -> None:
    carries = Carries(8)
    carries.push(Node(0, 3))
    with pytest.raises(ValueError, match="comes after"):
        carries.push(Node(0, 2))


def test_runs_are_in_proportion() -> None:
    assert runs(8, [1, 1, 1]) == ((0, 3), (3, 6), (6, 8))
    assert runs(16, [2, 1]) == ((0, 11), (11, 16))
    assert runs(2, [1, 1, 1]) == ((0, 1), (1, 2), (2, 2))


@pytest.mark.parametrize(
    ("slices", "paces", "expected"),
    [(16, [1.0, 1.0], [8, 8]), (16, [1.0, 2.0], [11, 5]), (4, [1.0, 100.0], [3, 1]), (2, [1, 1, 1], [1, 1, 0])],
)
def test_counts_by_pace(slices: int, paces: list[float], expected: list[int]) -> None:
    assert counts_for(slices, paces) == expected


def _take_steps(slicing: Slicing, paces: list[float], steps: range) -> list[float]:
    """Return how long the slowest rank takes in each of ``steps``."""
    longest = []
    for step in steps:
        counts = [end - first for first, end in slicing.runs_at(step)]
        seconds = [pace * count for pace, count in zip(paces, counts, strict=True)]
        longest.append(max(seconds))
        slicing.note(step, seconds, counts)
    return longest


def test_slices_move_to_the_fast_ranks_once_nobody_has_asked_for_them() -> None:
    slicing = Slicing(16, shares=[1.0, 1.0], ahead=4, balance=True)
    took = _take_steps(slicing, [1.0, 2.0], range(30))
    assert took[:7] == [16.0] * 7  # three steps are looked at, and four were asked for
    assert took[7:] == [11.0] * 23
    assert slicing.runs_at(29) == ((0, 11), (11, 16))
    slicing.begin_epoch()
    assert slicing.runs_at(0) == ((0, 11), (11, 16))
    assert statistics.mean(_take_steps(slicing, [2.0, 2.0], range(30))[-10:]) == 16.0


def test_one_slow_step_moves_nothing() -> None:
    slicing = Slicing(16, shares=[1.0, 1.0], ahead=0, balance=True)
    _take_steps(slicing, [1.0, 1.0], range(5))
    _take_steps(slicing, [9.0, 1.0], range(5, 6))
    _take_steps(slicing, [1.0, 1.0], range(6, 20))
    assert slicing.runs_at(20) == ((0, 8), (8, 16))


def test_twice_as_many_slices_are_held_by_the_same_ranks() -> None:
    slicing = Slicing(4, shares=[3.0, 1.0], ahead=0)
    slicing.double()
    assert (slicing.slices, slicing.runs_at(7)) == (8, ((0, 6), (6, 8)))
