"""Gradients of replicas are the average over the ranks, whatever the model and however backward runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.backends import EACH_BACKEND, ON_GPUS, OVER_ALL, OVER_BOTH
from tests.device import simulation
from tests.harness import run_ranks
from tests.ranks.ddp_cases import (
    WAYS,
    Attach,
    Build,
    Loss,
    assert_averaged,
    averages,
    batch,
    device_of,
    differentiate,
    inputs_for,
    mlp,
    name_of,
    replicate_tiny,
    squares,
    train_and_check,
    wide,
    wrap_tiny,
)

pytestmark = [
    pytest.mark.internals,  # run on other versions of torch and Python, too
    EACH_BACKEND,
]

# Models -------------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer used twice, and its weight once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 5, dtype=torch.float64)
        self.again = self.first
        self.last = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.first(x))) @ self.first.weight
        scores: Tensor = self.last(x)
        return scores


class Checkpointed(nn.Module):
    """Segments under activation checkpointing; the middle layer is in two: it gets its gradient in two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Linear(5, 5, dtype=torch.float64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for used in ((1, 2), (2, 3)):

            def run(x: Tensor, used: tuple[int, int] = used) -> Tensor:
                scores: Tensor = torch.tanh(self.layers[used[1]](torch.tanh(self.layers[used[0]](x))))
                return scores

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


def checkpointed_reentrant() -> nn.Module:
    return Checkpointed(True)


def checkpointed() -> nn.Module:
    return Checkpointed(False)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(6).to(kind)) for kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(self.parts, start=1):
            product = (part * x[0, 0].to(part.dtype) * number).sum()
            total = total + product.real.to(torch.float64) ** 2
        return total


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv = nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.conv(x.repeat(3, 1).view(1, 3, 4, 5))
        return scores


class Embeddings(nn.Module):
    """Two embeddings with sparse gradients (the second also used densely) among dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.words = nn.Embedding(11, 5, sparse=True, dtype=torch.float64)
        self.tied = nn.Embedding(3, 5, sparse=True, dtype=torch.float64)
        self.dense = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long()[:, 0] % 11
        hidden = self.words(tokens) + self.tied(tokens % 3)
        scores: Tensor = self.dense(hidden) + hidden @ self.tied.weight.T
        return scores


class Complex(nn.Module):
    """Complex parameters in double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.net = nn.Linear(5, 3, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x.to(torch.complex128)).abs()
        return scores


@dataclass
class Scores:
    values: Tensor
    note: str


class Holder:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class Packed(nn.Module):
    """Returns its tensors wrapped in something, and part of them unused by the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = mlp()

    def forward(self, x: Tensor) -> Any:
        values = self.net(x)
        packed: dict[str, Callable[[], Any]] = {
            "dict": lambda: {"scores": [values], "other": x},
            "tuple": lambda: (None, (values * 2, values)),
            "dataclass": lambda: Scores(values, "a note"),
            "object": lambda: Holder(values),
            "opaque": lambda: lambda: values,
        }
        return packed[self.kind]()


def loss_of_packed(model: nn.Module, rank: int, step: int) -> Tensor:
    packed = model(inputs_for(model, rank, step))
    if isinstance(packed, dict):
        values = packed["scores"][0]
    elif isinstance(packed, tuple):
        values = packed[1][1]
    else:
        values = packed.values if isinstance(packed, (Scores, Holder)) else packed()
    loss: Tensor = values.square().mean()
    return loss


def with_autocast(model: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autocast(device_of(model).type, dtype=torch.bfloat16):
        loss: Tensor = model(inputs_for(model, rank, step, torch.float32)).float().square().mean()
    return loss


def with_penalty(model: nn.Module, rank: int, step: int) -> Tensor:
    """A term of the parameters alone: their gradients may come before backward reaches the outputs."""
    return squares(model, rank, step) + sum((p * p).sum() for p in model.parameters())


def through_another_method(model: nn.Module, rank: int, step: int) -> Tensor:
    """Not through forward."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Sequential)
    x = inputs_for(model, rank, step)
    for layer in inner:
        x = layer(x)
    return x.square().mean()


def mlp32() -> nn.Module:
    return mlp(torch.float32)


# Tests --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("attach", WAYS, ids=name_of)
@ON_GPUS
def test_gradients_are_averages(attach: Attach, world_size: int) -> None:
    run_ranks(train_and_check, world_size, attach, mlp, squares)


