"""Several devices in each of several ranks: DataParallel inside, lockstep.replicate around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

TWO = ["cpu", "cpu"]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(9, 5, generator=generator).double(), torch.randint(0, 3, (9,), generator=generator)


def _trained(net: nn.Module, model: nn.Module, counts: list[int] | None, with_criterion: bool) -> list[list[float]]:
    """Parameters after a few steps; on each rank its share of the batch, or all of it where there are no ranks."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(4):
        x, y = _batch(step)
        if counts is not None:
            world = lockstep.world()
            world.share = lockstep.BatchShare(counts[world.rank], sum(counts))
            x, y = x.split(counts)[world.rank], y.split(counts)[world.rank]
        optimizer.zero_grad()
        (model(x, target=y) if with_criterion else F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    return [param.detach().flatten().tolist() for param in net.parameters()]


def _on_each_rank(way: str, with_criterion: bool) -> list[list[float]]:
    lockstep.init("gloo")
    net = _model()
    criterion = F.cross_entropy if with_criterion else None
    parallel: nn.Module = lockstep.DataParallel(net, TWO, criterion=criterion, output_dim=0)
    parallel = lockstep.replicate(parallel) if way == "replicate" else lockstep.DistributedDataParallel(parallel)
    return _trained(net, parallel, [6, 3], with_criterion)


@pytest.mark.parametrize("way", ["replicate", "wrapper"])
@pytest.mark.parametrize("with_criterion", [True, False])
def test_two_ranks_with_two_replicas_each_train_as_one_process(way: str, with_criterion: bool) -> None:
    net = _model()
    expected = _trained(net, net, None, with_criterion=False)
    for trained in run_ranks(_on_each_rank, 2, way, with_criterion):
        for ours, theirs in zip(trained, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.ranks(1, backends=("gloo",))
@pytest.mark.usefixtures("world")
def test_a_module_that_averages_over_ranks_is_refused() -> None:
    x, _ = _batch(0)
    with pytest.raises(lockstep.LockstepError, match=r"'module' averages its gradients.*replicate that"):
        lockstep.DataParallel(lockstep.replicate(_model()), TWO)
    with pytest.raises(lockstep.LockstepError, match=r"'module\.0' averages"):
        lockstep.DataParallel(nn.Sequential(lockstep.DistributedDataParallel(_model())), TWO)
    net = _model()
    parallel = lockstep.DataParallel(net, TWO, output_dim=0)
    parallel(x)
    lockstep.replicate(net)
    with pytest.raises(lockstep.LockstepError, match="'module' averages"):
        parallel(x)
