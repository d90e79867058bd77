"""Gradients that somebody keeps stay what they were, and a step in which nobody does takes no new memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import dlpack

import lockstep
from lockstep.ddp.api import replica_of
from tests.backends import EACH_BACKEND
from tests.ranks.ddp_cases import assert_averaged, differentiate, squares, wide

pytestmark = EACH_BACKEND

#: What a script may keep of a gradient.
KEPT: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda grad: grad,
    "detach()": lambda grad: grad.detach(),
    "a slice": lambda grad: grad.flatten()[:1],
    "a NumPy array": lambda grad: grad.numpy(),
    "DLPack": lambda grad: grad.__dlpack__(),
}


def _tensor(kept: Any) -> Tensor:
    return dlpack.from_dlpack(kept) if type(kept).__name__ == "PyCapsule" else torch.as_tensor(kept)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [None, True], ids=["as over the backend", "buckets are averaged early"])
def test_what_is_kept_of_a_gradient_stays_as_it_is(world: lockstep.World, overlap: bool | None) -> None:
    """One rank keeps all that each step gives it, as PCGrad and SVRG do; then both, then only of one parameter."""
    for how, keep in KEPT.items():
        for ranks, count in (((1,), 6), ((0, 1), 6), ((0,), 1)):
            model = lockstep.replicate(wide(), overlap=overlap, first_bucket_mb=0.01, bucket_cap_mb=0.3)
            kept: list[tuple[Any, Tensor]] = []
            for step in range(4):
                model.zero_grad()
                differentiate(squares(model, world.rank, step))
                assert_averaged(model, wide, squares, [step])
                grads = [param.grad for param in model.parameters() if param.grad is not None]
                if world.rank in ranks:
                    kept += [(keep(grad), grad.flatten().clone()) for grad in grads[:count]]
                del grads
            for something, was in kept:
                now = _tensor(something).flatten()
                assert torch.equal(now, was[: len(now)]), f"{how} changed"


@pytest.mark.ranks(2)
def test_an_ordinary_loop_copies_nothing(world: lockstep.World) -> None:
    """The ordinary loop, however it zeroes; then gradients that are added to, which change for who holds them."""
    for set_to_none in (True, False):
        model = lockstep.replicate(wide())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        homes = set()
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            differentiate(squares(model, world.rank, step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            (bucket,) = replica_of(model).reducer.buckets[-1:]
            assert all(param.grad is view for param, view in zip(bucket.params, bucket.views, strict=True))
            homes.add(bucket.flat.data_ptr())
        assert len(homes) == 1, "the bucket moved, though nobody held anything of it"
        held = [param.grad for param in model.parameters()]
        differentiate(squares(model, world.rank, 4))
        assert all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
        # Some gradients go on, the others are kept and begin anew.
        first = next(model.parameters())
        was = [None if grad is None else grad.clone() for grad in held]
        first.grad = None
        differentiate(squares(model, world.rank, 5))
        assert held[0] is not None
        assert was[0] is not None
        assert torch.equal(held[0], was[0])
        expected = lockstep.replicate(wide())
        differentiate(squares(expected, world.rank, 5))
        assert first.grad is not None
        torch.testing.assert_close(first.grad, next(expected.parameters()).grad)


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: object, *_: Tensor) -> Tensor:
        raise ArithmeticError("stopped")


@pytest.mark.ranks(2)
def test_what_is_kept_outlives_a_backward_that_fails(world: lockstep.World) -> None:
    """All gradients are kept, or only biases, and some buckets are under way when the backward fails."""
    for keeps in (lambda _: True, lambda grad: grad.ndim == 1):
        model = lockstep.replicate(wide(), first_bucket_mb=0.01, bucket_cap_mb=0.3)
        differentiate(squares(model, world.rank, 0))
        kept = [param.grad for param in model.parameters() if param.grad is not None and keeps(param.grad)]
        was = [grad.clone() for grad in kept]
        for step in (1, 2):
            model.zero_grad()
            inputs = torch.ones(4, 5, dtype=torch.float64).requires_grad_()
            with pytest.raises(ArithmeticError):
                differentiate(model(_Stops.apply(inputs)).sum())  # type: ignore[no-untyped-call]
            model.zero_grad()
            differentiate(squares(model, world.rank, step))
            assert_averaged(model, wide, squares, [step])
        for grad, before in zip(kept, was, strict=True):
            assert torch.equal(grad, before)
