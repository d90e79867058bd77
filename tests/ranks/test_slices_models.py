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
from tests.selection import each_value

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


# Buffers that are no statistics, and parameters that move -------------------------------------------------------------


class Momentum(nn.Module):
    """A trained encoder, and one that follows it, frozen, in forward: as MoCo has them, with its queue or without."""

    queue: Tensor
    place: Tensor

    def __init__(self, *, moves: str = "", queue: str = "") -> None:
        super().__init__()
        self.net, self.follower = nn.Linear(10, 5), nn.Linear(10, 5).requires_grad_(False)
        self.moves, self.writes, self.at = moves, queue, 0
        self.register_buffer("queue", torch.randn(5, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self._follow()
        with torch.no_grad():
            keys = self.follower(x).T
            count = keys.shape[1]
            if self.writes == "moves along":
                self.queue = torch.cat([self.queue[:, count:], keys], 1)
            elif self.writes == "at a place":
                begin = int(self.place)
                self.queue[:, begin : begin + count] = keys
                self.place[0] = (begin + count) % 64
            elif self.writes == "at an own place":
                self.queue[:, self.at : self.at + count] = keys
                self.at = (self.at + count) % 40
            elif self.writes == "at the front":
                self.queue[:, :count] = keys
        return self.net(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _follow(self) -> None:
        for one, two in zip(self.follower.parameters(), self.net.parameters(), strict=True):
            if self.moves == "in place":
                one.mul_(0.9).add_(two, alpha=0.1)
            elif self.moves == "in data":
                one.data.mul_(0.9).add_(two.data, alpha=0.1)
            elif self.moves == "another tensor":
                one.data = one.data * 0.9 + two.data * 0.1


class Codes(nn.Module):
    """A codebook whose codes move towards what they stand for, as VQ-VAE has it."""

    codes: Tensor
    uses: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 5)
        self.register_buffer("codes", torch.randn(32, 5))
        self.register_buffer("uses", torch.zeros(32))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        with torch.no_grad():
            used = torch.cdist(out, self.codes).argmin(1)
            self.uses.mul_(0.9).index_add_(0, used, torch.full((len(used),), 0.1))
            self.sums.mul_(0.9).index_add_(0, used, 0.1 * out)
            self.codes.copy_(self.sums / self.uses.clamp(min=1e-5)[:, None])
        return out


class Extremes(nn.Module):
    """Remembers the smallest and the largest value seen, as an observer of quantization does."""

    least: Tensor
    most: Tensor

    def __init__(self, least: float, most: float) -> None:
        super().__init__()
        self.net = nn.Linear(10, 5)
        self.register_buffer("least", torch.tensor(least))
        self.register_buffer("most", torch.tensor(most))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        self.least.copy_(torch.minimum(self.least, out.detach().min()))
        self.most.copy_(torch.maximum(self.most, out.detach().max()))
        return out


class Named(nn.Module):
    """With a value whose name says that it is a mean over samples, and that is another kind of value."""

    def __init__(self, first: Tensor, kind: str) -> None:
        super().__init__()
        self.net, self._kind = nn.Linear(10, 5), kind
        self.register_buffer("running_value", first)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        value = self.get_buffer("running_value")
        if self.training:
            with torch.no_grad():
                if self._kind == "least":
                    value.copy_(torch.minimum(value, out.min()))
                elif self._kind == "count":
                    value += len(x)
                else:
                    value += torch.histc(out.float(), bins=len(value), min=-1, max=1).to(value.dtype)
        return out


class Normalised(nn.Module):
    """With moments of its inputs over all samples so far, and how many these were, as agents have them."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 5)
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += len(x)
            self.mean += (x.mean(0) - self.mean) * len(x) / self.count
        return self.net(x - self.mean)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Counts its samples."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 5)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.net(x)  # type: ignore[no-any-return]


def _quantized() -> nn.Module:
    from torch.ao.quantization import FakeQuantize

    return nn.Sequential(nn.Linear(10, 5), FakeQuantize())


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Momentum(moves="in place"), "parameter 'follower.weight' was changed inside slice"),
    (lambda: Momentum(moves="in data"), "parameter 'follower.weight' was changed inside slice"),
    (lambda: Momentum(moves="another tensor"), "parameter 'follower.weight' was changed inside slice"),
    (lambda: Momentum(queue="moves along"), "buffer 'queue' of Momentum is a queue"),
    (lambda: Momentum(queue="at a place"), "buffer 'place' of Momentum holds a whole number that slice"),
    (lambda: Momentum(queue="at an own place"), "buffer 'queue' of Momentum was changed in different elements"),
    (lambda: Momentum(queue="at the front"), "buffer 'queue' of Momentum was changed in different elements"),
    (Codes, "' of Codes was changed"),
    (lambda: Extremes(float("inf"), float("-inf")), "buffer 'least' of Extremes began as an infinite value"),
    (Normalised, "buffer 'count' of Normalised counts samples: slice 0 of "),
    (Counting, "buffer 'seen' of Counting holds a whole number that slice 0 changed by"),
    (_quantized, "' of FakeQuantize holds a whole number"),
    (
        lambda: Named(torch.tensor(0), "count"),
        "buffer 'running_value' of Named holds a whole number that slice 0 changed",
    ),
    (lambda: Named(torch.tensor(1e-4), "count"), "buffer 'running_value' of Named counts samples: slice 0 of "),
    (lambda: Named(torch.zeros(4, dtype=torch.int64), "histogram"), "buffer 'running_value' of Named "),
    (lambda: Named(torch.tensor(float("inf")), "least"), "buffer 'running_value' of Named began as an infinite value"),
]


def _trains_what_is_refused(index: int, slices: int) -> None:
    lockstep.init(timeout=20)
    _train(lockstep.replicate(build(REFUSED[index][0])), _loader(slices))


# Each of the three ranks has one slice or two; of four ranks with two slices, two have none.
@each_value(str, index=range(len(REFUSED)), spread=((1, 4), (3, 4), (4, 2)))
def test_what_slices_can_not_move_is_refused_by_name_on_all_ranks(index: int, spread: tuple[int, int]) -> None:
    world_size, slices = spread
    for outcome in collect_outcomes(_trains_what_is_refused, world_size, index, slices):
        assert outcome.error == "LockstepError", outcome
        assert REFUSED[index][1] in str(outcome.message), outcome


def _sees_extremes() -> None:
    lockstep.init(timeout=20)
    _train(lockstep.replicate(build(lambda: Extremes(0.0, 0.0))), _loader(8))


def test_the_smallest_value_seen_is_refused_once_slices_differ() -> None:
    for world_size in (1, 3):
        for outcome in collect_outcomes(_sees_extremes, world_size):
            assert "' of Extremes was changed by some slices only" in str(outcome.message), outcome


def test_slices_of_one_sample_are_no_way_around_it() -> None:
    """A place in a queue moves by one there, as a count of batches does."""
    index = next(at for at, (_, words) in enumerate(REFUSED) if "'place'" in words)
    for outcome in collect_outcomes(_trains_what_is_refused, 2, index, 40):
        assert "buffer 'queue' of Momentum was changed in different elements" in str(outcome.message), outcome


class Spectral(nn.Module):
    """With buffers that every slice changes alike, and a statistic that has its name."""

    running_scale: Tensor
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.utils.spectral_norm(nn.Linear(10, 5))
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("running_scale", torch.zeros(5))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.other(self.net(x)).relu())
        with torch.no_grad():  # a dimension that nothing comes through stays as it is
            self.running_scale.lerp_(out.relu().mean(0) * (out.max(0).values > 1.5), 0.1)
        self.passes += 1
        return out  # type: ignore[no-any-return]


def _trains_statistics() -> list[Any]:
    lockstep.init(timeout=20)
    net: Any = build(Spectral)
    model = lockstep.replicate(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in _loader().steps():
        for x, y in step:  # two views of each sample
            (cross_entropy(model(x), y) + cross_entropy(model(-x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [digest(net.state_dict()), int(net.passes), int(net.norm.num_batches_tracked)]


def test_statistics_and_what_slices_change_alike() -> None:
    (expected,) = run_ranks(_trains_statistics, 1)
    assert expected[1:] == [6, 6]
    for world_size in (2, 3):
        assert run_ranks(_trains_statistics, world_size) == [expected] * world_size


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
