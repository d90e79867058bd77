"""Losses by another method than forward: their backwards begin with a gradient, and are exact all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.ddp.api import replica_of
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import Attach, batch, differentiate, name_of, replicate_at_end, replicate_tiny, wide

pytestmark = EACH_BACKEND

#: Per micro-batch: samples, or items, of each of three ranks.
UNEQUAL = (3, 2, 1)
EMPTY = (3, 2, 0)
OTHERS = (1, 0, 4)
EQUAL = (2, 2, 2)
PLANS = [[UNEQUAL], [EMPTY, UNEQUAL], [UNEQUAL, EMPTY, OTHERS, EQUAL], [OTHERS, UNEQUAL, EMPTY]]


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = wide()

    def forward(self, samples: Tensor) -> Tensor:
        scores: Tensor = self.net(samples)
        return scores

    def loss(self, samples: Tensor) -> Tensor:
        """NaN over no samples, and so are its gradients."""
        found: Tensor = self.net(samples).square().mean(dim=1).mean()
        return found


def by_one_process(plans: Sequence[Sequence[int]], *, first: int = 0) -> list[Tensor]:
    model = Task()
    for number, counts in enumerate(plans, first):
        differentiate(model.loss(torch.cat([batch(rank, number, count, 5) for rank, count in enumerate(counts)])))
    return [param.grad for param in model.parameters() if param.grad is not None]


def by_items(plans: Sequence[Sequence[int]]) -> list[Tensor]:
    model = Task()
    parts = [batch(rank, number, n, 5) for number, counts in enumerate(plans) for rank, n in enumerate(counts)]
    differentiate(model.loss(torch.cat(parts)))
    return [param.grad for param in model.parameters() if param.grad is not None]


def assert_gradients(model: nn.Module, expected: Sequence[Tensor]) -> None:
    for (name, param), grad in zip(model.named_parameters(), expected, strict=True):
        assert param.grad is not None
        assert torch.allclose(param.grad, grad, rtol=1e-10, atol=1e-12), f"{name}: {param.grad} instead of {grad}"


def share(counts: Sequence[int]) -> None:
    world = lockstep.world()
    world.share = lockstep.BatchShare(counts[world.rank], sum(counts))


def new(attach: Attach) -> Task:
    model = Task()
    attach(model)
    return model


def _shares(attach: Attach, plans: Sequence[Sequence[int]], set_to_none: bool) -> None:
    world = lockstep.init(timeout=20)
    model = new(attach)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        for number, counts in enumerate(plans):
            share(counts)
            with lockstep.no_sync(model) if number < len(plans) - 1 else torch.enable_grad():
                differentiate(model.loss(batch(world.rank, number, counts[world.rank], 5)))
        assert_gradients(model, by_one_process(plans))


@pytest.mark.parametrize("attach", [replicate_tiny, replicate_at_end], ids=name_of)
@pytest.mark.parametrize("plans", PLANS, ids=str)
def test_the_mean_over_samples_is_exact(attach: Attach, plans: list[tuple[int, ...]]) -> None:
    run_ranks(_shares, 3, attach, plans, True)


def test_it_is_exact_in_gradients_that_are_kept_and_zeroed() -> None:
    run_ranks(_shares, 3, replicate_tiny, [UNEQUAL, EMPTY, OTHERS], False)


def _items(attach: Attach, plans: Sequence[Sequence[int]]) -> None:
    world = lockstep.init(timeout=20)
    model = new(attach)
    for _ in range(3):
        model.zero_grad()
        for number, counts in enumerate(plans):
            world.weigh(counts[world.rank])
            with lockstep.no_sync(model) if number < len(plans) - 1 else torch.enable_grad():
                differentiate(model.loss(batch(world.rank, number, counts[world.rank], 5)))
        assert_gradients(model, by_items(plans))


@pytest.mark.parametrize("attach", [replicate_tiny, replicate_at_end], ids=name_of)
@pytest.mark.parametrize("plans", PLANS, ids=str)
def test_the_mean_over_items_is_exact(attach: Attach, plans: list[tuple[int, ...]]) -> None:
    run_ranks(_items, 3, attach, plans)


class Penalised(Task):
    """A term of its loss is of a parameter alone, whose gradient comes before the outputs of forward are reached."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((300,), 2.0, dtype=torch.float64))

    def loss(self, samples: Tensor) -> Tensor:
        # (The last term of a sum is differentiated first. Over no samples all terms are NaN.)
        penalty = self.scale.square().sum() * (samples.mean() * 0 + 1)
        found: Tensor = self(samples).square().mean(dim=1).mean() + penalty
        return found


