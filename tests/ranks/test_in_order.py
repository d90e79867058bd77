"""Parts of lists and loops, and outputs that come back in order: on 1, 2 and 3 ranks the same as in one process."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import lockstep
from lockstep.comm.in_order import gathering
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks

pytestmark = EACH_BACKEND

_SAMPLES = 23
_on_ranks = pytest.mark.parametrize("world_size", [1, 2, 3])


# Parts ----------------------------------------------------------------------------------------------------------------


class Squares(Dataset[int]):
    """A map-style dataset that counts what is fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.fetched += 1
        return index * index


def _numbers(length: int) -> Iterator[int]:
    yield from range(length)


def _parts(length: int) -> dict[str, list[Any]]:
    lockstep.init()
    squares = Squares(length)
    split = lockstep.split(squares)
    found = {
        "list": [*lockstep.split([*range(length)])],
        "strided": [*lockstep.split([*range(length)], strided=True)],
        "array": [int(item) for item in lockstep.split(np.arange(length))],
        "tensor": [int(item) for item in lockstep.split(torch.arange(length))],
        "loop": [*lockstep.split(_numbers(length))],
        "dataset": [*split],
        "loader": [int(item) for batch in DataLoader(split, batch_size=2) for item in batch],
    }
    assert squares.fetched == 2 * len(split)  # of this rank's items alone, once for each pass
    assert [*split.indices] == [*lockstep.split(range(length))]
    assert len(split) == len(split.indices)
    return found


@_on_ranks
@pytest.mark.parametrize("length", [0, 2, _SAMPLES])
def test_every_item_comes_once_and_in_order(world_size: int, length: int) -> None:
    parts = run_ranks(_parts, world_size, length)
    whole = [*range(length)]
    for name in ("list", "array", "tensor"):
        assert [item for part in parts for item in part[name]] == whole, name
    for name in ("dataset", "loader"):
        assert [item for part in parts for item in part[name]] == [index * index for index in whole], name
    for name in ("strided", "loop"):
        assert [part[name] for part in parts] == [whole[rank::world_size] for rank in range(world_size)], name
    sizes = [len(part["list"]) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def _slices() -> tuple[list[list[int]], list[str], list[str]]:
    lockstep.init()
    kinds = ([*range(10, 17)], np.arange(10, 17), torch.arange(10, 17), Squares(7))
    cut = [[int(item) for item in lockstep.split(each)[1:]] for each in kinds]
    numbers = {"a": 1, "b": 2, "c": 3}
    return cut, [*lockstep.split(numbers.keys())], [key for key, _ in lockstep.split(numbers.items())]


def test_a_part_has_slices_and_keys_come_in_the_order_of_their_dict() -> None:
    first, second = run_ranks(_slices, 2)
    assert first == ([[11, 12, 13]] * 3 + [[1, 4, 9]], ["a", "c"], ["a", "c"])
    assert second == ([[15, 16]] * 3 + [[25, 36]], ["b"], ["b"])


def _refusals() -> list[str]:
    w = lockstep.init()
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    here = w.rank == 1
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: lockstep.split([*range(4 + here)])),
        (ValueError, lambda: lockstep.split(["a", "b", "c" if here else "d"])),
        (ValueError, lambda: lockstep.split([1, 2], strided=here)),
        (ValueError, lambda: lockstep.split(_numbers(4) if here else [*range(4)])),
        (TypeError, lambda: lockstep.split({"a", "b"} if here else ["a", "b"])),
        (TypeError, lambda: lockstep.split({"a": 1})),
        (TypeError, lambda: lockstep.split("files")),
        (TypeError, lambda: lockstep.split(loader)),
        (TypeError, lambda: lockstep.split(lockstep.shard(loader))),
        (TypeError, lambda: lockstep.split(3)),  # type: ignore[arg-type]
        (TypeError, lambda: len(lockstep.split(_numbers(4)))),
        (ValueError, lambda: lockstep.shard(DataLoader(lockstep.split([*range(8)]), batch_size=4))),
    ]
    said = []
    for kind, call in calls:
        with pytest.raises(kind) as refused:
            call()
        said.append(str(refused.value))
    return said


