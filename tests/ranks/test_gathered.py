"""lockstep.gathered: losses of the whole batch on ranks with unequal shares, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize, relu
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.backends import BOTH, EACH_BACKEND
from tests.harness import collect_outcomes, run_ranks
from tests.selection import each_value

pytestmark = EACH_BACKEND

BATCH = 7
Rows = Callable[[Tensor], Tensor]


class Towers(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


def simclr(model: Towers, x: Tensor, y: Tensor, gathered: Rows) -> Tensor:
    one, two = (gathered(normalize(each, dim=1)) for each in (model(x, y)[0], model(y, x)[0]))
    both = torch.cat([one, two])
    count = len(one)
    logits = (both @ both.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
    return cross_entropy(logits, torch.arange(2 * count).roll(count))


def clip(model: Towers, x: Tensor, y: Tensor, gathered: Rows) -> Tensor:
    one, two = (gathered(normalize(each, dim=1)) for each in model(x, y))
    logits = one @ two.T * model.temperature.exp()
    targets = torch.arange(len(one))
    return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


def vicreg(model: Towers, x: Tensor, y: Tensor, gathered: Rows) -> Tensor:
    one, two = (gathered(each) for each in model(x, y))
    loss = 25 * mse_loss(one, two)
    for each in (one, two):
        centred = each - each.mean(0)
        covariance = centred.T @ centred / (len(each) - 1)
        loss = loss + 25 * relu(1 - (centred.var(0) + 1e-4).sqrt()).mean()
        loss = loss + covariance.masked_fill(torch.eye(4, dtype=torch.bool), 0).square().sum() / 4
    return loss


def dino(model: Towers, x: Tensor, y: Tensor, gathered: Rows) -> Tensor:
    """A mean over samples, which the shares weigh; the centre is a mean over the whole batch, without gradient."""
    student, teacher = model(x, y)[0], model(y, x)[0].detach()
    centre = gathered(teacher).mean(0)
    loss: Tensor = -(((teacher - centre) / 0.1).softmax(1) * student.log_softmax(1)).sum(1).mean()
    return loss


def mixed(model: Towers, x: Tensor, y: Tensor, gathered: Rows) -> Tensor:
    """A loss of the whole batch and a mean over samples, in one backward; and a penalty."""
    penalty = sum(param.square().sum() for param in model.parameters())
    return clip(model, x, y, gathered) + mse_loss(model(x, y)[0], y[:, :4]) + 0.01 * penalty


LOSSES = {each.__name__: each for each in (simclr, clip, vicreg, dino, mixed)}


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*(torch.randn(23, 6, generator=generator, dtype=torch.float64) for _ in range(2)))


def _alone(loss: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = Towers().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(_data(), BATCH):
        optimizer.zero_grad()
        LOSSES[loss](model, x, y, lambda rows: rows).backward()
        optimizer.step()
    return [param.detach().flatten().tolist() for param in model.parameters()]


def _trained(loss: str, shares: list[float] | None, how: str) -> list[list[float]]:
    world = lockstep.init(timeout=20)
    torch.manual_seed(0)
    net = Towers().double()
    model: Any = lockstep.replicate(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(_data(), BATCH), shares=shares)
    for x, y in loader:
        optimizer.zero_grad()
        if how == "weighed":
            world.weigh(len(x))
        if how == "by hand":
            LOSSES[loss](model, x, y, _by_hand).mul(world.world_size).backward()
        elif how == "accumulated":  # the same batch twice, half of the gradient each time
            with lockstep.no_sync(model):
                (LOSSES[loss](model, x, y, lockstep.gathered) / 2).backward()
            (LOSSES[loss](model, x, y, lockstep.gathered) / 2).backward()
        else:
            LOSSES[loss](model, x, y, lockstep.gathered).backward()
        optimizer.step()
    return [param.detach().flatten().tolist() for param in net.parameters()]


def _by_hand(rows: Tensor) -> Tensor:
    """What a script without lockstep.gathered does: everybody's rows, of which only its own have gradients."""
    world = lockstep.world()
    parts = world.gather(rows)
    parts[world.rank] = rows
    world.weigh(1)
    return torch.cat(parts)


def _close(found: list[list[float]], expected: list[list[float]]) -> bool:
    exact = [[torch.tensor(values, dtype=torch.float64) for values in each] for each in (found, expected)]
    return all(torch.allclose(one, two, rtol=1e-10, atol=1e-10) for one, two in zip(*exact, strict=True))


@each_value(str, each_backend=BOTH, loss=tuple(LOSSES), shares=([1.0, 1.0], [5.0, 2.0], [3.0, 1.0, 2.0]))
def test_losses_of_the_whole_batch_are_those_of_one_process(loss: str, shares: list[float]) -> None:
    expected = _alone(loss)
    for found in run_ranks(_trained, len(shares), loss, shares, "gathered"):
        assert _close(found, expected)


@each_value(loss=tuple(LOSSES), how=("weighed", "accumulated"))
def test_they_are_where_samples_are_counted_or_gradients_accumulate(loss: str, how: str) -> None:
    expected = _alone(loss)
    for found in run_ranks(_trained, 3, loss, None, how):
        assert _close(found, expected)


@pytest.mark.parametrize("loss", ["simclr", "vicreg"])
def test_rows_gathered_by_hand_need_one_share_for_every_rank(loss: str) -> None:
    expected = _alone(loss)
    for found in run_ranks(_trained, 2, loss, [5.0, 2.0], "by hand"):
        assert _close(found, expected)


def test_one_process_gathers_its_own_rows() -> None:
    for loss in LOSSES:
        assert _close(run_ranks(_trained, 1, loss, None, "gathered")[0], _alone(loss))


def _other_shapes() -> None:
    world = lockstep.init(timeout=20)
    lockstep.gathered(torch.zeros(2, 3 + world.rank))


def _whole_numbers() -> None:
    lockstep.init(timeout=20)
    lockstep.gathered(torch.zeros(2, 3, dtype=torch.int64))


def _in_a_slice() -> None:
    lockstep.init(timeout=20)
    for step in lockstep.shard(DataLoader(_data(), BATCH), slices=2).steps():
        for x, _ in step:
            lockstep.gathered(x)


def _weighs_nothing() -> None:
    world = lockstep.init(timeout=20)
    world.weigh(world.rank)
    lockstep.gathered(torch.zeros(2, 3))


def _weighs_late() -> None:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(nn.Linear(3, 3))
    loss = lockstep.gathered(model(torch.ones(2, 3))).sum()
    world.weigh(2)
    loss.backward()


def _weighs_on_one() -> None:
    world = lockstep.init(timeout=20)
    if world.is_main:
        world.weigh(2)
    lockstep.gathered(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        (
            _other_shapes,
            "ValueError",
            "of the same shape, dtype and kind of device on every rank; only their number may differ "
            "(rank 0: [2, *[3]] of float32 on cpu",
        ),
        (_whole_numbers, "ValueError", "takes rows of floating-point numbers"),
        (_in_a_slice, "LockstepError", "a loss of the whole batch can't be cut into slices"),
        (_weighs_nothing, "LockstepError", "rank 0 has 2 rows, but weight 0"),
        (_weighs_late, "LockstepError", "call it before lockstep.gathered()"),
        (_weighs_on_one, "LockstepError", "world.weigh() was called on some ranks and not on others"),
    ],
)
def test_mistakes_are_named_on_all_ranks(mistake: Callable[[], None], error: str, words: str) -> None:
    for outcome in collect_outcomes(mistake, 2):
        assert outcome.error == error, outcome
        assert words in str(outcome.message), outcome
