"""Ranks whose datasets differ, or fail on one rank only: an error on all of them, in words."""

from __future__ import annotations

import random
import sys
import types
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

import lockstep
from tests.harness import run_ranks


class Files(Dataset[str]):
    """A dataset of the user's own."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        return self.files[index]


class Fails(Dataset[int]):
    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __len__(self) -> int:
        if self._error is not None:
            raise self._error
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def _datasets(rank: int) -> dict[str, Any]:
    """By name: what each rank holds."""
    own = torch.Generator().manual_seed(rank)
    files = [f"{number}.png" for number in range(40)]
    random.Random(rank).shuffle(files)
    torch.manual_seed(rank)
    by_rank: Subset[int] = random_split(range(40), [30, 10])[0]  # type: ignore[arg-type]
    torch.manual_seed(0)
    return {
        "a split of each rank's own": by_rank,
        "a split of the common one": random_split(range(40), [30, 10])[0],  # type: ignore[arg-type]
        "tensors": TensorDataset(torch.randn(40, 2, generator=own)),
        "files": Files(files),
        "files in folders": Files([f"/rank-{rank}/{name}" for name in sorted(files)]),
        "length": range(40 + rank),
        "OSError": Fails(OSError("disk gone") if rank == 1 else None),
        "ZeroDivisionError": Fails(ZeroDivisionError() if rank == 0 else None),
        "NotImplementedError": Fails(NotImplementedError("no length") if rank == 0 else None),
        "another class": Subset(range(40), range(30)) if rank == 1 else range(30),  # type: ignore[arg-type]
    }


def _sharded() -> dict[str, str | None]:
    world = lockstep.init(timeout=20)
    said: dict[str, str | None] = {}
    for name, dataset in _datasets(world.rank).items():
        try:
            lockstep.shard(DataLoader(dataset, batch_size=4))
            said[name] = None
        except Exception as error:  # noqa: BLE001
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_ranks_with_different_data_are_refused_and_told_what_to_do() -> None:
    ranks = run_ranks(_sharded, 2)
    refused = {
        "a split of each rank's own": "ValueError: lockstep.shard: dataset.indices must be the same on every rank, but",
        "tensors": "ValueError: lockstep.shard: dataset.tensors[0] must be the same on every rank, but it is rank 0:",
        "files": "ValueError: lockstep.shard: dataset.files must be the same on every rank, but it is rank 0: 40",
        "length": "ValueError: lockstep.shard: the length of the dataset must be the same on every rank, but",
        "another class": "ValueError: lockstep.shard: dataset",
    }
    for said in ranks:
        for name, words in refused.items():
            assert str(said[name]).startswith(words), said[name]
        assert "generator=torch.Generator().manual_seed(0)" in str(said["a split of each rank's own"])
        assert said["a split of the common one"] is said["files in folders"] is None
    first, second = ranks
    assert first["another class"] == second["another class"]
    # Whatever fails on one rank ends all of them.
    assert second["OSError"] == "OSError: disk gone"
    assert first["OSError"] == "LockstepError: lockstep.shard failed on rank 1: OSError: disk gone"
    assert first["ZeroDivisionError"] == "ZeroDivisionError: "
    assert second["ZeroDivisionError"] == "LockstepError: lockstep.shard failed on rank 0: ZeroDivisionError: "
    assert (
        second["NotImplementedError"]
        == "LockstepError: lockstep.shard failed on rank 0: NotImplementedError: no length"
    )


# Hugging Face's datasets, or what of them matters here.


class HuggingFace:
    """What ``datasets.Dataset`` offers to a DataLoader. It remembers how it was asked."""

    def __init__(self, rows: list[int], kind: str | None = None) -> None:
        self._rows = rows
        self.format = {"type": kind}
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, float]:
        self.asked.append(1)
        return {"x": self._rows[index] + self._noise()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, float]]:
        self.asked.append(len(indices))
        return [{"x": self._rows[index] + self._noise()} for index in indices]

    def _noise(self) -> float:
        return torch.rand(()).item() if self.format["type"] == "custom" else 0.0

    def with_format(self, kind: str) -> Any:
        assert kind == "arrow"

        class Stored:
            def __getitem__(_, index: int) -> Any:
                return types.SimpleNamespace(to_pydict=lambda: {"x": [self._rows[index]]})

        return Stored()


def _hugging_face() -> dict[str, Any]:
    world = lockstep.init(timeout=20)
    library = types.ModuleType("datasets")
    library.Dataset = HuggingFace  # type: ignore[attr-defined]
    sys.modules["datasets"] = library
    seen: dict[str, Any] = {}
    rows = list(range(20))
    for name, dataset, inner in [
        ("plain", HuggingFace(rows), None),
        ("torch", HuggingFace(rows, "torch"), None),
        ("transform", HuggingFace(rows, "custom"), None),
        ("subset", HuggingFace(rows), range(10, 20)),
    ]:
        loader = lockstep.shard(DataLoader(dataset if inner is None else Subset(dataset, inner), 8))  # type: ignore[arg-type]
        values = [value for batch in loader for value in batch["x"].tolist()]
        seen[name] = [dataset.asked, values]
    with pytest.raises(ValueError, match="dataset must be the same on every rank, but it is rank 0: 20 rows") as caught:
        lockstep.shard(DataLoader(HuggingFace(rows if world.rank else rows[::-1]), 8))  # type: ignore[arg-type]
    assert "use the same seed on every rank" in str(caught.value)
    return seen


def test_a_hugging_face_dataset_is_asked_for_whole_slices() -> None:
    first, second = run_ranks(_hugging_face, 2)
    for name in ("plain", "torch"):
        assert first[name][0] == second[name][0] == [4, 4, 2]
        assert sorted(first[name][1] + second[name][1]) == list(range(20))
    assert first["transform"][0] == [4, *[1] * 10], "what is seen to draw is seeded sample by sample"
    assert len({value % 1 for rank in (first, second) for value in rank["transform"][1]}) == 20
    assert first["subset"][0] == [4, 1]
    assert sorted(first["subset"][1] + second["subset"][1]) == list(range(10, 20))