def test_what_has_no_common_order_is_refused_on_every_rank() -> None:
    expected = [
        "the number of items must be the same on every rank, but it is rank 0: 4, rank 1: 5",
        "items must be the same on every rank",
        "strided must be the same on every rank, but it is rank 0: False, rank 1: True",
        "the number of items must be the same on every rank, but it is rank 0: 4, rank 1: None",
        "lockstep.split: a set has no order that all ranks share: pass sorted(items)",
        "pass list(items) for its keys",
        "lockstep.split takes a list or another iterable, not a str: 'files'",
        "lockstep.split divides items, and a DataLoader gives batches of them",
        "lockstep.split divides items, and a ShardedLoader gives batches of them",
        "lockstep.split takes a list or another iterable, not a int",
        "without a length has no indices or length",
        "this DataLoader is over a lockstep.split, which is one rank's part already",
    ]
    for said in run_ranks(_refusals, 2):
        for text, words in zip(said, expected, strict=True):
            assert words in text


# Outputs --------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """An output as models return them."""

    logits: Tensor
    scores: tuple[Tensor, np.ndarray[Any, Any]]
    texts: list[str]


def _answer(numbers: Tensor) -> Answer:
    logits = torch.stack([numbers * 3.0, -numbers], dim=1).to(torch.bfloat16).requires_grad_()
    complex_ = torch.complex(numbers.double(), 0.25 * numbers.double())
    return Answer(logits, (complex_.conj(), (numbers % 2 == 0).numpy()), [f"ü{int(number)}" for number in numbers])


def _refuse_other_than(expected: Answer, found: Answer) -> None:
    assert torch.equal(found.logits, expected.logits)
    assert not found.logits.requires_grad
    assert torch.equal(found.scores[0], expected.scores[0])
    assert isinstance(found.scores[1], np.ndarray)
    assert found.scores[1].tolist() == expected.scores[1].tolist()
    assert found.texts == expected.texts


