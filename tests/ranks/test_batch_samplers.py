"""shard() of a loader whose batch sampler is the user's: the batches of one process, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import lockstep
from lockstep.data import batches as drawn_batches
from tests.backends import BOTH, EACH_BACKEND
from tests.digests import digest_of
from tests.harness import RanksFailed, collect_outcomes, run_ranks
from tests.launching import run
from tests.selection import each_value

pytestmark = EACH_BACKEND

SAMPLES = 41


class Augmented(Dataset[Tensor]):
    """An index, and a number that is drawn."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item() + random.random()])


class Buckets(Sampler[list[int]]):
    """Batches of up to eight samples and now and then of none, without a length; it draws from generators of every
    kind, its own and others, also between batches."""

    def __init__(self, rank: int) -> None:
        self._python = random.Random(rank)
        self._numpy, self._legacy = np.random.default_rng(rank), np.random.RandomState(rank)
        self.sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(rank))

    def __iter__(self) -> Iterator[list[int]]:
        left = list(self.sampler)
        self._python.shuffle(left)
        while left:
            draws: list[Any] = [self._numpy.integers(3), self._legacy.randint(3), torch.randint(3, ()).item()]
            size = sum(map(int, draws)) + random.randrange(2) + int(np.random.randint(2))
            yield left[:size]
            left = left[size:]


