"""Of all combinations of several parameters a few for every run of the tests, and the others for ``make faults``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.backends import GPUS


def each_value(
    ids: Callable[[Any], str | None] | None = None, /, *, on_gpus: bool = False, **values: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of the values of its parameters.

    Every run of the tests has as many combinations as the longest list has values, so that each value comes in one of
    them; all others have the mark ``campaign``. A parameter called ``each_backend`` is the fixture (tests/backends.py).

    Args:
        ids: as pytest's, for each value.
        on_gpus: also run what every run of the tests has on GPUs, where ``each_backend`` is a parameter.
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
    if on_gpus:
        chosen = sorted(
            {tuple(p for n, p in zip(values, places, strict=True) if n != "each_backend") for places in often}
        )
        others = {name: each for name, each in values.items() if name != "each_backend"}
        for seed, places in product(GPUS, chosen):
            given = {name: others[name][place] for name, place in zip(others, places, strict=True)}
            said = "-".join([str(seed.id), *((ids or str)(value) or "" for value in given.values())])
            given["each_backend"] = seed.values[0]
            combinations.append(pytest.param(*(given[name] for name in values), id=said, marks=seed.marks))
    indirect = [name for name in values if name == "each_backend"]
    return pytest.mark.parametrize(tuple(values), combinations, indirect=indirect, ids=ids)
