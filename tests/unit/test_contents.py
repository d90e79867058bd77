"""What decides a dataset's samples is read without fetching any."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from lockstep.data.contents import contents_of, fingerprint


class Own(Dataset[Any]):
    """A dataset as users write them; to fetch a sample is an error."""

    def __init__(self, length: int = 200, **attributes: Any) -> None:
        self._length = length
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are not fetched to be compared")


class Unsized(Dataset[Any]):
    """A dataset that only its sampler knows the length of."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("samples are not fetched to be compared")


class Table:
    """What lockstep asks of a pandas table."""

    def __init__(self, rows: list[list[Any]], index: list[Any]) -> None:
        self._rows = rows
        self.index = index

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def iloc(self) -> Any:
        class Rows:
            def __getitem__(_, places: list[int]) -> Table:
                return Table([self._rows[place] for place in places], [self.index[place] for place in places])

        return Rows()

    def to_numpy(self) -> np.ndarray:
        return np.array(self._rows, dtype=object)


_DAY = datetime.timedelta(days=1)


def _shuffled(by: int) -> list[int]:
    return [int(number) for number in np.random.default_rng(by).permutation(200)]


Make = Callable[[int], Any]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda by: Subset(Own(), _shuffled(by)), "dataset.indices"),
        (lambda by: Subset(Own(), torch.tensor(_shuffled(by))), "dataset.indices"),  # type: ignore[arg-type]
        (lambda by: Subset(Subset(Own(), _shuffled(by)), range(50)), "dataset.dataset.indices"),
        (lambda by: TensorDataset(torch.zeros(200, 3), torch.tensor(_shuffled(by))), "dataset.tensors[1]"),
        (lambda by: ConcatDataset([Own(), Subset(Own(), _shuffled(by))]), "dataset.datasets[1].indices"),
        (lambda by: StackDataset(a=Own(), b=Subset(Own(), _shuffled(by))), "dataset.datasets['b'].indices"),
        (_shuffled, "dataset"),
        (lambda by: np.array(_shuffled(by)), "dataset"),
        (lambda by: torch.tensor(_shuffled(by)), "dataset"),
        (lambda by: Own(files=[f"/data-of-{by}/{n}.png" for n in _shuffled(by)]), "dataset.files"),
        (lambda by: Own(samples=[(Path(f"{n}.png"), n % 3) for n in _shuffled(by)]), "dataset.samples"),
        (lambda by: Own(inputs=[torch.full((2,), n) for n in _shuffled(by)]), "dataset.inputs"),
        (lambda by: Own(frame=Table([[n] for n in _shuffled(by)], list(range(200)))), "dataset.frame"),
        (lambda by: Own(frame=Table([[f"/{by}/{n}.png", 0] for n in _shuffled(by)], [0] * 200)), "dataset.frame"),
        (lambda by: Own(frame=Table([[0]] * 200, [Path(f"/{n}") for n in _shuffled(by)])), "dataset.frame"),
        (lambda by: Own(days=Table([[_DAY * n] for n in _shuffled(by)], [0] * 200)), "dataset.days"),
        (lambda by: Subset(Own(), [f"key-{n}" for n in _shuffled(by)]), "dataset.indices"),  # type: ignore[misc]
        (lambda by: Subset(Own(), np.array([f"{n}" for n in _shuffled(by)])), "dataset.indices"),  # type: ignore[arg-type]
        (lambda by: Subset(Unsized(), [("a",) * by, ("b", 3)]), "dataset.indices"),  # type: ignore[list-item]
        (lambda by: Own(parts=TensorDataset(torch.tensor(_shuffled(by)))), "dataset.parts.tensors[0]"),
    ],
)
def test_two_shuffles_differ_where_they_were_made(make: Make, where: str) -> None:
    one, same, two = contents_of(make(1)), contents_of(make(1)), contents_of(make(2))
    assert one == same
    assert [name for name in one if one[name] != two[name]] == [where]


@pytest.mark.parametrize(
    "make",
    [
        lambda by: Own(files=[f"/machine-{by}/{n}.png" for n in range(200)]),
        lambda by: Own(frame=Table([[f"/machine-{by}/{n}.png", n] for n in range(200)], [Path(f"/{by}/a")] * 200)),
        lambda by: Subset(Own(), [f"/machine-{by}/{n}.png" for n in range(200)]),  # type: ignore[misc]
        lambda by: Unsized(files=_shuffled(by), parts=Unsized(files=_shuffled(by))),
        lambda by: Own(_seen=_shuffled(by), rank=by, lengths=_shuffled(by)[:50]),
        lambda by: Own(cache=[*[torch.ones(by)] * by, *[None] * (200 - by)]),
        lambda by: Own(generator=np.random.default_rng(by), model=torch.nn.Linear(2, 2)),
    ],
)
def test_what_is_no_part_of_the_data_is_not_compared(make: Make) -> None:
    assert contents_of(make(1)) == contents_of(make(2))


class Lengthless(Unsized):
    """A dataset whose base class asks for a length that it does not have."""

    def __len__(self) -> int:
        raise NotImplementedError("no length")


def test_a_length_that_raises_counts_as_none() -> None:
    assert contents_of(Lengthless(rows=[1, 2])) == {}
    assert "dataset.indices" in contents_of(Subset(Lengthless(), [3, 1]))


def test_a_dataset_within_itself_ends() -> None:
    endless = Own()
    endless.inner = endless  # type: ignore[attr-defined]
    assert contents_of(endless) == {}
    assert contents_of(Subset(Own(), [])) == {"dataset.indices": "none"}


class Image:
    """Gives itself as an array, as Pillow's images do."""

    def __init__(self, value: int) -> None:
        self._pixels = np.full((2, 2), value)
        self._read_by = object()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self._pixels.__array_interface__)


class Damaged:
    """An image whose file is cut off."""

    def __init__(self, value: int) -> None:
        self._value = value

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise OSError("truncated")


class Graph:
    """A sample of a class of the user's own, which refers to itself and to its dataset."""

    def __init__(self, value: int) -> None:
        self.edges, self.whole, self.dataset = {value, "a", "b"}, self, Own(files=[object()])


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(
    "make",
    [
        Image,
        Graph,
        Slotted,
        lambda value: [Slotted(1), Graph(value)],
        lambda value: {1, value, "a"},
        lambda value: range(value),
        lambda value: np.array([1, value], dtype="M8[D]"),
        lambda value: np.array([1, {"a": value}], dtype=object),
        lambda value: np.array([(1, value)], dtype="i4,f4"),
        lambda value: value * torch.eye(3).to_sparse(),
        lambda value: _DAY * value,
        lambda value: Path(f"/data/{value}"),
    ],
)
def test_samples_of_any_class_are_told_by_what_they_hold(make: Callable[[int], Any]) -> None:
    assert fingerprint(make(2)) == fingerprint(make(2)) != fingerprint(make(3))


def test_nothing_is_known_of_what_holds_nothing() -> None:
    assert fingerprint([object(), len, Damaged]) == ""
    assert fingerprint([object(), 1]) != fingerprint([object(), 2])
    assert fingerprint(Damaged(1)) != "", "its file can't be read, its attributes can"
