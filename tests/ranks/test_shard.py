"""shard() on real ranks: who gets which sample, what bad input gets, and where a pass goes on."""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import lockstep
from tests.harness import collect_outcomes, run_ranks
from tests.launching import run
from tests.selection import each_value


class Augmented(Dataset[tuple[float, str]]):
    """Samples that differ at each look: an index plus noise from each of the three generators."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[float, str]:
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        return index + noise / 4, f"sample {index}"


class Stream(IterableDataset[torch.Tensor]):
    """Numbers in an order that it shuffles itself, split among its workers."""

    def __init__(self, length: int, *, by_rank: bool = False) -> None:
        self._length = length
        self._by_rank = by_rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        if self._by_rank:
            first += 100 * torch.distributed.get_rank()
        numbers = list(range(first, first + self._length, step))
        random.shuffle(numbers)
        for number in numbers:
            yield torch.tensor([number, number])


def _numbers(length: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)), batch_size=batch_size, **options)


def _passes(world_sizes_args: dict[str, Any], epochs: int) -> list[list[tuple[list[int], float, float]]]:
    world = lockstep.init()
    loader = lockstep.shard(_numbers(**world_sizes_args))
    seen = []
    for epoch in range(epochs):
        assert loader.epoch == epoch
        batches = []
        for (batch,) in loader:
            assert world.share is not None
            assert world.share.local_samples == len(batch)
            batches.append((batch.tolist(), world.share.local_samples, world.share.global_samples))
        assert world.share is None
        assert len(batches) == len(loader)
        seen.append(batches)
    return seen


def _joined(ranks: list[list[Any]], epoch: int) -> list[list[int]]:
    """Global batches: the ranks' shares behind each other."""
    return [
        [number for slice_ in step for number in slice_[0]] for step in zip(*[r[epoch] for r in ranks], strict=True)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_world_size_takes_the_same_global_batches(drop_last: bool) -> None:
    arguments = {"length": 50, "batch_size": 8, "shuffle": True, "drop_last": drop_last}
    alone = run_ranks(_passes, 1, arguments, 2)
    first, second = _joined(alone, 0), _joined(alone, 1)
    assert first != second, "each epoch is shuffled anew"
    assert [len(batch) for batch in first] == [8] * 6 + ([] if drop_last else [2])
    if not drop_last:
        assert sorted(number for batch in first for number in batch) == list(range(50))
    for world_size in (2, 3, 4):
        ranks = run_ranks(_passes, world_size, arguments, 2)
        assert [_joined(ranks, 0), _joined(ranks, 1)] == [first, second]
        for step in zip(*[rank[0] for rank in ranks], strict=True):
            sizes = [local for _, local, _ in step]
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1
            assert {global_samples for _, _, global_samples in step} == {sum(sizes)}


def test_without_shuffling_the_order_is_sequential() -> None:
    ranks = run_ranks(_passes, 2, {"length": 7, "batch_size": 3}, 2)
    assert _joined(ranks, 0) == _joined(ranks, 1) == [[0, 1, 2], [3, 4, 5], [6]]


def _empty_slices(workers: int) -> list[Any]:
    world = lockstep.init()
    loader = lockstep.shard(DataLoader(Augmented(7), batch_size=3, num_workers=workers))
    assert loader.ranks_left_out == 2
    got = []
    for values, names in loader:
        assert world.share is not None
        got.append((len(values), str(values.dtype), len(names), world.share.weight(world.world_size)))
        mean = world.mean(values.mean())  # the mean over no samples is NaN, and must not count
        assert 0 <= mean < 7
    return got


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_samples_gets_an_empty_batch(workers: int) -> None:
    ranks = run_ranks(_empty_slices, 3, workers)
    double = "torch.float64"
    assert [rank[-1] for rank in ranks] == [(1, double, 1, 3.0), (0, double, 0, 0.0), (0, double, 0, 0.0)]
    assert all(rank[:-1] == [(1, double, 1, 1.0)] * 2 for rank in ranks)


def _augmented(workers: int, persistent: bool) -> tuple[list[list[float]], list[bool]]:
    world = lockstep.init()
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    loader = lockstep.shard(DataLoader(Augmented(20), batch_size=6, shuffle=True, **options))
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    epochs = [[value for values, _ in loader for value in values.tolist()] for _ in range(2)]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()
    if world.world_size > 1:  # one number has gone for each batch's stretch of the rank's own
        after = (before[0] if world.all_reduce(after[0], "max").equal(after[0]) else after[0], *after[1:])
    untouched = [torch.equal(before[0], after[0]), before[1] == after[1], str(before[2]) == str(after[2])]
    return epochs, untouched


def test_augmentation_is_the_same_at_every_world_size_and_number_of_workers() -> None:
    reference, untouched = run_ranks(_augmented, 1, 0, False)[0]
    assert untouched == [True] * 3, "fetching must leave the main process's generators alone"
    assert sorted(map(int, reference[0])) == list(range(20))
    fraction = {int(value): value % 1 for value in reference[0]}
    assert all(fraction[int(value)] != value % 1 for value in reference[1]), "each epoch augments anew"
    for world_size, workers, persistent in [(1, 2, False), (2, 0, False), (3, 3, True)]:
        ranks = run_ranks(_augmented, world_size, workers, persistent)
        for epoch in range(2):
            assert sorted(v for rank, _ in ranks for v in rank[epoch]) == sorted(reference[epoch])
        assert all(untouched == [True] * 3 for _, untouched in ranks)


def _workers(asked: int) -> int:
    lockstep.init()
    return lockstep.shard(_numbers(8, 4, num_workers=asked)).num_workers


def test_workers_are_divided_among_the_local_ranks() -> None:
    assert run_ranks(_workers, 2, 0) == [0, 0]
    assert run_ranks(_workers, 2, 1) == [1, 1]
    assert run_ranks(_workers, 2, 2) == [1, 1]
    assert run_ranks(_workers, 1, 2) == [2]


class Odd(Sampler[int]):
    """Draws the odd numbers, in an order that each rank would shuffle in its own way."""

    def __iter__(self) -> Iterator[int]:
        numbers = [int(number) for number in np.random.permutation(np.arange(1, 20, 2))]
        return iter(numbers)

    def __len__(self) -> int:
        return 10


class Dice(Sampler[int]):
    """Draws from a generator of its own that no one can seed, another on each rank."""

    def __init__(self, rank: int) -> None:
        self._generator = random.Random(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._generator.choices(range(20), k=10))

    def __len__(self) -> int:
        return 10


def _sampled(kind: str) -> list[list[int]]:
    world = lockstep.init()
    random.seed(world.rank)
    np.random.seed(world.rank)
    torch.manual_seed(world.rank)
    samplers: dict[str, Any] = {
        "weighted": WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 12),
        "replacement": RandomSampler(range(20), replacement=True, num_samples=12),
        "fewer": RandomSampler(range(20), num_samples=5, generator=torch.Generator().manual_seed(3)),
        "subset": SubsetRandomSampler([3, 5, 7, 11]),
        "custom": Odd(),
        "dice": Dice(world.rank),
        "one replica": lockstep.DistributedSampler(range(20), num_replicas=1, rank=0),  # type: ignore[arg-type]
    }
    loader = lockstep.shard(_numbers(20, 5, sampler=samplers[kind]))
    epochs = [[n for (batch,) in loader for n in batch.tolist()] for _ in range(2)]
    assert torch.initial_seed() == world.rank, "drawing must leave the global generators alone"
    return epochs


