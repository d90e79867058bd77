"""Distributed tests of three public projects, written anew with the mark ``ranks``: what each tests, not its code.

- PyTorch, ``test_accumulate_gradients_no_sync`` in ``torch/testing/_internal/distributed/distributed_test.py``: of a
  class that starts the processes of every test and joins them under a time limit. Backend and world size come from
  environment variables.
- Megatron-LM, ``tests/unit_tests/tensor_parallel/test_mappings.py``: to be started by torchrun on eight GPUs; each test
  makes its groups and takes them down, and a test that fails on one rank leaves the others waiting.
- torchmetrics, ``tests/unittests/bases/test_ddp.py``: functions that take their rank, handed to a pool of two processes
  which the whole session shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep

# PyTorch: accumulated gradients of DistributedDataParallel ------------------------------------------------------------


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _batch(step: int, size: int) -> Tensor:
    return torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.ranks(2, 3, backends=("shm", "gloo"))
@pytest.mark.parametrize("view", [True, False], ids=["view", "copy"])
def test_gradients_of_several_backwards_are_averaged_once(world: lockstep.World, view: bool) -> None:
    local, ours = _net(), nn.parallel.DistributedDataParallel(_net(), gradient_as_bucket_view=view)
    size = 2 * world.world_size
    for step in range(3):
        batch = _batch(step, size)
        local(batch).square().mean().backward()
        part = batch[2 * world.rank : 2 * world.rank + 2]
        if step < 2:
            with ours.no_sync():
                ours(part).square().mean().backward()
        else:
            ours(part).square().mean().backward()
    for mine, whole in zip(ours.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)


# Megatron-LM: mappings in and out of a region whose ranks each have a part of a layer ---------------------------------


class _Copy(torch.autograd.Function):
    """Into the region: every rank has the input; its gradient is the sum over the region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: dist.ProcessGroup) -> Tensor:
        ctx.region = region
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.region)
        return total, None


class _Sum(torch.autograd.Function):
    """Out of the region: the sum over it; its gradient goes to each rank as it is."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, region: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=region)
        return total

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@pytest.fixture
def region(world: lockstep.World) -> Iterator[dist.ProcessGroup]:
    """Two ranks that lie beside each other, of four: the group that this rank belongs to."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    yield pairs[world.rank // 2]
    for pair in pairs:
        if dist.get_rank(pair) >= 0:
            dist.destroy_process_group(pair)


@pytest.mark.ranks(4)
def test_the_sum_of_a_region_is_of_its_ranks_alone(world: lockstep.World, region: dist.ProcessGroup) -> None:
    x = torch.full((3,), 10.0**world.rank, requires_grad=True)
    y = _Sum.apply(x, region)  # type: ignore[no-untyped-call]
    assert y.tolist() == [[11.0, 1100.0][world.rank // 2]] * 3
    (y * (1 + world.rank)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0 + world.rank] * 3


@pytest.mark.ranks(4)
def test_a_layer_in_two_parts_computes_what_the_whole_does(world: lockstep.World, region: dist.ProcessGroup) -> None:
    whole, x = _net(), _batch(world.rank // 2, 5).requires_grad_()
    first, _, last = (each for each in whole)
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    mine = slice(3 * dist.get_rank(region), 3 * dist.get_rank(region) + 3)  # of the six hidden features
    inside = _Copy.apply(x, region)  # type: ignore[no-untyped-call]
    hidden = torch.tanh(nn.functional.linear(inside, first.weight[mine], first.bias[mine]))
    out = _Sum.apply(hidden @ last.weight[:, mine].T, region) + last.bias  # type: ignore[no-untyped-call]
    expected = whole(x.detach().requires_grad_())
    torch.testing.assert_close(out, expected)
    (got,) = torch.autograd.grad(out.square().sum(), x)
    alone = x.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(whole(alone).square().sum(), alone)
    torch.testing.assert_close(got, wanted)


# torchmetrics: states of a metric, of which each rank has another number of rows --------------------------------------


def _gather_rows(rows: Tensor) -> list[Tensor]:
    """All ranks' rows, [n, columns] with another n on each: padded to the longest, gathered, cut."""
    world_size = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    longest = int(max(count.item() for count in counts))
    padded = torch.zeros(longest, rows.shape[1], dtype=rows.dtype)
    padded[: len(rows)] = rows
    gathered = [torch.zeros_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    return [each[: int(count)] for each, count in zip(gathered, counts, strict=True)]


@pytest.mark.ranks(1, 2, 3, backends=("shm", "gloo"))
@pytest.mark.parametrize("counts", [(2, 3, 1), (4, 0, 2)], ids=["uneven", "one-has-none"])
def test_rows_of_uneven_ranks_are_gathered_whole(world: lockstep.World, counts: tuple[int, ...]) -> None:
    rows = [torch.arange(2.0 * count).reshape(count, 2) + 100 * rank for rank, count in enumerate(counts)]
    gathered = _gather_rows(rows[world.rank])
    for got, wanted in zip(gathered, rows[: world.world_size], strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.ranks(2)
def test_a_mean_over_ranks_is_that_of_all_samples(world: lockstep.World) -> None:
    values = torch.tensor([[1.0, 2.0, 6.0], [7.0]][world.rank])
    state = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(state)
    assert (state[0] / state[1]).item() == 4.0
