"""Loaders to which the script gives no seed: each has an order, and random numbers of samples, of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

import lockstep
from tests.harness import collect_outcomes, run_ranks

_SAMPLES, _BATCH = 24, 8


class _Noisy(Dataset[Tensor]):
    """Pairs of an index and a random number."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class _Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(_SAMPLES).tolist():
            yield torch.tensor([float(index), torch.rand(()).item()])


def _shard(*, seed: int | None = None, **options: Any) -> lockstep.ShardedLoader:
    given = {"dataset": _Noisy(), "batch_size": _BATCH, **options}
    return lockstep.shard(DataLoader(**given), seed=seed)


def _rows(loader: lockstep.ShardedLoader) -> list[list[float]]:
    """One pass: this rank's rows of each batch."""
    return [row for batch in loader for row in batch.tolist()]


def _in_pairs(kind: str) -> list[list[list[list[float]]]]:
    """Two epochs over two loaders side by side: the rows of both, batch by batch."""
    lockstep.init(seed=3)
    generator = torch.Generator().manual_seed(5)
    makers: dict[str, Any] = {
        "shuffled": lambda: _shard(shuffle=True),
        "sampler": lambda: _shard(sampler=SubsetRandomSampler(range(_SAMPLES))),
        "stream": lambda: _shard(dataset=_Stream()),
        "sequential": _shard,
        "one generator": lambda: _shard(shuffle=True, generator=generator),
    }
    first, second = kind.split(" and ") if " and " in kind else (kind, kind)
    a, b = makers[first](), makers[second]()
    return [[one.tolist(), two.tolist()] for _ in range(2) for one, two in zip(a, b, strict=True)]


def _joined(ranks: list[list[list[list[list[float]]]]]) -> list[list[list[list[float]]]]:
    """The pairs of global batches, from those of all ranks."""
    return [[[row for part in parts for row in part[side]] for side in range(2)] for parts in zip(*ranks, strict=True)]


def test_pairs_from_two_loaders_are_no_pairs_of_equal_samples() -> None:
    for kind in ("shuffled", "shuffled and sampler", "sampler", "stream", "sequential", "one generator"):
        alone = _joined(run_ranks(_in_pairs, 1, kind))
        assert alone == _joined(run_ranks(_in_pairs, 2, kind)), kind
        one, two = (torch.tensor([row for pair in alone for row in pair[side]]) for side in range(2))
        assert len(one) == 2 * _SAMPLES
        alike = (one == two).sum(dim=0)
        assert alike[1] == 0, f"{kind}: random numbers of the same samples"
        assert kind == "sequential" or alike[0] < _SAMPLES // 2, f"{kind}: the same order"


def _anew() -> list[Any]:
    """A loader that is made anew for each epoch, and an evaluation that is made before it."""
    lockstep.init(seed=3)
    told = []
    for _ in range(3):
        _rows(_shard())
        loader = _shard(shuffle=True)
        told.append([loader.seed, _rows(loader)])
    told.append([3, _rows(_shard(shuffle=True, seed=3))])
    return told


def test_a_loader_that_is_made_anew_for_each_epoch_gives_other_epochs() -> None:
    ranks = run_ranks(_anew, 2)
    assert [seed for seed, _ in ranks[0]] == [seed for seed, _ in ranks[1]]
    epochs = [torch.tensor([*one, *two]) for (_, one), (_, two) in zip(*ranks, strict=True)]
    for epoch in epochs:
        assert sorted(epoch[:, 0].tolist()) == [*map(float, range(_SAMPLES))]
    assert torch.equal(epochs[0], epochs[3]), "the first has the world's seed, whatever was made for evaluation"
    seeds = {seed for seed, _ in ranks[0]}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds), "a seed that shard() takes"
    for number in range(3):
        for other in range(number):
            alike = (epochs[number] == epochs[other]).sum(dim=0)
            assert alike[0] < _SAMPLES // 2
            assert alike[1] == 0


def _counted() -> list[int]:
    """The seeds of loaders, made in several ways."""
    lockstep.init(seed=3)
    generator, same = (torch.Generator().manual_seed(5) for _ in range(2))
    given = [_shard(shuffle=True, generator=each).seed for each in (generator, generator, same)]
    generator.manual_seed(5 + 1)
    given += [_shard(shuffle=True, generator=generator).seed for _ in range(2)]
    said = [_shard(shuffle=True, seed=3).seed for _ in range(2)]
    kinds = [_shard().seed, _shard(dataset=_Stream()).seed, _shard(sampler=SequentialSampler(range(8))).seed]
    try:
        _shard(batch_size=1 if lockstep.world().rank else 2)
    except ValueError:
        kinds.append(_shard(shuffle=True).seed)
    return [*given, *said, *kinds]


def test_what_counts_is_what_decides_the_seed() -> None:
    seeds, other = run_ranks(_counted, 2)
    assert seeds == other
    first, second, same, again, once_more, *rest = seeds
    assert (first, same, again) == (5, 5, 6)
    assert second not in (5, 6)
    assert once_more not in (5, 6, second)
    # Seeds that are given count for nothing, and neither does a loader that was refused. (One over fewer samples is in
    # the order of its sampler.)
    assert rest[:4] == [3, 3, 3, 3]
    assert rest[4] == 3
    assert rest[5] not in (3, *seeds[:5])


def _saved() -> list[Any]:
    """Three loaders, of which the third stands in its second epoch: its state, and what it would give on."""
    lockstep.init(seed=3)
    loader = [_shard(shuffle=True) for _ in range(3)][2]
    _rows(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    return [state, [row for batch in batches for row in batch.tolist()], _rows(loader)]


def _resumed(state: dict[str, Any]) -> list[Any]:
    lockstep.init(seed=4)
    loader = _shard(shuffle=True)
    loader.load_state_dict(state)
    return [loader.seed, _rows(loader), _rows(loader)]


def test_a_position_brings_its_loaders_seed_along() -> None:
    ((state, *rest),) = run_ranks(_saved, 1)
    assert state["seed"] != 3
    for world_size in (1, 2):
        ranks = run_ranks(_resumed, world_size, state)
        assert [seed for seed, *_ in ranks] == [state["seed"]] * world_size
        for number in range(2):
            assert sorted(row for rank in ranks for row in rank[1 + number]) == sorted(rest[number])


def _apart() -> None:
    world = lockstep.init(seed=3, timeout=20)
    _shard(shuffle=True)
    _shard(shuffle=True, seed=3 if world.rank else None)


def test_a_seed_that_one_rank_alone_gives_is_refused() -> None:
    for outcome in collect_outcomes(_apart, 2):
        assert outcome.error == "ValueError", outcome.traceback
        assert "the seed must be the same on every rank" in str(outcome.message)