class Remembers(Sampler[list[int]]):
    """Batches that depend on how many passes there were, of which nobody but itself knows."""

    def __init__(self, rank: int) -> None:
        self._passes = 100 * rank

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[list[int]]:
        self._passes += 1
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._passes)).tolist()
        return iter([order[begin : begin + 3] for begin in range(0, SAMPLES, 3)])

    def state_dict(self) -> dict[str, int]:
        return {"passes": self._passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._passes = state["passes"]


class ByEpoch(BatchSampler):
    """A subclass of torch's, shuffled by its own set_epoch, as scripts for several ranks have it."""

    def __init__(self, rank: int) -> None:
        super().__init__(range(SAMPLES), 2 + rank, drop_last=False)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.Random(self._epoch).shuffle(batches)
        return iter(batches)


class ForOneReplica(DistributedSampler[Any]):
    """Batches of its own, in a class that would divide them among replicas, made for one."""

    def __init__(self, rank: int) -> None:
        super().__init__(range(SAMPLES), num_replicas=1, rank=0, seed=rank)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        while order:
            size = 1 + order[0] % 5
            yield order[:size]
            order = order[size:]


class Itself(Sampler[list[int]]):
    """Its own iterator, which each iter() sets back."""

    def __init__(self, rank: int) -> None:
        self._begin, self._next = rank, 0

    def __iter__(self) -> Itself:
        self._next = self._begin
        return self

    def __next__(self) -> list[int]:
        batch = list(range(self._next, min(SAMPLES, self._next + 3)))
        self._next += 3
        if not batch:
            raise StopIteration
        return batch


LIST = [[3, 1, 2], [0], [], [4, 5, 6, 7, 8], [40, -1]]


def _sampler(kind: str, rank: int) -> Any:
    kinds: dict[str, Any] = {
        "buckets": Buckets,
        "remembers": Remembers,
        "by epoch": ByEpoch,
        "one replica": ForOneReplica,
        "itself": Itself,
    }
    return LIST if kind == "list" else kinds[kind](rank)


def _seen(
    kind: str, workers: int, stop: int | None = None, state: dict[str, Any] | None = None, portion: int = 4
) -> tuple[list[list[list[list[float]]]], dict[str, Any] | None]:
    """The rest of three epochs, batch by batch, and the state after batch ``stop`` of the second."""
    drawn_batches._PORTION = portion
    world = lockstep.init(timeout=30, seed=0 if state is None else 99)  # the state's seed wins
    common = torch.get_rng_state(), random.getstate()
    loader: Any = DataLoader(Augmented(), batch_sampler=_sampler(kind, world.rank), num_workers=workers)
    sharded = lockstep.shard(loader)
    if state is not None:
        sharded.load_state_dict(state)
        assert sharded.state_dict() == state
    epochs: list[list[list[list[float]]]] = []
    kept = None
    for epoch in range(sharded.epoch, 3):
        epochs.append([])
        for batch in sharded:
            share = world.share
            assert share is not None
            assert share.local_samples == len(batch)
            assert world.mean(batch.mean() if len(batch) else float("nan")) < SAMPLES
            epochs[-1].append(batch.tolist())
            if (epoch, sharded.state_dict()["cursor"]["batches"]) == (1, stop):
                kept = json.loads(json.dumps(sharded.state_dict()))
        assert sharded.state_dict()["cursor"] == {"epoch": epoch + 1, "samples": 0, "batches": 0, "in_epoch": False}
    assert common[1] == random.getstate(), "drawing leaves the script's generators alone"
    assert world.world_size > 1 or common[0].equal(torch.get_rng_state())
    return epochs, kept


def _joined(ranks: list[Any]) -> list[list[list[list[float]]]]:
    """Global batches, by epoch: the ranks' shares behind each other."""
    return [
        [[*itertools.chain.from_iterable(parts)] for parts in zip(*epochs, strict=True)]
        for epochs in zip(*[rank[0] for rank in ranks], strict=True)
    ]


@each_value(
    str,
    each_backend=BOTH,
    kind=("buckets", "by epoch", "remembers", "list", "one replica"),
    world_size=(2, 3),
    workers=(0, 2),
)
def test_the_global_batches_are_those_of_one_process(kind: str, world_size: int, workers: int) -> None:
    alone = run_ranks(_seen, 1, kind, 0, None, None, 256)
    expected = _joined(alone)
    assert _joined(run_ranks(_seen, world_size, kind, workers)) == expected
    indices = [[[int(sample[0]) for sample in batch] for batch in epoch] for epoch in expected]
    if kind == "list":
        assert indices == [[[3, 1, 2], [0], [4, 5, 6, 7, 8], [40, -1]]] * 3
    else:
        assert all(sorted(itertools.chain(*epoch)) == list(range(SAMPLES)) for epoch in indices)
        assert indices[0] != indices[1] != indices[2]


def test_a_sampler_that_is_its_own_iterator_is_begun_once_in_a_pass() -> None:
    expected = [[*range(first, min(SAMPLES, first + 3))] for first in range(0, SAMPLES, 3)]
    joined = _joined(run_ranks(_seen, 2, "itself", 0))
    assert [[[int(sample[0]) for sample in batch] for batch in epoch] for epoch in joined] == [expected] * 3


@each_value(str, each_backend=BOTH, kind=("buckets", "remembers", "by epoch"), world_size=(1, 3, 2), stop=(1, 5, 9))
def test_a_pass_goes_on_at_the_same_batch_on_any_number_of_ranks(kind: str, world_size: int, stop: int) -> None:
    ranks = run_ranks(_seen, 2, kind, 0, stop)
    state = ranks[0][1]
    assert state is not None
    assert state == ranks[1][1], "the state is the same on every rank"
    _, second, third = _joined(ranks)
    workers = 2 * (world_size == 3)
    assert _joined(run_ranks(_seen, world_size, kind, workers, None, state, 3)) == [second[stop:], third]


def _between_passes(kind: str) -> None:
    """A state that was saved between two passes, also of a sampler with a memory."""
    world = lockstep.init(timeout=30)

    def make() -> Any:
        return lockstep.shard(
            DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=_sampler(kind, world.rank))
        )

    whole, again = make(), make()
    for _ in whole:
        pass
    state = json.loads(json.dumps(whole.state_dict()))
    again.load_state_dict(state)
    assert again.state_dict() == state
    for one, two in zip(whole, again, strict=True):
        assert torch.equal(one[0], two[0])


