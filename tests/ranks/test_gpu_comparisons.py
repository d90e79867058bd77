"""What ranks tell each other of their steps is read a backward later on GPUs, and nothing waits for it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.device import simulation
from tests.device.simulation import Stress
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.gpu_features import begin

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

LATE = Stress(seed=3, jitter=200, main=300)


def _model(world: lockstep.World, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 2)).to(world.device)
    # Several buckets, of which the last has the flags.
    return lockstep.replicate(model, bucket_cap_mb=0.0001, first_bucket_mb=0.0001, **options)


def _loss(model: nn.Module, world: lockstep.World, step: int) -> torch.Tensor:
    inputs = torch.full((4, 5), 1.0 + world.rank + step, device=world.device)
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def _leaves_one_out(stress: Stress | None, dtype: torch.dtype) -> None:
    world = begin("gpu", stress)
    model = _model(world).to(dtype)
    lockstep.release(model)
    lockstep.replicate(model, bucket_cap_mb=0.0001, first_bucket_mb=0.0001)
    for step in range(8):
        model.zero_grad()
        loss = model(torch.full((4, 5), 1.0 + world.rank, device=world.device, dtype=dtype)).square().mean()
        if world.rank == 1 and step == 3:
            continue  # as who skips a loss that is not finite
        loss.backward()
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_that_leaves_a_backward_out_is_found_a_step_later(dtype: torch.dtype, gpus: str) -> None:
    for outcome in collect_outcomes(_leaves_one_out, 2, LATE if gpus == "simulated" else None, dtype):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        message = str(outcome.message)
        assert re.match(r"rank [01] of 2, step 4: the ranks averaged the gradients of different backwards: ", message)
        assert "rank 0 in backward 4 of each 16; rank 1 in backward 4 of each 16, after 1 forward without" in message
        assert "Decide that on all ranks together" in message


def _takes_other_batches(how: str, stress: Stress | None) -> None:
    world = begin("gpu", stress)
    model = _model(world)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(32, 5)), batch_size=4))
    for number, (inputs,) in enumerate(loader):
        if world.rank == 1 and number == 3 and how == "break":
            break
        if world.rank == 1 and number == 3 and how == "skips":
            continue
        model.zero_grad()
        model(inputs).square().mean().backward()
    for _ in range(4):
        model(torch.ones(2, 5, device=world.device)).sum().backward()
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize(("how", "theirs"), [("break", "no batch in hand"), ("skips", "epoch 0, batch 4")])
def test_a_rank_in_another_batch_is_found_a_step_later(how: str, theirs: str, gpus: str) -> None:
    for rank, outcome in enumerate(
        collect_outcomes(_takes_other_batches, 2, how, LATE if gpus == "simulated" else None)
    ):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        message = str(outcome.message)
        assert message.startswith(f"rank {rank} of 2, step 4: the ranks averaged the gradients of different batches: ")
        assert f"rank 0: epoch 0, batch 3; rank 1: {theirs}" in message


def _some_weigh(without: Callable[[int, int], bool], stress: Stress | None) -> None:
    if stress is not None:
        simulation.stress(stress)
    world = lockstep.init(timeout=30)  # which passes only if they are not found
    model = _model(world)
    for step in range(5):
        if not without(world.rank, step):
            world.weigh(4 + world.rank)
        else:
            world.share = None
        _loss(model, world, step).backward()
    raise AssertionError("nothing was noticed")


def _rank_1(rank: int, step: int) -> bool:  # noqa: ARG001
    return rank == 1


def _rank_0_in_step_3(rank: int, step: int) -> bool:
    return rank == 0 and step == 3


@pytest.mark.parametrize("without", [_rank_1, _rank_0_in_step_3])
def test_ranks_of_which_only_some_weigh_are_found_at_once(without: Callable[[int, int], bool], gpus: str) -> None:
    for outcome in collect_outcomes(_some_weigh, 2, without, LATE if gpus == "simulated" else None):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert f"step {1 if without is _rank_1 else 4}: some ranks have weighed" in str(outcome.message)


def _compared_behind_a_held_stream() -> tuple[int, int]:
    """Return how often the host waited in a step whose stream is held back, and how many copies it asked for."""
    world = begin("gpu", None)
    model = _model(world, check_finite="off", compare_every=None)
    for step in range(4):
        _loss(model, world, step).backward()
    torch.cuda.synchronize()
    inputs = torch.ones(4, 5, device=world.device)
    counting = simulation.Counting()
    with simulation.held_back(torch.cuda.current_stream()):
        model(inputs).square().mean().backward()
        counts = counting.so_far()
    torch.cuda.synchronize()
    return counts.waits, counts.to_host


def test_nothing_waits_for_a_comparison_and_one_copy_has_all_of_them(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated stream can be held back")
    assert run_ranks(_compared_behind_a_held_stream, 2) == [(0, 1)] * 2


def _in_slices(differs: bool, stress: Stress | None) -> None:
    world = begin("gpu", stress)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(5, 300).to(world.device), compare_every=1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(32, 5)), batch_size=4), slices=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, step in enumerate(loader.steps()):
            for (inputs,) in step:
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if differs and number == 4 and world.rank == 1:
                with torch.no_grad():
                    model.weight[7, 3] += 1


def test_digests_that_are_compared_on_the_host_are_there_when_they_are_read(gpus: str) -> None:
    late = LATE if gpus == "simulated" else None
    run_ranks(_in_slices, 2, False, late)
    # Read too early, a device's digests are 0 on all ranks, and no difference is ever found.
    for outcome in collect_outcomes(_in_slices, 2, True, late):
        assert outcome.error == "ReplicaMismatch", outcome.traceback
        assert "weight" in str(outcome.message)


def _rightly_different() -> None:
    world = begin("gpu", LATE if simulation.is_on() else None)
    model = _model(world)
    for step in range(6):
        with torch.no_grad():
            for _ in range(1 + 2 * world.rank):
                _loss(model, world, step)
        with lockstep.no_sync(model):
            for _ in range(1 + world.rank):
                _loss(model, world, step).backward()
        _loss(model, world, step).backward()


def test_ranks_that_rightly_differ_are_left_alone() -> None:
    run_ranks(_rightly_different, 2)
