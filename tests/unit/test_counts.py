"""Counts of items in flags: exact in every dtype, for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.ddp.counts import CountFlags, are_mixed, unit_of_means, unit_of_sums
from lockstep.share import MOST_ITEMS

_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16, 85, 86, 200, 700])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_total_is_exact(dtype: torch.dtype, world_size: int, data: st.DataObject) -> None:
    most = MOST_ITEMS // world_size - 1
    counts = data.draw(
        st.one_of(
            st.just([most] * world_size),
            st.lists(st.integers(0, most), min_size=world_size, max_size=world_size),
        )
    )
    writers = [CountFlags(dtype, rank=rank, world_size=world_size) for rank in range(world_size)]
    summed = torch.zeros(len(writers[0]), dtype=dtype)
    for writer, count in zip(writers, counts, strict=True):
        summed += torch.tensor(writer.flags(count), dtype=dtype)  # rounds each time, as a ring of ranks does
    sums = (summed.real if summed.is_complex() else summed).tolist()
    assert all(writer.total(sums) == sum(counts) for writer in writers)
    assert not are_mixed(sums)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_one_rank_that_did_not_weigh_is_seen(dtype: torch.dtype) -> None:
    world_size = 300
    summed = torch.zeros(len(CountFlags(dtype, rank=0, world_size=world_size)), dtype=dtype)
    for rank in range(world_size):
        flags = CountFlags(dtype, rank=rank, world_size=world_size)
        summed += torch.tensor(flags.flags(7) if rank != 200 else flags.unweighed, dtype=dtype)
    assert are_mixed((summed.real if summed.is_complex() else summed).tolist())


@given(total=st.integers(1, MOST_ITEMS), world_size=st.integers(1, 64))
def test_units_bring_weights_to_about_one(total: int, world_size: int) -> None:
    assert 1 <= total / unit_of_sums(total) < 2
    assert total < world_size or 0.5 <= total / world_size / unit_of_means(total, world_size) < 2 + 1 / world_size


def test_without_a_total_items_are_counted_one_by_one() -> None:
    assert unit_of_sums(None) == unit_of_means(None, 4) == unit_of_means(2, 4) == 1