@pytest.mark.parametrize("attach", [replicate_tiny, wrap_tiny], ids=name_of)
@pytest.mark.parametrize(
    ("build", "loss", "tolerance"),
    [
        (Shared, squares, 1e-12),
        (checkpointed, squares, 1e-12),
        (checkpointed_reentrant, squares, 1e-12),
        (Convolution, squares, 1e-12),
        (Embeddings, squares, 1e-12),
        (MixedDtypes, squares, 2e-2),
        (wide, squares, 1e-12),
        (mlp32, with_autocast, 1e-2),
        (mlp, with_penalty, 1e-12),
        (mlp, through_another_method, 1e-12),
    ],
    ids=name_of,
)
@ON_GPUS
def test_models_of_many_kinds(attach: Attach, build: Build, loss: Loss, tolerance: float) -> None:
    run_ranks(_train_many_kinds, 2, attach, build, loss, tolerance)


@pytest.mark.parametrize("attach", [replicate_tiny, wrap_tiny], ids=name_of)
@OVER_ALL
def test_complex_gradients_keep_their_precision(attach: Attach) -> None:
    run_ranks(_train_many_kinds, 3, attach, Complex, squares, 1e-12)  # a third is no exact float32


def _train_many_kinds(attach: Attach, build: Build, loss: Loss, tolerance: float) -> None:
    train_and_check(attach, build, loss, tolerance=tolerance)


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass", "object", "opaque"])
def test_outputs_of_any_form(kind: str) -> None:
    run_ranks(_train_packed, 2, kind)


def _train_packed(kind: str) -> None:
    train_and_check(replicate_tiny, lambda: Packed(kind), loss_of_packed)


class Branches(nn.Module):
    """``left`` is used by rank 0 only, ``right`` by the others, ``idle`` by nobody, ``trunk`` by all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.idle = nn.Linear(5, 5, dtype=torch.float64)
        self.trunk = nn.Linear(5, 5, dtype=torch.float64)
        self.left = nn.Linear(5, 3, dtype=torch.float64)
        self.right = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        scores: Tensor = (self.left if rank == 0 else self.right)(torch.tanh(self.trunk(x)))
        return scores


def branching(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(inputs_for(model, rank, step), rank).square().mean()
    return loss


def _unused(attach: Attach) -> None:
    w = lockstep.init()
    model = attach(Branches().to(w.device))
    for step in range(2):
        model.zero_grad()
        if step == 0 and w.is_main:
            with pytest.warns(
                UserWarning, match=r"no rank used 2 parameters in the first backward: 'idle.weight', 'idle.bias'"
            ):
                differentiate(branching(model, w.rank, step))
        else:
            differentiate(branching(model, w.rank, step))
        assert_averaged(model, Branches, branching, [step])


def _unused_keep_their_gradient(attach: Attach) -> None:
    """What nobody used stays as it was, bit by bit, though averaging three thirds would change the last one."""
    w = lockstep.init()
    model = attach(Branches())
    inner: Branches = getattr(model, "module", model)  # type: ignore[arg-type]
    sevenths = torch.full((5, 5), 1 / 7, dtype=torch.float64)
    inner.idle.weight.grad = sevenths.clone()
    for step in range(3):
        differentiate(branching(model, w.rank, step))
        assert torch.equal(inner.idle.weight.grad, sevenths)
        assert inner.idle.bias.grad is None


def _replicate_quietly(model: nn.Module) -> nn.Module:
    return lockstep.replicate(model, find_unused_parameters=True)


def _wrap_quietly(model: nn.Module) -> nn.Module:
    return lockstep.DistributedDataParallel(model, find_unused_parameters=True)


@pytest.mark.parametrize("attach", [replicate_tiny, wrap_tiny], ids=name_of)
@OVER_BOTH
def test_unused_parameters_are_averaged_if_anybody_used_them_and_named_if_nobody_did(attach: Attach) -> None:
    run_ranks(_unused, 3, attach)


@pytest.mark.parametrize("attach", [_replicate_quietly, _wrap_quietly], ids=name_of)
def test_unused_parameters_keep_the_gradient_they_had(attach: Attach) -> None:
    run_ranks(_unused_keep_their_gradient, 3, attach)


class OneRankWithout(torch.autograd.Function):
    """Gives no gradient to its input on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None if ctx.rank == 1 else grad), None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        gated: Tensor = OneRankWithout.apply(self.net(x), rank)  # type: ignore[no-untyped-call]
        return gated


@OVER_BOTH
def test_a_rank_without_any_gradient_takes_part() -> None:
    run_ranks(train_and_check, 2, replicate_tiny, Gated, branching)


# Accumulation -------------------------------------------------------------------------------------------------------


