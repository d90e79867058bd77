"""Optimizers whose ranks train models of their own, and averages that do not know of unequal shares, are warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import run_ranks
from tests.ranks.ddp_cases import differentiate, squares

pytestmark = EACH_BACKEND

_UNEQUAL = "steps with a batch that the ranks have unequal shares of"


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def _loader(samples: int = 48, *, drop_last: bool = False) -> lockstep.ShardedLoader:
    generator, world_size = torch.Generator().manual_seed(3), lockstep.world().world_size
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return lockstep.shard(DataLoader(TensorDataset(inputs), batch_size=2 * world_size, drop_last=drop_last))


def _sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)


def _train(optimizer: Optimizer, *models: nn.Module, samples: int = 48, drop_last: bool = False) -> None:
    for (inputs,) in _loader(samples, drop_last=drop_last):
        optimizer.zero_grad()
        for model in models:
            differentiate(model(inputs).square().mean())
        optimizer.step()


def _forgotten() -> None:
    model = _model()
    _train(_sgd(model), model)


def _one_of_two_is_forgotten() -> None:
    one, two = lockstep.replicate(_model()), _model()
    optimizers = _sgd(one), _sgd(two)
    for (inputs,) in _loader():
        for model, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            differentiate(model(inputs).square().mean())
            optimizer.step()


def _one_of_two_is_forgotten_in_one_optimizer() -> None:
    body, head = lockstep.replicate(_model()), _model()
    optimizer = _sgd(body, head)
    for (inputs,) in _loader():
        optimizer.zero_grad()
        differentiate(head(body(inputs)).square().mean())
        optimizer.step()


def _by_hand() -> None:
    model = lockstep.replicate(_model())
    optimizer = _sgd(model)
    for (inputs,) in _loader():
        grads = torch.autograd.grad(model(inputs).square().mean(), [*model.parameters()])
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()


def _functional() -> None:
    """Over a plain loader."""
    model = lockstep.replicate(_model())
    optimizer, rank = _sgd(model), lockstep.world().rank
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, params, (inputs,))
        return found.square().mean()

    for _ in range(3):
        grads = torch.func.grad(loss)({name: param.detach() for name, param in model.named_parameters()})
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()


def _with_warmup() -> None:
    """The learning rate begins with 0."""
    model = _model()
    optimizer = _sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    for (inputs,) in _loader():
        optimizer.zero_grad()
        differentiate(model(inputs).square().mean())
        optimizer.step()
        schedule.step()


def _weighs_no_share() -> None:
    model = DistributedDataParallel(_model())
    _train(_sgd(model), model, samples=45)


def _warnings(train: Callable[[], None]) -> list[str]:
    lockstep.init(timeout=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            _forgotten,
            "after 1 step of it: rank 0 differs from rank 1, in its parameter 0 of shape (6, 6) for example. No",
        ),
        (_one_of_two_is_forgotten, "No replica has that parameter, so each rank trains a model of its own"),
        (
            _one_of_two_is_forgotten_in_one_optimizer,
            "in its parameter 4 of shape (6, 6) for example. No replica has that parameter",
        ),
        (_by_hand, "Only gradients that loss.backward() brings are averaged, not those that torch.autograd.grad"),
        (_functional, "Only gradients that loss.backward() brings are averaged"),
        (_with_warmup, "after 9 steps of it"),
    ],
)
@OVER_BOTH
def test_ranks_that_train_models_of_their_own_are_told_so_once(train: Callable[[], None], words: str) -> None:
    said = [text for texts in run_ranks(_warnings, 2, train) for text in texts]
    assert len(said) == 1  # by the rank that came last
    assert "the parameters that SGD steps are not the same on all ranks after" in said[0]
    assert words in said[0]


@OVER_BOTH
def test_the_differing_ranks_are_named() -> None:
    said = [text for texts in run_ranks(_warnings, 3, _forgotten) for text in texts]
    assert len(said) == 1
    assert "rank 0 differs from ranks 1 and 2" in said[0]


def test_an_average_that_weighs_no_unequal_shares_is_told_of_once() -> None:
    said = run_ranks(_warnings, 2, _weighs_no_share)
    assert said[1] == []
    (text,) = said[0]
    assert f"SGD {_UNEQUAL} (rank 0 has 1 of 1 samples)" in text


def _adapts_copies() -> None:
    """Each batch trains a copy of the model, with an optimizer of its own."""
    model = _model()
    for (inputs,) in _loader():
        copy = deepcopy(model)
        optimizer = _sgd(copy)
        for _ in range(3):
            optimizer.zero_grad()
            differentiate(copy(inputs).square().mean())
            optimizer.step()


def test_optimizers_that_are_made_again_and_again_are_told_of_once() -> None:
    said = run_ranks(_warnings, 2, _adapts_copies)
    assert 1 <= sum(map(len, said)) <= 2
    assert max(map(len, said)) == 1


def _closes_the_group() -> None:
    """And trains on, each rank alone, inside the loop."""
    model = _model()
    optimizer = _sgd(model)
    for (inputs,) in _loader():
        if dist.is_initialized():
            dist.destroy_process_group()
        for _ in range(3):
            differentiate(model(inputs).square().mean())
            optimizer.step()
        break


def _replicated() -> None:
    model = lockstep.replicate(_model())
    _train(_sgd(model), model, samples=45)


def _need_not_be_equal() -> None:
    model = lockstep.replicate(_model(), compare_every=None)
    with lockstep.no_sync(model):
        _train(_sgd(model), model)


def _in_rounds() -> None:
    model = lockstep.replicate(_model(), sync=lockstep.LocalSteps(every=4))
    _train(_sgd(model), model)


def _in_rounds_of_uneven_batches() -> None:
    model = lockstep.replicate(_model(), sync=lockstep.LocalSteps(every=4))
    _train(_sgd(model), model, samples=45)


def _released() -> None:
    model = lockstep.replicate(_model())
    lockstep.release(model)
    _train(_sgd(model), model)


def _averaged_by_torch() -> None:
    model = DistributedDataParallel(_model())
    _train(_sgd(model), model, samples=45, drop_last=True)


def _in_parts() -> None:
    """Each rank's own optimizer has parameters of the same shapes as the other's, and others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = lockstep.replicate(nn.ModuleList([nn.Linear(6, 6).double() for _ in range(2)]))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for (inputs,) in _loader():
        optimizer.zero_grad()
        differentiate(sum((part(inputs).square().mean() for part in model), torch.zeros(())))
        optimizer.step()