@pytest.mark.parametrize("kind", ["remembers", "buckets"])
def test_a_run_goes_on_between_two_passes(kind: str) -> None:
    run_ranks(_between_passes, 2, kind)


def _after_a_pass_that_is_over(kind: str, how: str) -> None:
    """A state that was saved where a pass is over, and the loader has not moved to the next epoch yet."""
    world = lockstep.init(timeout=30)
    drawn_batches._PORTION = 3
    states: list[dict[str, Any]] = []

    def make() -> Any:
        return lockstep.shard(
            DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=_sampler(kind, world.rank))
        )

    whole, again, later = make(), make(), make()
    register = whole._register_end_of_pass_hook if how == "at its end" else whole._register_early_end_hook
    handle = register(lambda: states.append(json.loads(json.dumps(whole.state_dict()))))
    for number, _ in enumerate(whole):
        if how == "left early" and number == 1:
            break
    handle.remove()
    (state,) = states
    assert (state["cursor"]["epoch"], state["cursor"]["in_epoch"], state["over"]) == (0, True, True)
    for each in (again, later):
        each.load_state_dict(state)
        assert each.state_dict() == state
        assert each.batches_left == 0
    assert [*again] == []
    assert again.state_dict() == whole.state_dict()
    later.load_state_dict(again.state_dict())
    for _ in range(2):
        batches = [[batch.tolist() for (batch,) in loader] for loader in (whole, again, later)]
        assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize("how", ["at its end", "left early"])
@pytest.mark.parametrize("kind", ["remembers", "buckets"])
def test_the_epoch_after_a_pass_that_was_over_is_not_the_same_one_again(kind: str, how: str) -> None:
    run_ranks(_after_a_pass_that_is_over, 2, kind, how)


