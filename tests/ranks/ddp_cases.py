"""What the tests of replicas share: models, batches unique to rank and step, and the average worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lockstep

Build = Callable[[], nn.Module]
#: (model, rank, step) -> loss
Loss = Callable[[nn.Module, int, int], Tensor]
Attach = Callable[[nn.Module], nn.Module]


def differentiate(loss: Tensor, *, retain_graph: bool = False) -> None:
    """``loss.backward()``, which torch leaves untyped."""
    loss.backward(retain_graph=retain_graph)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def wide() -> nn.Module:
    """With parameters that are large enough to be packed one by one."""
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()


def batch(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def inputs_for(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A batch for a model with five inputs, on its device."""
    return batch(rank, step, 4, 5, dtype=dtype).to(device_of(model))


def squares(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(inputs_for(model, rank, step)).square().mean()
    return loss


def local_gradients(build: Build, loss: Loss, rank: int, steps: Sequence[int]) -> dict[str, Tensor | None]:
    """The gradients that rank ``rank`` alone accumulates over ``steps``."""
    model = build()
    for step in steps:
        differentiate(loss(model, rank, step))
    return {name: param.grad for name, param in model.named_parameters()}


def averages(build: Build, loss: Loss, world_size: int, steps: Sequence[int]) -> dict[str, Tensor | None]:
    """The gradients that every rank should hold; None where no rank has any."""
    ranks = [local_gradients(build, loss, rank, steps) for rank in range(world_size)]
    result: dict[str, Tensor | None] = {}
    for name in ranks[0]:
        present = [grads[name] for grads in ranks if grads[name] is not None]
        dense = [grad.to_dense() if grad.layout != torch.strided else grad for grad in present if grad is not None]
        result[name] = sum(dense[1:], dense[0]) / world_size if dense else None
    return result


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {}
    for name, param in model.named_parameters():
        grad = param.grad
        found[name.replace("_orig_mod.", "").removeprefix("module.")] = (
            grad.to_dense().clone() if grad is not None and grad.layout != torch.strided else grad
        )
    return found


def assert_averaged(
    model: nn.Module, build: Build, loss: Loss, steps: Sequence[int], *, tolerance: float = 1e-12
) -> None:
    expected, got = averages(build, loss, lockstep.world().world_size, steps), gradients(model)
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert got[name] is None, f"{name} has a gradient, though nobody used it"
        else:
            came = got[name]
            assert came is not None, f"{name} has no gradient"
            # Not torch.testing.assert_close: its first call imports sympy, a second for each rank of each test.
            assert came.dtype == grad.dtype
            assert torch.allclose(came.cpu(), grad, rtol=tolerance, atol=tolerance), f"{name}: {came} instead of {grad}"


def train_and_check(attach: Attach, build: Build, loss: Loss, *, steps: int = 3, tolerance: float = 1e-12) -> None:
    """Run some steps (the first of which launches its buckets late) and compare each with the average by hand."""
    world = lockstep.init()
    model = attach(build().to(world.device))
    for step in range(steps):
        model.zero_grad()
        differentiate(loss(model, world.rank, step))
        assert_averaged(model, build, loss, [step], tolerance=tolerance)


def replicate_tiny(model: nn.Module) -> nn.Module:
    """Many buckets, so that they are launched while backward goes on."""
    return lockstep.replicate(model, first_bucket_mb=1e-5, bucket_cap_mb=3e-4)


def wrap_tiny(model: nn.Module) -> nn.Module:
    return lockstep.DistributedDataParallel(model, bucket_cap_mb=3e-4)


def replicate_at_end(model: nn.Module) -> nn.Module:
    return lockstep.replicate(model, first_bucket_mb=1e-5, bucket_cap_mb=3e-4, overlap=False)


def wrap_views(model: nn.Module) -> nn.Module:
    return lockstep.DistributedDataParallel(model, gradient_as_bucket_view=True)


WAYS: list[Attach] = [replicate_tiny, wrap_tiny, replicate_at_end, wrap_views]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))