@pytest.mark.parametrize(
    ("kind", "count", "allowed"),
    [
        ("weighted", 12, set(range(10))),
        ("replacement", 12, set(range(20))),
        ("fewer", 5, set(range(20))),
        ("subset", 4, {3, 5, 7, 11}),
        ("custom", 10, set(range(1, 20, 2))),
        ("dice", 10, set(range(20))),
        ("one replica", 20, set(range(20))),
    ],
)
def test_other_samplers_are_drawn_once_for_all_ranks(kind: str, count: int, allowed: set[int]) -> None:
    alone = run_ranks(_sampled, 1, kind)[0]
    ranks = run_ranks(_sampled, 2, kind)
    for epoch in range(2):
        assert len(alone[epoch]) == count
        assert set(alone[epoch]) <= allowed
        assert sorted(n for rank in ranks for n in rank[epoch]) == sorted(alone[epoch])
    assert alone[0] != alone[1]


class Broken(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise ZeroDivisionError("no weights")

    def __len__(self) -> int:
        return 10


class Short(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 10


def _bad_sampler(sampler: Sampler[int]) -> None:
    lockstep.init(timeout=20)
    next(iter(lockstep.shard(_numbers(20, 4, sampler=sampler))))


@pytest.mark.parametrize(
    ("sampler", "message"),
    [(Broken(), "ZeroDivisionError: no weights"), (Short(), "its length is 10, but it yielded 3 samples")],
)
def test_a_failing_sampler_is_an_error_on_every_rank(sampler: Sampler[int], message: str) -> None:
    for outcome in collect_outcomes(_bad_sampler, 2, sampler):
        assert outcome.error == "LockstepError"
        assert outcome.message is not None
        assert "rank 0: the sampler" in outcome.message
        assert message in outcome.message


#: As torch raises it in whatever the main thread does when a worker has died.
_DEATH = "DataLoader worker (pid 4711) is killed by signal: Killed. "


class Interrupted(Broken):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError(_DEATH)


def test_the_death_of_another_loaders_worker_is_not_a_samplers_failure() -> None:
    drawing, other = collect_outcomes(_bad_sampler, 2, Interrupted())
    assert (drawing.error, drawing.message) == ("RuntimeError", _DEATH)
    assert f"rank 0: RuntimeError: {_DEATH.strip()}" in str(other.message)


def _stream(length: int, workers: int, drop_last: bool, persistent: bool = False) -> list[list[list[int]]]:
    world = lockstep.init()
    random.seed(world.rank)  # the ranks' own generators differ; the stream's order must not
    options: dict[str, Any] = {"num_workers": workers, "drop_last": drop_last, "persistent_workers": persistent}
    loader = lockstep.shard(DataLoader(Stream(length), batch_size=4, **options))
    epochs = []
    for _ in range(2):
        batches = []
        for batch in loader:
            assert batch.shape[1] == 2
            assert world.share is not None
            assert world.share.local_samples == len(batch)
            batches.append(batch[:, 0].tolist())
        epochs.append(batches)
    return epochs


@pytest.mark.parametrize(
    ("workers", "drop_last", "persistent"), [(0, False, False), (0, True, False), (2, False, False), (2, False, True)]
)
def test_a_stream_is_cut_the_same_at_every_world_size(workers: int, drop_last: bool, persistent: bool) -> None:
    alone = run_ranks(_stream, 1, 18, workers, drop_last, persistent)[0]
    ranks = run_ranks(_stream, 3, 18, workers, drop_last, persistent)
    for epoch in range(2):
        joined = [[n for part in step for n in part] for step in zip(*[rank[epoch] for rank in ranks], strict=True)]
        assert joined == alone[epoch]
        numbers = sorted(n for batch in joined for n in batch)
        assert len(numbers) == 16 if drop_last else numbers == list(range(18))
    assert alone[0] != alone[1], "each epoch is shuffled anew"


def _split_twice() -> None:
    lockstep.init(timeout=20)
    next(iter(lockstep.shard(DataLoader(Stream(8, by_rank=True), batch_size=4))))


def test_a_stream_that_splits_itself_by_rank_is_refused() -> None:
    for outcome in collect_outcomes(_split_twice, 2):
        assert outcome.error == "LockstepError"
        assert outcome.message is not None
        assert "the ranks read different streams" in outcome.message


class EmptyOnRankOne(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(2)] * (4 if lockstep.world().rank == 0 else 0))


def _empty_on_one_rank() -> None:
    lockstep.init(timeout=20)
    list(lockstep.shard(DataLoader(EmptyOnRankOne(), batch_size=4)))


def test_a_stream_that_is_empty_on_one_rank_is_refused_at_once() -> None:
    for outcome in collect_outcomes(_empty_on_one_rank, 2, timeout=15):
        assert outcome.error == "LockstepError"
        assert "None for an empty stream" in str(outcome.message)
        assert "Standard input is rank 0's alone" in str(outcome.message)


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class BatchesByRank(BatchSampler):
    """Splits batches among ranks in its own way."""

    num_replicas = 3


class OtherBatches(BatchSampler):
    """Draws whole batches in its own way."""


class Longer(Sampler[int]):
    """Gives more than its length, as samplers without an end do."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def _length_of_more() -> tuple[list[int], list[str]]:
    world = lockstep.init(timeout=20)
    loader = lockstep.shard(DataLoader(range(12), batch_size=4, sampler=Longer()))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = [index for batch in loader for index in batch.tolist()]
    return seen, [str(each.message) for each in caught] if world.is_main else []


def test_samples_beyond_a_samplers_length_are_not_left_out_in_silence() -> None:
    (ours, said), (theirs, _) = run_ranks(_length_of_more, 2)
    assert sorted(ours + theirs) == [*range(5)]
    assert said == [
        "the sampler Longer has a length of 5 and yields more: an epoch has its first 5 samples, where torch's "
        "DataLoader would take all"
    ]


def _refused(case: str) -> None:
    world = lockstep.init(timeout=20)
    data = TensorDataset(torch.arange(12))
    cases: dict[str, dict[str, Any]] = {
        "small": {"batch_size": 2},
        "batches by rank": {"batch_sampler": BatchesByRank(SequentialSampler(data), 4, False)},
        "unbatched": {"batch_size": None},
        "distributed": {"batch_size": 4, "sampler": lockstep.DistributedSampler(data)},
        "unordered": {"batch_size": 4, "num_workers": 1, "in_order": False},
        "endless": {"batch_size": 4, "sampler": iter(range(100))},
        "distributed in batches": {"batch_sampler": BatchSampler(lockstep.DistributedSampler(data), 4, False)},
        "distributed batches": {"batch_sampler": OtherBatches(lockstep.DistributedSampler(data), 4, False)},
        "small batches": {"batch_sampler": BatchSampler(SequentialSampler(data), 2, False)},
        "batch": {"batch_size": 4 if world.rank != 1 else 5},
        "drop": {"batch_size": 4, "drop_last": world.rank == 2},
        "one": {"batch_size": 4 if world.rank != 1 else None},
    }
    options = cases.get(case, {"batch_size": 4})
    if case == "length":
        data = TensorDataset(torch.arange(12 + world.rank))
    loader: Any = (OwnIteration if case == "own" else DataLoader)(data, **options)
    if case == "no loader":
        loader = [1, 2]
    if case == "twice":
        loader = lockstep.shard(loader)
    lockstep.shard(loader, seed=world.rank if case == "seed" else -1 if case == "negative" else None)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("small", "ValueError", "batch_size=2 is smaller than the world of 3 ranks"),
        (
            "batches by rank",
            "ValueError",
            "has a BatchesByRank with num_replicas=3, which splits the data among the ranks",
        ),
        ("distributed in batches", "ValueError", "has a DistributedSampler"),
        (
            "distributed batches",
            "ValueError",
            "has a DistributedSampler with num_replicas=3, which splits the data among the ranks",
        ),
        ("small batches", "ValueError", "batch_size=2 is smaller than the world of 3 ranks"),
        ("unbatched", "ValueError", "batch_size=None"),
        ("distributed", "ValueError", "has a DistributedSampler"),
        ("unordered", "ValueError", "in_order=False"),
        ("endless", "ValueError", "has no length"),
        ("own", "ValueError", "overrides DataLoader.__iter__"),
        ("no loader", "TypeError", "not list"),
        ("twice", "TypeError", "sharded already"),
        ("negative", "ValueError", "seed=-1"),
        (
            "length",
            "ValueError",
            "the length of the dataset must be the same on every rank, but it is rank 0: 12, rank 1",
        ),
        (
            "batch",
            "ValueError",
            "the batch size must be the same on every rank, but it is rank 0: 4, rank 1: 5, rank 2",
        ),
        ("drop", "ValueError", "drop_last must be the same on every rank"),
        ("seed", "ValueError", "the seed must be the same on every rank, but it is rank 0: 0, rank 1: 1, rank 2: 2"),
        ("one", "ValueError", "batch_size=None"),
    ],
)
def test_what_cannot_be_sharded_is_refused_on_every_rank(case: str, error: str, message: str) -> None:
    for outcome in collect_outcomes(_refused, 3, case):
        assert outcome.error == error, outcome.traceback
        assert outcome.message is not None
        assert message in outcome.message


def _batches_of(kind: str, plain: bool, drop_last: bool, slices: int | None) -> list[Any]:
    """What the ranks get of a batch sampler, or of the sampler and the batch size that it is made of."""
    lockstep.init(timeout=20)
    data = TensorDataset(torch.arange(22))
    own = torch.Generator().manual_seed(7)
    samplers: dict[str, Callable[[], Sampler[int]]] = {
        "sequential": lambda: SequentialSampler(data),
        "random": lambda: RandomSampler(data),
        "generator": lambda: RandomSampler(data, generator=own),
        "weighted": lambda: WeightedRandomSampler([1.0] * 22, 30),
    }
    sampler = samplers[kind]()
    if plain:
        loader: Any = DataLoader(data, batch_size=8, sampler=sampler, drop_last=drop_last)
    else:
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 8, drop_last))
    sharded = lockstep.shard(loader, slices=slices)
    assert (sharded.batch_size, sharded.drop_last) == (8, drop_last)
    if slices is None:
        seen = [batch.tolist() for (batch,) in sharded]
    else:
        seen = [[batch.tolist() for (batch,) in step] for step in sharded.steps()]
    assert len(seen) == len(sharded)
    return [seen, sharded.state_dict()]


@each_value(kind=("sequential", "random", "generator", "weighted"), drop_last=(False, True), slices=(4, None))
def test_a_plain_batch_sampler_is_its_sampler_and_batch_size(kind: str, drop_last: bool, slices: int | None) -> None:
    assert run_ranks(_batches_of, 2, kind, False, drop_last, slices) == run_ranks(
        _batches_of, 2, kind, True, drop_last, slices
    )


def _call_what_torchs_have() -> list[str]:
    lockstep.init()
    data = TensorDataset(torch.arange(12.0))
    loader = lockstep.shard(DataLoader(data, batch_size=4, shuffle=True))
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            loader.set_epoch(epoch)
            loader.sampler.set_epoch(epoch)
            assert len(loader.sampler) == 12
            assert loader.sampler.num_samples == 12
            for other in (copy.copy(loader.sampler), copy.deepcopy(loader.sampler)):
                other.set_epoch(epoch)
                assert (len([*other]), other.num_samples, type(other)) == (12, 12, type(loader.sampler))
            assert len([*pickle.loads(pickle.dumps(loader.sampler))]) == 12  # noqa: S301  (our own bytes)
            assert sum(len(batch) for (batch,) in loader) > 0
    said += [str(each.message) for each in caught]
    for name in ("batch_sampler", "generator", "worker_init_fn", "no_such_thing"):
        assert not hasattr(loader, name)
        try:
            getattr(loader, name)
        except AttributeError as error:
            said.append(str(error))
    own = WeightedRandomSampler([1.0] * 12, 12)
    assert lockstep.shard(DataLoader(data, batch_size=4, sampler=own)).sampler.weights is own.weights
    return said


def test_what_scripts_call_of_torchs_loaders_does_nothing_or_says_what_to_do() -> None:
    for told, *refused in run_ranks(_call_what_torchs_have, 2):
        assert told.startswith(
            "set_epoch(0) does nothing here: a loader from lockstep.shard shuffles again in each pass"
        )
        assert [each.partition(": ")[0] for each in refused] == [
            f"a loader from lockstep.shard has no '{name}'"
            for name in ("batch_sampler", "generator", "worker_init_fn", "no_such_thing")
        ]
        assert ".batch_size is that of all ranks together" in refused[0]


def test_a_world_is_needed() -> None:
    with pytest.raises(lockstep.LockstepError, match=r"call lockstep\.init\(\) first"):
        lockstep.shard(_numbers(4, 2))


def _seeds() -> list[bool]:
    lockstep.init(seed=7)

    def order(seed: int | None = None, **options: Any) -> list[int]:
        return [n for (b,) in lockstep.shard(_numbers(30, 10, shuffle=True, **options), seed=seed) for n in b.tolist()]

    generator = torch.Generator().manual_seed(8)
    return [
        order() == order(seed=7),
        order(generator=generator) == order(seed=8),
        order(seed=9, generator=generator) == order(seed=9),
        order() != order(seed=8),
    ]


def test_the_seed_is_the_arguments_or_the_generators_or_the_worlds() -> None:
    assert run_ranks(_seeds, 1) == [[True] * 4]


# Where a pass goes on.


def _interrupted(stop: int) -> tuple[dict[str, Any], list[list[float]]]:
    """One epoch and ``stop`` batches of the second; the state there."""
    lockstep.init()
    loader = lockstep.shard(DataLoader(Augmented(22), batch_size=6, shuffle=True, num_workers=2))
    assert (loader.epoch, loader.batches_left, loader.in_epoch) == (0, 4, False)
    for _ in loader:
        pass
    assert (loader.epoch, loader.batches_left, loader.in_epoch) == (1, 4, False)
    seen = []
    state: dict[str, Any] = {}
    for number, (values, _) in enumerate(loader, start=1):
        seen.append(values.tolist())
        if number == stop:
            assert (loader.epoch, loader.batches_left, loader.in_epoch) == (1, 4 - stop, True)
            state = loader.state_dict()
    return json.loads(json.dumps(state)), seen


def _resumed(state: dict[str, Any], workers: int, batch_size: int) -> tuple[int, list[list[float]], int, list[float]]:
    lockstep.init(seed=99)  # the state's seed wins
    loader = lockstep.shard(DataLoader(Augmented(22), batch_size=batch_size, shuffle=True, num_workers=workers))
    loader.load_state_dict(state)
    assert loader.state_dict() == {**state, "batch_size": batch_size}
    left = loader.batches_left
    rest = [values.tolist() for values, _ in loader]
    assert loader.epoch == 2
    return left, rest, len(loader), [value for values, _ in loader for value in values.tolist()]


@pytest.mark.parametrize("stop", [1, *[pytest.param(stop, marks=pytest.mark.campaign) for stop in (3, 4)]])
def test_a_pass_continues_inside_its_epoch_at_any_world_size(stop: int) -> None:
    states = run_ranks(_interrupted, 2, stop)
    assert states[0][0] == states[1][0], "the state is the same on every rank"
    state = states[0][0]
    assert state["cursor"] == {"epoch": 1, "samples": [6, 18, 22][stop // 2], "batches": stop, "in_epoch": True}
    whole = [[*a, *b] for a, b in zip(states[0][1], states[1][1], strict=True)]
    for world_size, workers in [(1, 0), (2, 2), (3, 3)]:
        ranks = run_ranks(_resumed, world_size, state, workers, 6)
        rest = [[v for part in step for v in part] for step in zip(*[rank[1] for rank in ranks], strict=True)]
        assert rest == whole[stop:], "bit for bit, augmentation included"
        assert {(left, length) for left, _, length, _ in ranks} == {(4 - stop, 4)}
        assert sorted(int(v) for rank in ranks for v in rank[3]) == list(range(22)), "the next epoch is a whole one"


def test_a_pass_continues_with_another_batch_size() -> None:
    state, seen = run_ranks(_interrupted, 1, 2)[0]
    left, rest, length, _ = run_ranks(_resumed, 1, state, 0, 4)[0]
    assert (left, length) == (3, 6)
    assert [v for batch in seen for v in batch] == [v for b in seen[:2] for v in b] + [v for b in rest for v in b]


def _other_data(state: dict[str, Any], case: str) -> tuple[int, bool]:
    world = lockstep.init(timeout=20)
    loader = lockstep.shard(DataLoader(Augmented(23 if case == "length" else 22), 6, shuffle=case != "order"))
    if case == "differs" and world.rank == 1:
        state = {**state, "seed": 5}
    try:
        loader.load_state_dict({"epoch": 3} if case == "garbage" else state)
    finally:
        unchanged = (loader.epoch, loader.in_epoch) == (0, False)
        assert unchanged
    return 0, unchanged


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("length", "CheckpointMismatch", "length=22, this one 23"),
        ("order", "CheckpointMismatch", "order='shuffled', this one 'sequential'"),
        ("garbage", "CheckpointMismatch", "not the state of a sharded loader"),
        ("differs", "ValueError", "seed must be the same on every rank, but it is rank 0: 0, rank 1: 5"),
    ],
)
def test_a_state_of_other_data_is_refused_on_every_rank(case: str, error: str, message: str) -> None:
    state, _ = run_ranks(_interrupted, 1, 2)[0]
    for outcome in collect_outcomes(_other_data, 2, state, case):
        assert outcome.error == error, outcome.traceback
        assert outcome.message is not None
        assert message in outcome.message


def _stream_resumed(workers: int) -> bool:
    lockstep.init()

    def make() -> lockstep.ShardedLoader:
        return lockstep.shard(DataLoader(Stream(30), batch_size=4, num_workers=workers))

    whole = make()
    states, batches = [], []
    for batch in whole:
        batches.append(batch.tolist())
        states.append(whole.state_dict())
    for number, state in enumerate(states, start=1):
        if number in (1, 5, len(states)):
            loader = make()
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == batches[number:]
    return True


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_continues_inside_its_epoch(workers: int) -> None:
    assert run_ranks(_stream_resumed, 2, workers) == [True, True]


def _sampler_resumed(fickle: bool) -> list[int]:
    lockstep.init()
    state: dict[str, Any] = {}
    loader = lockstep.shard(_numbers(20, 4, sampler=WeightedRandomSampler([1.0] * 20, 20)))
    seen: list[int] = []
    for number, (batch,) in enumerate(loader):
        if number == 2:
            state = loader.state_dict()
        elif number > 2:
            seen += batch.tolist()
    weights = [1.0] * 20 if not fickle else [1.0] * 10 + [0.0] * 10
    again = lockstep.shard(_numbers(20, 4, sampler=WeightedRandomSampler(weights, 20)))
    again.load_state_dict(state)
    assert [n for (batch,) in again for n in batch.tolist()] == seen
    return seen


def test_a_drawn_order_is_drawn_again_or_refused() -> None:
    run_ranks(_sampler_resumed, 2, False)
    for outcome in collect_outcomes(_sampler_resumed, 2, True):
        assert outcome.error == "CheckpointMismatch"
        assert outcome.message is not None
        assert "drew another order for epoch 0" in outcome.message


def _left_early() -> dict[str, Any]:
    world = lockstep.init()
    loader = lockstep.shard(_numbers(20, 4, shuffle=True))
    outer = world.share = lockstep.BatchShare(1, 2)
    first = []
    for (batch,) in loader:
        first = batch.tolist()
        break
    after_break = loader.state_dict()["cursor"]
    restored = world.share is outer
    second = [n for (batch,) in loader for n in batch.tolist()]
    fresh = lockstep.shard(_numbers(20, 4, shuffle=True), seed=loader.seed)
    epochs = [[n for (batch,) in fresh for n in batch.tolist()] for _ in range(2)]
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(lockstep.LockstepError, match="another pass over this loader has begun"):
        next(older)
    next(newer)
    assert world.share is not None
    in_newer = world.share.local_samples
    newer.close()  # type: ignore[attr-defined]
    return {
        "after break": after_break,
        "restored": restored and world.share is outer,
        "first": first == epochs[0][:4],
        "second": second == epochs[1],
        "in newer": in_newer,
        "epoch": loader.epoch,
    }


def test_leaving_early_gives_the_pass_up() -> None:
    assert run_ranks(_left_early, 1) == [
        {
            "after break": {"epoch": 1, "samples": 0, "batches": 0, "in_epoch": False},
            "restored": True,
            "first": True,
            "second": True,
            "in newer": 4,
            "epoch": 4,
        }
    ]


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("disk gone")
        return index


def _failing() -> tuple[str, dict[str, Any], bool]:
    world = lockstep.init()
    loader = lockstep.shard(DataLoader(Failing(), batch_size=2))
    with pytest.raises(OSError, match="disk gone") as caught:
        list(loader)
    return str(caught.value), loader.state_dict()["cursor"], world.share is None


def test_a_dataset_that_fails_leaves_the_position_where_it_was() -> None:
    cursor = {"epoch": 0, "samples": 4, "batches": 2, "in_epoch": True}
    assert run_ranks(_failing, 1) == [("disk gone", cursor, True)]


def _worker_sees_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Augmented), type(info.dataset)
    info.dataset._length += worker_id  # what torch's documentation does with a stream's bounds


def _worker_init() -> int:
    lockstep.init()
    loader = lockstep.shard(DataLoader(Augmented(6), 3, num_workers=1, worker_init_fn=_worker_sees_dataset))
    return sum(len(values) for values, _ in loader)


def test_a_worker_init_fn_sees_the_users_dataset() -> None:
    assert run_ranks(_worker_init, 1) == [6]


class Batched(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[float, str]]:
        return [(float(index), "at once") for index in indices]


def _batched(kind: type[Augmented], seed_samples: bool) -> list[str]:
    lockstep.init()
    loader = lockstep.shard(DataLoader(kind(6), 3), seed_samples=seed_samples)
    return [name for _, names in loader for name in names]


class BatchedRandom(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[float, str]]:
        return [(random.random(), "at once") for _ in indices]


@pytest.mark.parametrize("seed_samples", [False, True])
def test_batched_fetching_is_used_where_samples_are_not_seeded(seed_samples: bool) -> None:
    assert run_ranks(_batched, 1, Batched, seed_samples)[0] == ["at once"] * 6, "nothing is drawn"
    names = [f"sample {index}" for index in range(6)] if seed_samples else ["at once"] * 6
    assert run_ranks(_batched, 1, BatchedRandom, seed_samples)[0] == names


class BatchedLazily(Augmented):
    def __getitems__(self, indices: list[int]) -> Iterator[tuple[float, str]]:
        return ((float(index), "at once") for index in indices)


def _batched_lazily() -> list[int]:
    lockstep.init()
    return [len(values) for values, _ in lockstep.shard(DataLoader(BatchedLazily(7), 6))]


def test_batches_that_a_generator_gives_may_be_empty() -> None:
    assert run_ranks(_batched_lazily, 2) == [[3, 1], [3, 0]]


def _says() -> int:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    lockstep.init()
    lockstep.shard(_numbers(7, 3))
    logger.removeHandler(handler)
    assert all(
        message.endswith("a batch of zero samples, which counts with weight 0, goes to 2 ranks") for message in messages
    )
    return len(messages)


def test_rank_0_says_who_is_left_out() -> None:
    assert run_ranks(_says, 3) == [1, 0, 0]


_RESHAPES = """
import sys
import torch, lockstep
from torch.utils.data import DataLoader, TensorDataset

where = sys.argv[1]
world = lockstep.init()
loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(9, 2, 3)), batch_size=4))  # the last batch has one sample
for (x,) in loader:
    if where == "in the loop":
        x.view(x.size(0), -1)
    elif where == "earlier" and world.rank:
        raise ValueError("of the program's own")
if world.rank:
    raise ValueError("of the program's own")
"""


@pytest.mark.parametrize("where", ["in the loop", "earlier", "after the loop"])
def test_an_error_that_a_share_without_samples_has_caused_is_explained(tmp_path: Path, where: str) -> None:
    (tmp_path / "train.py").write_text(_RESHAPES)
    done = run(["lockstep", "run", "-n", "2", "train.py", where], tmp_path, torch=True)
    assert done.code == 1, done
    assert ("cannot reshape tensor of 0 elements" in done.err) == (where == "in the loop"), done.err
    explained = "the share of rank 1 of 2 has no sample of this batch (0 of 1 samples)"
    assert (explained in done.err) == (where == "in the loop"), done.err
    assert ("x.flatten(1)" in done.err) == (where == "in the loop")
