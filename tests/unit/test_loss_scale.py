"""The rule by which a loss scale changes, against torch's own."""

from __future__ import annotations

import random

import pytest
import torch

from lockstep.step.loss_scale import DynamicScale, is_state

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def test_the_scale_is_that_of_torchs_scaler() -> None:
    draws = random.Random(5)
    own, weight = DynamicScale(interval=4), torch.nn.Parameter(torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen = set()
    for _ in range(300):
        is_bad = draws.random() < 0.2
        factor = own.for_loss()
        assert factor == scaler.scale(torch.ones(())).item() == scaler.get_scale()
        weight.grad = torch.full((1,), float("inf") if is_bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        own.stepped(skipped=is_bad)
        assert own.scale == scaler.get_scale()
        seen.add(own.scale > factor)
        seen.add(own.scale < factor)
    assert seen == {True, False}
    assert own.skipped > 30


def test_several_optimizers_change_it_once() -> None:
    scale = DynamicScale()
    scale.for_loss()
    scale.stepped(skipped=True)
    assert scale.scale == 32768  # already, for who logs it
    scale.stepped(skipped=True)
    scale.stepped(skipped=False)
    assert scale.for_loss() == 32768
    assert scale.for_loss() == 32768  # a loss without a step, as in accumulation
    assert scale.skipped == 2


def test_it_stays_within_float32() -> None:
    scale = DynamicScale(interval=1)
    for _ in range(200):
        scale.for_loss()
        scale.stepped(skipped=False)
    assert torch.tensor(scale.scale).isfinite()
    assert scale.scale == 2.0**127


def test_a_state_comes_back() -> None:
    scale, other = DynamicScale(interval=3), DynamicScale(interval=3)
    for skipped in (True, False, False):
        scale.for_loss()
        scale.stepped(skipped=skipped)
    state = scale.state_dict()
    assert state == {"scale": 32768.0, "taken": 2, "skipped": 1}
    assert is_state(state)
    other.load_state_dict(state)
    assert other.state_dict() == state
    for each in (scale, other):
        each.for_loss()
        each.stepped(skipped=False)
        assert each.for_loss() == 65536


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"scale": 1.0, "taken": 0},
        {"scale": 3.0, "taken": 0, "skipped": 0},
        {"scale": 0.0, "taken": 0, "skipped": 0},
        {"scale": float("nan"), "taken": 0, "skipped": 0},
        {"scale": float("inf"), "taken": 0, "skipped": 0},
        {"scale": 2, "taken": 0, "skipped": 0},
        {"scale": 2.0, "taken": -1, "skipped": 0},
        {"scale": 2.0, "taken": 0, "skipped": True},
    ],
)
def test_what_is_no_state_is_told(bad: object) -> None:
    assert not is_state(bad)
    assert is_state({"scale": 2.0, "taken": 0, "skipped": 0})
