"""What docs/weights.md promises: any number of ranks trains what one process trains, whatever makes the mean."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import lockstep
from tests.harness import run_ranks

_CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5])


def _tokens(outputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(outputs, labels, ignore_index=2), float((labels != 2).sum())


def _class_weights(outputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(outputs, labels, weight=_CLASS_WEIGHTS), float(_CLASS_WEIGHTS[labels].sum())


def _sums(outputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum") * lockstep.world().world_size, 1.0


def _some_left_out(samples: list[tuple[Tensor, Tensor]]) -> Any:
    left = [sample for sample in samples if sample[1] != 1]
    return default_collate(left) if left else (torch.empty(0, 5), torch.empty(0, dtype=torch.int64))


def _dropped(outputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(outputs, labels), float(len(labels))


def _trained() -> dict[str, list[float]]:
    """The weights and the last loss after two epochs, by what makes the mean."""
    world = lockstep.init()
    drawn = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(22, 5, generator=drawn), torch.randint(0, 3, (22,), generator=drawn))
    losses: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, float]]] = {
        "tokens": _tokens, "class weights": _class_weights, "sums": _sums, "dropped": _dropped,
    }  # fmt: skip
    trained = {}
    for name, loss_of in losses.items():
        torch.manual_seed(0)
        model = lockstep.replicate(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        collate = _some_left_out if name == "dropped" else None
        loader = lockstep.shard(DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate))
        total = 0.0
        for inputs, labels in itertools.chain(loader, loader):
            counted = loss_of(torch.zeros(len(labels), 3), labels)[1]
            world.share = lockstep.BatchShare(counted, world.all_reduce(counted))
            loss, _ = loss_of(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = world.mean(loss)
        assert world.share is None, "what was said of the last batch goes with it"
        weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
        trained[name] = [*weights, total]
    return trained


def test_whatever_makes_the_mean_any_number_of_ranks_trains_what_one_does() -> None:
    alone = run_ranks(_trained, 1)[0]
    for world_size in (2, 3):
        for rank in run_ranks(_trained, world_size):
            for name, values in rank.items():
                assert values == pytest.approx(alone[name], rel=1e-4, abs=1e-6), f"{name} on {world_size} ranks"


# Several loaders.


class Numbers(Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


def _loaders() -> dict[str, str]:
    """How each way of reading two loaders ends on this rank."""
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(nn.Linear(2, 1))

    def make(length: int, batch_size: int) -> lockstep.ShardedLoader:
        return lockstep.shard(DataLoader(Numbers(length), batch_size))

    def joint(one: Tensor, two: Tensor) -> None:
        (model(one).mean() + model(two).mean()).backward()

    def side_by_side() -> None:
        for one, two in zip(make(14, 7), make(10, 5), strict=True):
            joint(one, two)

    def side_by_side_mean() -> None:
        for one, _ in zip(make(14, 7), make(10, 5), strict=True):
            world.mean(model(one).mean())

    def in_turns() -> None:
        second = iter(make(12, 5))
        for one in make(6, 3):
            joint(one, next(second))

    def cycled() -> None:
        """The second one's iterator is made anew inside the first one's loop; their last batches are the odd ones."""
        short = make(8, 4)
        second = iter(short)
        for one in make(15, 4):
            try:
                two = next(second)
            except StopIteration:
                second = iter(short)
                two = next(second)
            joint(one, two)

    def evenly() -> None:
        for one, two in zip(make(14, 6), make(10, 4), strict=False):
            if len(one) == 3:
                joint(one, two)
                world.mean(model(one).mean())
        for one, two in zip(make(14, 7), make(14, 7), strict=True):
            joint(one, two)

    def evaluation_of_two() -> None:
        model.eval()
        for one, two in zip(make(14, 7), make(10, 5), strict=True):
            with torch.no_grad():
                world.mean(model(one).mean(), samples=len(one))
                model(two)
        model.train()

    def said() -> None:
        for one, two in zip(make(14, 7), make(10, 5), strict=True):
            for batch in (one, two):
                world.share = lockstep.BatchShare(len(batch), world.all_reduce(len(batch)))
                model(batch).mean().backward()

    def one_inside_the_other() -> None:
        for one in make(14, 7):
            for two in make(10, 5):
                model(two).mean().backward()
                world.mean(model(two).mean())
                assert world.share == lockstep.BatchShare(len(two), 5)
            assert world.share == lockstep.BatchShare(len(one), 7)
            model(one).mean().backward()

    def one_after_the_other() -> None:
        for batch in make(7, 7):
            del batch
            break
        kept = iter(make(7, 7))
        next(kept)
        for two in make(10, 5):
            model(two).mean().backward()
            world.mean(model(two).mean())

    def evaluation_between_steps() -> None:
        """Their iterators begin before the loop and in its first batch; batches come before and after the backward."""
        validation, other = iter(make(15, 5)), make(18, 3)
        late = None
        for one in make(12, 4):
            late = iter(other) if late is None else late
            loss = model(one).mean()
            with torch.no_grad():
                model(next(validation))
            loss.backward()
            with torch.no_grad():
                model(next(late)) + model(next(late))

    def with_a_teacher() -> None:
        for one, two in zip(make(14, 7), make(10, 5), strict=True):
            with torch.no_grad():
                taught = model(two)
            (model(one).mean() + (model(two) - taught).mean()).backward()

    ended = {}
    for way in (
        side_by_side, side_by_side_mean, in_turns, cycled, with_a_teacher, evenly, evaluation_of_two, said,
        one_inside_the_other, one_after_the_other, evaluation_between_steps,
    ):  # fmt: skip
        try:
            way()
            ended[way.__name__] = "right"
        except lockstep.LockstepError as error:
            ended[way.__name__] = str(error)
        model.zero_grad()
    return ended


def test_two_loaders_in_one_step_are_exact_or_refused() -> None:
    for rank, ended in enumerate(run_ranks(_loaders, 2)):
        refused = [name for name, words in ended.items() if words != "right"]
        assert refused == ["side_by_side", "side_by_side_mean", "in_turns", "cycled", "with_a_teacher"], ended
        shares = "batch_size=7> (4 of 7 samples)", "batch_size=5> (3 of 5 samples)"
        if rank == 0:
            assert all(words in ended["side_by_side"] for words in shares)
        assert "this backward meets batches of several sharded loaders" in ended["side_by_side"]
        assert "World.mean() without samples= meets" in ended["side_by_side_mean"]


def _averaged(order: str) -> list[list[float]]:
    """Train, and evaluate a plain average of the weights on one batch of another loader between two steps."""
    lockstep.init(timeout=60)
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(3, 1, dtype=torch.float64))
    average = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [TensorDataset(torch.randn(length, 3, dtype=torch.float64)) for length in (29, 45)]
    train, other = (lockstep.shard(DataLoader(each, batch_size=size)) for each, size in zip(data, (8, 5), strict=True))
    validation = iter(other) if order != "begun inside" else None
    weights = []
    batches = iter([*train]) if order == "a list" else iter(train)
    for (inputs,) in batches:
        validation = iter(other) if validation is None else validation
        if order == "before the forward":
            with torch.no_grad():
                average(next(validation)[0])
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if order == "before the step":
            with torch.no_grad():
                average(next(validation)[0])
        optimizer.step()
        if order in ("after the step", "begun inside", "a list"):
            with torch.no_grad():
                average(next(validation)[0])
        weights.append(model.weight.flatten().tolist())
    return weights


@pytest.mark.parametrize("order", ["before the forward", "before the step", "after the step", "begun inside", "a list"])
def test_a_batch_that_only_another_module_had_has_no_part_in_a_step(order: str) -> None:
    alone = run_ranks(_averaged, 1, order)[0]
    for weights in run_ranks(_averaged, 2, order):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)


# Batches that are not what their slices were.


def _views(samples: list[Tensor]) -> Tensor:
    return torch.stack([view for sample in samples for view in (sample, sample)])


def _mosaic(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples).reshape(1, -1)


def _detection(samples: list[Tensor]) -> tuple[tuple[Tensor, ...], list[dict[str, Tensor]]]:
    return tuple(samples), [{"boxes": sample[:1]} for sample in samples]


def _first_three(samples: list[Tensor]) -> dict[str, Any]:
    left = samples[:3]
    return {"inputs": torch.stack(left), "names": [str(sample) for sample in left]}


def _time_first(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples, dim=1)


def _warnings(says: bool) -> dict[str, int]:
    world = lockstep.init()
    heard = {}
    for collate in (_views, _mosaic, _detection, _first_three, _time_first):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in lockstep.shard(DataLoader(Numbers(16), 8, collate_fn=collate)):
                if says:
                    world.share = lockstep.BatchShare(1, world.world_size)
        assert all("the collate_fn made a batch of size" in str(warning.message) for warning in said)
        assert all(warning.filename == __file__ for warning in said), [warning.filename for warning in said]
        heard[collate.__name__] = len(said)
    return heard


def test_a_collate_fn_that_seems_to_drop_samples_is_told_of_once() -> None:
    silent = {"_views": 0, "_detection": 0, "_time_first": 0}
    assert run_ranks(_warnings, 2, False) == [silent | {"_mosaic": 1, "_first_three": 1}] * 2
    assert run_ranks(_warnings, 2, True) == [silent | {"_mosaic": 0, "_first_three": 0}] * 2
