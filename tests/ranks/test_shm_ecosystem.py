"""torch's own distributed classes over shm: they train to what they train to over gloo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


class _Net(nn.Module):
    """Layers of several kinds, with buffers (batch norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 5)
        self.extra = nn.Linear(64, 64)
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.skip:  # (else some parameters take no part on this rank)
            return self._whole(x)
        out: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.extra(torch.relu(self.norm(self.first(x)))))
        return out


def _plain(tensors: Iterable[torch.Tensor]) -> list[list[float]]:
    """As numbers: a tensor would travel to the test as a descriptor, which ends with its rank."""
    return [tensor.detach().reshape(-1).tolist() for tensor in tensors]


def _train(backend: str, how: str) -> list[list[float]]:
    # Imported where needed: some of these take seconds, and some warn about themselves, and warnings are errors here.
    from torch.nn.parallel import DistributedDataParallel

    world = lockstep.init(backend, timeout=30)
    torch.manual_seed(0)
    net = _Net()
    how_wrapped: dict[str, Any] = {
        "static graph": {"static_graph": True},
        "unused parameters": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True},
    }
    # (With PowerSGD over gloo and three buckets, torch waits for itself.)
    model = DistributedDataParallel(net, bucket_cap_mb=1 if how == "powersgd" else 0.01, **how_wrapped.get(how, {}))
    if how == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if how.startswith("powersgd"):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "post-local SGD":
        optimizer = _post_local_sgd(model, optimizer)
    if how == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    generator = torch.Generator().manual_seed(100 + world.rank)
    steps = 6 + (world.rank if how == "join" else 0)

    def run() -> None:
        for _ in range(steps):
            x = torch.randn(8, 20, generator=generator)
            net.skip = how == "unused parameters" and world.rank == 1
            y = torch.randint(0, 5, (8,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    if how == "join":
        from torch.distributed.algorithms.join import Join

        with Join([model]):
            run()
    else:
        run()
    return _plain(model.parameters())


def _post_local_sgd(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Two steps of all-reduced gradients, then steps of each rank's own, averaged every second one."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None,
        subgroup=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        start_localSGD_iter=2,
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, averager=PeriodicModelAverager(period=2, warmup_steps=2))


_HOW = [
    "plain",
    "static graph",
    "unused parameters",
    "views",
    "fp16",
    "powersgd",
    "post-local SGD",
    "zero",
    "join",
]


@pytest.mark.parametrize("how", _HOW)
def test_ddp_trains_to_the_same_parameters_as_over_gloo(how: str) -> None:
    over_shm, over_gloo = run_ranks(_train, 2, "shm", how), run_ranks(_train, 2, "gloo", how)
    if how != "post-local SGD":  # (whose ranks are equal after some steps only)
        assert over_shm[0] == over_shm[1]
    for of_shm, of_gloo in zip(over_shm, over_gloo, strict=True):
        for got, want in zip(of_shm, of_gloo, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_powersgd_with_several_buckets_keeps_the_ranks_equal() -> None:
    """Its callbacks issue collectives while autograd's thread issues those of the next buckets."""
    first, second = (run_ranks(_train, 2, "shm", "powersgd, several buckets") for _ in range(2))
    assert first[0] == first[1] == second[0] == second[1]


def _two_dimensions(backend: str) -> list[list[float]]:
    """A mesh of 2 x 2: a sub-group per row and column."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    lockstep.init(backend, timeout=30)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    whole = torch.arange(48.0).view(8, 6)
    results: list[Any] = []
    for there in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
        each: Any = distribute_tensor(whole, mesh, there)
        results += [each, (each * 2).redistribute(mesh, [Replicate(), Shard(1)]), each.sum(dim=0)]
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=mesh.get_group("data"))
    return [*_plain(result.full_tensor() for result in results), tensor.tolist()]


def test_a_mesh_of_two_dimensions_as_over_gloo() -> None:
    assert run_ranks(_two_dimensions, 4, "shm") == run_ranks(_two_dimensions, 4, "gloo")


def _sparse(backend: str) -> list[list[float]]:
    """Gradients of an embedding, sparse, through torch's DDP and by hand."""
    from torch.nn.parallel import DistributedDataParallel

    world = lockstep.init(backend, timeout=30)
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Embedding(20, 3, sparse=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.tensor([step, world.rank, 5 * world.rank + step])).square().sum().backward()
        optimizer.step()
    pair = torch.sparse_coo_tensor(
        torch.tensor([[0, world.rank], [world.rank, 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (3, 3, 2)
    )
    dist.all_reduce(pair)
    return _plain([*net.parameters(), pair.to_dense()])


def test_sparse_gradients_as_over_gloo() -> None:
    over_shm, over_gloo = run_ranks(_sparse, 2, "shm"), run_ranks(_sparse, 2, "gloo")
    for got, want in zip(over_shm[0], over_gloo[0], strict=True):
        assert got == pytest.approx(want, rel=1e-6)
    assert over_shm[0] == over_shm[1]


def _tensor_parallel(backend: str) -> list[list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    world = lockstep.init(backend, timeout=30)
    mesh = init_device_mesh("cpu", (world.world_size,))
    whole = torch.arange(24.0).view(6, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = torch.matmul(columns, distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)]))
    assert isinstance(product, DTensor)
    results = [rows, columns, product, product.redistribute(mesh, [Replicate()])]
    return _plain(result.full_tensor() for result in results)


def test_dtensor_redistributes_as_over_gloo() -> None:
    over_shm, over_gloo = run_ranks(_tensor_parallel, 2, "shm"), run_ranks(_tensor_parallel, 2, "gloo")
    assert over_shm == over_gloo


def _sharded(backend: str) -> list[list[float]]:
    from torch.distributed.fsdp import fully_shard

    world = lockstep.init(backend, timeout=30)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
    return _plain(parameter.full_tensor() for parameter in net.parameters())  # type: ignore[attr-defined]


def _model_averaging() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    world = lockstep.init("shm", timeout=30)
    net = nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.fill_(float(world.rank))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # (it leaves out parameters without a gradient)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    averager.average_parameters(net.parameters())
    assert torch.equal(net.weight, torch.full((3, 3), (world.world_size - 1) / 2))
    dist.barrier()


def test_fsdp_trains_as_over_gloo() -> None:
    over_shm, over_gloo = run_ranks(_sharded, 2, "shm"), run_ranks(_sharded, 2, "gloo")
    for got, want in zip(over_shm[0], over_gloo[0], strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_local_sgd_averages() -> None:
    run_ranks(_model_averaging, 3)
