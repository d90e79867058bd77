"""Batches that a loop takes before its model needs them: lists, prefetchers, threads, one batch alone."""

from __future__ import annotations

import gc
import itertools
import queue
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from tests.backends import EACH_BACKEND, OVER_ALL
from tests.harness import collect_outcomes, run_ranks

pytestmark = EACH_BACKEND

Batch = list[Tensor]
_SAMPLES, _BATCH = 29, 8  # the last batch has 5


def _one_ahead(loader: Iterable[Batch]) -> Iterator[Batch]:
    batches = iter(loader)
    before = next(batches)
    for batch in batches:
        yield before
        before = batch
    yield before


def _three_at_once(loader: Iterable[Batch]) -> Iterator[Batch]:
    """As a trainer that counts tokens of all that it accumulates does."""
    batches = iter(loader)
    while window := [batch for _, batch in zip(range(3), batches, strict=False)]:
        yield from window


def _by_a_thread(loader: Iterable[Batch]) -> Iterator[Batch]:
    waiting: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in loader:
            waiting.put(batch)
        waiting.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    yield from iter(waiting.get, None)
    thread.join()


def _by_cycle(loader: Iterable[Batch]) -> Iterator[Batch]:
    yield from itertools.islice(itertools.cycle(loader), 11)


def _the_first(loader: Iterable[Batch]) -> Iterator[Batch]:
    batch = next(iter(loader))
    for _ in range(3):
        yield batch


def _twice(loader: Iterable[Batch]) -> Iterator[Batch]:
    batches = list(loader)
    yield from batches
    yield from batches[::-1]


