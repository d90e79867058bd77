"""What the small objects of a run held at a point of rest: every change that a program can make is seen."""

from __future__ import annotations

import array
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.checkpoint.noted import Objects
from lockstep.checkpoint.rest import Rest
from lockstep.checkpoint.state import Position, RunState
from lockstep.errors import CheckpointError

CPU = torch.device("cpu")


class _Slotted:
    __slots__ = ("__best", "unset")

    def __init__(self) -> None:
        self.__best = 0

    def improve(self) -> None:
        self.__best += 1


@dataclass(slots=True)
class _Inner:
    counts: list[int] = field(default_factory=list)


class _Holder:
    """An extra object that holds something, and whose state is a number of its own."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.number = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def _array_of(size: int) -> np.ndarray[Any, Any]:
    return np.zeros(size)


def _set_first(values: Any) -> None:
    values[0] = 7


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's generator": (torch.Generator, lambda held: torch.rand(2, generator=held)),
    "NumPy's generator": (lambda: np.random.default_rng(5), lambda held: held.random()),
    "NumPy's old generator": (lambda: np.random.RandomState(5), lambda held: held.random_sample()),
    "a bit generator": (lambda: np.random.MT19937(5), lambda held: held.random_raw()),
    "Python's generator": (lambda: random.Random(5), lambda held: held.random()),
    "a long deque": (lambda: deque(range(9000), maxlen=9000), lambda held: held.append(4)),
    "a large array that is transposed": (lambda: np.zeros((90, 80)).T, lambda held: _set_first(held[0])),
    "a full deque": (lambda: deque([1, 2, 3], maxlen=3), lambda held: held.append(4)),
    "an array of Python": (lambda: array.array("d", [1, 2]), _set_first),
    "bytes": (lambda: bytearray(4), _set_first),
    "slots": (_Slotted, lambda held: held.improve()),
    "a dataclass with slots": (_Inner, lambda held: held.counts.append(1)),
    "an array": (lambda: _array_of(4), _set_first),
    "a large array": (lambda: _array_of(4096), _set_first),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    make, change = CHANGES[what]
    thing = _Holder(make())
    objects = Objects({"it": thing}, tuple, words=str)
    before = objects.note()["it"].mark
    assert objects.mark("it") == before
    change(thing.held)
    assert objects.mark("it") != before


@pytest.mark.parametrize("make", [lambda n: torch.full((2,), float(n)), lambda n: Decimal(n) / 7, np.float64, object])
def test_another_one_in_the_same_memory_is_another_one(make: Callable[..., Any]) -> None:
    thing = _Holder(None)
    objects = Objects({"it": thing}, tuple, words=str)
    for number in range(50):
        thing.held = None
        thing.held = make() if make is object else make(number)
        mark = objects.note()["it"].mark
        thing.held = None  # and what comes now mostly takes its place
        thing.held = make() if make is object else make(number + 1)
        assert objects.mark("it") != mark


def test_a_path_that_is_used_has_not_changed() -> None:
    thing = _Holder(Path("a") / "b")
    objects = Objects({"it": thing}, tuple, words=str)
    mark = objects.note()["it"].mark
    assert str(thing.held) in {"/".join(thing.held.parts), str(thing.held)}
    assert objects.mark("it") == mark
    thing.held /= "c"
    assert objects.mark("it") != mark


def test_functions_classes_and_modules_are_not_looked_into() -> None:
    thing = _Holder([np, random.random, _Holder, torch.nn.functional.relu])
    objects = Objects({"it": thing}, tuple, words=str)
    noted = objects.note()["it"]
    assert noted.mark is not None
    assert len(noted.mark) < 20
    thing.number = 1.0
    assert objects.state("it", noted) == {"number": 0.0}


# Modules.


class _Extra(nn.Module):
    """A module with a state beside its tensors, which each forward changes."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = 0
        self.history = torch.zeros(size)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.history += 1
        return self.layer(values)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.history = state["seen"], state["history"]


class _Hooked(nn.Module):
    """A module whose state dict has more by a hook, and a parameter under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = 0

        def more(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
            state[f"{prefix}seen"] = self.seen
            state[f"{prefix}no_module._extra_state"] = self.seen
            state[f"{prefix}renamed"] = state.pop(f"{prefix}layer.bias")

        self._register_state_dict_hook(more)  # type: ignore[no-untyped-call]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(values)  # type: ignore[no-any-return]


def _trained(model: nn.Module, **extra: Any) -> tuple[RunState, Rest]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunState(model, optimizer, extra=extra)
    rest = Rest(run, Position(), CPU)
    rest.note(None)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        rest.note(None, only_after_a_step=True)
    return run, rest


def test_the_extra_state_of_modules_is_that_of_the_point() -> None:
    average = torch.optim.swa_utils.AveragedModel(_Extra())
    model = nn.Sequential(_Extra(), _Extra())
    run, rest = _trained(model, average=average)
    average(torch.ones(2))
    model(torch.ones(2))
    (point,) = rest.points
    then = rest.at(point)
    state = then.model_state()
    assert [state[f"{number}._extra_state"]["seen"] for number in range(2)] == [3, 3]
    assert [state[f"{number}._extra_state"]["history"].item() for number in range(2)] == [3.0, 3.0]
    assert run.model_state()["0._extra_state"]["seen"] == 4
    assert then.extra_state("average")["module._extra_state"]["seen"] == 0
    assert run.extra_state("average")["module._extra_state"]["seen"] == 1


class _Fresh(_Extra):
    """A module that makes its state anew each time that it is asked for."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": self.history.clone()}


class _Unlike(_Extra):
    """A module whose state is never twice the same."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get_extra_state(self) -> dict[str, Any]:
        self.asked += 1
        return {"seen": self.seen, "asked": self.asked}


def test_an_extra_state_that_is_made_anew_for_each_look_is_known_by_what_it_holds() -> None:
    model = _Fresh(2000)
    _, rest = _trained(model)
    copies = rest.at(rest.points[0]).model_state(), rest.at(rest.points[0]).model_state()
    assert all(each["_extra_state"]["seen"] == 3 for each in copies)
    model(torch.ones(2))
    state = rest.at(rest.points[0]).model_state()["_extra_state"]
    assert (state["seen"], state["history"].tolist()) == (3, [3.0] * 2000)


def test_of_an_extra_state_that_is_never_twice_the_same_it_is_what_it_is_now() -> None:
    model = _Unlike()
    _, rest = _trained(model)
    asked = model.asked
    model(torch.ones(2))
    assert rest.at(rest.points[0]).model_state()["_extra_state"]["seen"] == 4
    assert asked <= 4, "it is not asked at each step"


def test_what_hooks_add_to_a_state_dict_is_that_of_the_point() -> None:
    model = _Hooked()
    run, rest = _trained(model)
    bias = model.layer.bias.tolist()
    model(torch.ones(2))
    state = rest.at(rest.points[0]).model_state()
    assert (state["seen"], state["no_module._extra_state"], run.model_state()["seen"]) == (3, 3, 4)
    assert state["renamed"].tolist() == bias


def test_an_extra_state_that_is_too_large_to_be_copied_is_refused_once_it_has_changed() -> None:
    model = _Extra(2**19)
    _, rest = _trained(model)
    then = rest.at(rest.points[0])
    assert then.model_state()["_extra_state"]["seen"] == 3
    model(torch.ones(2))
    with pytest.raises(CheckpointError, match=r"^model: what its state dict has besides tensors .* has changed since"):
        then.model_state()
