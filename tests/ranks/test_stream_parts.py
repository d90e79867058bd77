"""shard() of a stream that each rank reads a part of: unequal parts, exact means, an end that all agree on."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import lockstep
from tests.backends import BOTH, EACH_BACKEND, OVER_ALL, OVER_BOTH
from tests.harness import Outcome, collect_outcomes, run_ranks
from tests.selection import each_value

pytestmark = EACH_BACKEND

#: By rank, the samples of its part.
UNEQUAL = (13, 4, 8)


class Parts(IterableDataset[dict[str, Tensor]]):
    """A rank's part, split among its workers: numbers of its own, each with one that is drawn."""

    def __init__(self, lengths: tuple[int, ...] = UNEQUAL, *, fails_at: int | None = None) -> None:
        self._lengths, self._fails_at = lengths, fails_at

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rank, info = int(os.environ["RANK"]), get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self._lengths[rank], step):
            if number == self._fails_at:
                raise OSError("the shard is damaged")
            drawn = torch.rand((), dtype=torch.float64) + random.random()
            yield {
                "x": torch.tensor([100.0 * rank + number, drawn], dtype=torch.float64),
                "y": torch.tensor(number % 3),
            }


class SharedOut(IterableDataset[int]):
    """Numbers that every rank shuffles, when it is opened or for its first sample, and of which it takes every n-th."""

    def __init__(self, *, when_opened: bool) -> None:
        self._when_opened = when_opened

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine()) if self._when_opened else self._read()

    def _read(self) -> Iterator[int]:
        yield from self._mine()

    def _mine(self) -> list[int]:
        numbers = list(range(23))
        random.shuffle(numbers)
        return numbers[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]


def _loader(dataset: Any, batch_size: int = 6, **options: Any) -> lockstep.ShardedLoader:
    return lockstep.shard(DataLoader(dataset, batch_size, **options), stream="parts")


def _net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 3).double()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs / 100), targets).backward()
    optimizer.step()