def _accumulate(attach: Attach, set_to_none: bool) -> None:
    w = lockstep.init()
    model = attach(wide())
    for start in (0, 3):
        model.zero_grad(set_to_none=set_to_none)
        with lockstep.no_sync(model):
            for step in (start, start + 1):
                differentiate(squares(model, w.rank, step))
        differentiate(squares(model, w.rank, start + 2))
        assert_averaged(model, wide, squares, [start, start + 1, start + 2])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("attach", WAYS, ids=name_of)
def test_no_sync_accumulates_and_the_next_backward_averages_all(attach: Attach, set_to_none: bool) -> None:
    run_ranks(_accumulate, 2, attach, set_to_none)


def _no_sync_is_local() -> bool:
    w = lockstep.init()
    model = replicate_tiny(mlp())
    with lockstep.no_sync(model):
        loss = squares(model, w.rank, 0)
    differentiate(loss)  # the forward was inside: that is what counts
    mine = [param.grad for param in model.parameters() if param.grad is not None]
    reference = mlp()
    differentiate(squares(reference, w.rank, 0))
    return all(torch.equal(a, b.grad) for a, b in zip(mine, reference.parameters(), strict=True) if b.grad is not None)


def test_inside_no_sync_gradients_stay_local() -> None:
    assert run_ranks(_no_sync_is_local, 2) == [True, True]


def _accumulate_in_sync(attach: Attach) -> None:
    w = lockstep.init()
    model = attach(mlp())
    for step in range(3):
        differentiate(squares(model, w.rank, step))
        assert_averaged(model, mlp, squares, list(range(step + 1)))


@pytest.mark.parametrize("attach", WAYS, ids=name_of)
def test_averaging_every_backward_without_zero_grad_adds_averages(attach: Attach) -> None:
    run_ranks(_accumulate_in_sync, 3, attach)


def twice(model: nn.Module, rank: int, step: int) -> Tensor:
    return squares(model, rank, step) + squares(model, rank, step + 100)


def test_two_forwards_and_one_backward() -> None:
    run_ranks(train_and_check, 2, replicate_tiny, mlp, twice)


def _second_backward() -> None:
    w = lockstep.init()
    model = replicate_tiny(mlp())
    loss = squares(model, w.rank, 0)
    differentiate(loss, retain_graph=True)
    assert_averaged(model, mlp, squares, [0])
    differentiate(loss)
    assert_averaged(model, mlp, squares, [0, 0])


def test_a_second_backward_is_averaged_too() -> None:
    run_ranks(_second_backward, 2)


def _autograd_grad_sends_nothing() -> None:
    """Only rank 0 asks for a gradient with respect to its input: were anything sent, it would wait for ever."""
    w = lockstep.init(timeout=5)
    model = replicate_tiny(mlp())
    if w.is_main:
        x = batch(0, 0, 4, 5).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x)
        assert grad.shape == x.shape
        parameters = list(model.parameters())
        assert len(torch.autograd.grad(model(x).square().sum(), parameters)) == len(parameters)
        assert all(param.grad is None for param in parameters)
    differentiate(squares(model, w.rank, 1))
    assert_averaged(model, mlp, squares, [1])


@OVER_BOTH
def test_autograd_grad_sends_nothing() -> None:
    run_ranks(_autograd_grad_sends_nothing, 2)


