"""shard(loader, shares=[2, 1]): global batches cut in the proportion of the shares, and means over them exact."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import lockstep
from lockstep.data.order import share_bounds
from tests.backends import EACH_BACKEND
from tests.harness import collect_outcomes, run_ranks

pytestmark = EACH_BACKEND


class Stream(IterableDataset[Tensor]):
    """Numbers, split among its workers."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self._length, step):
            yield torch.tensor(number)


def _loader(kind: str, length: int, batch_size: int) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(length), batch_size=batch_size, num_workers=1)
    return DataLoader(
        TensorDataset(torch.arange(length)), batch_size=batch_size, shuffle=True, num_workers=int(kind == "workers")
    )


def _seen(kind: str, length: int, batch_size: int, shares: list[float] | None) -> list[list[int]]:
    world = lockstep.init(timeout=20)
    loader = lockstep.shard(_loader(kind, length, batch_size), shares=shares)
    seen = []
    for batch in itertools.chain(loader, loader):
        mine = (batch if kind == "stream" else batch[0]).tolist()
        share = world.share
        assert share is not None
        start, stop = share_bounds(
            int(share.global_samples),
            rank=world.rank,
            world_size=world.world_size,
            shares=None if shares is None else tuple(shares),
        )
        assert len(mine) == share.local_samples == stop - start
        seen.append(mine)
    empty = seen[len(seen) // 2 - 1] == []
    assert kind == "stream" or (loader.ranks_left_out > 0) >= empty
    return seen


def _joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches: the ranks' shares behind each other."""
    return [[*itertools.chain.from_iterable(parts)] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("kind", ["map", "workers", "stream"])
@pytest.mark.parametrize("shares", [[2, 1], [1, 2.5, 1], [3, 3, 3], [1, 1, 1, 5]], ids=str)
def test_the_same_global_batches_in_unequal_parts(kind: str, shares: list[float]) -> None:
    alone = run_ranks(_seen, 1, kind, 33, 16, None)[0]
    ranks = run_ranks(_seen, len(shares), kind, 33, 16, shares)
    assert _joined(ranks) == alone
    assert [len(batch) for batch in alone] == [16, 16, 1] * 2


def _trained(shares: list[float] | None) -> list[list[float]]:
    world = lockstep.init(timeout=20)
    drawn = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(22, 5, generator=drawn).double(), torch.randn(22, 2, generator=drawn).double())
    loader = lockstep.shard(DataLoader(data, batch_size=8, shuffle=True), shares=shares)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for inputs, targets in itertools.chain(loader, loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append([world.mean(loss), *(float(param.detach().sum()) for param in model.parameters())])
    return found


@pytest.mark.parametrize("shares", [[2, 1], [1, 6, 2]], ids=str)
def test_means_are_those_of_one_process(shares: list[float]) -> None:
    alone = torch.tensor(run_ranks(_trained, 1, None)[0], dtype=torch.float64)
    for found in run_ranks(_trained, len(shares), shares):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), alone, rtol=1e-10, atol=1e-10)


def _resumed(shares: list[list[float]]) -> list[list[int]]:
    """A pass that goes on, in mid-epoch, with other shares."""
    lockstep.init(timeout=20)
    seen: list[list[int]] = []
    state: dict[str, Any] | None = None
    for each in shares:
        loader = lockstep.shard(_loader("map", 40, 8), shares=each)
        if state is not None:
            loader.load_state_dict(state)
        for number, (batch,) in enumerate(loader):
            seen.append(batch.tolist())
            state = loader.state_dict()
            if number == 1:
                break
    return seen


def test_a_pass_goes_on_with_other_shares() -> None:
    ranks = run_ranks(_resumed, 2, [[2, 1], [1, 3]])
    alone = run_ranks(_seen, 1, "map", 40, 8, None)[0]
    assert _joined(ranks) == alone[:4]
    assert [len(batch) for batch in ranks[0]] == [5, 5, 2, 2]


def _refused(shares: Any, by_rank: bool) -> None:
    world = lockstep.init(timeout=20)
    lockstep.shard(_loader("map", 40, 8), shares=shares[world.rank] if by_rank else shares)


@pytest.mark.parametrize(
    ("shares", "error", "words"),
    [
        ([2, 1, 1], "ValueError", "one for each of the 2 ranks, not 3"),
        ([1], "ValueError", "one for each of the 2 ranks, not 1"),
        ([2, 0], "ValueError", "expected positive numbers, not 0"),
        ([2, -1.0], "ValueError", "expected positive numbers, not -1.0"),
        ([2, float("nan")], "ValueError", "not nan"),
        ([2, float("inf")], "ValueError", "not inf"),
        ([2, True], "TypeError", "not True"),
        ([2, "1"], "TypeError", "not '1'"),
        ("21", "TypeError", "expected a list of numbers"),
        (2, "TypeError", "expected a list of numbers"),
        ([100, 1], "ValueError", "leave rank 1 without a sample in every batch"),
    ],
    ids=str,
)
def test_shares_that_make_no_sense(shares: Any, error: str, words: str) -> None:
    for outcome in collect_outcomes(_refused, 2, shares, False):
        assert outcome.error == error, outcome.traceback
        assert words in str(outcome.message)


def test_shares_are_the_same_on_every_rank() -> None:
    for outcome in collect_outcomes(_refused, 2, [[2, 1], [1, 2]], True):
        assert outcome.error == "ValueError", outcome.traceback
        assert "shares must be the same on every rank, but it is rank 0: [2, 1], rank 1: [1, 2]" in str(outcome.message)


def _side_by_side(shares: list[Any], sizes: list[int]) -> None:
    lockstep.init(timeout=20)
    model = lockstep.replicate(nn.Linear(1, 1))
    loaders = [
        lockstep.shard(DataLoader(TensorDataset(torch.ones(4 * size, 1)), batch_size=size), shares=share)
        for share, size in zip(shares, sizes, strict=True)
    ]
    for (one,), (two,) in zip(*loaders, strict=True):
        (model(one).mean() + model(two).mean()).backward()


@pytest.mark.parametrize(
    ("shares", "sizes", "fits"),
    [
        ([[2, 1], [2, 1]], [8, 8], True),
        ([[2, 1], [4, 2]], [6, 12], True),
        ([[2, 1], None], [6, 6], False),
        ([[2, 1], [2, 1]], [6, 8], False),
        ([[2, 1], [1, 2]], [6, 6], False),
    ],
    ids=str,
)
def test_two_loaders_side_by_side_weigh_alike_or_are_refused(shares: list[Any], sizes: list[int], fits: bool) -> None:
    for outcome in collect_outcomes(_side_by_side, 2, shares, sizes):
        assert outcome.ok if fits else outcome.error == "LockstepError", outcome.traceback
        assert fits or "weigh differently" in str(outcome.message)