class Stream(IterableDataset[Tensor]):
    """Numbers, as they come."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(_SAMPLES)


def _gather(window: int) -> None:
    w = lockstep.init()
    gathering.WINDOW = window  # so that few rows travel at once
    data = TensorDataset(torch.arange(_SAMPLES))
    for options in ({}, {"shuffle": True}, {"sampler": torch.randperm(_SAMPLES).tolist()}):
        loader = lockstep.shard(DataLoader(data, batch_size=5, **options))  # the last batch has less samples than 3
        for _ in range(2):  # two epochs, in two orders
            found = w.gather_in_order([_answer(numbers) for (numbers,) in loader], loader)
            assert (found is None) == (w.rank != 0)
            if found is not None:
                _refuse_other_than(_answer(torch.arange(_SAMPLES)), found)
    loader = lockstep.shard(DataLoader(data, batch_size=6))
    each = [{"n": int(number), "box": torch.arange(int(number))} for (numbers,) in loader for number in numbers]
    found = w.gather_in_order(each, loader, per="sample")
    if found is not None:
        assert [one["n"] for one in found] == [*range(_SAMPLES)]
        assert all(torch.equal(one["box"], torch.arange(number)) for number, one in enumerate(found))
    loader = lockstep.shard(DataLoader(data, batch_size=6))
    kinds = (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex128)
    found = w.gather_in_order([[numbers.to(kind) for kind in kinds] for (numbers,) in loader], loader)
    for kind, one in zip(kinds, found or [], strict=False):
        assert one.dtype == kind
        assert torch.equal(one.view(torch.uint8), torch.arange(_SAMPLES).to(kind).view(torch.uint8))
    drawn = [4, 9, 1, 9, 0, 20]
    loader = lockstep.shard(DataLoader(data, batch_size=4, sampler=drawn))
    found = w.gather_in_order([numbers for (numbers,) in loader], loader)
    assert found is None or found.tolist() == sorted(drawn)
    loader = lockstep.shard(DataLoader(Stream(), batch_size=4))
    found = w.gather_in_order([[numbers, -numbers] for numbers in loader], loader)
    assert found is None or [part.tolist() for part in found] == [[*range(_SAMPLES)], [*range(0, -_SAMPLES, -1)]]
    if w.world_size > 1:
        proportions = [rank + 1.0 for rank in range(w.world_size)]
        loader = lockstep.shard(DataLoader(data, batch_size=7), shares=proportions)
        found = w.gather_in_order([numbers for (numbers,) in loader], loader)
        assert found is None or found.tolist() == [*range(_SAMPLES)]


@_on_ranks
@pytest.mark.parametrize("window", [40, 2**24])
@OVER_BOTH
def test_outputs_of_a_loader_come_in_the_order_of_the_data_set(world_size: int, window: int) -> None:
    run_ranks(_gather, world_size, window)


class ByParity:
    """Batches of even numbers, then of odd ones, of sizes from 5 to 1; and some numbers again."""

    def __iter__(self) -> Iterator[list[int]]:
        rest = [*range(0, _SAMPLES, 2), *range(1, _SAMPLES, 2), 7, 3]
        size = 5
        while rest:
            yield rest[:size]
            rest, size = rest[size:], size - 1 or 5


def _gather_by_index(window: int) -> None:
    w = lockstep.init()
    gathering.WINDOW = window
    data = TensorDataset(torch.arange(_SAMPLES))
    costs = [1.0 + index * 5 % 7 for index in range(_SAMPLES)]
    loader = lockstep.shard(DataLoader(data, batch_size=6, shuffle=True), costs=costs)
    for _ in range(2):
        found = w.gather_in_order([_answer(numbers) for (numbers,) in loader], loader)
        assert (found is None) == (w.rank != 0)
        if found is not None:
            _refuse_other_than(_answer(torch.arange(_SAMPLES)), found)
    drawn = sorted([*range(_SAMPLES), 7, 3])
    for options in ({}, {"costs": costs}, {"costs": lambda index: costs[index]}):
        loader = lockstep.shard(DataLoader(data, batch_sampler=ByParity(), num_workers=len(options)), **options)
        outputs = [numbers for (numbers,) in loader]
        found = w.gather_in_order(outputs, loader)
        assert found is None or found.tolist() == drawn
        found = w.gather_in_order([int(number) for numbers in outputs for number in numbers], loader, per="sample")
        assert found is None or found == drawn
    loader = lockstep.shard(DataLoader(data, batch_size=6, drop_last=True), costs=costs)
    with pytest.raises(ValueError, match="has 23 samples, and the ranks were given 18 of them"):
        w.gather_in_order([numbers for (numbers,) in loader], loader)


@_on_ranks
@pytest.mark.parametrize("window", [40, 2**24])
@OVER_BOTH
def test_outputs_of_parts_of_equal_cost_and_of_drawn_batches_come_by_their_indices(
    world_size: int, window: int
) -> None:
    run_ranks(_gather_by_index, world_size, window)


def _gather_splits(length: int) -> None:
    w = lockstep.init()
    whole = [*range(length)]
    for part in (lockstep.split(whole), lockstep.split(whole, strided=True), lockstep.split(_numbers(length))):
        found = w.gather_in_order([[item, None, {"x": torch.full((item % 3,), item)}] for item in part], part)
        assert (found is None) == (w.rank != 0)
        if found is not None:
            assert [one[0] for one in found] == whole
            assert [one[2]["x"].tolist() for one in found] == [[item] * (item % 3) for item in whole]
    for strided in (False, True):
        part = lockstep.split(torch.arange(length), strided=strided)
        loader = DataLoader(part, batch_size=3)
        found = w.gather_in_order([(batch, 2 * batch) for batch in loader], loader)
        if found is not None:
            expected = [] if not length else (torch.arange(length), 2 * torch.arange(length))
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))


@_on_ranks
@pytest.mark.parametrize("length", [0, 2, _SAMPLES])
@OVER_BOTH
def test_outputs_of_a_split_come_in_the_order_of_the_items(world_size: int, length: int) -> None:
    run_ranks(_gather_splits, world_size, length)


def _gather_into_files(folder: str) -> None:
    w = lockstep.init()
    gathering.WINDOW = 64
    data = TensorDataset(torch.arange(_SAMPLES))
    loader = lockstep.shard(DataLoader(data, batch_size=5, shuffle=True))
    rows = [torch.stack([numbers, numbers + 100], dim=1) for (numbers,) in loader]
    assert w.gather_in_order(rows, loader, path=f"{folder}/one.npy") is None
    pairs = [{"a": each.half(), "b": (each.bfloat16(), each[:, :0])} for each in rows]
    w.gather_in_order(pairs, loader, path=Path(folder) / "two.safetensors")
    part = lockstep.split(range(_SAMPLES), strided=True)
    w.gather_in_order([torch.tensor(item / 4) for item in part], part, path=f"{folder}/scalars.npy")


@_on_ranks
@OVER_BOTH
def test_outputs_in_a_file_are_mapped_and_no_pickle(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "one.npy").write_text("of an earlier run")
    run_ranks(_gather_into_files, world_size, str(tmp_path))
    rows = torch.stack([torch.arange(_SAMPLES), torch.arange(_SAMPLES) + 100], dim=1)
    mapped = np.load(tmp_path / "one.npy", mmap_mode="r", allow_pickle=False)
    assert isinstance(mapped, np.memmap)
    assert mapped.tolist() == rows.tolist()
    tensors = load_file(tmp_path / "two.safetensors")
    assert sorted(tensors) == ["a", "b.0", "b.1"]
    assert torch.equal(tensors["a"], rows.half())
    assert torch.equal(tensors["b.0"], rows.bfloat16())
    assert tensors["b.1"].shape == (_SAMPLES, 0)
    assert np.load(tmp_path / "scalars.npy").tolist() == [item / 4 for item in range(_SAMPLES)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.npy", "scalars.npy", "two.safetensors"]
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


# What is refused ------------------------------------------------------------------------------------------------------


def _mistakes(folder: str) -> list[str]:
    w = lockstep.init(timeout=60)
    data = TensorDataset(torch.arange(_SAMPLES))
    here = w.rank == 1

    def last() -> lockstep.ShardedLoader:
        return lockstep.shard(DataLoader(data, batch_size=5))

    def outputs_of(loader: Any, function: Callable[[Tensor], Any] = lambda numbers: numbers) -> list[Any]:
        return [function(numbers) for (numbers,) in loader]

    def gather(function: Callable[[Tensor], Any], **options: Any) -> None:
        loader = last()
        w.gather_in_order(outputs_of(loader, function), loader, **options)

    def one_missing() -> None:
        loader = last()
        w.gather_in_order(outputs_of(loader)[here:], loader)

    def left() -> None:
        loader = last()
        w.gather_in_order([next(iter(loader))[0]], loader)

    def never_begun() -> None:
        w.gather_in_order([], last())

    def dropped() -> None:
        loader = lockstep.shard(DataLoader(data, batch_size=5, drop_last=True))
        w.gather_in_order(outputs_of(loader), loader)

    def sliced() -> None:
        loader = lockstep.shard(DataLoader(data, batch_size=5), slices=2)
        w.gather_in_order([], loader)

    def two_loaders() -> None:
        loaders = [last(), last()]
        made = [outputs_of(loader) for loader in loaders]
        w.gather_in_order(made[here], loaders[here])

    def unequal_streams() -> None:
        part = lockstep.split(_numbers(7 + here))
        w.gather_in_order([*part], part)

    def a_shuffled_loader_over_a_split() -> None:
        loader = DataLoader(lockstep.split(range(8)), shuffle=True)
        w.gather_in_order([*loader], loader)

    def an_unfinished_loop() -> None:
        part = lockstep.split(_numbers(8))
        w.gather_in_order([next(iter(part))], part)

    calls: list[Callable[[], object]] = [
        one_missing,
        left,
        never_begun,
        dropped,
        sliced,
        two_loaders,
        unequal_streams,
        a_shuffled_loader_over_a_split,
        an_unfinished_loop,
        lambda: w.gather_in_order([], DataLoader(data)),
        lambda: gather(lambda numbers: numbers[1:]),
        lambda: gather(lambda numbers: numbers.float().mean()),
        lambda: gather(lambda _: "texts"),
        lambda: gather(lambda numbers: numbers.float() if here else numbers),
        lambda: gather(lambda numbers: numbers.view(-1, 1).expand(-1, 2 + int(numbers.sum()) % 2)),
        lambda: gather(lambda numbers: numbers, per="row"),
        lambda: gather(lambda numbers: numbers, path=f"{folder}/x.pt"),
        lambda: gather(lambda numbers: (numbers, numbers), path=f"{folder}/x.npy"),
        lambda: gather(lambda numbers: numbers.bfloat16(), path=f"{folder}/x.npy"),
        lambda: gather(lambda numbers: [str(number) for number in numbers], path=f"{folder}/x.safetensors"),
        lambda: gather(lambda numbers: numbers, path=f"{folder}/x.npy" if here else None),
        lambda: gather(lambda numbers: numbers, path=f"{folder}/nowhere/x.npy"),
        lambda: gather(lambda numbers: numbers, path="s3://bucket/x.npy" if here else f"{folder}/x.npy"),
    ]
    said = []
    for call in calls:
        with pytest.raises((ValueError, TypeError, lockstep.LockstepError)) as refused:
            call()
        said.append(f"{type(refused.value).__name__}: {refused.value}")
    return said


@OVER_BOTH
def test_what_can_not_be_gathered_is_refused_on_every_rank(tmp_path: Path) -> None:
    expected = [
        ("ValueError", "4 outputs, but this rank was given 5 batches by epoch 0 of sharded loader 0"),
        ("ValueError", "the last loop over the sharded loader was left after 1 of its batches"),
        ("ValueError", "no loop over the sharded loader has begun"),
        ("ValueError", "has 23 samples, and the ranks were given 20 of them (12 on rank 0 and 8 on rank 1)"),
        ("ValueError", "the loader was sharded with slices="),
        ("ValueError", "rank 0: epoch 0 of sharded loader 5; rank 1: epoch 0 of sharded loader 6"),
        ("ValueError", "different numbers of items, which have no common order: rank 0: 7; rank 1: 8"),
        ("ValueError", "shuffles, samples, drops or does not make batches"),
        ("ValueError", "the loop over the split did not come to its end"),
        ("TypeError", "not a DataLoader: any other does not tell which items this rank has"),
        ("ValueError", "one for each sample of its batch. For outputs that are one for each sample"),
        ("TypeError", "is a tensor of layout torch.strided and shape ()"),
        ("TypeError", "is 'texts': expected a dense tensor"),
        ("ValueError", "torch.int64 with rows of []; on rank 1 a tensor of torch.float32 with rows of []"),
        ("ValueError", "where the first has"),
        ("ValueError", "per='row': expected 'batch' or 'sample'"),
        ("ValueError", "expected a file name that ends in .npy or .safetensors"),
        ("ValueError", "the outputs have 2 tensors ('0' and '1'), and .npy holds one: name it .safetensors"),
        ("ValueError", "NumPy has no dtype for torch.bfloat16: name the file .safetensors"),
        ("ValueError", "'outputs' is a list of plain values, and a file holds tensors alone"),
        ("ValueError", "the ranks pass different arguments, path: rank 0: memory; rank 1: .npy"),
        ("LockstepError", "No such file or directory"),
        ("LockstepError", "this is a URL"),
    ]
    for said in run_ranks(_mistakes, 2, str(tmp_path)):
        for text, (kind, words) in zip(said, expected, strict=True):
            assert text.startswith(kind), text
            assert words in text
    assert not [*tmp_path.iterdir()]


def _write_too_much(folder: str) -> None:
    w = lockstep.init(timeout=60)
    gathering.WINDOW = 4096
    if w.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    part = lockstep.split(range(8))
    w.gather_in_order([torch.zeros(1000) for _ in part], part, path=os.path.join(folder, "large.npy"))


@OVER_BOTH
def test_a_file_that_can_not_be_written_is_an_error_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    for rank, outcome in enumerate(collect_outcomes(_write_too_much, 3, str(tmp_path))):
        assert outcome.error == "LockstepError", (rank, outcome.traceback)
        assert "large.npy: File too large" in str(outcome.message)
    assert not [*tmp_path.iterdir()]


def _subset() -> list[int] | None:
    w = lockstep.init()
    loader = lockstep.shard(
        DataLoader(TensorDataset(torch.arange(9)), batch_size=3, sampler=SubsetRandomSampler([7, 2, 5]))
    )
    found = w.gather_in_order([numbers for (numbers,) in loader], loader)
    return None if found is None else found.tolist()


def test_a_subset_comes_by_its_indices() -> None:
    assert run_ranks(_subset, 2) == [[2, 5, 7], None]


def _after_a_load() -> list[list[int]]:
    """What is gathered of a whole pass, of orders of every kind, after the loader was put elsewhere."""
    w = lockstep.init()
    data = TensorDataset(torch.arange(_SAMPLES))
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"batch_size": 5, "shuffle": True}, {}),
        ({"batch_size": 5, "sampler": torch.randperm(_SAMPLES).tolist()}, {}),
        ({"batch_size": 5, "shuffle": True}, {"costs": [1.0 + index * 5 % 7 for index in range(_SAMPLES)]}),
        ({"batch_sampler": ByParity()}, {}),
    ]
    gathered = []
    for options, sharded in kinds:
        loader = lockstep.shard(DataLoader(data, **options), **sharded)
        inside: dict[str, Any] = {}
        outputs = []
        for (numbers,) in loader:
            outputs.append(numbers)
            inside = inside or loader.state_dict()
        loader.load_state_dict(inside)
        found = w.gather_in_order(outputs, loader)
        gathered.append([] if found is None else found.tolist())
        rest = [numbers for (numbers,) in loader]
        with pytest.raises(ValueError, match="of its epoch \\(a resume\\)"):
            w.gather_in_order(rest, loader)
    return gathered


def test_outputs_of_a_pass_find_their_places_after_a_state_was_loaded() -> None:
    found, nothing = run_ranks(_after_a_load, 2)
    assert found == [[*range(_SAMPLES)]] * 3 + [sorted([*range(_SAMPLES), 7, 3])]
    assert nothing == [[]] * 4


def _over_hosts() -> str:
    _gather(40)
    return torch.distributed.get_backend()


def test_outputs_of_several_hosts_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BACKEND", "hierarchical")
    assert run_ranks(_over_hosts, 3, hosts=[2, 1]) == ["hierarchical"] * 3
