"""A rank that leaves a backward out is found at once, and programs whose ranks rightly differ are left alone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes
from tests.ranks.ddp_cases import assert_averaged, batch, differentiate, mlp, replicate_tiny, squares

pytestmark = EACH_BACKEND


def _leaves_one_out(way: str) -> None:
    world = lockstep.init(timeout=20)
    model = replicate_tiny(mlp()) if way == "overlapped" else lockstep.replicate(mlp())
    if way == "hooked":
        lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)
    for step in range(5):
        model.zero_grad()
        loss = squares(model, world.rank, step)
        if world.rank == 1 and step == 2:
            continue  # as who skips a loss that is not finite
        differentiate(loss)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("way", ["plain", "overlapped", "hooked"])
@OVER_BOTH
def test_a_rank_that_leaves_a_backward_out_is_found_in_the_next(way: str) -> None:
    for outcome in collect_outcomes(_leaves_one_out, 2, way):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        message = str(outcome.message)
        assert "rank 0 of 2, step 3" in message or "rank 1 of 2, step 3" in message
        assert re.search(r"rank 1[^;\n]*after 1 forward without a backward", message), message
        assert not re.search(r"rank 0 [^;\n]*after 1 forward", message), message
        assert "Decide that on all ranks together" in message


def _leaves_several_out(number: int) -> None:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    for step in range(2 + 2 * number):
        model.zero_grad()
        loss = squares(model, world.rank, step)
        if world.rank == 1 and 2 <= step < 2 + number:
            continue
        differentiate(loss)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("number", [4, 8, 16])
@OVER_BOTH
def test_any_number_of_backwards_left_out_in_a_row_is_found(number: int) -> None:
    for outcome in collect_outcomes(_leaves_several_out, 2, number):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert f"after {number} forwards without a backward" in str(outcome.message)


@pytest.mark.ranks(2)
def test_ranks_may_differ_in_forwards_that_are_not_for_training(world: lockstep.World) -> None:
    plays = 1 + 2 * world.rank  # so many more forwards has this rank

    def train(model: nn.Module, before: Callable[[nn.Module], None]) -> None:
        for step in range(3):
            model.zero_grad()
            if step:
                before(model)
            loss = squares(model, world.rank, step)
            differentiate(loss)
            assert_averaged(model, mlp, squares, [step])

    def without_gradients(model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(plays):
                model(batch(0, 0, 4, 5))

    def in_evaluation(model: nn.Module) -> None:
        model.eval()
        for _ in range(plays):
            model(batch(0, 0, 4, 5))
        model.train()

    def for_inputs(model: nn.Module) -> None:  # an attack that takes as many steps as it needs
        for _ in range(plays):
            inputs = batch(0, 0, 4, 5).requires_grad_()
            torch.autograd.grad(model(inputs).sum(), inputs)

    def that_fails(model: nn.Module) -> None:  # and is tried again
        for _ in range(plays):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(batch(0, 0, 4, 3))

    for before in (without_gradients, in_evaluation, for_inputs, that_fails):
        train(lockstep.replicate(mlp()), before)

    # As many forwards as it takes, and one backward through all of them.
    model = lockstep.replicate(mlp())
    for step in range(3):
        model.zero_grad()
        outputs: list[Tensor] = [model(batch(world.rank, step, 4, 5)) for _ in range(plays)]
        differentiate(torch.stack(outputs).square().mean())
        assert_averaged(model, mlp, squares, [step], tolerance=1e-9)

    # Micro-batches, more on one rank than on the other.
    model = lockstep.replicate(mlp())
    for step in range(3):
        model.zero_grad()
        with lockstep.no_sync(model):
            for _ in range(plays):
                differentiate(0 * squares(model, world.rank, step))
        differentiate(squares(model, world.rank, step))
        assert_averaged(model, mlp, squares, [step])

    # A forward without a backward on every rank, and two backwards one after the other.
    model = lockstep.replicate(mlp())
    for step in range(3):
        model.zero_grad()
        squares(model, world.rank, 9)
        first, second = squares(model, world.rank, step), squares(model, world.rank, step + 5)
        differentiate(first)
        differentiate(second)
        assert_averaged(model, mlp, squares, [step, step + 5])

    # An agent that plays for as long as its game lasts, and does so from the beginning.
    model = lockstep.replicate(mlp())
    for step in range(3):
        model.zero_grad()
        for _ in range(plays + step * world.rank):
            squares(model, world.rank, step)
        differentiate(squares(model, world.rank, step))
        assert_averaged(model, mlp, squares, [step])

    # Two forwards in each step; from the third step on one rank's loss has no use for the first, or for the last.
    for unused in (0, 1):
        model = lockstep.replicate(mlp())
        for step in range(5):
            model.zero_grad()
            losses = [squares(model, world.rank, step + 10 * number) for number in range(2)]
            differentiate(losses[1 - unused] if step > 1 and world.rank else losses[0] + losses[1])
