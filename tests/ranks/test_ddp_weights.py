"""Unequal slices of a global batch: the mean over samples stays exact, accumulated or not, empty slices included."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import (
    Attach,
    batch,
    differentiate,
    mlp,
    name_of,
    replicate_at_end,
    replicate_tiny,
    wide,
    wrap_tiny,
)

pytestmark = EACH_BACKEND

#: Per micro-batch: samples of each of three ranks.
EQUAL = (2, 2, 2)
UNEQUAL = (3, 2, 1)
EMPTY = (3, 2, 0)
OTHERS = (1, 0, 4)


def mean_of_squares(model: nn.Module, samples: Tensor) -> Tensor:
    """NaN over no samples, and so are its gradients."""
    loss: Tensor = model(samples).square().mean(dim=1).mean()
    return loss


def by_one_process(plans: Sequence[Sequence[int]]) -> list[Tensor]:
    model = wide()
    for step, counts in enumerate(plans):
        samples = torch.cat([batch(rank, step, count, 5) for rank, count in enumerate(counts)])
        differentiate(mean_of_squares(model, samples))
    return [param.grad for param in model.parameters() if param.grad is not None]


def backward(model: nn.Module, step: int, counts: Sequence[int]) -> None:
    world = lockstep.world()
    world.share = lockstep.BatchShare(counts[world.rank], sum(counts))
    loss = mean_of_squares(model, batch(world.rank, step, counts[world.rank], 5))
    world.share = lockstep.BatchShare(1, 1000)  # the loader has moved on: the forward's share is what counts
    differentiate(loss)


def assert_equal_gradients(model: nn.Module, expected: Sequence[Tensor]) -> None:
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        assert torch.allclose(param.grad, grad, rtol=1e-12, atol=1e-14), f"{param.grad} instead of {grad}"


def _accumulate(attach: Attach, plans: Sequence[Sequence[int]], rounds: int, set_to_none: bool) -> None:
    lockstep.init()
    model = attach(wide())
    for _ in range(rounds):
        model.zero_grad(set_to_none=set_to_none)
        with lockstep.no_sync(model):
            for step, counts in enumerate(plans[:-1]):
                backward(model, step, counts)
        backward(model, len(plans) - 1, plans[-1])
        assert_equal_gradients(model, by_one_process(plans))


@pytest.mark.parametrize("attach", [replicate_tiny, wrap_tiny, replicate_at_end], ids=name_of)
@pytest.mark.parametrize(
    "plans",
    [
        [UNEQUAL],
        [EMPTY],
        [EQUAL, UNEQUAL],
        [UNEQUAL, EMPTY],
        [EMPTY, UNEQUAL],
        [EMPTY, EMPTY],
        [UNEQUAL, EMPTY, OTHERS, EQUAL],
        [OTHERS, UNEQUAL, UNEQUAL, EMPTY],
    ],
    ids=str,
)
def test_the_mean_over_samples_is_exact(attach: Attach, plans: list[tuple[int, ...]]) -> None:
    run_ranks(_accumulate, 3, attach, plans, 3, True)


def test_it_is_exact_in_gradients_that_are_kept_and_zeroed() -> None:
    run_ranks(_accumulate, 3, replicate_tiny, [UNEQUAL, EMPTY, OTHERS], 3, False)


def _accumulate_in_sync() -> None:
    """Every backward averages, and the next adds to the average."""
    lockstep.init()
    model = replicate_tiny(wide())
    plans = [UNEQUAL, EMPTY, OTHERS, EQUAL]
    for step, counts in enumerate(plans):
        backward(model, step, counts)
        assert_equal_gradients(model, by_one_process(plans[: step + 1]))


@OVER_BOTH
def test_it_is_exact_when_averages_are_added_up() -> None:
    run_ranks(_accumulate_in_sync, 3)


def _average_then_accumulate() -> None:
    """An average is in grad already when unequal micro-batches are added to it."""
    lockstep.init()
    model = replicate_tiny(wide())
    plans = [UNEQUAL, OTHERS, EMPTY, EQUAL]
    backward(model, 0, plans[0])
    with lockstep.no_sync(model):
        backward(model, 1, plans[1])
        backward(model, 2, plans[2])
    backward(model, 3, plans[3])
    assert_equal_gradients(model, by_one_process(plans))


def test_it_is_exact_when_micro_batches_are_added_to_an_average() -> None:
    run_ranks(_average_then_accumulate, 3)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(5, 5, dtype=torch.float64)
        self.net = mlp()

    def forward(self, x: Tensor, touch_idle: bool) -> Tensor:
        scores: Tensor = self.net(self.idle(x) if touch_idle else x)
        return scores


def _empty_slice_leaves_no_trace() -> None:
    """A parameter that only the rank with the empty slice touched was used by nobody."""
    w = lockstep.init()
    model = lockstep.replicate(HalfUsed(), find_unused_parameters=True)
    w.share = lockstep.BatchShare([2, 0][w.rank], 2)
    for _ in range(2):
        model.zero_grad()
        model(batch(w.rank, 0, [2, 0][w.rank], 5), w.rank == 1).square().mean().backward()
        assert model.idle.weight.grad is None
        assert model.net[0].weight.grad is not None
        assert all(bool(p.grad.isfinite().all()) for p in model.net.parameters() if p.grad is not None)


@OVER_BOTH
def test_an_empty_slice_leaves_no_trace() -> None:
    run_ranks(_empty_slice_leaves_no_trace, 2)


def _two_shares_in_one_backward() -> None:
    w = lockstep.init(timeout=10)
    model = replicate_tiny(mlp())
    w.share = lockstep.BatchShare([3, 1][w.rank], 4)
    first = mean_of_squares(model, batch(w.rank, 0, 3, 5))
    w.share = lockstep.BatchShare([1, 3][w.rank], 4)
    second = mean_of_squares(model, batch(w.rank, 1, 3, 5))
    differentiate(first + second)


def test_one_backward_through_different_shares_is_refused() -> None:
    for outcome in collect_outcomes(_two_shares_in_one_backward, 2):
        assert outcome.error == "LockstepError"
        assert "different shares" in str(outcome.message)


def _penalty() -> None:
    """A term that every rank adds in full comes out unchanged."""
    w = lockstep.init()
    model = replicate_tiny(mlp())
    w.share = lockstep.BatchShare([3, 1][w.rank], 4)
    loss = mean_of_squares(model, batch(w.rank, 0, [3, 1][w.rank], 5)) + sum((p * p).sum() for p in model.parameters())
    differentiate(loss)
    alone = mlp()
    samples = torch.cat([batch(0, 0, 3, 5), batch(1, 0, 1, 5)])
    differentiate(mean_of_squares(alone, samples) + sum((p * p).sum() for p in alone.parameters()))
    assert_equal_gradients(model, [param.grad for param in alone.parameters() if param.grad is not None])


def test_a_penalty_on_the_parameters_comes_out_unchanged() -> None:
    run_ranks(_penalty, 2)
