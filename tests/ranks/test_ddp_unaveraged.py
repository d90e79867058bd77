"""An optimizer does not step with gradients that each rank has accumulated for itself."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import differentiate, mlp, squares

pytestmark = EACH_BACKEND


def _last_window(how: str) -> None:
    """Seven batches in windows of three: the last window is never averaged."""
    w = lockstep.init(timeout=20)
    model: nn.Module = lockstep.replicate(mlp()) if how != "wrapped" else lockstep.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(7):
        closes = (number + 1) % 3 == 0 and how != "never"
        with nullcontext() if closes else lockstep.no_sync(model):
            differentiate(squares(model, w.rank, number))
        if closes or number == 6:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if how == "closure":
                optimizer.step(lambda: 0.0)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=how != "zeros")
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("how", ["plain", "wrapped", "never", "closure", "zeros"])
@OVER_BOTH
def test_a_step_with_gradients_that_were_never_averaged_is_an_error(how: str) -> None:
    averaged = 0 if how == "never" else 2
    for rank, outcome in enumerate(collect_outcomes(_last_window, 2, how)):
        assert outcome.error == "LockstepError", outcome.traceback
        message = str(outcome.message)
        assert f"rank {rank} of 2, after {averaged} averaged backwards: SGD is about to step with gradients" in message
        assert "those of '0.weight', '0.bias'" in message
        assert "with nullcontext() if is_last else lockstep.no_sync(model)" in message


def _last_window_without_samples() -> None:
    """The last window is one batch of one sample: the other rank accumulates nothing in it."""
    lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(9, 5).double()), batch_size=2))
    for number, (inputs,) in enumerate(loader):
        closes = number % 2 == 1
        with nullcontext() if closes else lockstep.no_sync(model):
            differentiate(model(inputs).square().mean())
        if closes or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    raise AssertionError("nothing was noticed")


@OVER_BOTH
def test_a_rank_without_a_sample_in_the_last_window_hears_of_it_too() -> None:
    for rank, outcome in enumerate(collect_outcomes(_last_window_without_samples, 2)):
        assert outcome.error == "LockstepError", outcome.traceback
        message = str(outcome.message)
        assert f"rank {rank} of 2, after 2 averaged backwards: SGD is about to step with gradients" in message
        assert "those of '0.weight', '0.bias'" in message


def _averages_by_itself_for_shares_of_an_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        with lockstep.no_sync(model):
            differentiate(squares(model, w.rank, step))
        for param in model.parameters():
            dist.all_reduce(param.grad)
            assert param.grad is not None
            param.grad.div_(w.world_size)
        optimizer.step()
        optimizer.zero_grad()


@OVER_BOTH
def test_an_optimizer_within_another_compares_nothing_again() -> None:
    run_ranks(_averages_by_itself_for_shares_of_an_optimizer, 2)


def _rightly_so() -> None:
    w = lockstep.init(timeout=20)

    def train(model: nn.Module, *, steps: int = 3, between: Any = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            with lockstep.no_sync(model):
                differentiate(squares(model, w.rank, step))
            if between is not None:
                between(model)
            optimizer.step()
            optimizer.zero_grad()

    def average(model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)
            assert param.grad is not None
            param.grad.div_(w.world_size)

    def drop(model: nn.Module) -> None:
        model.zero_grad()

    def put_zeros(model: nn.Module) -> None:
        model.zero_grad(set_to_none=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for between in (average, drop, put_zeros):
            train(lockstep.replicate(mlp()), between=between)
        # Local SGD of a script's own, which averages parameters; it says that replicas need not be equal.
        model = lockstep.replicate(mlp(), compare_every=None)
        train(model)
        for param in model.parameters():
            dist.all_reduce(param.data)

        # Another model's gradients are waiting: a discriminator's step, whose loss has been through the generator.
        generator, discriminator = lockstep.replicate(nn.Linear(5, 5).double()), lockstep.replicate(mlp())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
        for step in range(3):
            with lockstep.no_sync(generator):
                differentiate(discriminator(generator(torch.ones(4, 5).double() * (step + w.rank))).square().mean())
            optimizers[1].step()
            discriminator.zero_grad()
            generator.zero_grad()
            differentiate(generator(torch.ones(4, 5).double() * (step + w.rank)).square().mean())
            optimizers[0].step()
            generator.zero_grad()

        # Ranks that train apart, and slices, whose gradients are averaged at the end.
        train(lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=2)))


@OVER_BOTH
def test_scripts_that_average_by_themselves_or_drop_what_accumulated_are_left_alone() -> None:
    run_ranks(_rightly_so, 2)


def _post_local_sgd() -> None:
    """torch's own classes: averages within a subgroup of one rank each, and parameters every other step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    groups = [dist.new_group([rank]) for rank in range(w.world_size)]
    state = hooks.PostLocalSGDState(process_group=None, subgroup=groups[w.rank], start_localSGD_iter=1)
    lockstep.register_comm_hook(model, state, hooks.post_localSGD_hook)
    optimizer, averager = torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        with lockstep.no_sync(model):
            differentiate(squares(model, w.rank, step + 10))
        differentiate(squares(model, w.rank, step))
        optimizer.step()
        averager.average_parameters(model.parameters())


def test_post_local_sgd_of_torch_is_left_alone() -> None:
    run_ranks(_post_local_sgd, 2)


def _alone() -> None:
    lockstep.init()
    model = lockstep.replicate(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.no_sync(model):
        differentiate(squares(model, 0, 0))
    optimizer.step()


def test_a_world_of_one_has_nothing_to_average() -> None:
    run_ranks(_alone, 1)