def gradient_penalty(model: nn.Module, rank: int, step: int) -> Tensor:
    x = inputs_for(model, rank, step).requires_grad_()
    values = model(x)
    (slope,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    loss: Tensor = values.square().mean() + (slope.norm() - 1) ** 2
    return loss


@ON_GPUS
def test_a_gradient_penalty_is_averaged_with_the_loss() -> None:
    run_ranks(train_and_check, 2, replicate_tiny, mlp, gradient_penalty)


def _penalise_gradients(model: nn.Module, inputs: Tensor, way: str, unsynced: AbstractContextManager[Any]) -> None:
    """Add the gradients of a loss to ``grad``, and then those of a penalty on what is there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        if way == "accumulated":
            with unsynced:
                torch.autograd.backward(model(inputs).sin().mean(), create_graph=True)
        torch.autograd.backward(model(inputs).square().mean(), create_graph=True)
    penalty = torch.stack([param.grad.square().sum() for param in model.parameters() if param.grad is not None]).sum()
    differentiate(penalty if way == "alone" else model(inputs).cos().mean() + 0.1 * penalty)


def _gradients_with_a_graph(attach: Attach, way: str, set_to_none: bool) -> None:
    world = lockstep.init(timeout=20)
    counts = (3, 1)
    model, alone = wide().to(world.device), wide()
    wrapper = attach(model)
    for step in range(3):
        world.share = lockstep.BatchShare(counts[world.rank], sum(counts))
        parts = [batch(rank, step, count, 5) for rank, count in enumerate(counts)]
        wrapper.zero_grad(set_to_none=set_to_none)
        alone.zero_grad()
        if step == 2:  # views of buckets are there when the graph is made
            differentiate(wrapper(parts[world.rank].to(world.device)).mean())
            differentiate(alone(torch.cat(parts)).mean())
        _penalise_gradients(wrapper, parts[world.rank].to(world.device), way, lockstep.no_sync(wrapper))
        _penalise_gradients(alone, torch.cat(parts), way, nullcontext())
        for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert param.grad is not None
            assert other.grad is not None
            assert torch.allclose(param.grad.cpu(), other.grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("way", ["together", "alone", "accumulated"])
@pytest.mark.parametrize("attach", WAYS, ids=name_of)
@ON_GPUS
def test_averages_are_differentiated_once_more(attach: Attach, way: str) -> None:
    run_ranks(_gradients_with_a_graph, 2, attach, way, True)


def test_averages_are_differentiated_once_more_where_gradients_are_zeroed() -> None:
    run_ranks(_gradients_with_a_graph, 2, replicate_tiny, "together", False)


# What comes after backward ------------------------------------------------------------------------------------------


def _clip() -> tuple[float, float]:
    w = lockstep.init()
    model = replicate_tiny(mlp().to(w.device))
    differentiate(squares(model, w.rank, 0))
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    expected = averages(mlp, squares, 2, [0])
    by_hand = float(torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm())
    return norm, by_hand


@ON_GPUS
def test_clipping_right_after_backward_sees_the_averages() -> None:
    for norm, by_hand in run_ranks(_clip, 2):
        assert norm == pytest.approx(by_hand, rel=1e-12)


def _scaled() -> list[float]:
    w = lockstep.init()
    model = replicate_tiny(mlp(torch.float32).to(w.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(w.device.type, init_scale=2.0**8)
    for step in range(3):
        optimizer.zero_grad()
        loss = with_autocast(model, w.rank, step)
        if step == 1 and w.rank == 1:
            loss = loss * float("inf")  # an overflow on one rank: all must skip the step
        differentiate(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), *(float(param.sum()) for param in model.parameters())]


@ON_GPUS
def test_a_grad_scaler_skips_the_same_steps_everywhere() -> None:
    first, second = run_ranks(_scaled, 2)
    assert first == second
    assert first[0] == 2.0**7


# Hooks of the user's ------------------------------------------------------------------------------------------------


def _changed_by_hooks(attach: Attach) -> None:
    """A hook that comes after replicate sees this rank's own gradient, and what it makes of it is averaged."""
    w = lockstep.init()

    def change(param: nn.Parameter, rank: int) -> None:
        assert param.grad is not None
        if step % 2:
            param.grad = param.grad * (rank + 2)
        else:
            param.grad.mul_(rank + 2)

    model, seen, step = wide().to(w.device), dict[int, Tensor](), 0
    wrapper = attach(model)  # held, since a wrapper that is gone releases its module
    for position, param in enumerate(model.parameters()):

        def hook(param: nn.Parameter, position: int = position) -> None:
            assert param.grad is not None
            seen[position] = param.grad.clone()
            change(param, w.rank)

        param.register_post_accumulate_grad_hook(hook)
    alone = [wide() for _ in range(w.world_size)]
    for step in range(4):
        model.zero_grad()
        differentiate(squares(wrapper, w.rank, step))
        for rank, other in enumerate(alone):
            other.zero_grad()
            differentiate(squares(other, rank, step))
        for position, param in enumerate(model.parameters()):
            grads = [[*other.parameters()][position].grad for other in alone]
            terms = [grad * (rank + 2) for rank, grad in enumerate(grads) if grad is not None]
            assert param.grad is not None
            close = 1e-9 if simulation.is_real(w.device) else 0.0  # a GPU sums in another order
            torch.testing.assert_close(seen[position].cpu(), grads[w.rank], rtol=close, atol=close)
            torch.testing.assert_close(param.grad.cpu(), sum(terms) / w.world_size)


@pytest.mark.parametrize("attach", WAYS, ids=name_of)
@ON_GPUS
def test_hooks_that_change_gradients(attach: Attach) -> None:
    run_ranks(_changed_by_hooks, 2, attach)
