"""Where rows belong, and outputs as columns and as bytes: without ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.in_order.columns import RowKind, bytes_to_trees, columns_of, trees_to_bytes
from lockstep.comm.in_order.files import RowFile
from lockstep.comm.in_order.places import Counts, places_of


def _counts(by_round: list[int]) -> Counts:
    return Counts([items, 1] for items in by_round)


_rounds = st.integers(1, 5).flatmap(
    lambda ranks: st.lists(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks), max_size=8)
)


@given(rounds=_rounds, seed=st.none() | st.integers(0, 100))
def test_each_row_has_the_place_at_which_it_was_handed_out(rounds: list[list[int]], seed: int | None) -> None:
    ranks = len(rounds[0]) if rounds else 1
    handed: list[list[int]] = [[] for _ in range(ranks)]  # the places of each rank, dealt out one by one
    place = 0
    for sizes in rounds:
        for rank, size in enumerate(sizes):
            handed[rank] += range(place, place + size)
            place += size
    order = None
    if seed is not None:
        order = torch.randint(0, 1 + place, (place,), generator=torch.Generator().manual_seed(seed))
        by_index = sorted(range(place), key=lambda at: (int(order[at]), at))
        handed = [[by_index.index(at) for at in mine] for mine in handed]
    found = places_of([_counts([sizes[rank] for sizes in rounds]) for rank in range(ranks)], order)
    assert [each.tolist() for each in found] == handed


def test_a_rank_may_have_had_fewer_rounds() -> None:
    found = places_of([Counts([[1, 3]]), Counts([[1, 2]]), Counts()], None)
    assert [each.tolist() for each in found] == [[0, 2, 4], [1, 3], []]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_rows_are_cut_across_outputs(step: int) -> None:
    whole = torch.arange(22, dtype=torch.int16).view(11, 2)
    pieces = whole.split([4, 0, 5, 2])
    (column,) = columns_of([piece.t().contiguous().t() for piece in pieces], [4, 0, 5, 2], "sample").columns
    assert len(column) == 11
    cut = [column.rows(first, first + step) for first in range(0, 11, step)]
    assert torch.equal(torch.cat(cut).view(torch.int16).view(11, 2), whole)
    assert not len(column.rows(11, 12))


def test_a_single_row_of_a_column_is_itself() -> None:
    (column,) = columns_of([torch.arange(6.0).view(2, 3)[:1, 1]], [1], "sample").columns
    assert column.rows(0, 1).view(torch.float32).tolist() == [1.0]


def test_trees_come_back_from_bytes_with_their_bits() -> None:
    trees: list[Any] = [
        {"a": torch.tensor([1.5, float("nan")]).bfloat16(), "b": [None, True, "ü", 2.5, {"c": 7}]},
        torch.zeros(0, 3, dtype=torch.int8),
        (torch.tensor(3, dtype=torch.uint8), np.array([[1, 2]], dtype=np.uint16)),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        {},
        "text",
    ]
    back = bytes_to_trees(trees_to_bytes(trees).rows(0, 1 << 20).view(torch.uint8))
    assert torch.equal(back[0]["a"].view(torch.int16), trees[0]["a"].view(torch.int16))
    assert back[0]["b"] == trees[0]["b"]
    assert back[1].shape == (0, 3)
    assert back[1].dtype == torch.int8
    assert isinstance(back[2], list)
    assert back[2][0].item() == 3
    assert back[2][1].dtype == np.uint16
    assert back[2][1].tolist() == [[1, 2]]
    assert torch.equal(back[3], trees[3].resolve_conj())
    assert back[4:] == [{}, "text"]


@pytest.mark.parametrize("odd", [{1: torch.ones(1)}, [object(), torch.ones(1)], torch.ones(2).to_sparse(), {1, 2}])
def test_what_json_can_not_hold_is_refused_with_its_place(odd: Any) -> None:
    with pytest.raises(TypeError, match=r"output 1 \(of 2, from 0\)\[?'?x?"):
        trees_to_bytes([1, {"x": odd}])


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_file_that_can_not_be_begun_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    kind = RowKind((), "tensor", torch.float32, (3,))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left on device") as caught:
        RowFile(tmp_path / f"rows{suffix}", [kind], 2)
    assert caught.value.filename == str(tmp_path / f"rows{suffix}")
    assert [*tmp_path.iterdir()] == []
    assert os.listdir("/proc/self/fd") == before