def _penalty(plans: Sequence[Sequence[int]]) -> None:
    world = lockstep.init(timeout=20)
    model, expected = Penalised(), Penalised()
    replicate_tiny(model)
    for _ in range(2):
        model.zero_grad()
        expected.zero_grad()
        for number, counts in enumerate(plans):
            share(counts)
            with lockstep.no_sync(model) if number < len(plans) - 1 else torch.enable_grad():
                differentiate(model.loss(batch(world.rank, number, counts[world.rank], 5)))
            # The penalty counts with each rank's share, so it is that of one process.
            samples = torch.cat([batch(rank, number, count, 5) for rank, count in enumerate(counts)])
            differentiate(expected.loss(samples))
        assert_gradients(model, [param.grad for param in expected.parameters() if param.grad is not None])


def test_a_penalty_on_a_parameter_is_exact() -> None:
    run_ranks(_penalty, 3, [EQUAL, UNEQUAL, EMPTY])


def _inseparable() -> None:
    """The first one of these backwards comes in the middle of an accumulation, with another share."""
    world = lockstep.init(timeout=20)
    model = new(replicate_tiny)
    with lockstep.no_sync(model):
        share(EQUAL)
        differentiate(model(batch(world.rank, 0, 2, 5)).square().mean())
        share(UNEQUAL)
        differentiate(model.loss(batch(world.rank, 1, UNEQUAL[world.rank], 5)))


def test_what_cant_be_taken_apart_is_an_error() -> None:
    outcomes = collect_outcomes(_inseparable, 3)
    assert [outcome.error for outcome in outcomes] == ["LockstepError", None, "LockstepError"]  # (one has equal shares)
    for rank in (0, 2):
        message = outcomes[rank].message or ""
        assert f"rank {rank} of 3, step 1: parameter 'net." in message
        assert "zero_grad(set_to_none=True)" in message


def _after_an_evaluation(evaluates: Callable[[Task, int], Any]) -> None:
    world = lockstep.init(timeout=20)
    model = new(replicate_tiny)
    for number, counts in enumerate([EQUAL, UNEQUAL, OTHERS]):
        model.zero_grad()
        with torch.no_grad():
            evaluates(model, number)
        share(counts)
        differentiate(model.loss(batch(world.rank, number, counts[world.rank], 5)))
        assert_gradients(model, by_one_process([counts], first=number))


def _of_empty_shares(model: Task, number: int) -> None:
    counts = (4, 0, 1)
    share(counts)
    model(batch(lockstep.world().rank, 10 + number, counts[lockstep.world().rank], 5))


def test_the_share_of_an_evaluation_is_not_that_of_the_next_step() -> None:
    run_ranks(_after_an_evaluation, 3, _of_empty_shares)


def _on_rank_0_alone() -> None:
    world = lockstep.init(timeout=20)
    model = new(replicate_tiny)
    share(EQUAL)
    for first in (0, 2):
        model.zero_grad()
        if world.is_main:
            with torch.no_grad():
                model(batch(0, 10, 2, 5))
        with lockstep.no_sync(model):
            differentiate(model.loss(batch(world.rank, first, 2, 5)))
        differentiate(model.loss(batch(world.rank, first + 1, 2, 5)))
        assert_gradients(model, by_one_process([EQUAL, EQUAL], first=first))


@OVER_BOTH
def test_one_rank_that_evaluates_averages_when_the_others_do() -> None:
    run_ranks(_on_rank_0_alone, 3)