def _some(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Not read ahead, but it begins as that does."""
    for number, batch in enumerate(loader):
        if number >= 2:
            yield batch


def _plain(loader: Iterable[Batch]) -> Iterator[Batch]:
    yield from loader


_READERS: dict[str, Callable[[Iterable[Batch]], Iterator[Batch]]] = {
    "a list": lambda loader: iter([*loader]),
    "a list, twice and backwards": _twice,
    "one ahead": _one_ahead,
    "three at once": _three_at_once,
    "a thread": _by_a_thread,
    "a cycle": _by_cycle,
    "the first": _the_first,
    "some": _some,
    "plain": _plain,
}


class _Inputs:
    """What a script does with a batch's inputs."""

    as_they_are = staticmethod(lambda inputs: inputs)
    viewed = staticmethod(lambda inputs: inputs[:, :2].unsqueeze(1).squeeze(1))
    computed = staticmethod(lambda inputs: inputs * 1.0)


def _train(
    reader: str, what: str, batch_size: int = _BATCH, shares: list[int] | None = None, drop_last: bool = False
) -> tuple[Any, Any, list[str]]:
    """The weights and the mean loss of each step, and the warnings."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(*(torch.randn(_SAMPLES, size, dtype=torch.float64) for size in (2, 1)))
    loader = lockstep.shard(DataLoader(samples, batch_size=batch_size, drop_last=drop_last), shares=shares)
    weights, losses = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for inputs, targets in _READERS[reader](loader):
                loss = ((model(getattr(_Inputs, what)(inputs)) - targets) ** 2).mean()
                losses.append(world.mean(loss))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                weights.append(model.weight.flatten().tolist())
    said = [str(each.message) for each in told]
    return weights, losses, [message for message in said if "World.mean() after the end of the loop" not in message]


@OVER_ALL
@pytest.mark.parametrize("what", ["as_they_are", "viewed"])
@pytest.mark.parametrize("reader", _READERS)
def test_it_trains_as_one_process(reader: str, what: str) -> None:
    batch_size = _SAMPLES if reader == "the first" else _BATCH
    weights, losses, told = run_ranks(_train, 1, reader, what, batch_size)[0]
    assert told == []
    for shares in (None, [2, 1]):
        for found, means, warned in run_ranks(_train, 2, reader, what, batch_size, shares):
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
            torch.testing.assert_close(means, losses, rtol=0, atol=1e-12)
            assert warned == []


@pytest.mark.parametrize("reader", ["a list", "one ahead", "a thread"])
def test_inputs_that_are_not_known_are_told_once_if_batches_weigh_differently(reader: str) -> None:
    for rank, (_, _, told) in enumerate(run_ranks(_train, 2, reader, "computed")):
        assert len(told) == 1
        assert f"rank {rank} of 2: batches of <sharded loader" in told[0]
        assert "were taken before the model needed them" in told[0]
        assert f"(here 4 of 8 samples, {3 - rank} of 5 samples)" in told[0]
        assert "world.weigh" in told[0]


def _alone(kind: str, batch_size: int) -> list[str]:
    """Steps that each take one batch and give the pass up; the warnings."""
    lockstep.init(timeout=60)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64))
    samples = TensorDataset(*(torch.randn(_SAMPLES, size, dtype=torch.float64) for size in (2, 1)))
    loader = lockstep.shard(DataLoader(samples, batch_size=batch_size, shuffle=True))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            if kind == "kept":
                inputs, targets = next(iter(loader))
                differ = model(inputs / 255) - targets
            elif kind == "dropped":
                differ = model(next(iter(loader))[0] / 255)
            elif kind == "given":
                inputs, targets = next(iter(loader))
                differ = model(inputs) - targets
                differ.mean().backward()
                differ = model(torch.zeros_like(inputs))  # of no batch
            else:
                next(iter(loader))
                differ = model(torch.zeros(1, 2, dtype=torch.float64))
            differ.square().mean().backward()
    return [str(each.message) for each in told]


@pytest.mark.parametrize("kind", ["kept", "dropped"])
def test_one_batch_of_a_pass_that_is_given_up_is_told_if_its_shares_differ(kind: str) -> None:
    for rank, told in enumerate(run_ranks(_alone, 2, kind, 5)):
        assert len(told) == 1
        assert f"rank {rank} of 2: batches of <sharded loader" in told[0]
        assert "next(iter(loader))" in told[0]
        assert f"(here {3 - rank} of 5 samples)" in told[0]
    assert run_ranks(_alone, 2, kind, 4) == [[], []], "even shares weigh alike"
    assert run_ranks(_alone, 1, kind, 5) == [[]]


@pytest.mark.parametrize("kind", ["given", "looked at"])
def test_nothing_is_said_of_a_batch_that_the_model_was_given_or_not_at_all(kind: str) -> None:
    assert run_ranks(_alone, 2, kind, 5) == [[], []]


@pytest.mark.parametrize("reader", ["a list", "one ahead", "a thread"])
def test_nothing_is_said_where_all_batches_weigh_alike(reader: str) -> None:
    weights, *_ = run_ranks(_train, 1, reader, "computed", _BATCH, None, True)[0]
    for found, _, told in run_ranks(_train, 2, reader, "computed", _BATCH, None, True):
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
        assert told == []


class _Regression(nn.Linear):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return ((nn.functional.linear(inputs, self.weight, self.bias) - targets) ** 2).mean()


def _train_by_method(reader: str, weighs: bool) -> tuple[Any, list[str]]:
    """The model is never called: it returns its loss by another method."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = _Regression(2, 1, dtype=torch.float64).to(world.device)
    lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(*(torch.randn(_SAMPLES, size, dtype=torch.float64) for size in (2, 1)))
    loader = lockstep.shard(DataLoader(samples, batch_size=_BATCH))
    weights = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for inputs, targets in _READERS[reader](loader):
                optimizer.zero_grad()
                if weighs:
                    world.weigh(len(targets))
                model.loss(inputs, targets).backward()
                optimizer.step()
                weights.append(model.weight.flatten().tolist())
    return weights, [str(each.message) for each in told]


@OVER_ALL
def test_losses_by_another_method_train_as_one_process_in_an_ordinary_pass() -> None:
    ((alone, _),) = run_ranks(_train_by_method, 1, "plain", False)
    for weights, told in run_ranks(_train_by_method, 2, "plain", False):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)
        assert told == []


@pytest.mark.parametrize("reader", ["a list", "one ahead", "a thread"])
def test_losses_by_another_method_are_told_once_if_batches_weigh_differently(reader: str) -> None:
    ((alone, _),) = run_ranks(_train_by_method, 1, reader, False)
    for rank, (_, told) in enumerate(run_ranks(_train_by_method, 2, reader, False)):
        assert ["came by another method than the model's forward" in message for message in told] == [True], told
        assert f"rank {rank} of 2: batches of <sharded loader" in told[0]
        assert f"(here 4 of 8 samples, {3 - rank} of 5 samples)" in told[0]
    # (A thread may hand out the next batch between a count and its backward.)
    for weights, told in run_ranks(_train_by_method, 2, reader, True) if reader != "a thread" else ():
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)
        assert told == []


def _stream_gone(kind: str) -> tuple[Any, list[str]]:
    lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64))
    samples: Any = TensorDataset(torch.randn(_SAMPLES, 2, dtype=torch.float64))
    if kind == "stream":
        samples = _Stream(samples)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for (inputs,) in list(lockstep.shard(DataLoader(samples, batch_size=_BATCH))):
            model(inputs * 1.0 if kind == "computed" else inputs).square().mean().backward()
    assert model.weight.grad is not None
    return model.weight.grad.tolist(), [str(each.message) for each in told]


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from (self.samples[number] for number in range(_SAMPLES))


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_list_needs_its_loader_no_more(kind: str) -> None:
    (alone, _), *_ = run_ranks(_stream_gone, 1, kind)
    for gradient, told in run_ranks(_stream_gone, 2, kind):
        torch.testing.assert_close(gradient, alone, rtol=0, atol=1e-12)
        assert told == []


