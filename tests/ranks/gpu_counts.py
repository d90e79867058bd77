"""What a rank's steps ask of a simulated GPU, counted: on its own, as a replica, and under torch's wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.device import simulation
from tests.device.simulation import Counting
from tests.ranks import gpu_features as features
from tests.ranks.gpu_features import begin

#: Column -> the most that any counted step asked for: kernels and copies on the device (each is a launch), copies to
#: it and to the host, waits of the host, collectives.
Asked = dict[str, int]
#: A model, and how to make a batch for it.
Made = tuple[nn.Module, Callable[[], Tensor]]


class _Residual(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, made, 3, padding=1, bias=False),
            nn.BatchNorm2d(made),
            nn.ReLU(),
            nn.Conv2d(made, made, 3, padding=1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.skip = (
            nn.Identity()
            if given == made
            else nn.Sequential(nn.Conv2d(given, made, 1, bias=False), nn.BatchNorm2d(made))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.body(inputs) + self.skip(inputs))


def resnet_18() -> Made:
    """Return a model with the layers of a ResNet-18, an eighth as wide."""
    widths = [8, 8, 8, 16, 16, 32, 32, 64, 64]
    blocks = [_Residual(*pair) for pair in pairwise(widths)]
    stem = [nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model, lambda: torch.randn(2, 3, 8, 8)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.mixed(self.before(inputs)).chunk(3, -1)
        inputs = inputs + self.joined(torch.softmax(query @ key.transpose(1, 2) / 8, -1) @ value)
        found: Tensor = inputs + self.wide(self.after(inputs))
        return found


def gpt() -> Made:
    """Return a small GPT whose largest parameters are packed one by one."""
    model = nn.Sequential(nn.Embedding(64, 128), _Block(128), _Block(128), nn.LayerNorm(128), nn.Linear(128, 64))
    return model, lambda: torch.randint(64, (2, 6))


def many_small() -> Made:
    """Return a model of 100 small parameters."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)]), lambda: torch.randn(2, 4)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.used = nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)])
        self.spare = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.used(self.body(inputs))
        return found


def unused() -> Made:
    """Return a model with a head that no forward uses."""
    return _TwoHeads(), lambda: torch.randn(2, 4)


MODELS: dict[str, Callable[[], Made]] = {
    "ResNet-18": resnet_18,
    "GPT": gpt,
    "small parameters": many_small,
    "unused head": unused,
}


def asked(name: str) -> dict[str, Asked]:
    """Return what a model's steps ask for: "alone", as a "replica", as an "unchecked" one, and under "torch"."""
    world = begin("gpu", None)
    return {how: _of_steps(name, how, world) for how in ("alone", "replica", "unchecked", "torch")}