class Own(Sampler[list[int]]):
    """Draws from a generator that nobody can seed, so that no epoch is drawn twice."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.SystemRandom().sample(range(SAMPLES), SAMPLES)
        return iter([order[:20], order[20:]])


class Shrinks(Sampler[list[int]]):
    """Has fewer batches each time."""

    def __init__(self) -> None:
        self.left = 8

    def __iter__(self) -> Iterator[list[int]]:
        self.left -= 4
        return iter([[number] for number in range(self.left)])


def _resumed_elsewhere(make: type[Any]) -> None:
    lockstep.init(timeout=20)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=make()))
    state: dict[str, Any] = {}
    for _ in loader:
        state = loader.state_dict()
        break
    sampler = make()
    if isinstance(sampler, Shrinks):
        sampler.left = 4
    again = lockstep.shard(DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=sampler))
    again.load_state_dict(state)
    list(again)


@pytest.mark.parametrize("make", [Own, Shrinks])
def test_a_sampler_that_draws_other_batches_at_a_resume_is_refused(make: type[Any]) -> None:
    for outcome in collect_outcomes(_resumed_elsewhere, 2, make):
        assert outcome.error == "CheckpointMismatch", outcome.traceback
        words = (
            f"rank 0: the batch sampler {make.__name__} drew other batches for epoch 0 than before it was interrupted"
        )
        assert words in str(outcome.message)


class Yields(Sampler[Any]):
    """Yields what it is given; an exception is raised."""

    def __init__(self, *batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch


def _failing(batches: tuple[Any, ...], costs: Any) -> list[list[int]]:
    drawn_batches._PORTION = 2
    lockstep.init(timeout=20)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_sampler=Yields(*batches))
    seen = []
    try:
        for (batch,) in lockstep.shard(loader, costs=costs):
            seen.append(batch.tolist())
    except Exception as error:
        raise type(error)(f"after {len(seen)} batches: {error}") from error
    return seen


@pytest.mark.parametrize(
    ("batches", "costs", "words"),
    [
        ((ZeroDivisionError("no weights"),), None, "after 0 batches: rank 0: the batch sampler Yields could not draw "
         "the batches from 0 on of epoch 0: ZeroDivisionError: no weights"),
        (([0, 1],) * 5 + (OSError("gone"),), None, "after 1 batches: rank 0: the batch sampler Yields could not draw "
         "the batches from 3 on of epoch 0: OSError: gone"),
        ((3,), None, "TypeError: batch 0 is 3; expected the indices of its samples"),
        (([0, 1.5],), None, "TypeError: it gave 1.5; lockstep.shard needs whole numbers as indices"),
        ((["a"],), None, "TypeError: it gave 'a'"),
        (([0, 2**63],), None, "ValueError: it gave 9223372036854775808; lockstep.shard sends indices as"),
        (([0, 1, 2],), "sampler", "batch 0 is no pair (indices, costs)"),
        ((([0, 1], [2.0]),), "sampler", "ValueError: batch 0 has 2 samples and 1 costs"),
        ((([0, 1], [2.0, -1]),), "sampler", "ValueError: batch 0 has -1.0 for sample 1"),
        (([0, 1],), len, "TypeError"),
        (([0, 9],), [1.0] * 8, "batch 0: costs= has 8 costs, and the sampler gave the index 9"),
    ],
    ids=str,
)  # fmt: skip
def test_what_goes_wrong_on_rank_0_is_the_same_error_on_every_rank(
    batches: tuple[Any, ...], costs: Any, words: str
) -> None:
    errors = set()
    for outcome in collect_outcomes(_failing, 3, batches, costs):
        assert words in str(outcome.message), outcome
        errors.add((outcome.error, str(outcome.message).replace(f"rank {outcome.rank} of 3", "")))
    assert len(errors) == 1, errors


def test_the_death_of_another_loaders_worker_is_not_a_batch_samplers_failure() -> None:
    death = "DataLoader worker (pid 4711) is killed by signal: Killed. "  # as torch raises it wherever rank 0 is
    drawing, other = collect_outcomes(_failing, 2, ([0, 1], RuntimeError(death)), None)
    assert (drawing.error, drawing.message) == ("RuntimeError", f"after 0 batches: {death}"), "and nothing else is said"
    assert f"rank 0: RuntimeError: {death.strip()}" in str(other.message)


def _apart() -> None:
    drawn_batches._PORTION = 2
    world = lockstep.init(timeout=20)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=[[0, 1]] * 9))
    batches = iter(loader)
    next(batches)
    if world.rank == 1:
        batches = iter(loader)
    for _ in batches:
        pass


def test_ranks_whose_loops_are_apart_are_told_at_the_next_portion() -> None:
    for outcome in collect_outcomes(_apart, 2):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert "at different places (rank 0: batch 3 of epoch 0 of sharded loader 0, rank 1: batch 0 of epoch 1" in str(
            outcome.message
        )


class Endless(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return (([number % SAMPLES] * (1 + number % 4)) for number in itertools.count())


def _what_it_has() -> None:
    world = lockstep.init(timeout=20)
    data = TensorDataset(torch.arange(SAMPLES))
    endless = lockstep.shard(DataLoader(data, batch_sampler=Endless(), num_workers=1))
    taken = [batch.tolist() for (batch,) in itertools.islice(endless, 700)]
    sizes = [world.all_reduce(len(batch)) for batch in taken[-4:]]
    assert sizes == [1, 2, 3, 4]
    with pytest.raises(TypeError, match="the batch sampler Endless has no length"):
        len(endless)
    assert endless.batch_size is None
    assert repr(endless) == "<sharded loader of TensorDataset, in batches of Endless>"
    remembers = lockstep.shard(DataLoader(data, batch_sampler=_sampler("remembers", world.rank)))
    assert (len(remembers), remembers.batches_left) == (14, 14)
    left = []
    for _ in remembers:
        left.append(remembers.batches_left)
    assert left == [*range(13, -1, -1)]
    by_epoch = lockstep.shard(DataLoader(data, batch_sampler=_sampler("by epoch", world.rank)))
    assert len(by_epoch) == 21, "rank 0's word, on every rank"
    by_epoch.batch_sampler.set_epoch(3)
    listed = lockstep.shard(DataLoader(data, batch_sampler=LIST))
    with pytest.warns(UserWarning, match="set_epoch"):
        listed.batch_sampler.set_epoch(3)
    with pytest.raises(ValueError, match="costs="):
        lockstep.shard(DataLoader(data, batch_sampler=LIST), costs=[1.0])


def test_what_a_loader_with_a_batch_sampler_tells() -> None:
    run_ranks(_what_it_has, 2)


class Priced(Buckets):
    """Yields costs beside the indices."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch, [_cost(index) for index in batch]


