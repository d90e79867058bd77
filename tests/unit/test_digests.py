"""The digest by which the tests say that two states have the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.digests import digest_of

_LONG = np.arange(2000.0)


def _changed(array: Any, at: int) -> Any:
    other = array.copy() if isinstance(array, np.ndarray) else array.clone()
    other[at] += 1e-9 if other.dtype in (np.float64, torch.float64) else 1
    return other


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (_LONG, _changed(_LONG, 1000)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.arange(5), _changed(torch.arange(5), 4)),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 1}, {"b": 1}),
        ([], ()),
        (1, True),
        (0.1, 0.1 + 2e-17 + 1e-16),
    ],
)
def test_other_bits_have_another_digest(one: Any, two: Any) -> None:
    assert digest_of({"state": one}) != digest_of({"state": two})


def test_the_same_bits_have_the_same_digest() -> None:
    state = {"a": [torch.arange(6.0).reshape(2, 3).t(), (None, "x")], "b": _LONG}
    again = {"a": [torch.arange(6.0).reshape(2, 3).t().contiguous(), (None, "x")], "b": _LONG.copy()}
    assert digest_of(state) == digest_of(again)