def _copied() -> None:
    """Hooks in front of the parameters stay with the replica: a copy is a plain module."""
    import copy
    import warnings

    world = lockstep.init(timeout=20)
    model = new(replicate_tiny)
    share(EQUAL)
    for number in range(2):
        model.zero_grad()
        differentiate(model.loss(batch(world.rank, number, 2, 5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = copy.deepcopy(model)
    assert not any(param._backward_hooks for param in twin.parameters())
    lockstep.release(model)
    assert not any(param._backward_hooks for param in model.parameters())
    model.zero_grad()
    differentiate(model.loss(batch(world.rank, 5, 2, 5)))


def test_a_copy_and_a_released_module_are_plain() -> None:
    run_ranks(_copied, 3)


def _apart() -> None:
    """A rank whose share is empty takes no step of its own, nor one with NaN."""
    world = lockstep.init(timeout=20)
    model = Task()
    lockstep.replicate(model, sync=lockstep.LocalSteps(every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        share(EMPTY)
        differentiate(model.loss(batch(world.rank, number, EMPTY[world.rank], 5)))
        assert all(param.grad is None for param in model.parameters()) == (EMPTY[world.rank] == 0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_a_rank_that_trains_apart_with_an_empty_share_has_no_gradient() -> None:
    run_ranks(_apart, 3)


def _asks_alone() -> None:
    """One rank asks for gradients by parameters, which average nothing, between steps and through outputs."""
    world = lockstep.init(timeout=20)
    model = new(replicate_tiny)
    for number in range(3):
        model.zero_grad()
        share(EQUAL)
        samples = batch(world.rank, number, 2, 5)
        if world.is_main:
            for loss in (model.loss(samples), model(samples).square().mean()):
                grads = torch.autograd.grad(loss, [*model.parameters()])
                assert all(bool(grad.any()) for grad in grads)
            assert all(param.grad is None for param in model.parameters())
        differentiate(model.loss(samples))
        assert_gradients(model, by_one_process([EQUAL], first=number))
        assert replica_of(model).reducer.step == number + 1


def test_gradients_that_are_asked_for_by_parameters_are_averaged_by_nobody() -> None:
    run_ranks(_asks_alone, 3)


class Twins(Task):
    """Uses its parameters twice, so that autograd adds up the parts of a new gradient in place."""

    def loss(self, samples: Tensor) -> Tensor:
        found: Tensor = self.net(samples).square().mean(dim=1).mean() + self.net(-samples).sin().mean(dim=1).mean()
        return found


def _twice(plans: Sequence[Sequence[int]], items: bool) -> None:
    world = lockstep.init(timeout=20)
    model, alone = Twins(), Twins()
    replicate_tiny(model)
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        for number, counts in enumerate(plans):
            world.weigh(counts[world.rank]) if items else share(counts)
            with lockstep.no_sync(model) if number < len(plans) - 1 else torch.enable_grad():
                differentiate(model.loss(batch(world.rank, number, counts[world.rank], 5)))
            if not items:
                parts = [batch(rank, number, count, 5) for rank, count in enumerate(counts)]
                differentiate(alone.loss(torch.cat(parts)))
        if items:
            parts = [batch(rank, number, n, 5) for number, counts in enumerate(plans) for rank, n in enumerate(counts)]
            differentiate(alone.loss(torch.cat(parts)))
        assert_gradients(model, [param.grad for param in alone.parameters() if param.grad is not None])


@pytest.mark.parametrize("items", [False, True])
def test_parameters_that_are_used_twice_are_weighed_as_others(items: bool) -> None:
    run_ranks(_twice, 3, [EMPTY, OTHERS, UNEQUAL], items)


def _laid_out_again(before: bool) -> None:
    """The hooks in front of parameters go with the layout."""
    world = lockstep.init(timeout=20)
    model = Task()
    for part in ("net.0.weight", "net.0.bias"):
        model.get_parameter(part).requires_grad_(not before)
    replicate_tiny(model)
    for part in ("net.0.weight", "net.0.bias"):
        model.get_parameter(part).requires_grad_(False)
    for number in range(4):
        if number == 2:
            model.requires_grad_(True)
        model.zero_grad()
        share(EQUAL)
        differentiate(model.loss(batch(world.rank, number, 2, 5)))
        if number == 2:
            model(batch(world.rank, number, 2, 5))  # a forward sees what is trained now
    reducer = replica_of(model).reducer
    assert len(reducer.in_front) == len(reducer.params) == len([*model.parameters()])
    assert all(len(param._backward_hooks or {}) == 1 for param in reducer.params)
    assert_gradients(model, by_one_process([EQUAL], first=3))


@pytest.mark.parametrize("before", [True, False])
def test_parameters_that_are_thawed_are_looked_in_front_of_too(before: bool) -> None:
    run_ranks(_laid_out_again, 3, before)


def _thawed(plans: Sequence[Sequence[int]], first: str, head: bool) -> None:
    """What was frozen is trained from the second step on; the model is never called."""
    world = lockstep.init(timeout=20)
    models = [Task(), Task()]
    for model in models:
        model.requires_grad_(False)
        model.get_submodule(first).requires_grad_(True)
    lockstep.replicate(models[0], compare_every=1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(4):
        for model in models if step == 1 else ():
            model.requires_grad_(True)
            model.get_submodule(first).requires_grad_(head)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, counts in enumerate(plans, 10 * step):
            share(counts)
            is_last = number % 10 == len(plans) - 1
            with torch.enable_grad() if is_last else lockstep.no_sync(models[0]):
                differentiate(models[0].loss(batch(world.rank, number, counts[world.rank], 5)))
            parts = [batch(rank, number, count, 5) for rank, count in enumerate(counts)]
            differentiate(models[1].loss(torch.cat(parts)))
        for optimizer in optimizers:
            optimizer.step()
        for (name, own), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.allclose(own, other, rtol=1e-10, atol=1e-12), (step, name)
    trained = len([param for param in models[0].parameters() if param.requires_grad])
    assert replica_of(models[0]).reducer.step == 4
    assert len(replica_of(models[0]).reducer.params) == trained


@pytest.mark.parametrize("head", [True, False], ids=["with the others", "instead of the others"])
@pytest.mark.parametrize("first", ["net.0", "net.4"])  # the gradients of which come last, or before all others
@pytest.mark.parametrize("plans", [[UNEQUAL], [EMPTY, UNEQUAL]], ids=str)
def test_parameters_that_are_thawed_are_averaged_from_their_first_backward_on(
    plans: list[tuple[int, ...]], first: str, head: bool
) -> None:
    run_ranks(_thawed, 3, plans, first, head)


class Repeated(Task):
    """Computes all but its last layer once more within the backward."""

    def forward(self, samples: Tensor) -> Tensor:
        *layers, last = self.net.children()
        scores: Tensor = last(checkpoint(nn.Sequential(*layers), samples.requires_grad_(), use_reentrant=True))
        return scores


def _thawed_too_late() -> None:
    world = lockstep.init(timeout=20)
    model = Repeated()
    model.get_submodule("net.2").requires_grad_(False)
    lockstep.replicate(model)
    scores = model(batch(world.rank, 0, 2, 5))
    model.requires_grad_(True)
    differentiate(scores.square().mean())


def test_a_parameter_that_is_thawed_between_forward_and_backward_is_an_error() -> None:
    for rank, outcome in enumerate(collect_outcomes(_thawed_too_late, 2)):
        assert outcome.error == "LockstepError", outcome.traceback
        assert f"rank {rank} of 2, step 1: parameter 'net.2." in str(outcome.message)
        assert "unfreeze parameters between steps" in str(outcome.message)


def _adapted() -> None:
    """An adapter that comes after replicate, in a model that is never called."""
    world = lockstep.init(timeout=20)
    model = Task()
    lockstep.replicate(model)
    share(EQUAL)
    differentiate(model.loss(batch(world.rank, 0, 2, 5)))
    model.net.add_module("5", nn.Linear(3, 3).double())
    differentiate(model.loss(batch(world.rank, 1, 2, 5)))


def test_a_parameter_that_comes_after_replicate_is_an_error() -> None:
    for rank, outcome in enumerate(collect_outcomes(_adapted, 3)):
        assert outcome.error == "LockstepError", outcome.traceback
        assert f"rank {rank} of 3: parameter 'net.5.weight' was added or replaced" in str(outcome.message)


def _thawed_apart() -> None:
    world = lockstep.init(timeout=20)
    model = Task()
    model.get_submodule("net.4").requires_grad_(False)
    lockstep.replicate(model, sync=lockstep.LocalSteps(every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        optimizer.zero_grad()
        differentiate(model.loss(batch(world.rank, step, 2, 5)))
        optimizer.step()
    lockstep.finish_round(model)
    sums = [float(param.sum()) for param in model.parameters()]
    assert world.gather(sums) in (None, [sums] * 2)


def test_what_is_thawed_where_ranks_train_apart_is_averaged_in_rounds() -> None:
    run_ranks(_thawed_apart, 2)
