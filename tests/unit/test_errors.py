"""Lists in messages are cut, and say how much of them is left out."""

from __future__ import annotations

import pytest

from lockstep.errors import listed


@pytest.mark.parametrize(
    ("items", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c", "d"], "a or b and 2 more")],
)
def test_a_list_says_how_many_are_left_out(items: list[str], text: str) -> None:
    assert listed(items, most=2, between=" or ") == text