def _cost(index: int) -> float:
    return float(1 + (index * 37) % 64) ** 2


COSTS: dict[str, Any] = {
    "none": None,
    "table": [_cost(index) for index in range(SAMPLES)],
    "function": _cost,
    "sampler": "sampler",
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _trained(costs: str, batched: str, shares: list[float] | None, workers: int) -> list[list[float]]:
    drawn_batches._PORTION = 3
    world = lockstep.init(timeout=30)
    numbers = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.arange(SAMPLES),
        torch.randn(SAMPLES, 3, generator=numbers).double(),
        torch.randn(SAMPLES, 1, generator=numbers).double(),
    )
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True}
    if batched == "sampler":
        options = {"batch_sampler": (Priced if costs == "sampler" else Buckets)(world.rank)}
    loader = lockstep.shard(DataLoader(data, num_workers=workers, **options), shares=shares, costs=COSTS[costs])
    model = lockstep.replicate(_model().to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _, inputs, targets in itertools.chain(loader, loader):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append([world.mean(loss), *(float(param.detach().sum()) for param in model.parameters())])
    return found


@each_value(
    str,
    on_gpus=True,
    each_backend=BOTH,
    costs=("table", "function", "sampler", "none"),
    batched=("sampler", "size", "sampler", "sampler"),
    world_size=(2, 3),
    workers=(0, 1),
)
def test_means_are_those_of_one_process(costs: str, batched: str, world_size: int, workers: int) -> None:
    if costs == "sampler" and batched == "size":
        with pytest.raises(RanksFailed, match="this DataLoader has none of its own: give it batch_sampler="):
            run_ranks(_trained, world_size, costs, batched, None, workers)
        return
    found = run_ranks(_trained, 1, "sampler" if costs == "sampler" else "none", batched, None, 0)[0]
    alone = torch.tensor(found, dtype=torch.float64)
    shares = [3.0, 1.0] if world_size == 2 else None
    for found in run_ranks(_trained, world_size, costs, batched, shares, workers):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), alone, rtol=1e-9, atol=1e-9)


def _divided(costs: str, length: int, batch_size: int) -> list[list[int]]:
    drawn_batches._PORTION = 3
    lockstep.init(timeout=30)
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size=batch_size, shuffle=True)
    return [batch.tolist() for (batch,) in lockstep.shard(loader, costs=COSTS[costs])]


def test_ranks_have_parts_of_equal_cost_in_the_order_of_the_batch() -> None:
    whole = run_ranks(_divided, 1, "none", SAMPLES, 13)[0]
    ranks = run_ranks(_divided, 3, "table", SAMPLES, 13)
    assert run_ranks(_divided, 3, "function", SAMPLES, 13) == ranks, "whoever tells the costs"
    uneven = False
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert sorted(itertools.chain(*parts)) == sorted(batch), "the batch is the same, and each sample has one rank"
        assert all(part == sorted(part, key=batch.index) for part in parts)
        loads = [sum(map(_cost, part)) for part in parts]
        by_number = [sum(map(_cost, batch[begin : begin + 5])) for begin in range(0, len(batch), 5)]
        if len(batch) == 13:
            assert max(loads) <= 1.2 * sum(loads) / 3, (loads, by_number)
            assert max(loads) <= max(by_number)
        uneven |= len({len(part) for part in parts}) > 2
    assert uneven, "the costs are such that the numbers of samples differ by more than one"
    assert [len(part[-1]) for part in ranks] == [1, 1, 0], "two samples for three ranks"


