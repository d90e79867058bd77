"""Beside torch.nn.DataParallel: the same values where torch's are right, and none of its faults.

torch's class makes replicas on accelerators only, so these tests need two of them; what they compare is compared
with the bare module on CPU replicas in ``tests/unit/test_data_parallel.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep import trees

pytestmark = [
    pytest.mark.gpu(2, apart=True),
    # torch's own class: gathering scalars.
    pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """What CUDA opens for the process as a whole is no test's leak."""
    for device in ("cuda:0", "cuda:1"):
        nn.Conv2d(3, 4, 3, device=device)(torch.ones(2, 3, 8, 8, device=device)).flatten(1).mm(
            torch.ones(144, 2, device=device)
        ).sum().backward()
    torch.ones(4, device="cuda:0").to("cuda:1")
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """No TF32: the same sums in the same precision."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _pair(module: nn.Module, **options: Any) -> tuple[nn.DataParallel[nn.Module], lockstep.DataParallel]:
    module = module.to("cuda:0")
    theirs = nn.DataParallel(copy.deepcopy(module), device_ids=[0, 1])
    return theirs, lockstep.DataParallel(module, device_ids=[0, 1], **options)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, batch: dict[str, Any], *, scale: float) -> dict[str, Any]:
        hidden = self.norm(self.linear(batch["x"])) * scale
        return {"out": [hidden, batch["pair"][1].float()], "loss": hidden.mean(), "none": None}


@pytest.mark.parametrize("size", [8, 5, 1])
@pytest.mark.parametrize("where", ["cpu", "cuda:0", "cuda:1"])
def test_nested_inputs_and_outputs(size: int, where: str) -> None:
    torch.manual_seed(0)
    theirs, ours = _pair(Nested(), output_dim=0)
    theirs.eval()
    ours.eval()
    batch = {
        "x": torch.randn(size, 4, device=where),
        "pair": (torch.arange(size, device=where), torch.arange(size, device=where)),
    }
    found = ours(batch, scale=2.0)
    if size == 1:  # of which torch's makes no arguments for the second device, but a keyword argument
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
            theirs(batch, scale=2.0)
        wanted = theirs.module(trees.to_device(batch, torch.device("cuda:0")), scale=2.0)
        wanted["loss"] = wanted["loss"].unsqueeze(0)  # gathered from the devices
    else:
        wanted = theirs(batch, scale=2.0)
    for one, other in zip(found["out"], wanted["out"], strict=True):
        torch.testing.assert_close(one, other)
        assert one.device == other.device
    torch.testing.assert_close(found["loss"], wanted["loss"])
    assert found["none"] is wanted["none"] is None
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.device_ids == theirs.device_ids


def test_training_with_batch_statistics() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    theirs, ours = _pair(net)
    curves = []
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 5, (16,), generator=generator)
            loss = F.cross_entropy(model(x), y.to("cuda:0"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_loss_on_the_devices_is_the_loss_on_one() -> None:
    torch.manual_seed(0)
    theirs, ours = _pair(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), criterion=nn.CrossEntropyLoss())
    x, y = torch.randn(11, 6), torch.randint(0, 4, (11,))
    F.cross_entropy(theirs(x), y.to("cuda:0")).backward()
    ours(x, target=y).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_evaluation_copies_nothing_and_every_edit_is_noticed() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)).to("cuda:0").eval()
    ours = lockstep.DataParallel(net, device_ids=[0, 1], output_dim=0)
    x = torch.randn(8, 6, device="cuda:0")
    with torch.no_grad():
        ours(x)
        before = ours.copies.bytes
        for _ in range(3):
            torch.testing.assert_close(ours(x), net(x))
        assert ours.copies.bytes == before
        net[0].weight.data.mul_(2)
        net[2].bias.data[1] = 7.0
        torch.testing.assert_close(ours(x), net(x))
        assert ours.copies.bytes > before


def test_dropout_differs_between_devices_and_is_repeated_by_the_seed() -> None:
    ours = lockstep.DataParallel(nn.Dropout(0.5), device_ids=[0, 1], gather=False)
    x = torch.ones(2, 256)

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        return [output.cpu() for _ in range(3) for output in ours(x)]

    first = run()
    assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))
    assert len({tuple(output.flatten().tolist()) for output in first}) == len(first)


def test_scaled_half_precision_training() -> None:
    torch.manual_seed(0)
    theirs, ours = _pair(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4)), output_dim=0)
    curves = []
    for model in (theirs, ours):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        losses = []
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 6, generator=generator), torch.randint(0, 4, (16,), generator=generator)
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(x)
                loss = F.cross_entropy(output.float(), y.to("cuda:0"))
            assert output.dtype == torch.float16
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=2e-2)


def test_a_table_built_on_first_use_stays_on_its_device() -> None:
    class Table(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(4.0, device=x.device)
            return x + self.table

    net = Table()
    ours = lockstep.DataParallel(net, device_ids=[0, 1])
    x = torch.zeros(6, 4)
    with pytest.warns(UserWarning, match=r"the forward sets Table\.table"):
        ours(x)
    for training in (False, True):
        ours.train(training)
        torch.testing.assert_close(ours(x).cpu(), torch.arange(4.0).expand(6, 4))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
def test_large_sparse_and_unaligned_tensors_travel_once() -> None:
    class Odd(nn.Module):
        adjacency: Tensor

        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(400).bfloat16().to("cuda:0")
            self.unaligned = nn.Parameter(flat[1:33].view(8, 4))
            self.large = nn.Parameter(torch.randn(8, 2**20))  # 32 MiB
            self.register_buffer("adjacency", torch.eye(8).roll(1, 0).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            hidden = (self.adjacency @ F.linear(x.bfloat16(), self.unaligned).float().t()).t()
            return hidden @ self.large[:, -3:]

    torch.manual_seed(0)
    net = Odd().to("cuda:0").eval()
    ours = lockstep.DataParallel(net, device_ids=[0, 1], output_dim=0)
    x = torch.randn(6, 4, device="cuda:0")
    with torch.no_grad():
        # A product of other sizes may be rounded otherwise to 8 bits.
        torch.testing.assert_close(ours(x), net(x), rtol=2e-2, atol=5e-2)
        before = ours.copies.bytes
        ours(x)
        assert ours.copies.bytes == before
        net.large.data[7, -1] += 10
        net.adjacency._values().mul_(2)
        torch.testing.assert_close(ours(x), net(x), rtol=2e-2, atol=5e-2)
        assert ours.copies.bytes > before + net.large.nbytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_submodule_runs_on_each_device() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("cuda:0")
    net[1] = torch.compile(net[1], backend="eager")
    ours = lockstep.DataParallel(net, device_ids=[0, 1], output_dim=0)
    x = torch.randn(6, 4, device="cuda:0")
    torch.testing.assert_close(ours(x), net(x))
    ours(x).sum().backward()
    assert all(param.grad is not None for param in net.parameters())


def test_errors_devices_and_parameters_in_the_wrong_place() -> None:
    net = nn.Linear(4, 4).to("cuda:1")
    with pytest.raises(RuntimeError, match=r"'module\.weight' is on cuda:1, but .* on cuda:0 \(device_ids\[0\]\)"):
        lockstep.DataParallel(net, device_ids=[0, 1])(torch.ones(4, 4))
    swapped = lockstep.DataParallel(net, device_ids=["cuda:1", torch.device("cuda", 0)], output_device=0, output_dim=0)
    assert swapped(torch.ones(6, 4)).device == torch.device("cuda:0")
    with pytest.raises(RuntimeError, match=r"\(in replica \d of 2 on cuda:\d\)"):
        swapped(torch.ones(6, 3))
    with pytest.raises(ValueError, match="names cuda:0 more than once"):
        lockstep.DataParallel(net, device_ids=[0, 0])


def test_outputs_that_stay_leave_memory_balanced() -> None:
    net = nn.Linear(64, 4096).to("cuda:0")
    ours = lockstep.DataParallel(net, device_ids=[0, 1], criterion=lambda output, _: output.square().mean())
    x = torch.randn(8192, 64)
    ours(x, target=x).backward()
    for device in (0, 1):
        torch.cuda.reset_peak_memory_stats(device)
    ours(x, target=x).backward()
    first, second = (torch.cuda.max_memory_allocated(device) for device in (0, 1))
    assert 0.75 < first / second < 1.33