def _of_steps(name: str, how: str, world: lockstep.World) -> Asked:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.to(world.device)
    inputs = batch().to(world.device)
    options: dict[str, Any] = {"bucket_cap_mb": 0.05, "first_bucket_mb": 0.05, "compare_every": None}
    trained: nn.Module = model
    if how == "replica":
        lockstep.replicate(model, **options)
    elif how == "unchecked":
        lockstep.replicate(model, check_finite="off", **options)
    elif how == "torch":
        trained = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=0.05, find_unused_parameters=name == "unused head"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found: Asked = {}
    for step in range(7):
        torch.cuda.synchronize()
        dist.barrier()
        counting = Counting()
        trained(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = asdict(counting.so_far())
        now["launches"] += now.pop("on_device")
        if step >= 4:  # the first steps learn and compare their batches, and torch lays out its buckets anew
            found = {column: max(count, found.get(column, 0)) for column, count in now.items()}
    if how in ("replica", "unchecked"):
        lockstep.release(model)
    return found


def waits(feature: str) -> list[int]:
    """Return how often the host waits in each of some steps with a feature that reads what the ranks have sent."""
    world = begin("gpu", None)
    model = features.replica(feature, features.net(feature, world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, features.FEATURES).to(world.device)
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        counting = Counting()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(counting.so_far().waits)
    return found[3:]


def waits_in_slices() -> list[int]:
    """Train in slices that move by pace; return how often the host waited from one slice of a step to the next."""
    world = begin("gpu", None)
    model = lockstep.replicate(features.net("plain", world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, features.FEATURES, generator=generator), torch.randint(4, (64,), generator=generator)
    )
    given = DataLoader(data, batch_size=16, pin_memory=True)
    found: list[int] = []
    for slices in lockstep.shard(given, slices=lockstep.Slices(8, balance=True)).steps():
        counting = None
        for inputs, labels in slices:
            if counting is not None:
                found.append(counting.so_far().waits)
            counting = Counting()
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def places(bucket_view: bool) -> tuple[list[int], list[list[float]]]:
    """Return where gradients of odd sizes lie, modulo 128 bytes, and their values after two steps."""
    world = begin("gpu", None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.Linear(7, 1)).to(world.device)
    lockstep.replicate(model, gradient_as_bucket_view=bucket_view)
    for step in range(2):
        model.zero_grad()
        model(torch.full((2, 5), 1.0 + world.rank + step, device=world.device)).sum().backward()
    lockstep.clip_grad_norm_(model, 0.5)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [grad.data_ptr() % 128 for grad in grads], [grad.flatten().tolist() for grad in grads]


def of_the_world() -> tuple[Asked, list[Any]]:
    """Let World's collectives take tensors of a GPU that is behind. Return what was asked for, and the results."""
    world = begin("gpu", None)
    value = torch.arange(4.0, device=world.device) + 10 * world.rank
    torch.cuda.synchronize()
    counting = Counting()

    with simulation.held_back(torch.cuda.current_stream()):
        results = [
            world.all_reduce(value),
            world.all_reduce(value.to(torch.int64), "mean"),
            world.all_reduce(value, "max"),
            *world.gather(value[: 2 + world.rank]),
            world.broadcast(value, source=1),
        ]
        counts = counting.so_far()
    assert all(each.device == world.device for each in results)
    return asdict(counts), [each.tolist() for each in results]


def mixed_in_the_world() -> list[Any]:
    """Gather a tensor of a GPU, one of the CPU and a word. Return what came, and where it lies."""
    world = begin("gpu", None)
    gathered = world.gather([torch.arange(3, device=world.device), torch.arange(2), "a word"][world.rank])
    sent = world.broadcast(torch.full((2,), 5.0) if world.rank == 1 else None, source=1)
    assert all(each.device == world.device for each in (*gathered[:2], sent))
    mean = world.mean(torch.tensor([1.0, 3.0], device=world.device) + world.rank)
    return [gathered[0].tolist(), gathered[1].tolist(), gathered[2], sent.tolist(), mean.tolist(), str(mean.device)]


def waits_with_sparse_gradients() -> list[int]:
    """Return how often the host waits in each of some steps with two sparse gradients."""
    world = begin("gpu", None)
    torch.manual_seed(0)
    tables = [nn.Embedding(30, 8, sparse=True, device=world.device) for _ in range(2)]
    model = lockstep.replicate(nn.Sequential(*tables, nn.Linear(8, 2, device=world.device)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        numbers = torch.tensor([step, world.rank, 3 + step], device=world.device)
        loss = model[2](tables[0](numbers) + tables[1](numbers)).sum()
        counting = Counting()
        loss.backward()
        found.append(counting.so_far().waits)
        optimizer.step()
        optimizer.zero_grad()
    return found[2:]


def waits_with_kept_gradients(layers: int) -> list[int]:
    """Return how often the host waits in steps that accumulate weighed gradients and zero them in place."""
    world = begin("gpu", None)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]).to(world.device)
    lockstep.replicate(model)
    inputs = torch.ones(2, 4, device=world.device)
    found = []
    for _ in range(4):
        torch.cuda.synchronize()  # or flags of the step before are waited for, if they are late
        counting = Counting()
        for is_last in (False, True):
            with contextlib.nullcontext() if is_last else lockstep.no_sync(model):
                loss = model(inputs).sum()
                world.weigh(2 + world.rank)
                loss.backward()
        found.append(counting.so_far().waits)
        model.zero_grad(set_to_none=False)
    return found[2:]


def waits_of_local_steps(layers: int) -> tuple[int, int]:
    """Return how often the host waits in a step within a round of local steps, and in two rounds."""
    world = begin("gpu", None)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]).to(world.device)
    lockstep.replicate(model, sync=lockstep.LocalSteps(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.ones(2, 4, device=world.device)
    steps = []
    for _ in range(16):
        torch.cuda.synchronize()
        counting = Counting()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        steps.append(counting.so_far().waits)
    lockstep.finish_round(model)
    return min(steps[8:]), sum(steps[8:])


def gathered_behind_a_held_stream() -> tuple[Asked, list[float]]:
    """Gather rows of a GPU that is behind. Return what forward and backward asked for, and this rank's gradient."""
    world = begin("gpu", None)
    rows = torch.full((2 + world.rank, 3), 1.0 + world.rank, device=world.device, requires_grad=True)
    torch.cuda.synchronize()
    counting = Counting()
    with simulation.held_back(torch.cuda.current_stream()):
        lockstep.gathered(rows).square().sum().backward()
        counts = counting.so_far()
    assert rows.grad is not None
    return asdict(counts), rows.grad.flatten().tolist()
