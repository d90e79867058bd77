"""A total that tells whether values are finite."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.comm.looks import total_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 1000, 1 << 18, (1 << 18) + 1], ids=str)
def test_one_bad_value_shows_wherever_it_lies(dtype: torch.dtype, count: int) -> None:
    values = torch.zeros(count, dtype=dtype)
    assert math.isfinite(total_of(values).item())
    for place in {0, 1, count // 2 - 1, count // 2, count // 2 + 1, count - 2, count - 1} & set(range(count)):
        for bad in (math.nan, math.inf, -math.inf):
            values[place] = bad
            assert not math.isfinite(total_of(values).item()), (place, bad)
            assert not math.isfinite(total_of(torch.stack([values, values], dim=1)[:, 0]).item()), "not contiguous"
            values[place] = 0
