"""Steps in slices: the same bits on any number of ranks, and the exact mean."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep import DistributedDataParallel
from tests.backends import BOTH, EACH_BACKEND, ON_GPUS, OVER_ALL
from tests.digests import digest_of
from tests.harness import run_ranks
from tests.selection import each_value

pytestmark = EACH_BACKEND

SAMPLES, BATCH = 107, 40  # the last batch has 27


def digest(*things: Any) -> str:
    """Return a digest of tensors, in lists and dicts."""
    return digest_of(things)


class Net(nn.Module):
    """With all that depends on the world elsewhere: dropout, batch statistics, a mask, parameters used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(10, 24), nn.BatchNorm1d(24), nn.Dropout(0.3)
        self.sometimes, self.never = nn.Linear(24, 24), nn.Linear(3, 3)
        self.last = nn.Linear(24, 5)
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.1, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        if x[0, 0] > 0:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 10, generator=generator), torch.randint(0, 5, (count,), generator=generator)
    )


def build(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return make()


def _trained(slices: int, options: dict[str, Any], wrapped: bool, epochs: int = 2) -> list[Any]:
    world = lockstep.init(timeout=30)
    net: Any = build().to(world.device)
    model = DistributedDataParallel(net) if wrapped else lockstep.replicate(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), slices=lockstep.Slices(slices, **options))
    losses = []
    for _ in range(epochs):
        for step in loader.steps():
            total = torch.zeros((), dtype=torch.float64, device=world.device)
            for x, y in step:
                loss = cross_entropy(model(x), y)
                loss.backward()
                total += loss.detach().double() * len(y)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(world.all_reduce(total.item()) / step.samples, 6))
    between = torch.rand(())  # a number that the ranks have in common
    return [digest(net.state_dict(), optimizer.state_dict(), between), losses, int(net.norm.num_batches_tracked)]


@each_value(on_gpus=True, each_backend=BOTH, slices=(4, 6, 8, 1), world_size=(4, 3, 2))
def test_the_bits_are_the_same_on_any_number_of_ranks(slices: int, world_size: int) -> None:
    (expected,) = run_ranks(_trained, 1, slices, {}, False)
    assert expected[2] == 2 * 3  # a step counts as one
    assert run_ranks(_trained, world_size, slices, {}, False) == [expected] * world_size


def test_they_are_the_same_in_other_shares_wrapped_and_with_workers() -> None:
    (expected,) = run_ranks(_trained, 1, 8, {}, False)
    assert run_ranks(_trained, 2, 8, {"shares": [3, 1]}, False) == [expected] * 2
    assert run_ranks(_trained, 2, 8, {"balance": True}, True) == [expected] * 2
    assert run_ranks(_trained, 3, 8, {"shares": [0.1, 7, 1]}, False) == [expected] * 3
    assert run_ranks(_trained, 1, 7, {}, False) != [expected]  # another cut has other bits


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(11, 7, dtype=torch.float64), nn.Linear(7, 11, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x).cumsum(1))  # type: ignore[no-any-return]


def _padded_texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    texts = torch.randint(1, 11, (30, 13), generator=generator)
    lengths = torch.randint(0, 13, (30,), generator=generator)
    lengths[:3] = 0  # whole slices without a token
    return TensorDataset(texts.where(torch.arange(13) < lengths[:, None], 0))


def _mean_over_tokens(model: nn.Module, texts: Tensor) -> Tensor:
    return cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten(), ignore_index=0)


def _weighed(slices: int, how: str) -> None:
    world = lockstep.init(timeout=30)
    model, alone = lockstep.replicate(build(Tokens).to(world.device)), build(Tokens)
    loader: Any = lockstep.shard(DataLoader(_padded_texts(), 9), slices=slices)
    for step in loader.steps():
        for (texts,) in step:
            count = int((texts[:, 1:] != 0).sum())
            step.weigh(count) if how == "step" else world.weigh(count)
            _mean_over_tokens(model, texts).backward()  # NaN without a token
        begin = step.number * 9
        (whole,) = _padded_texts()[begin : begin + step.samples]
        alone.zero_grad()
        _mean_over_tokens(alone, whole).backward()
        for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert param.grad is not None
            assert expected.grad is not None
            assert torch.allclose(param.grad.cpu(), expected.grad, rtol=1e-10, atol=1e-10)
        model.zero_grad()


@each_value(
    str, on_gpus=True, each_backend=BOTH, spread=((1, 4, "step"), (2, 4, "world"), (3, 9, "step"), (4, 2, "step"))
)
def test_uneven_tokens_are_weighed_exactly(spread: tuple[int, int, str]) -> None:
    world_size, slices, how = spread
    run_ranks(_weighed, world_size, slices, how)