def test_a_list_whose_loader_is_gone_is_told_as_well() -> None:
    for _, told in run_ranks(_stream_gone, 2, "computed"):
        assert ["batches of a sharded loader were taken" in message for message in told] == [True]


def _weighed(reader: str) -> tuple[Any, list[str]]:
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(*(torch.randn(_SAMPLES, size, dtype=torch.float64) for size in (2, 1)))
    loader = lockstep.shard(DataLoader(samples, batch_size=_BATCH))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for inputs, targets in _READERS[reader](loader):
            optimizer.zero_grad()
            loss = ((model(inputs * 1.0) - targets) ** 2).mean()
            world.weigh(len(targets))
            loss.backward()
            optimizer.step()
    return model.weight.flatten().tolist(), [str(each.message) for each in told]


@pytest.mark.parametrize("reader", ["a list", "one ahead"])
def test_what_the_script_says_counts(reader: str) -> None:
    alone = run_ranks(_weighed, 1, reader)[0][0]
    for weights, _ in run_ranks(_weighed, 2, reader):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)


def _odd(kind: str) -> tuple[Any, list[str]]:
    """Train with forwards of which one is given the loader's tensors and another is not, or all in another order."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model, second = (lockstep.replicate(nn.Linear(2, 2, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([*model.parameters(), *second.parameters()], lr=0.05)
    samples = TensorDataset(torch.randn(_SAMPLES, 2, dtype=torch.float64))
    loader = lockstep.shard(DataLoader(samples, batch_size=_BATCH))
    reader = _READERS["one ahead" if kind.endswith("one ahead") else "a list"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for (inputs,) in reader(loader):
            optimizer.zero_grad()
            if kind.startswith("two models"):
                second(model(inputs)).square().mean().backward()
            elif kind.startswith("two views"):
                (model(inputs) + model(inputs.flip(1) * 1.0)).square().mean().backward()
            elif kind.startswith("weighed first"):
                world.weigh(len(inputs))
                model(inputs).square().mean().backward()
            elif kind.startswith("a view that one rank computes"):
                model(inputs * 1.0 if world.rank else inputs).square().mean().backward()
            optimizer.step()
    return [model.weight.tolist(), second.weight.tolist()], [str(each.message) for each in told]


@pytest.mark.parametrize("reader", ["a list", "one ahead"])
@pytest.mark.parametrize("kind", ["two models", "two views", "weighed first"])
def test_forwards_of_one_backward_have_one_weight(kind: str, reader: str) -> None:
    (alone, _), *_ = run_ranks(_odd, 1, f"{kind}, {reader}")
    for weights, told in run_ranks(_odd, 2, f"{kind}, {reader}"):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)
        assert told == []


@pytest.mark.parametrize("reader", ["a list", "one ahead"])
def test_ranks_of_which_one_knows_its_batch_train_on(reader: str) -> None:
    assert len(run_ranks(_odd, 2, f"a view that one rank computes, {reader}")) == 2


def _beside() -> tuple[Any, list[float], int, list[str]]:
    """Evaluate a list of other batches in the middle of an ordinary pass."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [TensorDataset(torch.randn(length, 2, dtype=torch.float64)) for length in (_SAMPLES, 11)]
    train, other = (lockstep.shard(DataLoader(each, batch_size=_BATCH)) for each in data)
    held = list(other)
    peeked = next(iter(train))
    means = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for (inputs,) in train:
            loss = model(inputs * 1.0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for (held_out,) in held:
                    model(held_out)
            means.append(world.mean(loss))
    gone = weakref.ref(other)
    del other
    gc.collect()
    return model.weight.tolist(), means, len(peeked) + (gone() is not None), [str(each.message) for each in told]


def test_what_was_read_ahead_changes_nothing_for_an_ordinary_pass() -> None:
    (alone, means, *_), *_ = run_ranks(_beside, 1)
    for weights, found, kept, told in run_ranks(_beside, 2):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(found, means, rtol=0, atol=1e-12)
        assert kept == 1, "the list keeps no loader"
        assert told == []


class _Same:
    """A dataset whose samples are the same objects in every epoch."""

    def __init__(self) -> None:
        self.samples = [torch.full((2,), float(number), dtype=torch.float64) for number in range(_SAMPLES)]

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return self.samples[number]


def _same_objects(reader: str) -> tuple[Any, list[str]]:
    lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(_Stacks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = lockstep.shard(DataLoader(_Same(), batch_size=_BATCH, shuffle=True, collate_fn=list))  # type: ignore[arg-type]
    next(iter(loader))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            for batch in _READERS[reader](loader):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    return [each.tolist() for each in model.parameters()], [str(each.message) for each in told]


class _Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, samples: list[Tensor]) -> Tensor:
        made: Tensor = self.linear(torch.stack(samples) / _SAMPLES)
        return made


@pytest.mark.parametrize("reader", ["plain", "a list", "one ahead"])
def test_objects_that_come_again_in_each_epoch_are_of_the_last(reader: str) -> None:
    (alone, _), *_ = run_ranks(_same_objects, 1, reader)
    for weights, told in run_ranks(_same_objects, 2, reader):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)
        assert told == []