def _augmented(costs: str, workers: int, state: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """The samples of each batch of what is left of an epoch, and the state after the second one."""
    drawn_batches._PORTION = 2
    lockstep.init(timeout=30)
    given = DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=workers)
    loader = lockstep.shard(given, costs=COSTS[costs])
    if state is not None:
        loader.load_state_dict(state)
    seen, states = [], []
    for batch in loader:
        seen.append(batch.tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    return seen, states[1]


@pytest.mark.parametrize("costs", ["table", "function"])
def test_samples_are_augmented_alike_in_whatever_part_and_a_pass_goes_on(costs: str) -> None:
    def batches(ranks: list[Any]) -> list[list[Any]]:
        return [sorted(itertools.chain(*parts)) for parts in zip(*[seen for seen, _ in ranks], strict=True)]

    expected = batches(run_ranks(_augmented, 1, "none", 0, None))
    ranks = run_ranks(_augmented, 3, costs, 1, None)
    assert batches(ranks) == expected
    assert batches(run_ranks(_augmented, 2, costs, 0, ranks[0][1])) == expected[2:]


def _sliced(costs: str, state: dict[str, Any] | None, stop: int | None) -> list[Any]:
    drawn_batches._PORTION = 3
    world = lockstep.init(timeout=30)
    numbers = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=numbers).double(), torch.randn(SAMPLES, 1).double())
    sampler: Any = (Priced if costs == "sampler" else Buckets)(world.rank)
    loader = lockstep.shard(DataLoader(data, batch_sampler=sampler), slices=4, costs=COSTS[costs])
    model = lockstep.replicate(_model())
    if state is not None:
        loader.load_state_dict(state)
    found: list[Any] = []
    for step in loader.steps():
        for inputs, targets in step:
            loss = nn.functional.mse_loss(model(inputs), targets)
            step.add_loss(loss)
            loss.backward()
        found.append([step.samples, step.loss, digest_of([param.grad for param in model.parameters()])])
        model.zero_grad()
        if step.number + 1 == stop:
            return [found, json.loads(json.dumps(loader.state_dict()))]
    return [found, None]


@each_value(str, each_backend=BOTH, costs=("table", "function", "sampler", "none"), world_size=(2, 3))
def test_slices_have_the_same_bits_on_any_number_of_ranks(costs: str, world_size: int) -> None:
    (expected,) = run_ranks(_sliced, 1, costs, None, None)
    assert min(samples for samples, _, _ in expected[0]) < 4 < max(samples for samples, _, _ in expected[0])
    begun = run_ranks(_sliced, world_size, costs, None, 4)
    assert all(rank == begun[0] for rank in begun)
    assert begun[0][0] == expected[0][:4]
    rest = run_ranks(_sliced, 5 - world_size, costs, begun[0][1], None)
    assert all(rank[0] == expected[0][4:] for rank in rest)


