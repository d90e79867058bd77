"""Of all combinations of several parameters a few for every run of the tests, and the others for ``make faults``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def each_value(ids: Callable[[Any], str | None] | None = None, /, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of the values of its parameters.

    Every run of the tests has as many combinations as the longest list has values, so that each value comes in one of
    them; all others have the mark ``campaign``. A parameter called ``each_backend`` is the fixture (tests/backends.py).
    """
    lists = list(values.values())
    often = {tuple(turn % len(each) for each in lists) for turn in range(max(map(len, lists)))}
    combinations = [
        pytest.param(
            *(each[place] for each, place in zip(lists, places, strict=True)),
            marks=() if places in often else pytest.mark.campaign,
        )
        for places in product(*(range(len(each)) for each in lists))
    ]
    indirect = [name for name in values if name == "each_backend"]
    return pytest.mark.parametrize(tuple(values), combinations, indirect=indirect, ids=ids)
