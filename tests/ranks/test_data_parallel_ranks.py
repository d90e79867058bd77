"""Several devices in each of several ranks: DataParallel inside, lockstep.replicate around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from tests.harness import collect_outcomes, run_ranks

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


# What needs all ranks, in a forward whose replicas are threads.


def _normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def _with_statistics(devices: list[str]) -> list[list[float]]:
    lockstep.init()
    net = lockstep.convert_sync_batchnorm(_normed())
    return _trained(net, lockstep.replicate(lockstep.DataParallel(net, devices, output_dim=0)), [6, 3], False)


def test_statistics_are_of_all_ranks_where_each_has_one_device() -> None:
    net = _normed()
    expected = _trained(net, net, None, with_criterion=False)
    for trained in run_ranks(_with_statistics, 2, ["cpu"]):
        for ours, theirs in zip(trained, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def _statistics_of_replicas(converted: bool) -> tuple[list[list[float]], list[list[float]]]:
    """Parameters and buffers of one rank with two devices, where replicas run in turn first and then side by side."""
    lockstep.init()
    net = lockstep.convert_sync_batchnorm(_normed()) if converted else _normed()
    trained = _trained(net, lockstep.DataParallel(net, TWO, output_dim=0), None, with_criterion=False)
    return trained, [buffer.double().flatten().tolist() for buffer in net.buffers()]


def test_each_replica_of_one_rank_has_its_own_statistics() -> None:
    (ours,) = run_ranks(_statistics_of_replicas, 1, True)
    (plain,) = run_ranks(_statistics_of_replicas, 1, False)
    for one, other in zip([*ours[0], *ours[1]], [*plain[0], *plain[1]], strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def _needs_all_ranks(what: str, sizes: list[int]) -> None:
    world = lockstep.init(timeout=20)
    net = lockstep.convert_sync_batchnorm(_normed()) if what == "SyncBatchNorm" else _normed()

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        if what == "gathered":
            return lockstep.gathered(output).square().mean()
        if what == "mean":
            scale: float = world.mean(1.0)
            return output.sum() * scale
        return F.cross_entropy(output, target)

    model = lockstep.replicate(lockstep.DataParallel(net, TWO, criterion=criterion, output_dim=0))
    x, y = _batch(0)
    size = sizes[world.rank]
    model.eval()
    with torch.no_grad():
        model(x[:size])  # an evaluation without the criterion needs nobody
    model.train(what == "SyncBatchNorm")
    model(x[:size], target=y[:size]).backward()


@pytest.mark.parametrize("sizes", [[4, 4], [4, 1]], ids=["alike", "of which one fills one device"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("SyncBatchNorm", "a SyncBatchNorm in training needs all ranks"),
        ("gathered", r"lockstep.gathered() needs all ranks"),
        ("mean", "World.mean() needs all ranks"),
    ],
)
def test_what_needs_all_ranks_is_refused_on_each_where_one_has_several_devices(
    what: str, words: str, sizes: list[int]
) -> None:
    for outcome in collect_outcomes(_needs_all_ranks, 2, what, sizes):
        assert outcome.error == "LockstepError", outcome.traceback
        assert words in str(outcome.message)
        assert "in a forward of lockstep.DataParallel on 2 devices" in str(outcome.message)


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
