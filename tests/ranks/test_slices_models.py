"""Steps in slices of what people's models and loaders do: buffers of all sorts, frozen layers, mixing collate_fns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

import lockstep
from tests.backends import EACH_BACKEND
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.test_slices import BATCH, Net, build, digest, samples

pytestmark = EACH_BACKEND


def _train(model: nn.Module, loader: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loader.steps():
        for x, y in step:
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loader(slices: int = 4, **options: Any) -> Any:
    return lockstep.shard(DataLoader(samples(), BATCH, shuffle=True, **options), slices=slices)


class Observed(nn.Module):
    """With buffers that a forward replaces."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(10, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        self.count = self.count + 1
        shifted: Tensor = out - self.mean
        return shifted


def _observed() -> list[Any]:
    lockstep.init(timeout=20)
    net: Any = build(Observed)
    kept = net.mean
    _train(lockstep.replicate(net), _loader())
    return [digest(net.state_dict()), int(net.count), net.mean is kept]


def test_buffers_that_are_replaced() -> None:
    (expected,) = run_ranks(_observed, 1)
    assert expected[1:] == [3, True]
    for world_size in (2, 3):
        assert run_ranks(_observed, world_size) == [expected] * world_size


def _freezes_after() -> str:
    lockstep.init(timeout=20)
    net: Any = build()
    model = lockstep.replicate(net)
    net.first.requires_grad_(False)
    _train(model, _loader())
    return digest(net.state_dict())


def test_layers_that_are_frozen_after_replicate() -> None:
    assert run_ranks(_freezes_after, 2) == run_ranks(_freezes_after, 1) * 2


def _mix(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + x[torch.randperm(len(x))], y


def _mixes(workers: int) -> str:
    lockstep.init(timeout=20)
    net = build()
    _train(lockstep.replicate(net), _loader(collate_fn=_mix, num_workers=workers))
    return digest(net.state_dict())


def test_a_collate_fn_that_draws_gives_the_same_slices_whatever_the_dataset() -> None:
    expected = run_ranks(_mixes, 1, 0)
    assert run_ranks(_mixes, 2, 0) == expected * 2
    assert run_ranks(_mixes, 3, 1) == expected * 3


def _two_loaders() -> str:
    lockstep.init(timeout=20)
    net = build()
    model = lockstep.replicate(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = lockstep.shard(DataLoader(samples(), 23), slices=3)
    for one, two in zip(_loader().steps(), other.steps(), strict=False):
        for x, y in one:
            cross_entropy(model(x), y).backward()
        for x, _ in two:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(net.state_dict())


def test_steps_of_two_loaders_one_after_the_other() -> None:
    expected = run_ranks(_two_loaders, 1)
    for world_size in (2, 3):
        assert run_ranks(_two_loaders, world_size) == expected * world_size


def _unfreezes_inside() -> None:
    net: Any = build()
    net.first.requires_grad_(False)
    model = lockstep.replicate(net)
    for step in _loader().steps():
        for x, y in step:
            net.first.requires_grad_(True)
            cross_entropy(model(x), y).backward()


class Sized(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.resize_(5)
        return self.net(x)  # type: ignore[no-any-return]


def _resizes_inside() -> None:
    _train(lockstep.replicate(build(Sized)), _loader())


def _makes(mistake: Callable[[], None]) -> None:
    lockstep.init(timeout=20)
    mistake()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (_unfreezes_inside, "unfreeze parameters between steps"),
        (_resizes_inside, "buffer 'seen' was of shape [0] and is of [5] after slice"),
    ],
)
def test_what_all_ranks_would_have_to_agree_on_is_refused(mistake: Callable[[], None], words: str) -> None:
    for outcome in collect_outcomes(_makes, 2, mistake):
        assert outcome.message is not None
        assert words in outcome.message, outcome


def _goes_on_from(state: dict[str, Any] | None) -> list[Any]:
    lockstep.init(timeout=20)
    loader: Any = lockstep.shard(DataLoader(samples(), BATCH), slices="auto")
    if state is not None:
        loader.load_state_dict(state)
    sizes = [step.slices for step in loader.steps() for _ in [list(step)]]
    return [loader.slices, sizes, loader.state_dict()]


def test_a_run_that_goes_on_with_automatic_slices_keeps_their_number() -> None:
    state = run_ranks(_goes_on_from, 2, None)[0][2]
    for world_size in (1, 3):
        for slices, sizes, _ in run_ranks(_goes_on_from, world_size, state):
            assert (slices, sizes) == (2, [2, 2, 2])
