"""Streams with a state of their own: kept with the position, used if it leads to the right samples, and else not."""

from __future__ import annotations

import itertools
import json
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lockstep
from tests.backends import BOTH, EACH_BACKEND
from tests.harness import collect_outcomes, run_ranks
from tests.selection import each_value

pytestmark = EACH_BACKEND

#: What was read in this process.
READ: list[int] = []


class Counts(IterableDataset[Tensor]):
    """Numbers and what is drawn for each, from where it was; by worker, and by rank if it is in parts."""

    def __init__(self, *, in_parts: bool = False, length: int = 30) -> None:
        self._in_parts, self._length = in_parts, length
        self._at = 0
        self._begins_at = 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        rank = int(os.environ["RANK"]) if self._in_parts else 0
        numbers = list(range(first, self._length - 9 * rank, step))
        self._at, self._begins_at = self._begins_at, 0
        for number in numbers[self._at :]:
            READ.append(number)
            self._at += 1
            yield torch.tensor([100.0 * rank + number, torch.rand(()).item()])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begins_at = state["at"]


class Skips(Counts):
    """Forgets two samples, as a shuffle buffer that begins empty does."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begins_at = state["at"] + 2


class BeginsAnew(Counts):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Fails(Counts):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError(*["shard_idx"] if state else [])


class NoJson(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self._at)}


class FailsToTell(Counts):
    """Can't tell its state from the fifth sample on."""

    def state_dict(self) -> dict[str, Any]:
        if self._at > 4:
            raise RuntimeError("not at a boundary")
        return super().state_dict()


class DrawsLate(Counts):
    """Draws from Python's generator as well, from the fourth batch on."""

    def __iter__(self) -> Iterator[Tensor]:
        for number, drawn in super().__iter__():
            yield torch.stack([number, drawn + (random.random() if number % 100 > 13 else 0)])


class TakesArguments(Counts):
    """A state that only its library's own loader can ask for."""

    def state_dict(self, num_samples: int) -> dict[str, Any]:  # type: ignore[override]
        raise AssertionError(num_samples)


def _loader(dataset: Any, **options: Any) -> lockstep.ShardedLoader:
    return lockstep.shard(DataLoader(dataset, 4, **options), stream="parts" if dataset._in_parts else "whole")


