"""Compiled code that communicates over "shm": the compiler stops at our process group and does not look into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _cases(world: lockstep.World) -> dict[str, Callable[[Tensor], Tensor]]:
    size, rank = world.world_size, world.rank
    half = dist.new_group(list(range(size)), backend="shm")

    def all_reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_reduce_later(x: Tensor) -> Tensor:
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        return x

    def all_reduce_in_a_group(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=half)
        total: Tensor = x + half.size() - size
        return total

    def all_gather(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        return parts[0] + parts[1]

    def all_gather_into_tensor(x: Tensor) -> Tensor:
        whole = x.new_empty(size * len(x))
        dist.all_gather_into_tensor(whole, x)
        return whole[: len(x)] + whole[len(x) :]

    def reduce_scatter_tensor(x: Tensor) -> Tensor:
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, x.repeat(size))
        return part

    def broadcast(x: Tensor) -> Tensor:
        first, second = x.clone(), x.clone()
        dist.broadcast(first, 0)
        dist.broadcast(second, 1)
        return first + second

    def barrier(x: Tensor) -> Tensor:
        dist.barrier()
        return all_reduce(x)

    def send_and_receive(x: Tensor) -> Tensor:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            other = torch.empty_like(x)
            dist.recv(other, 0)
            x += other
            dist.send(x, 0)
        return x

    def functional_all_reduce(x: Tensor) -> Tensor:
        total: Tensor = functional.all_reduce(x, "sum", world.group)
        return total + 0

    def world_mean(x: Tensor) -> Tensor:
        return torch.full_like(x, world.mean(x.mean())) * size

    def world_all_reduce(x: Tensor) -> Tensor:
        return world.all_reduce(x)

    def world_barrier(x: Tensor) -> Tensor:
        world.barrier()
        return all_reduce(x)

    return {case.__name__: case for case in list(locals().values()) if getattr(case, "__module__", "") == __name__}


def _compiled_steps(backend: str) -> dict[str, Any]:
    world = lockstep.init("shm")
    found: dict[str, Any] = {}
    for name, communicate in _cases(world).items():
        torch.compiler.reset()
        compiled = torch.compile(lambda x, communicate=communicate: communicate(x * 2) + 1, backend=backend)
        for _ in range(2):
            found[name] = compiled(torch.full((2,), world.rank + 1.0)).tolist()
    return found


def test_collectives_in_compiled_code() -> None:
    for found in run_ranks(_compiled_steps, 2, "aot_eager"):
        assert found == {name: [7.0, 7.0] for name in found}  # 2 + 4, from two ranks, and 1
        assert len(found) == 13


def _torch_ddp() -> list[list[float]]:
    world = lockstep.init("shm")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled: Any = torch.compile(TorchDDP(model), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        data = torch.randn(4, 4)[2 * world.rank : 2 * world.rank + 2]
        optimizer.zero_grad()
        compiled(data).square().mean().backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def _alone() -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        data = torch.randn(4, 4)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_torchs_ddp_compiled_trains_as_one_process() -> None:
    (alone,) = run_ranks(_alone, 1)
    for ranks in run_ranks(_torch_ddp, 2):
        for ours, theirs in zip(ranks, alone, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
