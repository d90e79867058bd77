"""Optimizers derived from another optimizer: torch calls hooks for each of the two steps, and there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import lockstep
from lockstep import _torch
from lockstep.ddp.in_rounds import InRounds
from lockstep.job import flight
from lockstep.job.page import Cell
from lockstep.step.local_training import local_training_of
from tests.devices import own_page
from tests.harness import run_ranks


class Derived(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class DerivedTwice(Derived):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.99)
        return super().step(closure)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        raise ValueError("this optimizer does not step")


class Unchanged(torch.optim.SGD):
    """Has the step of its parent, as AdamW has Adam's."""


def hooked() -> None:
    """Have torch call hooks in the parents' steps: it does so from the first optimizer of a class on."""
    for kind in (torch.optim.SGD, Derived, DerivedTwice):
        kind(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def _hooked() -> None:
    hooked()


def _stepped(optimizer: torch.optim.Optimizer) -> list[bool]:
    """What its hooks find in one step."""
    found: list[bool] = []

    def asks(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found.append(_torch.nesting[type(optimizer)] and _torch.is_inner_step(optimizer))

    optimizer.register_step_pre_hook(asks)
    optimizer.register_step_post_hook(asks)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return found


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (torch.optim.SGD, [False, False]),
        (Unchanged, [False, False]),
        (Derived, [False, True, True, False]),
        (DerivedTwice, [False, True, True, True, True, False]),
    ],
)
def test_inner_steps_are_known(kind: Callable[..., torch.optim.Optimizer], found: list[bool]) -> None:
    assert _stepped(kind(nn.Linear(1, 1).parameters(), lr=0.1)) == found


def test_the_step_after_one_that_failed_is_no_inner_one() -> None:
    failing = Failing(nn.Linear(1, 1).parameters(), lr=0.1)
    found: list[bool] = []
    failing.register_step_pre_hook(lambda optimizer, *_: found.append(_torch.is_inner_step(optimizer)))
    for _ in range(2):
        with pytest.raises(ValueError, match="does not step"):
            failing.step()
    assert found == [False, False]


def test_an_optimizer_that_another_one_steps_is_no_inner_one() -> None:
    inner = Derived(nn.Linear(1, 1).parameters(), lr=0.1)

    class Around(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # noqa: ARG002
            inner.step()

    assert _stepped(Around(nn.Linear(1, 1).parameters(), lr=0.1)) == [False, False]


def _counted(name: str, folder: str) -> tuple[int, int]:
    hooked()
    lockstep.init()
    model = lockstep.replicate(nn.Linear(2, 2), sync=lockstep.LocalSteps(2))
    optimizer = {kind.__name__: kind for kind in (torch.optim.SGD, Derived, DerivedTwice)}[name](
        model.parameters(), lr=0.1
    )
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    training = local_training_of(model)
    assert isinstance(training, InRounds)
    return saved.step, training.rounds


@pytest.mark.parametrize("kind", ["SGD", "Derived", "DerivedTwice"])
def test_a_checkpointer_and_rounds_count_a_step_once(kind: str, tmp_path: Path) -> None:
    for steps, rounds in run_ranks(_counted, 2, kind, str(tmp_path)):
        assert (steps, rounds) == (6, 2), "the third round ends with the next forward"


@pytest.mark.parametrize("kind", [torch.optim.SGD, Derived, DerivedTwice])
def test_the_page_counts_a_step_once(kind: Callable[..., torch.optim.Optimizer], tmp_path: Path) -> None:
    with own_page(tmp_path) as pages:
        flight.watch_optimizers(optimizers)
        before = pages.get(1, Cell.STEPS)
        optimizer = kind(nn.Linear(2, 2).parameters(), lr=0.1)
        for _ in range(3):
            optimizer.step()
        assert pages.get(1, Cell.STEPS) - before == 3


def _left_out(name: str) -> list[float]:
    hooked()
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(1, 1, bias=False))
    kinds = {kind.__name__: kind for kind in (torch.optim.SGD, Derived)}
    optimizer = kinds[name](model.parameters(), lr=0.1)
    values: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.ones(2, 1)
        if step == 1 and world.rank == 1:
            inputs.fill_(float("nan"))
        model(inputs).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it says that the step is left out
            optimizer.step()
        values.append(next(model.parameters()).item())
    return values


@pytest.mark.parametrize("kind", ["SGD", "Derived"])
def test_a_step_that_is_not_finite_changes_nothing(kind: str) -> None:
    for first, second, third in run_ranks(_left_out, 2, kind):
        assert first == second
        assert third < second