def _train(lengths: tuple[int, ...], batch_size: int, workers: int, drop_last: bool) -> dict[str, Any]:
    world = lockstep.init(timeout=60)
    loader = _loader(
        Parts(lengths), batch_size, num_workers=workers, drop_last=drop_last, persistent_workers=workers > 0
    )
    model = lockstep.replicate(_net().to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs: list[list[list[list[float]]]] = []
    losses = []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            targets = batch.pop("y")  # as scripts do
            inputs = batch.pop("x")
            assert inputs.shape == (len(targets), 2)
            assert world.share is not None
            assert world.share.local_samples == len(targets)
            assert world.share.global_samples == world.all_reduce(len(targets))
            assert inputs.device.type == world.device.type
            losses.append(world.mean(inputs[:, 0].mean()))
            epochs[-1].append(inputs.tolist())
            _step(model, optimizer, inputs, targets)
    return {"epochs": epochs, "weight": model.weight.tolist(), "means": losses}


def _joined(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    """Global batches: what the ranks had of each, behind each other."""
    return [[*itertools.chain.from_iterable(parts)] for parts in zip(*ranks, strict=True)]


def _alone(batches: list[list[list[float]]]) -> dict[str, Any]:
    """What one process makes of the same global batches."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    for batch in batches:
        inputs = torch.tensor(batch, dtype=torch.float64)
        _step(model, optimizer, inputs, (inputs[:, 0] % 100 % 3).long())
        means.append(inputs[:, 0].mean().item())
    return {"weight": model.weight.tolist(), "means": means}


@OVER_ALL
@pytest.mark.parametrize(
    ("world_size", "lengths", "workers", "drop_last"),
    [(1, (13,), 0, False), (2, (13, 4), 2, False), (3, UNEQUAL, 0, False), (3, (8, 7, 9), 0, True)],
)
def test_each_step_is_the_mean_over_the_samples_of_all_ranks(
    world_size: int, lengths: tuple[int, ...], workers: int, drop_last: bool
) -> None:
    ranks = run_ranks(_train, world_size, lengths, 6, workers, drop_last)
    epochs = [_joined([rank["epochs"][epoch] for rank in ranks]) for epoch in range(2)]
    for batches in epochs:
        numbers = [int(sample[0]) for batch in batches for sample in batch]
        parts = [100 * rank + number for rank in range(world_size) for number in range(lengths[rank])]
        if drop_last:
            assert [len(batch) for batch in batches] == [6] * (min(lengths) // 2)
            assert sorted(numbers) == sorted(number for number in parts if number % 100 < len(batches) * 2)
        else:
            assert sorted(numbers) == parts, "each sample comes once"
    drawn = [[sample[1] for batch in batches for sample in batch] for batches in epochs]
    assert not set(drawn[0]) & set(drawn[1]), "each epoch draws other numbers"
    if not workers:  # (each worker draws alike for its first sample)
        assert len(set(drawn[0])) == len(drawn[0]) - (world_size - 1), "the ranks draw alike for the first sample only"
    alone = _alone(epochs[0] + epochs[1])
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["weight"]), torch.tensor(alone["weight"]), rtol=0, atol=1e-12)
        assert rank["means"] == pytest.approx(alone["means"], abs=1e-9)


def _numbers(when_opened: bool) -> list[list[list[int]]]:
    lockstep.init(timeout=60)
    loader = _loader(SharedOut(when_opened=when_opened), batch_size=4)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("when_opened", [True, False])
def test_what_a_stream_shuffles_before_it_splits_itself_is_shuffled_alike(when_opened: bool) -> None:
    ranks = run_ranks(_numbers, 3, when_opened)
    first, second = [_joined([rank[epoch] for rank in ranks]) for epoch in range(2)]
    for batches in (first, second):
        assert sorted(itertools.chain(*batches)) == list(range(23))
    assert first != second, "each epoch is shuffled anew"


def _resumed(workers: int) -> bool:
    world = lockstep.init(timeout=60)

    def make() -> lockstep.ShardedLoader:
        return _loader(Parts((13, 4, 8)[: world.world_size]), 4, num_workers=workers)

    whole = make()
    states, batches = [], []
    for batch in whole:
        batches.append(batch["x"].tolist())
        states.append(json.loads(json.dumps(whole.state_dict())))
    for number, state in enumerate(states, start=1):
        if number in (1, 4, len(states) - 1, len(states)):
            again = make()
            again.load_state_dict(state)
            assert [batch["x"].tolist() for batch in again] == batches[number:], f"after {number} of {len(states)}"
            assert again.epoch == 1
    return True


@each_value(str, each_backend=BOTH, world_size=(3, 2), workers=(0, 2))
def test_a_pass_goes_on_where_each_rank_was(world_size: int, workers: int) -> None:
    assert run_ranks(_resumed, world_size, workers) == [True] * world_size


def _positions() -> tuple[dict[str, Any], dict[str, Any]]:
    lockstep.init(timeout=60)
    loader = _loader(Parts())
    batches = iter(loader)
    next(batches)
    inside = loader.state_dict()
    for _ in batches:
        pass
    return inside, loader.state_dict()


def _load(state: dict[str, Any], stream: Any) -> int:
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Parts((5, 5, 5)), 6), stream=stream)
    loader.load_state_dict(state)
    return loader.epoch


def test_a_position_inside_an_epoch_is_one_of_as_many_ranks() -> None:
    positions = run_ranks(_positions, 2)
    assert positions[0] == positions[1], "the state is the same on every rank"
    inside, between = positions[0]
    read_otherwise = {3: ("parts", "by 3 ranks"), 1: ("whole", "whole by every rank")}
    for world_size, (stream, words) in read_otherwise.items():
        for outcome in collect_outcomes(_load, world_size, inside, stream):
            assert outcome.error == "CheckpointMismatch", outcome.traceback
            assert "the stream was read by 2 ranks, each its own part, when this position" in str(outcome.message)
            assert words in str(outcome.message)
        assert run_ranks(_load, world_size, between, stream) == [1] * world_size


def _positions_with(shares: list[float] | None) -> list[dict[str, Any]]:
    """Positions inside an epoch, where it is over, and after it."""
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Parts(), 6), stream="parts", shares=shares)
    found: list[dict[str, Any]] = []
    loader._register_end_of_pass_hook(lambda: found.append(loader.state_dict()))
    for _ in loader:
        found = found or [loader.state_dict()]
    return [*found, loader.state_dict()]


def _load_with(shares: list[float] | None, state: dict[str, Any]) -> tuple[int, int]:
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Parts((12, 12)), 6), stream="parts", shares=shares)
    loader.load_state_dict(state)
    return loader.epoch, sum(len(batch["x"]) for batch in loader)


def test_a_position_inside_an_epoch_is_one_of_the_same_shares() -> None:
    unequal, equal = run_ranks(_positions_with, 2, [2, 1])[0], run_ranks(_positions_with, 2, None)[0]
    assert [state.get("shares") for state in unequal] == [[2, 1]] * 3
    assert [state.get("shares") for state in equal] == [[1, 1]] * 3
    refused = [(None, unequal, "4 and 2", "3 and 3"), ([1, 2], unequal, "4 and 2", "2 and 4")]
    for shares, states, before, now in [*refused, ([2, 1], equal, "3 and 3", "4 and 2")]:
        inside, *ended = states
        for outcome in collect_outcomes(_load_with, 2, shares, inside):
            assert outcome.error == "CheckpointMismatch", outcome
            assert f"the ranks read {before} samples of each full batch from their own parts" in str(outcome.message)
            assert f"and {now} in this run" in str(outcome.message)
        for state in ended:
            assert [epoch for epoch, _ in run_ranks(_load_with, 2, shares, state)] == [state["cursor"]["epoch"]] * 2
    assert run_ranks(_load_with, 2, [4, 2], unequal[0]) == [(0, 8), (0, 10)], "the same in other numbers"
    assert run_ranks(_load_with, 2, [1, 1], equal[0]) == [(0, 9), (0, 9)]
    of_before = {key: value for key, value in unequal[0].items() if key != "shares"}
    assert run_ranks(_load_with, 2, [2, 1], of_before) == [(0, 8), (0, 10)], "from a version that did not note them"
    damaged: list[Any] = [[1], [1, -1], "12", [1, "x"]]
    for each in damaged:
        for outcome in collect_outcomes(_load_with, 2, None, {**unequal[0], "shares": each}):
            assert "this is not the state of a sharded loader" in str(outcome.message)


def _begun(lengths: tuple[int, ...], batch_size: int, drop_last: bool) -> int:
    lockstep.init(timeout=20)
    return len(list(_loader(Parts(lengths), batch_size, drop_last=drop_last)))


@OVER_BOTH
@pytest.mark.parametrize(
    ("lengths", "drop_last", "words"),
    [((3, 0, 0), False, "ranks 1 and 2 have no sample"), ((3, 1, 5), True, "rank 1 has no full batch")],
)
def test_a_rank_that_gets_nothing_is_named_on_all(lengths: tuple[int, ...], drop_last: bool, words: str) -> None:
    for outcome in collect_outcomes(_begun, 3, lengths, 6, drop_last):
        assert outcome.error == "LockstepError", outcome.traceback
        assert words in str(outcome.message)


def test_a_stream_of_nothing_has_no_batches() -> None:
    assert run_ranks(_begun, 2, (0, 0), 4, False) == [0, 0]


class Same(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        first = 10.0 if os.environ["RANK"] == "1" else 0.0
        return iter(torch.arange(first, first + 9).unsqueeze(1))


def _same() -> None:
    lockstep.init(timeout=20)
    list(_loader(Same()))


def test_parts_that_are_the_same_are_named() -> None:
    for outcome in collect_outcomes(_same, 3):
        assert outcome.error == "LockstepError", outcome.traceback
        assert "the parts of ranks 0 and 2 begin with the same samples" in str(outcome.message)
        assert 'stream="parts" says that the stream splits itself' in str(outcome.message)


class OfClass:
    """A sample that is no container."""

    def __init__(self, number: int) -> None:
        self.number = number


class Unreadable:
    """A sample of which nothing can be read but by its own module."""

    __slots__ = ()


class Objects(IterableDataset[Any]):
    def __init__(self, part: int, *, readable: bool) -> None:
        self._part, self._readable = part, readable

    def __iter__(self) -> Iterator[Any]:
        return iter([OfClass(self._part) if self._readable else Unreadable() for _ in range(4)])


def _count(samples: list[Any]) -> Tensor:
    return torch.ones(len(samples))


def _of_objects(readable: bool, apart: bool) -> int:
    world = lockstep.init(timeout=20)
    dataset = Objects(world.rank if apart else 0, readable=readable)
    return sum(len(batch) for batch in _loader(dataset, 4, collate_fn=_count))


def test_parts_are_compared_by_what_objects_hold_and_not_by_their_class() -> None:
    assert run_ranks(_of_objects, 2, True, True) == [4, 4]
    for outcome in collect_outcomes(_of_objects, 2, True, False):
        assert "the parts of ranks 0 and 1 begin with the same samples" in str(outcome.message)
    assert run_ranks(_of_objects, 2, False, True) == [4, 4], "nothing is known of them, so nothing is said"


def _damaged(fails_at: int, workers: int) -> int:
    world = lockstep.init(timeout=30)
    dataset = Parts((12, 12), fails_at=fails_at if world.rank == 1 else None)
    steps = 0
    try:
        for _ in _loader(dataset, 4, num_workers=workers):
            steps += 1
    except Exception as error:
        raise type(error)(f"after {steps} steps: {error}") from error
    return steps


def _assert_damage_is_said(outcomes: list[Outcome], steps: int) -> None:
    words = "reading the stream failed on rank 1: OSError"
    assert [outcome.error for outcome in outcomes] == ["LockstepError", "OSError"], outcomes[0].traceback
    assert f"after {steps} steps: {words}" in str(outcomes[0].message)
    assert "the shard is damaged" in str(outcomes[0].message)
    assert f"after {steps} steps: " in str(outcomes[1].message)


@each_value(str, each_backend=BOTH, fails_at=(0, 3, 7), workers=(0, 2))
def test_a_part_that_can_not_be_read_is_an_error_on_every_rank_in_the_same_step(fails_at: int, workers: int) -> None:
    steps = fails_at // 2 if not workers else {0: 0, 3: 1, 7: 3}[fails_at]
    _assert_damage_is_said(collect_outcomes(_damaged, 2, fails_at, workers), steps)


def _crossed() -> None:
    world = lockstep.init(timeout=20)
    loaders = [iter(_loader(Parts())) for _ in range(2)]
    for loader in loaders if world.rank else reversed(loaders):
        next(loader)


def test_ranks_at_different_loaders_are_told_so() -> None:
    for outcome in collect_outcomes(_crossed, 2):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert "rank 0: batch 0 of epoch 0 of sharded loader 1, rank 1: batch 0 of epoch 0 of sharded loader 0" in str(
            outcome.message
        )


def _left_early() -> list[int]:
    """Loops that all ranks leave after two batches, and one that is gone through."""
    lockstep.init(timeout=30)
    loader = _loader(Parts((13, 4, 8)), 6)
    seen = []
    for _ in range(2):
        for batches, _batch in enumerate(loader):
            if batches == 1:
                break
        seen.append(loader.epoch)
    seen.append(len(list(loader)))
    return seen


@OVER_BOTH
def test_a_loop_may_be_left_on_all_ranks() -> None:
    assert run_ranks(_left_early, 3) == [[1, 2, 7]] * 3


def _popping(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([sample.pop("x") for sample in samples]), torch.stack([sample.pop("y") for sample in samples])


class Common(Parts):
    """The same on every rank."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"x": torch.arange(2.0) + number, "y": torch.tensor(number)} for number in range(7)])


def _popped(stream: Any) -> list[int]:
    lockstep.init(timeout=30)
    dataset = Common() if stream == "whole" else Parts((5, 2))
    loader = lockstep.shard(DataLoader(dataset, 4, collate_fn=_popping), stream=stream)
    return [len(inputs) for inputs, targets in loader if inputs.shape == (len(targets), 2)]


def test_a_collate_fn_may_change_its_samples() -> None:
    assert run_ranks(_popped, 2, "whole") == [[2, 2], [2, 1]]
    assert run_ranks(_popped, 2, "parts") == [[2, 2, 1], [2, 0, 0]]


class OfAnyKind:
    """A collate_fn that returns one thing for a batch, whatever its samples."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, samples: list[dict[str, Tensor]]) -> Any:
        if self._kind == "sparse":
            return torch.stack([sample["x"] for sample in samples]).to_sparse()
        return Awkward(self._kind, len(samples))


class Awkward:
    """What can't be copied, or on one rank can't be measured."""

    def __init__(self, kind: str, samples: int) -> None:
        self._kind, self.samples = kind, samples

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("no copies of this")

    @property
    def nbytes(self) -> int:
        if self._kind == "unmeasured" and os.environ["RANK"] == "1" and self.samples == 2:
            raise ValueError("who knows")
        return 8


def _of_any_kind(kind: str) -> int:
    lockstep.init(timeout=20)
    return len([*_loader(Parts((12, 5, 9)), 9, collate_fn=OfAnyKind(kind))])


@pytest.mark.parametrize("kind", ["sparse", "uncopied"])
def test_batches_may_be_sparse_or_can_not_be_copied(kind: str) -> None:
    assert run_ranks(_of_any_kind, 3, kind) == [4, 4, 4]


def test_a_batch_that_can_not_be_measured_is_an_error_on_every_rank() -> None:
    for rank, outcome in enumerate(collect_outcomes(_of_any_kind, 3, "unmeasured")):
        assert outcome.error == "ValueError", outcome
        assert rank == 1 or "rank 1: who knows" in str(outcome.message), outcome


def _in_order() -> list[float] | None:
    world = lockstep.init(timeout=30)
    loader = _loader(Parts((5, 2)), 4)
    outputs = [batch["x"][:, 0] for batch in loader]
    gathered = world.gather_in_order(outputs, loader)
    return None if gathered is None else gathered.tolist()


def test_outputs_come_in_the_order_of_the_batches() -> None:
    assert run_ranks(_in_order, 2) == [[0, 1, 100, 101, 2, 3, 4], None]


def _refused(stream: Any, slices: int | None, mapped: bool) -> None:
    lockstep.init(timeout=20)
    dataset: Any = TensorDataset(torch.arange(9)) if mapped else Parts()
    lockstep.shard(DataLoader(dataset, 6), stream=stream, slices=slices)


@pytest.mark.parametrize(
    ("stream", "slices", "mapped", "words"),
    [
        ("parts", None, True, "stream='parts': the dataset TensorDataset is not a stream"),
        ("some", None, False, "stream='some': expected \"whole\""),
        ("parts", 4, False, 'slices=4: stream="parts" gives each rank a part of this stream'),
    ],
)
def test_what_can_not_be_is_refused(stream: Any, slices: int | None, mapped: bool, words: str) -> None:
    for outcome in collect_outcomes(_refused, 2, stream, slices, mapped):
        assert outcome.error == "ValueError", outcome.traceback
        assert words in str(outcome.message)


def _length() -> str:
    lockstep.init(timeout=20)
    with pytest.raises(TypeError) as error:
        len(_loader(Parts()))
    return str(error.value)


def test_it_has_no_length() -> None:
    assert run_ranks(_length, 1) == ["a stream of Parts has no length"]
