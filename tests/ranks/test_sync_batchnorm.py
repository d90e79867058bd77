"""SyncBatchNorm: N ranks with slices of a batch compute what torch's BatchNorm does with the whole of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from tests.backends import EACH_BACKEND, ON_GPUS, OVER_ALL
from tests.harness import collect_outcomes, run_ranks

pytestmark = [
    pytest.mark.internals,  # run on other versions of torch and Python, too
    EACH_BACKEND,
]

CHANNELS = 3


def _net(dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Sequential:
    """Two batch norms, so that gradients pass through one on their way to the other."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d if len(shape) < 2 else nn.BatchNorm2d
    first = nn.Linear(CHANNELS, 4) if not shape else nn.Conv2d(CHANNELS, 4, 2)
    head = [nn.Linear(4, 2)] if not shape else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    return nn.Sequential(norm(CHANNELS, momentum=0.3), first, nn.Tanh(), norm(4, momentum=None), *head).to(dtype)


def _batch(step: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = 5 + torch.randn(size, CHANNELS, *shape, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.randint(2, (size,), generator=generator)


def _train(dtype_name: str, shape: tuple[int, ...], sizes: list[list[int]]) -> dict[str, Any]:
    """Largest differences between these ranks and one process with torch's batch norm; ``sizes``: per step and rank."""
    world = lockstep.init()
    dtype = getattr(torch, dtype_name)
    alone = _net(dtype, shape)
    model = lockstep.replicate(lockstep.convert_sync_batchnorm(copy.deepcopy(alone)).to(world.device))
    differences = {"output": 0.0, "input gradient": 0.0, "parameter": 0.0, "buffer": 0.0}
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (alone, model)]
    for step, slices in enumerate(sizes):
        images, labels = _batch(step, sum(slices), shape, dtype)
        begin = sum(slices[: world.rank])
        mine = slice(begin, begin + slices[world.rank])
        whole, part = images.clone().requires_grad_(), images[mine].to(world.device, copy=True).requires_grad_()
        world.share = lockstep.BatchShare(slices[world.rank], sum(slices))
        outputs = alone(whole), model(part)
        nn.functional.cross_entropy(outputs[0], labels).backward()
        nn.functional.cross_entropy(outputs[1], labels[mine].to(world.device)).backward()
        assert whole.grad is not None
        if len(part):
            assert part.grad is not None
            # The gradient of this rank's own loss: the replica's weights apply to parameters.
            as_global = part.grad.cpu() * slices[world.rank] / sum(slices)
            differences["input gradient"] = max(
                differences["input gradient"], float((as_global - whole.grad[mine]).abs().max())
            )
            difference = float((outputs[1].cpu() - outputs[0][mine]).abs().max())
            differences["output"] = max(differences["output"], difference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    world.share = None
    for kind, pairs in {
        "parameter": zip(alone.parameters(), model.parameters(), strict=True),
        "buffer": zip(alone.buffers(), model.buffers(), strict=True),
    }.items():
        differences[kind] = max(float((a - b.cpu()).abs().max()) for a, b in pairs)
    bits = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()]).tolist()
    return {"differences": differences, "buffers": bits}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (3, 3)], ids=["linear", "images"])
@OVER_ALL
def test_equal_and_unequal_slices_train_as_one_process(world_size: int, shape: tuple[int, ...]) -> None:
    equal = [4] * world_size
    unequal = [5, 1, 2][:world_size]
    empty = [3, 0, 2][:world_size]
    results = run_ranks(_train, world_size, "float64", shape, [equal, unequal, empty, unequal])
    for result in results:
        assert max(result["differences"].values()) < 1e-12, result["differences"]
        assert result["buffers"] == results[0]["buffers"], "not the same bits on every rank"


@OVER_ALL
def test_float32_is_as_near_as_float32_can_be() -> None:
    for result in run_ranks(_train, 2, "float32", (3, 3), [[5, 2]] * 4):
        assert max(result["differences"].values()) < 5e-6, result["differences"]


def _far_from_zero() -> float:
    """Values with a mean that is large against their deviation: where E[x^2] - E[x]^2 has nothing left."""
    world = lockstep.init()
    norm = lockstep.SyncBatchNorm(1, momentum=1.0)
    values = 1000 + torch.arange(8.0)[world.rank :: 2].view(-1, 1) / 8
    norm(values)
    exact = (torch.arange(8.0) / 8).double().var()
    assert norm.running_var is not None
    return float((norm.running_var.double() / exact - 1).abs())


def test_a_large_mean_costs_no_digits_of_the_variance() -> None:
    assert max(run_ranks(_far_from_zero, 2)) < 1e-6


def _half_precision() -> list[Any]:
    lockstep.init()
    norm = lockstep.SyncBatchNorm(2)
    values = torch.randn(4, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    result = norm(values)
    result.float().square().sum().backward()
    assert values.grad is not None
    assert norm.weight.grad is not None
    return [str(each.dtype) for each in (result, values.grad, norm.weight.grad)]


def test_bfloat16_values_keep_their_type_and_float32_parameters_theirs() -> None:
    assert run_ranks(_half_precision, 2) == [["torch.bfloat16", "torch.bfloat16", "torch.float32"]] * 2


def _refused(size: int) -> None:
    world = lockstep.init()
    lockstep.SyncBatchNorm(2)(torch.randn(size if world.is_main else 0, 2))


def test_one_value_per_channel_in_all_is_refused_on_every_rank() -> None:
    for outcome in collect_outcomes(_refused, 2, 1):
        assert outcome.error == "ValueError"
        assert "expected more than 1 value per channel when training, got 1 on all ranks" in (outcome.message or "")
    assert [outcome.error for outcome in collect_outcomes(_refused, 2, 2)] == [None, None]


def _evaluate_alone() -> bool:
    world = lockstep.init(timeout=5)
    norm = lockstep.SyncBatchNorm(2).eval()
    if not world.is_main:
        return True
    values = torch.randn(3, 2)
    plain = nn.BatchNorm1d(2).eval()
    return torch.equal(norm(values), plain(values))  # rank 1 takes no part


def test_evaluation_is_local() -> None:
    assert run_ranks(_evaluate_alone, 2) == [True, True]


def _torch_on_cpu() -> None:
    lockstep.init()
    lockstep.replicate(nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)))


def test_torchs_layer_on_the_cpu_is_refused_with_the_remedy() -> None:
    (outcome,) = collect_outcomes(_torch_on_cpu, 1)
    assert outcome.error == "ValueError"
    assert "'1' is a torch.nn.SyncBatchNorm on the CPU" in (outcome.message or "")
    assert "lockstep.convert_sync_batchnorm(model)" in (outcome.message or "")


def _compiled() -> float:
    world = lockstep.init()
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = lockstep.replicate(lockstep.convert_sync_batchnorm(copy.deepcopy(plain)).to(world.device))
    compiled = torch.compile(model, backend="eager")
    values = torch.randn(6, 2)
    found = compiled(values[world.rank * 3 : world.rank * 3 + 3].to(world.device))
    found.square().mean().backward()
    return float((found.cpu() - plain(values)[world.rank * 3 : world.rank * 3 + 3]).abs().max())


@ON_GPUS
def test_a_compiled_model_synchronises_as_well() -> None:
    assert max(run_ranks(_compiled, 2)) < 1e-6
