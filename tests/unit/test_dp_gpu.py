"""DataParallel's parts between the CPU and one CUDA device; several are in ``tests/parity``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep import DataParallel, bits
from lockstep.data_parallel import copies as contents
from lockstep.data_parallel.copies import Copier, Slot, transfer
from lockstep.data_parallel.devices import capacity_of, resolve_devices
from lockstep.data_parallel.replicas import brought

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """What CUDA opens for the process as a whole is no test's leak."""
    nn.Linear(8, 8, device="cuda:0")(torch.ones(8, 8, device="cuda:0")).sum().backward()
    torch.cuda.synchronize()


def tensors(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(64, generator=generator).bfloat16().to(device)
    made = [
        torch.randn(7, 5, generator=generator),
        torch.randn(7, 5, generator=generator).t(),
        torch.randn(4, 6, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(9, generator=generator).double(),
        torch.tensor([True, False, True]),
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.randn(600, 700, generator=generator),
        torch.randn(bits.GROUP + 5, generator=generator),
    ]
    # The last two begin between two words of 32 bits.
    return [*(each.to(device) for each in made), flat[1:33].view(4, 8), flat[3:51].view(6, 8)[:, ::2]]


@pytest.mark.parametrize(("source", "target"), [(CPU, GPU), (GPU, CPU)])
def test_tensors_arrive_and_a_changed_element_is_seen_from_the_other_device(
    source: torch.device, target: torch.device
) -> None:
    originals = tensors(source)
    copies = [torch.empty_like(original, device=target) for original in originals]
    transfer(originals, copies)
    torch.cuda.synchronize()
    for original, copied in zip(originals, copies, strict=True):
        assert torch.equal(original.cpu(), copied.cpu())
    pairs = list(zip(originals, copies, strict=True))
    assert contents.changed(pairs) == []
    for i, original in enumerate(originals):
        if original.numel() == 0:
            continue
        last = tuple(size - 1 for size in original.shape)
        before = original[last].clone()
        original[last] = ~before if original.dtype == torch.bool else before + 1
        assert i in contents.changed(pairs)
        original[last] = before
    assert contents.changed(pairs) == []


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(("first", "second"), [(CPU, GPU), (GPU, CPU)])
def test_a_store_copies_to_another_device_what_has_changed_and_counts_it(
    first: torch.device, second: torch.device
) -> None:
    dense = torch.randn(300, 40, device=first)
    slots = [
        Slot(dense, 2, is_buffer=False),
        Slot(torch.eye(5, device=first).to_sparse(), 2, is_buffer=True),
        Slot(torch.eye(5, device=first).to_sparse_csr(), 2, is_buffer=True),
    ]
    copier = Copier([first, second], check_contents=True)
    copier.renew(slots, [1])
    copied = copier.count.bytes
    copier.renew(slots, [1])
    assert copier.count.bytes == copied
    dense.data[7, 7] = 9.0
    copier.renew(slots, [1])
    assert copied + dense.nbytes <= copier.count.bytes <= 2 * copied  # one fingerprint stands for neighbours as well
    for slot in slots:
        assert slot.copy(1).device == second
        torch.testing.assert_close(slot.copy(1).to_dense().cpu(), slot.source.to_dense().cpu())


def test_gradients_are_brought_to_the_device_of_their_originals() -> None:
    grads: list[Tensor | None] = [torch.randn(3, 2, device=GPU), None, torch.randn(700, 700, device=GPU)]
    origins = [(0, 1), (1, 1), (2, 1)]
    with torch.no_grad():  # as in a backward that creates no graph
        found = brought(origins, grads, [CPU] * 3)
    for one, other in zip(found, grads, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert one.device == CPU
            assert torch.equal(one, other.cpu())


def test_one_device_takes_inputs_from_anywhere_and_gives_outputs_where_asked() -> None:
    torch.manual_seed(0)
    net: Any = nn.Linear(4, 3)
    parallel = DataParallel(net, [0])
    assert net.weight.device == GPU
    assert parallel.device_ids == [0]
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    assert parallel(x).device == GPU
    assert DataParallel(net, ["cuda:0"], output_device="cpu")(x).device == CPU
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss = DataParallel(net, [0], criterion=criterion)(x, target=y)
    torch.testing.assert_close(loss, F.cross_entropy(net(x.cuda()), y.cuda()))
    loss.backward()
    assert net.weight.grad.device == GPU


def test_devices_as_cuda_describes_them() -> None:
    found = capacity_of(GPU)
    assert found is not None
    assert found.memory > 2**30
    assert found.processors > 1
    assert found.clock > 1e5  # 100 MHz
    assert resolve_devices(None)[0] == GPU
    with pytest.raises(ValueError, match="names cuda:0 more than once"):
        resolve_devices([0, 0])
    with pytest.raises(ValueError, match="there is no cuda:77"):
        resolve_devices([0, 77])


def test_a_parameter_left_on_the_cpu_is_named() -> None:
    parallel = DataParallel(nn.Linear(4, 3), [0])
    parallel.module.to("cpu")
    with pytest.raises(RuntimeError, match=r"'module\.weight' is on cpu, but .* on cuda:0 \(device_ids\[0\]\)"):
        parallel(torch.ones(2, 4))