def _evaluated() -> list[float]:
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64)).eval()
    samples = TensorDataset(torch.randn(_SAMPLES, 2, dtype=torch.float64))
    batches = list(lockstep.shard(DataLoader(samples, batch_size=_BATCH)))
    with torch.no_grad():
        return [world.mean(model(inputs).mean()) for (inputs,) in batches]


def test_means_of_an_evaluation_are_those_of_one_process() -> None:
    alone = run_ranks(_evaluated, 1)[0]
    for means in run_ranks(_evaluated, 2):
        torch.testing.assert_close(means, alone, rtol=0, atol=1e-12)


def _evaluated_after(reader: str) -> tuple[list[float], list[str]]:
    """Train on a loop that reads ahead, and then evaluate batches that nobody has sharded."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(_SAMPLES, 2, dtype=torch.float64))
    loader = lockstep.shard(DataLoader(samples, batch_size=_BATCH))
    means = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for (inputs,) in _READERS[reader](loader):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            means.append(world.mean(float(world.rank)))  # it is of the last batch still
            with torch.no_grad():
                model(torch.ones(4, 2, dtype=torch.float64))
            means.append(world.mean(float(world.rank)))
    return means, [str(each.message) for each in told]


@pytest.mark.parametrize("reader", ["a list", "one ahead"])
def test_the_last_batch_of_such_a_loop_weighs_no_evaluation_after_it(reader: str) -> None:
    results = run_ranks(_evaluated_after, 2, reader)
    for means, _ in results:
        torch.testing.assert_close(means, [0.4, 0.5] * 2, rtol=0, atol=1e-12)  # shares of 3 and 2 samples, and equal
    assert [len(told) for _, told in results] == [2, 0]  # once an epoch, on rank 0
    assert all("World.mean() after the end of the loop" in text for _, told in results for text in told)


def _pairs(weighs: bool) -> Any:
    """Each forward is given a batch and the one before it."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(_SAMPLES, 2, dtype=torch.float64))
    before = None

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1, dtype=torch.float64)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return self.net(torch.cat([one, two]))  # type: ignore[no-any-return]

    model = lockstep.replicate(Pair())
    for (inputs,) in lockstep.shard(DataLoader(samples, batch_size=_BATCH)):
        if before is not None:
            model.zero_grad()
            if weighs:
                world.weigh(len(before) + len(inputs))
            model(before, inputs).square().mean().backward()
        before = inputs
    return [param.grad.flatten().tolist() for param in model.parameters() if param.grad is not None]


def test_a_forward_of_two_batches_with_unequal_shares_is_refused_unless_it_is_weighed() -> None:
    for outcome in collect_outcomes(_pairs, 2, False):
        assert outcome.error == "LockstepError", outcome.traceback
        assert re.search(
            r"rank \d of 2: this forward was given several batches of .*whose shares", outcome.message or ""
        )
    (alone,) = run_ranks(_pairs, 1, True)
    for found in run_ranks(_pairs, 2, True):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def _normalised(gathers: bool) -> list[Any]:
    """Go through a list of one loader's batches inside of a loop over another, whose shares are others."""
    world = lockstep.init(timeout=60)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()
    if not gathers:
        model = lockstep.convert_sync_batchnorm(model) if world.world_size > 1 else model
    else:
        model[1] = nn.Identity()  # type: ignore[operator]
    lockstep.replicate(model)
    data = [TensorDataset(torch.randn(length, 2, dtype=torch.float64)) for length in (12, 5)]
    other, held = (lockstep.shard(DataLoader(each, batch_size=size)) for each, size in zip(data, (12, 5), strict=True))
    replay = list(held)
    for _ in other:
        for (inputs,) in replay:
            model.zero_grad()
            rows = model(inputs)
            if gathers:
                rows = lockstep.gathered(rows)
                (rows @ rows.T).logsumexp(1).mean().backward()
            else:
                (rows * torch.tensor([1.0, 2.0, 3.0])).square().mean().backward()
    return [param.grad.flatten().tolist() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("gathers", [False, True])
def test_statistics_and_gathered_rows_weigh_as_the_batch_that_the_forward_was_given(gathers: bool) -> None:
    (alone,) = run_ranks(_normalised, 1, gathers)
    for found in run_ranks(_normalised, 2, gathers):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)
