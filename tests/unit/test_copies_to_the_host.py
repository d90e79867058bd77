"""What comes from a device to the CPU is there when it is read, however late the device's stream is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from lockstep.data_parallel.copies import changed, transfer
from lockstep.data_parallel.scatter import scatter
from lockstep.ddp.accumulated import _are_not_zero
from lockstep.ddp.digest import BITS
from lockstep.ddp.drift import _combine
from lockstep.ddp.same_batches import FLAGS, _flags_of
from lockstep.trees import to_device
from tests.device import simulation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("late")]

_CPU = torch.device("cpu")


@pytest.fixture
def late() -> None:
    """Make the current stream late by 200 ms or so, so that what is read too early is not there yet."""
    torch.ones(1, device="cuda:0").add_(1).cpu()
    if simulation.is_on():
        simulation.delay(torch.cuda.current_stream(), 200)
    else:
        torch.cuda._sleep(400_000_000)


def _here(tensor: Tensor) -> Tensor:
    """Return the same values on the GPU, computed behind what makes its stream late."""
    return tensor.pin_memory().to("cuda:0", non_blocking=True) + 0


def _digest() -> int:
    return int(_combine(5, _here(torch.tensor(1234567)), _CPU))


def _flags() -> Tensor:
    return _flags_of([[3, _here(torch.tensor(99))], [_here(torch.tensor(7))]], torch.zeros(FLAGS))


def _flags_by_hand() -> Tensor:
    whole = ((3 * 31 + 99) * 31 + 7) & ((1 << BITS) - 1)
    ones = [(whole >> bit) & 1 for bit in range(BITS)]
    return torch.tensor([*ones, *[1 - one for one in ones], 0], dtype=torch.float32)


def _scattered(tree: Any) -> list[Any]:
    return scatter(tree, [_CPU, _CPU], 0, None)[0]


def _packed(make: Callable[[Tensor], Tensor]) -> PackedSequence:
    values = make(torch.arange(24.0).view(4, 6, 1))
    return pack_padded_sequence(values, torch.tensor([6, 5, 3, 2]), batch_first=True)


def _transferred(size: int) -> Tensor:
    target = torch.zeros(size).pin_memory()  # as of a user who has pinned a module's parameters
    transfer([_here(torch.arange(float(size)))], [target])
    return target.clone()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(_digest, lambda: (5 * 31 + 1234567) & ((1 << BITS) - 1), id="digest"),
        pytest.param(_flags, _flags_by_hand, id="flags"),
        pytest.param(
            lambda: torch.cat(_scattered(_here(torch.arange(8.0)))), lambda: torch.arange(8.0), id="scattered"
        ),
        pytest.param(
            lambda: torch.cat(_scattered(_here(torch.arange(8.0)).requires_grad_())).detach(),
            lambda: torch.arange(8.0),
            id="scattered with gradients",
        ),
        pytest.param(
            lambda: _scattered((torch.ones(4), _here(torch.tensor(3.0))))[1][1],
            lambda: torch.tensor(3.0),
            id="to every replica",
        ),
        pytest.param(
            lambda: _scattered(_packed(_here))[0].data,
            lambda: _scattered(_packed(lambda same: same))[0].data,
            id="packed",
        ),
        pytest.param(lambda: _transferred(100), lambda: torch.arange(100.0), id="small parameter"),
        pytest.param(lambda: _transferred(3_000_000), lambda: torch.arange(3_000_000.0), id="large parameter"),
        pytest.param(lambda: to_device([_here(torch.ones(3))], _CPU)[0], lambda: torch.ones(3), id="batch"),
        pytest.param(
            lambda: changed([(torch.ones(9), _here(torch.ones(9))), (torch.ones(9), _here(torch.zeros(9)))]),
            lambda: [0, 1],  # (both in one digest)
            id="changed",
        ),
        pytest.param(
            lambda: [*_are_not_zero([torch.zeros(3), _here(torch.ones(3)), _here(torch.zeros(3))])],
            lambda: [False, True, False],
            id="gradients",
        ),
    ],
)
def test_values_are_there_when_they_are_read(found: Callable[[], Any], expected: Callable[[], Any]) -> None:
    result = found()
    is_same = torch.equal(result, expected()) if isinstance(result, Tensor) else result == expected()
    assert bool(is_same), result
