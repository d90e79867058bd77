"""Optimizer steps that a device has not begun: what is kept of the time before them, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.rest import Rest
from lockstep.checkpoint.state import Position, RunState
from lockstep.errors import CheckpointError
from tests.device import simulation

pytestmark = pytest.mark.gpu

Params = Any


@pytest.fixture(autouse=True)
def only_simulated(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated stream can be held back")


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.norm(self.layer(values))  # type: ignore[no-any-return]


class _Counts(torch.optim.Optimizer):
    """Keeps a number in place of a tensor."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                taken = self.state[param]["taken"] = self.state[param].get("taken", 0) + 1
                param.sub_(param.grad, alpha=group["lr"] / taken)


OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "a number": _Counts,
}


class _Average(nn.Module):
    """An average of a parameter, and on the host the number of its updates."""

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("mean", param.detach().clone())
        self.register_buffer("count", torch.zeros(1))

    @torch.no_grad()
    def update(self, param: torch.Tensor) -> None:
        self.mean.lerp_(param, 0.1)
        self.count += 1


class _Told:
    """An object with a state."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class _Training:
    """A run on a GPU, two steps of which are done."""

    def __init__(self, make: Callable[[Params], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = _Norm().cuda()
        self.optimizer = make(self.model.parameters())
        self.average = _Average(self.model.layer.weight)
        self.other = torch.optim.AdamW([nn.Parameter(torch.ones(2, device="cuda"))], lr=0.1)
        extra: dict[str, Any] = {"average": self.average, "other": self.other, "told": _Told()}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.run = RunState(self.model, self.optimizer, self.scheduler, extra=extra)
        self.position = Position()
        self.position.count(self.optimizer)
        self.rest = Rest(self.run, self.position, torch.device("cuda", torch.cuda.current_device()))
        self.inputs = torch.randn(2, 3, device="cuda")
        self.rest.note(None)
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().sum().backward()
        self.optimizer.step()
        self.other.param_groups[0]["params"][0].grad = torch.ones(2, device="cuda")
        self.other.step()
        self.average.update(self.model.layer.weight)
        self.run.extra["told"].load_state_dict({"steps": self.position.step})
        self.scheduler.step()
        self.rest.note(None)

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, in numbers."""
        return _in_numbers(_read(self.run))

    def state_before(self, step: int) -> dict[str, Any]:
        """The same of before a pending step, read on a stream beside."""
        assert self.rest.pending is not None
        pending = self.rest.pending.before(step)
        assert pending is not None
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            then = self.rest.at(pending.points[-1], pending)
            numbers = _in_numbers(_read(then))
        then.require_unchanged()
        return numbers


def _read(run: RunState) -> dict[str, Any]:
    return {
        "model": run.model_state(),
        "optimizer": run.optimizer_state(),
        "scheduler": run.scheduler_state(),
        "generators": run.generators(torch.device("cuda", 0)).to_json(),
        **{name: run.extra_state(name) for name in run.extra},
    }


def _in_numbers(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: _numbers(part) for name, part in parts.items()}


def _numbers(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items() if key != "_last_lr"}
    if isinstance(tree, (list, tuple)):
        return [*map(_numbers, tree)]
    return tree


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_was_before_a_step_that_the_device_has_not_begun(
    make: Callable[[Params], torch.optim.Optimizer], steps: int
) -> None:
    training = _Training(make)
    before = training.state()
    with simulation.held_back(torch.cuda.current_stream()):
        for _ in range(steps):
            training.step()
        assert training.position.step == 2 + steps
        assert training.rest.least(2 + steps) == 2
        assert training.state_before(2) == before
    torch.cuda.synchronize()
    assert training.rest.least(2 + steps) == 2 + steps
    assert training.state() != before


def test_what_was_read_while_the_device_went_on_is_refused() -> None:
    training = _Training(OPTIMIZERS["AdamW"])
    assert training.rest.pending is not None
    with simulation.held_back(torch.cuda.current_stream()):
        training.step()
        pending = training.rest.pending.before(2)
    assert pending is not None
    torch.cuda.synchronize()
    assert training.rest.pending.before(2) is None
    with pytest.raises(CheckpointError, match="the device has gone on to step 3 while step 2 was read"):
        training.rest.at(pending.points[-1], pending).require_unchanged()


def test_a_tensor_of_the_optimizers_that_is_another_one_is_refused() -> None:
    training = _Training(OPTIMIZERS["AdamW"])
    with simulation.held_back(torch.cuda.current_stream()):
        training.step()
        for entries in training.optimizer.state.values():
            entries["step"] = entries["step"] + 1
        with pytest.raises(CheckpointError, match="has put another tensor in the place of 'step'"):
            training.state_before(2)


def test_what_changes_on_the_host_in_unknown_ways_keeps_no_step() -> None:
    mixed = _Training(lambda params: torch.optim.SGD([*params, nn.Parameter(torch.ones(1))], lr=0.1))
    with simulation.held_back(torch.cuda.current_stream()):
        mixed.step()
        assert mixed.rest.least(3) == 3
