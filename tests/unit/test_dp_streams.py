"""DataParallel over two GPUs, real or simulated, whose streams are late: what one process computes on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from tests.device import simulation
from tests.device.simulation import Counting, Stress

pytestmark = pytest.mark.gpu(2, apart=True)


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """What CUDA opens for the process as a whole is no test's leak."""
    for device in ("cuda:0", "cuda:1"):
        nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
    torch.cuda.synchronize()


@pytest.fixture(params=[Stress(seed=1, jitter=300), Stress(seed=2, side=500), Stress(seed=3, jitter=200, main=300)])
def late(request: pytest.FixtureRequest, gpus: str) -> Iterator[None]:
    if gpus == "simulated":
        simulation.stress(request.param)
    yield
    if gpus == "simulated":
        simulation.stress(Stress())


def _train(model: Any, net: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 6, generator=generator), torch.randint(0, 4, (12,), generator=generator)
        optimizer.zero_grad()
        output = model(x)
        F.cross_entropy(output, y.to(output.device)).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


@pytest.mark.parametrize("stream", ["default", "own", "own on each"])
@pytest.mark.usefixtures("late")
def test_training_on_late_streams(stream: str) -> None:
    net, plain = _net().to("cuda:0"), _net()
    wanted = _train(plain, plain)
    first, second = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize()
    with (
        torch.cuda.stream(second if stream == "own on each" else None),
        torch.cuda.stream(None if stream == "default" else first),
    ):
        found = _train(lockstep.DataParallel(net, device_ids=[0, 1]), net)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("late")
def test_evaluation_on_late_streams() -> None:
    net = _net()
    x = torch.randn(12, 6)
    with torch.no_grad():
        wanted = net(x)
        ours = lockstep.DataParallel(net.to("cuda:0").eval(), device_ids=[0, 1])
        for _ in range(3):
            torch.testing.assert_close(ours(x).cpu(), wanted)
        next(net.parameters()).data.mul_(2)
        torch.testing.assert_close(ours(x).cpu(), net(x.to("cuda:0")).cpu())


def test_an_evaluation_waits_once_for_all_that_it_compares(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated device counts waits")
    net = _net()
    x = torch.randn(12, 6, device="cuda:0")
    with torch.no_grad():
        ours = lockstep.DataParallel(net.to("cuda:0").eval(), device_ids=[0, 1])
        ours(x)
        counting = Counting()
        ours(x)
        assert counting.so_far().waits == 1