def _checkpointed(folder: Path, kind: str, stop: int | None) -> list[list[int]]:
    """The batches of two epochs, or as far as a run comes that resumes and is left after step ``stop``."""
    drawn_batches._PORTION = 3
    world = lockstep.init(timeout=30)
    data = TensorDataset(torch.arange(SAMPLES), torch.arange(float(SAMPLES))[:, None])
    loader = lockstep.shard(DataLoader(data, batch_sampler=_sampler(kind, world.rank)))
    model = lockstep.replicate(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    seen = []
    for _ in saved.epochs(2):
        for indices, inputs in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            seen.append(indices.tolist())
            if saved.step == stop:
                saved.save()
                return seen
    return seen


@pytest.mark.parametrize("kind", ["remembers", "buckets"])
def test_a_run_resumes_from_a_checkpoint_on_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    def joined(ranks: list[Any]) -> list[list[int]]:
        return [[*itertools.chain(*parts)] for parts in zip(*ranks, strict=True)]

    expected = joined(run_ranks(_checkpointed, 1, tmp_path / "whole", kind, None))
    stop = len(expected) // 2 + 2  # in the second epoch
    begun = joined(run_ranks(_checkpointed, 2, tmp_path / "run", kind, stop))
    assert begun == expected[:stop]
    assert joined(run_ranks(_checkpointed, 3, tmp_path / "run", kind, None)) == expected[stop:]


def _short_of_memory(costs: str) -> list[list[float]]:
    """Slices of at most two samples fit, so batches are cut again."""
    drawn_batches._PORTION = 3
    world = lockstep.init(timeout=30)
    numbers = torch.arange(float(SAMPLES), dtype=torch.float64)[:, None]
    loader = lockstep.shard(
        DataLoader(TensorDataset(numbers), batch_sampler=Buckets(world.rank)), slices="auto", costs=COSTS[costs]
    )
    model = lockstep.replicate(nn.Linear(1, 1).double())
    found = []
    for step in loader.steps():
        for (inputs,) in step:
            with step.attempt():
                if len(inputs) > 2:
                    raise MemoryError
                model(inputs).mean().backward()
                step.add_loss(inputs.mean())
        model.zero_grad()
        found.append([step.samples, round(step.loss, 9)])
    return found


@pytest.mark.parametrize("costs", ["table", "function"])
def test_a_drawn_batch_is_cut_again_when_memory_runs_out(costs: str) -> None:
    (expected,) = run_ranks(_short_of_memory, 1, costs)
    assert max(samples for samples, _ in expected) > 4, "two slices did not do"
    assert run_ranks(_short_of_memory, 2, costs) == [expected] * 2


def _unlike() -> None:
    world = lockstep.init(timeout=20)
    costs = [1.0 + (world.rank == 1)] * SAMPLES
    lockstep.shard(DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=8), costs=costs)


def test_costs_are_the_same_on_every_rank() -> None:
    for outcome in collect_outcomes(_unlike, 2):
        assert outcome.error == "ValueError", outcome.traceback
        assert "costs must be the same on every rank, but it is rank 0: a table with digest" in str(outcome.message)


def _side_by_side(other: Any) -> None:
    lockstep.init(timeout=20)
    model = lockstep.replicate(nn.Linear(1, 1))
    data = TensorDataset(torch.ones(8, 1))
    loaders = [lockstep.shard(DataLoader(data, batch_size=4), costs=costs) for costs in ([1, 2, 3, 9] * 2, other)]
    for (one,), (two,) in zip(*loaders, strict=True):
        (model(one).mean() + model(two).mean()).backward()


@pytest.mark.parametrize(("other", "fits"), [([1, 2, 3, 9] * 2, True), ([1] * 8, False), (None, False)], ids=str)
def test_two_loaders_side_by_side_weigh_alike_or_are_refused(other: Any, fits: bool) -> None:
    for outcome in collect_outcomes(_side_by_side, 2, other):
        assert outcome.ok if fits else outcome.error == "LockstepError", outcome.traceback
        assert fits or "weigh differently" in str(outcome.message)


_JOB = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import lockstep

world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
costs = [1.0, 1.0, 9.0, 7.0] * 50
loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(200, 1)), batch_size=4), costs=costs)
for epoch in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
"""


def test_the_summary_says_what_parts_of_equal_cost_have_won(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_JOB)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True, LOCKSTEP_QUIET="")
    assert done.code == 0, done
    # By number one rank has 16 of 18; by cost they have 9 each.
    line = "parts of equal cost: in 100 global batches the costliest rank had 1.00 times the mean cost, and would have "
    assert f"{line}had 1.78 times with equal numbers of samples (44% less)" in done.err, done.err