def _exact(slices: int, keep: bool) -> None:
    """As one backward over the whole batch, the last, shorter one too; and added to what is there."""
    world = lockstep.init(timeout=30)

    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5)).double()

    model, alone = lockstep.replicate(net().to(world.device)), net()
    data = samples(23)
    loader: Any = lockstep.shard(DataLoader(data, 10), slices=slices)
    for step in loader.steps():
        for x, y in step:
            cross_entropy(model(x.double()), y).backward()
        begin = step.number * 10
        x, y = data[begin : begin + step.samples]
        cross_entropy(alone(x.double()), y).backward()
        for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert param.grad is not None
            assert expected.grad is not None
            assert torch.allclose(param.grad.cpu(), expected.grad, rtol=1e-12, atol=1e-12)
        if not keep:
            model.zero_grad()
            alone.zero_grad()


@pytest.mark.parametrize("keep", [False, True])
@ON_GPUS
def test_the_mean_is_exact_by_sample(keep: bool) -> None:
    for world_size, slices in ((1, 3), (2, 3), (3, 10), (4, 2)):
        run_ranks(_exact, world_size, slices, keep)


class Kinds(nn.Module):
    """Parameters of several dtypes and memory formats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.twisted = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(self.conv(x).mean((2, 3)).bfloat16()).float()
        out: Tensor = (hidden * self.twisted).abs().float() * self.exact
        return out


def _kinds() -> list[str]:
    world = lockstep.init(timeout=30)
    model = lockstep.replicate(build(Kinds).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    loader: Any = lockstep.shard(DataLoader(TensorDataset(x), 12), slices=6)
    for step in loader.steps():
        for (part,) in step:
            model(part).square().mean().backward()
        assert all(param.grad is not None and param.grad.dtype == param.dtype for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [digest(model.state_dict()), str(world.world_size)]


@OVER_ALL
def test_parameters_of_every_kind() -> None:
    found = {digest for world_size in (1, 2, 3) for digest, _ in run_ranks(_kinds, world_size)}
    assert len(found) == 1


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(45, 10, generator=torch.Generator().manual_seed(2)))


class Noisy(Dataset[Tensor]):
    """Augmented with random numbers of all kinds."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((10,), float(index)) + torch.rand(10)


def _over(dataset: Any, workers: int) -> str:
    lockstep.init(timeout=30)
    model = lockstep.replicate(build(lambda: nn.Sequential(nn.Linear(10, 4), nn.Dropout())))
    loader: Any = lockstep.shard(DataLoader(dataset, 12, num_workers=workers), slices=5)
    for _ in range(2):
        for step in loader.steps():
            for x in step:
                model(x).square().mean().backward()
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param.sub_(param.grad, alpha=0.01)
            model.zero_grad()
    return digest(model.state_dict())


@pytest.mark.parametrize("make", [Stream, Noisy])
def test_streams_and_augmentation_in_workers(make: type[Any]) -> None:
    found = {
        digest for ranks, workers in ((1, 0), (2, 0), (3, 0)) for digest in run_ranks(_over, ranks, make(), workers)
    }
    assert len(found) == 1
    if make is Noisy:  # the number of a stream's workers decides which samples meet
        assert found == set(run_ranks(_over, 2, make(), 2))


def _logged(folder: Path) -> None:
    world = lockstep.init(timeout=30)
    model = lockstep.replicate(build())
    loader = lockstep.shard(DataLoader(samples(), BATCH), slices=4)
    with lockstep.Log(folder / f"{world.world_size}.jsonl", every=2) as log:
        for step in loader.steps():
            for x, y in step:
                loss = cross_entropy(model(x), y)
                loss.backward()
                log(loss=loss)
            model.zero_grad()


def test_what_is_logged_in_slices_is_exact_on_any_number_of_ranks(tmp_path: Path) -> None:
    lines = {}
    for world_size in (1, 3, 6):  # with six, two ranks have no slice and never log
        run_ranks(_logged, world_size, tmp_path)
        text = (tmp_path / f"{world_size}.jsonl").read_text()
        lines[world_size] = [{**json.loads(line), "time": 0} for line in text.splitlines()]
    assert lines[1] == lines[3] == lines[6]
    assert [line["step"] for line in lines[1]] == [2, 3]


def _in_a_thread() -> tuple[str, str]:
    """Train in a thread that has not called ``init``, with slices that draw."""
    world = lockstep.init(timeout=20)
    net = nn.Sequential(Net(), nn.Dropout(0.5))
    model = lockstep.replicate(net)
    loader = lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), slices=4)
    before = torch.get_rng_state()

    def train() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in loader.steps():
            for x, y in step:
                cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert torch.equal(torch.get_rng_state(), before), f"rank {world.rank}: the common stream has moved"
    return digest(net.state_dict()), digest([torch.randn(3)])


def test_slices_in_any_thread_leave_the_common_random_numbers_where_they_were() -> None:
    alone = run_ranks(_in_a_thread, 1)
    assert run_ranks(_in_a_thread, 2) == alone * 2