def _one_for_each_rank() -> None:
    """Models that differ on purpose, each with all of the data."""
    model, rank = _model(), lockstep.world().rank
    optimizer = _sgd(model)
    for step in range(12):
        optimizer.zero_grad()
        differentiate(model(torch.full((2, 6), float(rank + step), dtype=torch.float64)).square().mean())
        optimizer.step()


def _on_one_rank() -> None:
    if lockstep.world().rank == 0:
        _one_for_each_rank()


@pytest.mark.parametrize(
    "train",
    [
        _replicated,
        _need_not_be_equal,
        _in_rounds,
        _in_rounds_of_uneven_batches,
        _released,
        _averaged_by_torch,
        _in_parts,
        _one_for_each_rank,
        _on_one_rank,
        _closes_the_group,
    ],
)
def test_nothing_is_said_where_all_is_well(train: Callable[[], None]) -> None:
    assert run_ranks(_warnings, 2, train) == [[], []]


def _passes() -> None:
    model = lockstep.replicate(_model())
    optimizer = _sgd(model)
    for step in range(40):
        optimizer.zero_grad()
        differentiate(squares(nn.Sequential(nn.Linear(5, 6).double(), model), 0, step))
        optimizer.step()


def _attended() -> int:
    from lockstep.step import stepping

    lockstep.init(timeout=60)
    _passes()
    return len(stepping.alerted)


def test_replicas_are_not_looked_at_for_long() -> None:
    assert run_ranks(_attended, 2) == [0, 0]