def _resume(
    kind: type[Counts], in_parts: bool, workers: int, states: list[Any] | None, stop: int
) -> tuple[list[list[list[float]]], list[Any], list[str], int]:
    """The batches of the rest of two epochs, the state after ``stop`` of the first, the warnings, how much was read."""
    world = lockstep.init(timeout=60)
    loader = _loader(kind(in_parts=in_parts), num_workers=workers, persistent_workers=workers > 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if states is not None:
            loader.load_state_dict(states[world.rank if in_parts else 0])
        seen: list[list[list[float]]] = []
        state, read = None, 0
        for _ in range(loader.epoch, 2):
            for batch in loader:
                seen.append(batch.tolist())
                if len(seen) == stop:
                    state = json.loads(json.dumps(loader.state_dict()))
            read = read or len(READ)
    return seen, [state], [str(each.message) for each in caught], read


def _joined(ranks: list[Any]) -> list[list[list[float]]]:
    return [[*itertools.chain.from_iterable(parts)] for parts in zip(*[rank[0] for rank in ranks], strict=True)]


@each_value(
    str,
    each_backend=BOTH,
    kind=(Counts, DrawsLate, Skips, BeginsAnew, Fails, NoJson, TakesArguments, FailsToTell),
    in_parts=(False, True),
    workers=(0, 2),
    stop=(3, 1, 5),
)
def test_a_resume_gives_the_same_batches_whatever_the_state_is_worth(
    kind: type[Counts], in_parts: bool, workers: int, stop: int
) -> None:
    before = run_ranks(_resume, 2, kind, in_parts, workers, None, stop)
    states = [rank[1][0] for rank in before]
    keeps = kind not in (NoJson, TakesArguments)
    assert all(("stream" in state) == keeps for state in states)
    after = run_ranks(_resume, 2, kind, in_parts, workers, states, 0)
    for one, two in zip(before, after, strict=True):
        assert two[0] == one[0][stop:]
    told = [after[0][2], *([after[1][2]] if in_parts else [])]
    words = {
        Skips: "led to other samples than came next before the interruption",
        BeginsAnew: "led to other samples",
        Fails: "could not be used (KeyError: 'shard_idx')",
        FailsToTell: "failed, or is not made of JSON types (RuntimeError: not at a boundary)",
        NoJson: "failed, or is not made of JSON types (TypeError: ",
    }
    for rank, messages in enumerate(told):
        if kind in words:
            assert messages, "it is said"
            assert all(words[kind] in message and f"rank {rank} of 2: " in message for message in messages)
        else:
            assert not messages
    if not workers:
        at_once = 2 if in_parts else 4
        read = {Counts: 30 - stop * at_once, Skips: 30 + at_once, BeginsAnew: 30 + at_once}
        read[FailsToTell] = 30 - min(4, stop * at_once)
        assert after[0][3] == read.get(kind, 30)


def test_a_whole_stream_goes_on_by_its_state_on_any_number_of_ranks() -> None:
    before = run_ranks(_resume, 2, Counts, False, 0, None, 5)
    assert before[0][1] == before[1][1], "the state is the same on every rank"
    for world_size in (1, 3):
        after = run_ranks(_resume, world_size, Counts, False, 0, before[0][1], 0)
        assert _joined(after) == _joined(before)[5:]
        read = [30 - 20, *[1] * (world_size - 1)]  # the others look at the first sample of the stream
        assert [rank[3] for rank in after] == read, "nothing is read again"


def _state_after_a_pass() -> int:
    lockstep.init(timeout=60)
    dataset = Counts()
    assert len([*_loader(dataset)]) == 8
    at: int = dataset.state_dict()["at"]
    return at


def test_who_only_looks_at_the_first_sample_leaves_the_state_as_it_was() -> None:
    assert run_ranks(_state_after_a_pass, 3) == [30, 0, 0]


def test_a_rank_with_another_ranks_state_counts_and_says_so() -> None:
    before = run_ranks(_resume, 2, Counts, True, 0, None, 4)
    first = before[0][1][0]
    after = run_ranks(_resume, 2, Counts, True, 0, [first, first], 0)
    assert _joined(after) == _joined(before)[4:]
    assert not after[0][2]
    assert "rank 1 of 2: the loaded position has the states of the stream on rank 0 alone" in after[1][2][0]
    assert (after[0][3], after[1][3]) == (30 - 8, 21)


class Unrepeatable(Counts):
    """Its samples are other ones at each look, and it has no state to tell."""

    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            yield sample + random.SystemRandom().random()


@pytest.mark.parametrize("in_parts", [False, True])
def test_samples_that_nobody_finds_again_are_an_error_on_every_rank(in_parts: bool) -> None:
    states = [rank[1][0] for rank in run_ranks(_resume, 1, Unrepeatable, in_parts, 0, None, 2)]
    (outcome,) = collect_outcomes(_resume, 1, Unrepeatable, in_parts, 0, states, 0)
    assert outcome.error == "CheckpointMismatch", outcome.traceback
    assert "Unrepeatable gave other samples than before the interruption, by its saved state and also from the" in str(
        outcome.message
    )


class Unreadable:
    """A sample of which nothing can be read but by its own module."""

    __slots__ = ()


class OfUnreadable(Counts):
    def __iter__(self) -> Iterator[Any]:
        return (Unreadable() for _ in super().__iter__())


def _sizes(states: list[Any] | None) -> tuple[list[int], Any, list[str], int]:
    world = lockstep.init(timeout=60)
    loader = _loader(OfUnreadable(), collate_fn=lambda samples: torch.ones(len(samples)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if states is not None:
            loader.load_state_dict(states[world.rank])
        sizes, state = [], None
        for batch in loader:
            sizes.append(len(batch))
            state = state or loader.state_dict()
    return sizes, state, [str(each.message) for each in caught], len(READ)


def test_a_state_that_can_not_be_compared_is_not_trusted() -> None:
    ((sizes, state, told, _),) = run_ranks(_sizes, 1, None)
    assert not told
    ((again, _, told, read),) = run_ranks(_sizes, 1, [state])
    assert again == sizes[1:]
    assert read == 30, "from the beginning"
    assert "leads to objects that can't be compared with the samples that came next" in told[0]


def _edited(change: str) -> None:
    lockstep.init(timeout=30)
    loader = _loader(Counts())
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    if change == "batches":
        state["cursor"]["batches"] = 1
    else:
        state["stream"]["workers"]["0"] = {"at": 3}
    again = _loader(Counts())
    again.load_state_dict(state)
    list(again)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("batches", "are not those of its number of batches"),
        ("fields", "these are not the states of a stream (KeyError"),
    ],
)
def test_states_that_do_not_belong_to_the_position_are_refused(change: str, words: str) -> None:
    for outcome in collect_outcomes(_edited, 2, change):
        assert outcome.error == "CheckpointMismatch", outcome.traceback
        assert words in str(outcome.message)


def _checkpointed(folder: str, stop: int | None) -> list[list[float]]:
    lockstep.init(timeout=60)
    model = lockstep.replicate(nn.Linear(2, 1))
    loader = _loader(Counts(in_parts=True))
    saved = lockstep.Checkpointer(folder, model=model, loader=loader)
    seen: list[list[float]] = []
    for _ in saved.epochs(1):
        for batch in loader:
            seen.append(batch[:, 0].tolist())
            if len(seen) == stop:
                saved.save()
                return seen
    return seen


def test_a_checkpoint_keeps_each_ranks_state(tmp_path: Path) -> None:
    whole = run_ranks(_checkpointed, 2, str(tmp_path / "whole"), None)
    before = run_ranks(_checkpointed, 2, str(tmp_path / "run"), 4)
    for outcome in collect_outcomes(_checkpointed, 3, str(tmp_path / "run"), None):
        assert outcome.error == "CheckpointMismatch", outcome.traceback
        assert "2 ranks had loaders in different states" in str(outcome.message)
    after = run_ranks(_checkpointed, 2, str(tmp_path / "run"), None)
    assert [one + two for one, two in zip(before, after, strict=True)] == whole


class Epochs(Counts):
    """Another order in each epoch, by set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        self._length = 10 + epoch


def _epochs() -> list[int]:
    lockstep.init(timeout=30)
    loader = _loader(Epochs())
    return [sum(len(batch) for batch in loader) for _ in range(3)]


def test_a_dataset_is_told_the_epoch() -> None:
    assert run_ranks(_epochs, 1) == [[10, 11, 12]]


class Shuffled(IterableDataset[int]):
    """Numbers in another order in each epoch, split among its workers."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        numbers = [*range(40)]
        random.Random(self._epoch).shuffle(numbers)
        info = get_worker_info()
        return iter(numbers[info.id :: info.num_workers] if info else numbers)


def _shuffled(persistent: bool, state: dict[str, Any] | None) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
    """The batches of what is left of three epochs, and a state in each of them."""
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Shuffled(), 6, num_workers=2, persistent_workers=persistent))
    if state is not None:
        loader.load_state_dict(state)
    epochs: list[list[list[int]]] = []
    states = []
    for _ in range(loader.epoch, 3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            if len(epochs[-1]) == 2:
                states.append(loader.state_dict())
    return epochs, states


@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_that_live_on_are_told_the_epoch(world_size: int) -> None:
    fresh = [epochs for epochs, _ in run_ranks(_shuffled, world_size, False, None)]
    ranks = run_ranks(_shuffled, world_size, True, None)
    assert [epochs for epochs, _ in ranks] == fresh
    assert fresh[0][0] != fresh[0][1] != fresh[0][2]
    for (epochs, _), whole in zip(run_ranks(_shuffled, world_size, True, ranks[0][1][1]), fresh, strict=True):
        assert epochs == [whole[1][2:], whole[2]]
