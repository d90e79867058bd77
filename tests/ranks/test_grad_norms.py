"""Norms of gradients and clipping by them, against torch's own functions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.ddp import norms
from tests.backends import EACH_BACKEND, OVER_ALL
from tests.harness import run_ranks
from tests.ranks.ddp_cases import device_of

pytestmark = EACH_BACKEND


def _net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Sequential(nn.Linear(40, 40), nn.Tanh()), nn.Linear(40, 2)).to(
        dtype
    )


def _backward(model: nn.Module, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> None:
    world = lockstep.world()
    inputs = torch.arange(4 * 6, dtype=dtype).reshape(4, 6).cos() * (world.rank + 1)
    (model(inputs.to(device_of(model))).square().sum() * scale).backward()


def _grads(params: Any) -> list[torch.Tensor]:
    return [param.grad.clone() for param in params if param.grad is not None]


def _compare(params: list[nn.Parameter], what: Any, *how: Any, within: float = 1e-12) -> None:
    """Clip what the parameters have by us, through ``what``, and copies of it by torch."""
    copies = [nn.Parameter(torch.zeros_like(param)) for param in params]
    for param, other in zip(params, copies, strict=True):
        other.grad = None if param.grad is None else param.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(copies, *how)
    got = lockstep.clip_grad_norm_(what, *how)
    torch.testing.assert_close(got, expected, rtol=within, atol=within, equal_nan=True)
    for param, other in zip(params, copies, strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=within, atol=within, equal_nan=True)


def _like_torch(overlap: bool | None, as_view: bool) -> list[float]:
    world = lockstep.init()
    model = lockstep.replicate(
        _net().to(world.device), overlap=overlap, gradient_as_bucket_view=as_view, first_bucket_mb=1e-4
    )
    params = list(model.parameters())
    found = []
    for norm_type in (2.0, 1.0, float("inf"), 3.0, 0.5):
        for max_norm in (1e-3, 1e9):
            for what in (model, model.parameters(), params):
                model.zero_grad()
                _backward(model)
                _compare(params, what, max_norm, norm_type)
    for param in params:  # the same on every rank
        assert param.grad is not None
        everyones = world.gather(param.grad)
        assert all(torch.equal(each, everyones[0]) for each in everyones)
    _backward(model)
    found += [float(lockstep.clip_grad_norm_(model, 0.5)), float(lockstep.clip_grad_norm_(model, 1e9))]
    return found


@OVER_ALL
@pytest.mark.parametrize(("overlap", "as_view"), [(None, True), (True, True), (None, False)])
def test_clipping_is_torchs_on_all_ranks(each_backend: str, overlap: bool | None, as_view: bool) -> None:
    del each_backend
    found = run_ranks(_like_torch, 2, overlap, as_view)
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx(0.5, rel=1e-6)


def _after_changes() -> None:
    """Whatever changes gradients after backward, the norm is of what is there."""
    lockstep.init()
    model = lockstep.replicate(_net())
    params = list(model.parameters())

    def by_data(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.data.mul_(3)  # which no version tells of

    def by_numpy(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.numpy()[...] *= 3

    def by_hand(param: nn.Parameter) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.grad.add_(param)

    def anew(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad = param.grad * 2

    def none(param: nn.Parameter) -> None:
        param.grad = None

    for change in (by_data, by_numpy, by_hand, anew, none):
        for chosen in (params, params[:1], params[2:4]):
            for max_norm in (1e-3, 1e9):
                model.zero_grad()
                _backward(model)
                before = float(lockstep.clip_grad_norm_(model, 1e9))
                for param in chosen:
                    change(param)
                _compare(params, model, max_norm)
                if change is by_data and chosen is params:
                    assert float(torch.nn.utils.get_total_norm(_grads(params))) != pytest.approx(before)
    model.zero_grad()
    _backward(model)
    _compare(params[1:4], params[1:4], 1e-3)  # a part of a bucket
    one = params[0]
    _compare([one], one, 1e-3)
    with lockstep.no_sync(model):
        _backward(model)
    _compare(params, model, 1e-3)
    assert norms._in_buckets(params)[1] == []
    lockstep.release(model)
    _compare(params, model, 1e-4)


def test_a_norm_is_never_stale() -> None:
    run_ranks(_after_changes, 2)


def _with_a_scaler() -> None:
    lockstep.init()
    model = lockstep.replicate(_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _backward(model, torch.float32)
    unscaled = float(torch.nn.utils.get_total_norm(_grads(model.parameters())))
    model.zero_grad()
    world = lockstep.world()
    inputs = torch.arange(4 * 6, dtype=torch.float32).reshape(4, 6).cos() * (world.rank + 1)
    scaler.scale(model(inputs).square().sum()).backward()
    assert float(lockstep.clip_grad_norm_(model, 1e9)) == pytest.approx(1024 * unscaled, rel=1e-5)
    scaler.unscale_(optimizer)
    assert float(lockstep.clip_grad_norm_(model, 0.25)) == pytest.approx(unscaled, rel=1e-5)
    assert float(lockstep.grad_norms(model).total) == pytest.approx(0.25, rel=1e-5)
    scaler.step(optimizer)


def test_clipping_after_a_scaler_has_unscaled() -> None:
    run_ranks(_with_a_scaler, 2)


def _not_finite() -> None:
    lockstep.init()
    model = lockstep.replicate(_net())
    params = list(model.parameters())
    for bad in (float("nan"), float("inf")):
        model.zero_grad()
        _backward(model, scale=bad)
        before = _grads(params)
        with pytest.raises(RuntimeError, match=r"total norm of order 2 of the gradients is (nan|inf)"):
            lockstep.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        for now, then in zip(_grads(params), before, strict=True):
            torch.testing.assert_close(now, then, equal_nan=True, rtol=0, atol=0)
        _compare(params, model, 1.0)
    empty = nn.Linear(2, 2)
    assert float(lockstep.clip_grad_norm_(empty, 1.0)) == 0.0
    nothing = lockstep.grad_norms(empty)
    assert (float(nothing.total), nothing.layers) == (0.0, {})
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not list"):
        lockstep.grad_norms([])  # type: ignore[arg-type]


def test_gradients_that_are_not_finite() -> None:
    run_ranks(_not_finite, 2)


def _mixed() -> None:
    """Several dtypes, a frozen layer, a sparse embedding beside the buckets, two replicas in one call."""
    lockstep.init()
    model = _net()
    model.append(nn.Linear(2, 2).float())
    model[0].requires_grad_(False)
    lockstep.replicate(model, overlap=True)
    other = lockstep.replicate(nn.Linear(3, 3).double())
    plain = nn.Linear(3, 1).double()
    params = [*model.parameters(), *other.parameters(), *plain.parameters()]
    world = lockstep.world()
    inputs = torch.ones(4, 6, dtype=torch.float64) * (world.rank + 1)
    hidden = nn.Sequential(*list(model)[:-1])(inputs)
    (model[-1](hidden.float()).square().sum() + hidden.sum()).backward()
    plain(other(torch.ones(2, 3, dtype=torch.float64))).sum().backward()
    assert len(norms._in_buckets(params)[0]) == 3
    _compare(params, params, 1e9, within=1e-7)  # float32's
    assert model[0].weight.grad is None


def test_parameters_of_several_dtypes_and_replicas_and_of_none() -> None:
    run_ranks(_mixed, 2)


def _by_layer() -> tuple[float, dict[str, float]]:
    world = lockstep.init()
    model = lockstep.replicate(_net())
    _backward(model)
    found = lockstep.grad_norms(model)
    for name, norm in found.layers.items():
        expected = torch.nn.utils.get_total_norm(_grads(model.get_submodule(name).parameters()))
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        found.total, torch.nn.utils.get_total_norm(_grads(model.parameters())), rtol=1e-12, atol=0
    )
    assert not found.total.requires_grad
    assert list(found.layers) == ["0", "2.0", "3"]
    assert float(lockstep.grad_norms(model, norm_type=float("inf")).total) == max(
        float(grad.abs().max()) for grad in _grads(model.parameters())
    )
    del world
    return float(found.total), {name: float(norm) for name, norm in found.layers.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_norms_by_layer(world_size: int) -> None:
    found = run_ranks(_by_layer, world_size)
    assert all(each == found[0] for each in found)


def _digits() -> tuple[float, float, float]:
    """Of many equal squares: the relative error of ours, and of torch's, in float32."""
    lockstep.init()
    model = lockstep.replicate(nn.Linear(1 << 10, 1 << 10, bias=False))
    with torch.no_grad():
        model.weight.fill_(0.0)
    model(torch.full((1, 1 << 10), 0.1)).sum().backward()
    exact = float(torch.nn.utils.get_total_norm([grad.double() for grad in _grads(model.parameters())]))
    torchs = float(torch.nn.utils.get_total_norm(_grads(model.parameters())))
    ours = float(lockstep.clip_grad_norm_(model, 1e9))
    return exact, abs(ours / exact - 1), abs(torchs / exact - 1)


def test_a_large_bucket_keeps_its_digits() -> None:
    for _, ours, torchs in run_ranks(_digits, 2):
        assert ours < 1e-6
        assert ours <= torchs


def _compiled(folder: str) -> None:
    lockstep.init()
    log = lockstep.Log(folder, every=1)
    model = lockstep.replicate(_net())
    alone = copy.deepcopy(model)

    @torch.compile(backend="eager")
    def step(inputs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(inputs).square().sum().backward()
        norm = lockstep.clip_grad_norm_(model, 0.1)
        log(norm=norm, layer=lockstep.grad_norms(model).layers["3"])
        return norm

    inputs = torch.ones(2, 6, dtype=torch.float64)
    alone(inputs).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(step(inputs), expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(_grads(model.parameters()), _grads(alone.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_a_compiled_step_clips_and_logs(tmp_path: Path) -> None:
    run_ranks(_compiled, 1, str(tmp_path), timeout=100.0)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["norm"] > line["layer"] > 0
