"""Points of rest: what is copied at them, and what a run is saved with in the middle of a step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.checkpoint.rest import Rest
from lockstep.checkpoint.state import Position, RunState
from lockstep.errors import CheckpointError

CPU = torch.device("cpu")


class _Model(nn.Module):
    def __init__(self, *, large: int = 4) -> None:
        super().__init__()
        self.layer, self.norm, self.slow = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("constant", torch.arange(float(large)))
        self.register_buffer("uncounted", torch.zeros(large))
        self.replaced: torch.Tensor
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("not_saved", torch.zeros(2), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.uncounted.data[0] += 1  # type: ignore[operator,index]
            self.replaced = self.replaced + 1
            self.slow.weight.data = 0.5 * self.slow.weight.data + 1
        return self.norm(self.layer(values) + self.slow(values))  # type: ignore[no-any-return]


def _run(model: nn.Module, **optimizers: torch.optim.Optimizer) -> RunState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return RunState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), extra=optimizers)


def _step(run: RunState) -> None:
    assert run.optimizer is not None
    run.model(torch.randn(4, 2)).square().sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _values(state: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in state.items()}


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_forward_after_a_point_leaves_no_trace(steps: int) -> None:
    run = _run(_Model())
    rest = Rest(run, Position(), CPU)
    rest.note(None)
    for _ in range(steps):
        _step(run)
        assert not rest.points
        rest.note(None, only_after_a_step=True)
    (point,) = rest.points
    before = _values(run.model_state())
    python, numpy, common = random.getstate(), np.random.get_state(), torch.get_rng_state()
    run.model(torch.randn(4, 2))
    random.random(), np.random.normal()
    assert run.scheduler is not None
    assert run.optimizer is not None
    run.optimizer.param_groups[0]["lr"] = 7.0
    assert _values(run.model_state()) != before
    then = rest.at(point)
    assert _values(then.model_state()) == before
    saved = then.generators(CPU).to_json()
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(common)
    assert saved == run.generators(CPU).to_json()
    state = then.optimizer_state()
    assert state is not None
    assert state["param_groups"][0]["lr"] == 0.1


def test_large_constants_are_not_copied() -> None:
    run = _run(_Model(large=2**25))  # 128 MiB
    rest = Rest(run, Position(), CPU)
    for _ in range(3):
        rest.note(None)
        _step(run)
    rest.note(None)
    copied = {name for _, name in rest._watch.copies}
    assert "constant" not in copied
    assert {"uncounted", "replaced", "slow.weight", "norm.running_mean"} <= copied


def test_points_without_a_step_between_them_teach_nothing() -> None:
    run = _run(_Model())
    rest = Rest(run, Position(), CPU)
    for _ in range(3):  # as in a run that resumes at the end of a pass
        rest.note(None)
    for _ in range(5):
        _step(run)
        rest.note(None)
    before = _values(run.model_state())
    run.model(torch.randn(4, 2))
    assert _values(rest.at(rest.points[-1]).model_state()) == before


def test_what_changes_for_the_first_time_in_a_step_is_named() -> None:
    model = _Model(large=2**25)
    run = _run(model)
    rest = Rest(run, Position(), CPU)
    rest.note(None)
    run.model(torch.randn(4, 2))
    with pytest.raises(CheckpointError, match=r"uncounted.* have changed for the first time in the middle of a step"):
        rest.at(rest.points[0])


def test_a_parameter_that_is_trained_by_now_is_the_present_one() -> None:
    run = _run(_Model())
    rest = Rest(run, Position(), CPU)
    rest.note(None)
    run.model.slow.weight.requires_grad_(True)  # type: ignore[union-attr]
    _step(run)
    rest.note(None)
    _step(run)
    rest.note(None)
    now = _values(run.model_state())
    assert _values(rest.at(rest.points[0]).model_state()) == now


def test_points_without_a_step_between_them_are_kept() -> None:
    run = _run(_Model())
    position = Position()
    rest = Rest(run, position, CPU)
    _step(run)
    for position.epoch in range(3):
        rest.note(False)
    position.epoch = 3
    rest.note(None, only_after_a_step=True)  # gradients are being accumulated
    assert [point.moment.epoch for point in rest.points] == [0, 1, 2]
    run.model(torch.randn(4, 2))  # statistics are gathered anew: the copies are those of the last point only
    position.epoch = 4
    rest.note(False)
    assert [point.moment.epoch for point in rest.points] == [4]
    assert rest.dropped == 3
    _step(run)
    assert rest.dropped == 0


def test_any_optimizer_counts_and_a_gate_holds_it() -> None:
    model, other = _Model(), nn.Linear(1, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    rest = Rest(_run(model, second=second), Position(), CPU)
    rest.note(None)
    held = []

    def gate() -> None:
        held.append(rest.is_stepping)
        rest.steps()

    rest.gate = gate
    other(torch.ones(1)).backward()
    second.step()
    assert held == [False]
    assert not rest.points
    assert not rest.is_stepping


def test_a_step_that_fails_is_under_way_until_the_next_point() -> None:
    parameter = nn.Parameter(torch.ones(1))

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
            raise RuntimeError("no")

    model = nn.Module()
    model.p = parameter
    optimizer = Failing([parameter], lr=0.1)
    rest = Rest(RunState(model, optimizer), Position(), CPU)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert rest.is_stepping
    rest.note(None)
    assert not rest.is_stepping


def test_an_evaluation_is_known_by_the_mode_unless_the_model_is_trained_in_it() -> None:
    run = _run(_Model())
    rest = Rest(run, Position(), CPU)
    _step(run)
    assert not rest.evaluates
    run.model.eval()
    assert rest.evaluates
    run.model.train()
    assert not rest.evaluates
    run.model.eval()
    _step(run)
    assert not rest.evaluates


@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_uncounted_changes_that_begin_late_are_seen(kind: str) -> None:
    run = _run(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)))
    rest = Rest(run, Position(), CPU)
    teacher: nn.Parameter = run.model[1].weight  # type: ignore[index]

    def move() -> None:
        if kind == "in place":
            teacher.data.mul_(0.5)
        else:
            teacher.data = 0.5 * teacher.data

    rest.note(None)
    for step in range(8):
        _step(run)
        if step > 4:
            move()
        rest.note(None)
    before = _values(run.model_state())
    move()
    assert _values(rest.at(rest.points[0]).model_state()) == before


@pytest.mark.parametrize("counted", [True, False])
def test_weights_that_are_put_in_for_an_evaluation_are_not_saved(counted: bool) -> None:
    run = _run(nn.Linear(2, 2))
    rest = Rest(run, Position(), CPU)
    weight: nn.Parameter = run.model.weight  # type: ignore[assignment]

    def put_in(value: torch.Tensor) -> None:
        with torch.no_grad():
            (weight if counted else weight.data).copy_(value)

    for epoch in range(3):
        rest.note(False)
        _step(run)
        rest.note(None, only_after_a_step=True)
        rest.note(None)
        before, own = _values(run.model_state()), weight.detach().clone()
        put_in(torch.ones(2, 2))
        if epoch == 0 or not counted:
            with pytest.raises(CheckpointError, match=r"model: weight has changed .* outside of steps"):
                rest.at(rest.points[-1])
        else:  # it was seen that they change after a pass
            assert _values(rest.at(rest.points[-1]).model_state()) == before
        put_in(own)


def test_a_parameter_that_forwards_change_is_copied() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 2))
    run = _run(model)
    rest = Rest(run, Position(), CPU)

    def forward() -> torch.Tensor:
        return model(torch.arange(4))  # type: ignore[no-any-return]

    rest.note(None)
    for _ in range(5):
        forward().sum().backward()
        assert run.optimizer is not None
        run.optimizer.step()
        rest.note(None)
    before = _values(run.model_state())
    forward()
    assert _values(run.model_state()) != before
    assert _values(rest.at(rest.points[0]).model_state()) == before


def test_parameters_that_are_frozen_again_and_moved_are_copied() -> None:
    run = _run(_Model())
    rest = Rest(run, Position(), CPU)
    weight: nn.Parameter = run.model.layer.weight  # type: ignore[assignment,union-attr]

    def move() -> None:
        if not weight.requires_grad:
            with torch.no_grad():
                weight.mul_(0.5)

    rest.note(None)
    for step in range(8):
        if step == 5:
            rest.note(False)  # an epoch begins
        weight.requires_grad_(step < 5)
        move()
        _step(run)
        rest.note(None)
    before = _values(run.model_state())
    move()
    assert _values(rest.at(rest.points[0]).model_state()) == before


@pytest.mark.parametrize("size", [4, 2**19])
def test_modules_in_extra_are_as_they_were(size: int) -> None:
    run = _run(nn.Linear(2, 2))
    average, norm, values = nn.Module(), nn.BatchNorm1d(2), torch.zeros(size)
    average.register_buffer("values", values)
    average.norm = norm
    rest = Rest(RunState(run.model, run.optimizer, extra={"average": average}), Position(), CPU)

    def update() -> None:
        values.add_(1)
        norm(torch.randn(4, 2))

    for epoch in range(3):
        rest.note(False)
        for _ in range(3):
            _step(run)
            rest.note(None, only_after_a_step=True)
        rest.note(None)
        before = _values(average.state_dict())
        update()
        if size > 4 and epoch == 0:
            with pytest.raises(CheckpointError, match=r"extra 'average': values.* have changed"):
                rest.at(rest.points[-1])
        else:
            assert _values(dict(rest.at(rest.points[-1]).extra_state("average"))) == before


def test_what_is_added_in_the_middle_of_a_step_is_named() -> None:
    run = _run(nn.Linear(2, 2))
    rest = Rest(run, Position(), CPU)
    rest.note(None)
    run.model.register_buffer("late", torch.zeros(1))
    with pytest.raises(CheckpointError, match="model: late has changed"):
        rest.at(rest.points[0])


def _turn(run: RunState, rest: Rest, *after: object) -> None:
    """Take a turn of the loop: a step, what follows it, and the question for the next batch."""
    _step(run)
    for each in after:
        each()  # type: ignore[operator]
    rest.note(None, only_after_a_step=True)


def test_what_steps_in_each_turn_must_have_stepped_before_an_evaluation() -> None:
    run = _run(nn.Linear(2, 2))
    average, counts = torch.optim.swa_utils.AveragedModel(run.model), _Counts()
    rest = Rest(RunState(run.model, run.optimizer, run.scheduler, extra={"a": average, "c": counts}), Position(), CPU)
    assert run.scheduler is not None
    scheduler = run.scheduler.step  # type: ignore[attr-defined]
    rest.note(False)
    _step(run)
    assert "its scheduler (StepLR) may step in each turn" in rest.missing_in_turn()
    scheduler()
    assert rest.missing_in_turn() == ""
    rest.note(None)
    _turn(run, rest, scheduler, lambda: average.update_parameters(run.model), counts.count)
    _step(run)
    assert "its scheduler (StepLR) has changed in other turns" in rest.missing_in_turn()
    scheduler()
    assert "extra 'c' (_Counts) has changed in other turns" in rest.missing_in_turn()
    counts.count()
    assert "extra 'a' has changed in other turns" in rest.missing_in_turn()
    average.update_parameters(run.model)
    assert rest.missing_in_turn() == ""
    with torch.no_grad():
        run.model.weight.zero_()  # type: ignore[operator]
    assert rest.missing_in_turn() == "parameters (weight) are not what the optimizer's step has left"


@pytest.mark.parametrize("between", [False, True])
def test_a_scheduler_that_waits_for_evaluations(between: bool) -> None:
    run = _run(nn.Linear(2, 2))
    assert run.optimizer is not None
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    rest = Rest(RunState(run.model, run.optimizer, scheduler), Position(), CPU)
    rest.note(False)
    _turn(run, rest)
    rest.note(None)
    if between:
        scheduler.step(1.0)
    rest.note(False)
    _step(run)
    assert ("mostly steps after an evaluation" in rest.missing_in_turn()) == (not between)


def test_tensors_without_a_shape_are_watched_once_they_have_one() -> None:
    run = _run(nn.Linear(2, 2))
    model = nn.Sequential(run.model, nn.LazyBatchNorm1d())
    rest = Rest(RunState(model, run.optimizer), Position(), CPU)
    rest.note(False)
    model(torch.randn(4, 2)).sum().backward()
    with pytest.raises(CheckpointError, match=r"model: .*1\.weight.* have changed for the first time"):
        rest.at(rest.points[0])
    for _ in range(2):
        _step(run)
        rest.note(None)
    before = _values(model.state_dict())
    model(torch.randn(4, 2))
    assert _values(rest.at(rest.points[0]).model_state()) == before


def test_buffers_can_be_resized_after_a_point() -> None:
    run = _run(_Model())
    rest = Rest(run, Position(), CPU)
    rest.note(None)
    run.model.constant.resize_(8)  # type: ignore[operator]
    _step(run)
    rest.note(None)
    assert rest.at(rest.points[0]).model_state()["constant"].shape == (8,)


class _Counts:
    def __init__(self) -> None:
        self.counts = [0]

    def count(self) -> None:
        self.counts[0] += 1

    def state_dict(self) -> dict[str, object]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.counts = state["counts"]
