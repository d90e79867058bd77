"""Datasets and samplers that a script changes between two passes: alike on all ranks, or each rank by what it found."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

import lockstep
from tests.harness import collect_outcomes, run_ranks

_SAMPLES, _BATCH = 20, 4


class _Growing(Dataset[Tensor]):
    def __init__(self) -> None:
        self.items = [float(number) for number in range(_SAMPLES)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.items[index]], dtype=torch.float64)


class _Batches(Sampler[list[int]]):
    """As many batches as a dataset of any length has, by weights."""

    def __init__(self, data: _Growing) -> None:
        self.data, self.weights = data, [1.0] * _SAMPLES

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.multinomial(torch.tensor(self.weights), _SAMPLES).tolist()
        for begin in range(0, _SAMPLES, _BATCH):
            yield order[begin : begin + _BATCH]


def _loader(kind: str, data: _Growing) -> lockstep.ShardedLoader:
    options: dict[str, Any] = {"batch_size": _BATCH, "shuffle": kind in ("shuffled", "slices", "costs")}
    if kind == "sampler":
        options = {"batch_size": _BATCH, "sampler": RandomSampler(data, replacement=True, num_samples=_SAMPLES)}
    elif kind == "batches":
        options = {"batch_sampler": _Batches(data)}
    given: dict[str, dict[str, Any]] = {"slices": {"slices": 2}, "costs": {"costs": lambda index: 1.0 + index % 3}}
    return lockstep.shard(DataLoader(data, **options), **given.get(kind, {}))


def _grown(kind: str, how: str) -> list[list[float]]:
    """Two epochs with a dataset that has grown in between: the samples that this rank was given in each."""
    world = lockstep.init(timeout=20)
    data = _Growing()
    loader = _loader(kind, data)
    model = lockstep.replicate(nn.Linear(1, 1, dtype=torch.float64))
    seen: list[list[float]] = []
    for _ in range(2):
        seen.append([])
        steps: Iterable[Any] = loader.steps() if kind == "slices" else loader
        for step in steps:
            for inputs in step if kind == "slices" else [step]:
                seen[-1] += inputs.flatten().tolist()
                model(inputs).square().mean().backward()
        mine = [100.0 + world.rank] * world.rank  # rank 0 finds none, rank 1 one
        for found in [mine] if how == "apart" else world.gather(mine):
            data.items += found
    return seen


@pytest.mark.parametrize("kind", ["shuffled", "sequential", "slices", "costs", "sampler", "batches"])
def test_a_dataset_that_grows_by_each_ranks_own_finds_is_refused(kind: str) -> None:
    for rank, outcome in enumerate(collect_outcomes(_grown, 2, kind, "apart")):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        message = str(outcome.message)
        assert re.search(rf"rank {rank} of 2\b", message)
        if kind in ("shuffled", "sequential", "slices"):
            assert "rank 0: epoch 1 of 20 samples, batch 0; rank 1: epoch 1 of 21 samples, batch 0" in message.replace(
                ", rank", "; rank"
            )
        else:
            assert "epoch 1: the length of the dataset was the same on every rank, and is not any more" in message
            assert "(rank 0: 20, rank 1: 21)" in message
        assert "world.gather(mine)" in message


@pytest.mark.parametrize("kind", ["shuffled", "sequential", "slices", "costs"])
def test_a_dataset_that_grows_alike_is_given_whole(kind: str) -> None:
    first, second = zip(*run_ranks(_grown, 2, kind, "alike"), strict=True)
    whole = [float(number) for number in range(_SAMPLES)]
    assert sorted(each for seen in first for each in seen) == whole
    assert sorted(each for seen in second for each in seen) == [*whole, 101.0]


class _Remembers(Sampler[int]):
    """Keeps what it has drawn, in several forms."""

    def __init__(self) -> None:
        self.drawn = torch.empty(0)
        self.lists: list[int] = [0]

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.drawn = torch.randperm(_SAMPLES)
        self.lists = self.drawn.tolist()
        return iter(self.lists)


class _ByArray(Sampler[int]):
    def __init__(self) -> None:
        self.weights = np.ones(_SAMPLES)

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(torch.from_numpy(self.weights), _SAMPLES).tolist())


def _weighted(kind: str, how: str) -> list[str]:
    """Three epochs of a sampler whose weights follow from losses; what the rank is warned of."""
    world = lockstep.init(timeout=20)
    data = _Growing()
    samplers: dict[str, Any] = {
        "weighted": lambda: WeightedRandomSampler([1.0] * _SAMPLES, _SAMPLES),
        "array": _ByArray,
        "batches": lambda: _Batches(data),
        "remembers": _Remembers,
    }
    sampler = samplers[kind]()
    options = {"batch_sampler": sampler} if kind == "batches" else {"batch_size": _BATCH, "sampler": sampler}
    loader = lockstep.shard(DataLoader(data, **options))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            losses = {int(number): number + 1 for batch in loader for number in batch.flatten().tolist()}
            everyones = world.gather([[*losses], [*losses.values()]]) if how == "exchanged" else []
            if how == "own" or (how == "rank 0's" and world.is_main):
                everyones = [[[*losses], [*losses.values()]]]
            for indices, values in everyones:
                for index, value in zip(indices, values, strict=True):
                    sampler.weights[index] = value
    return [str(each.message) for each in told]


@pytest.mark.parametrize("kind", ["weighted", "array", "batches"])
def test_weights_that_each_rank_changes_by_itself_are_told_once(kind: str) -> None:
    rank_0, *others = run_ranks(_weighted, 3, kind, "own")
    assert len(rank_0) == 1
    name = {"weighted": "WeightedRandomSampler", "array": "_ByArray", "batches": "_Batches"}[kind]
    assert rank_0[0].startswith(f"weights of the sampler {name} was changed on ranks 1 and 2 and is not the same as on")
    assert "rank 0, which draws epoch 1 for all ranks" in rank_0[0]
    assert "world.gather([indices.tolist(), losses.tolist()])" in rank_0[0]
    assert others == [[], []]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, how) for kind in ("weighted", "array", "batches") for how in ("exchanged", "rank 0's")),
        ("remembers", "nothing"),
    ],
)
def test_samplers_that_are_rightly_as_they_are_are_left_alone(kind: str, how: str) -> None:
    assert run_ranks(_weighted, 2, kind, how) == [[], []]
