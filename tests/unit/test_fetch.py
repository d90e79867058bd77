"""Walking, emptying and fingerprinting batches of any shape."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import default_collate

from lockstep.data.collate import copied, nothing_of
from lockstep.data.contents import contents_of, fingerprint
from lockstep.data.dead_workers import naming_dead_workers, tells_of_a_death
from lockstep.data.fetch import BatchKey, Fetched, FetchingDataset
from lockstep.data.seeding import SampleSeeds, preserved_generators
from lockstep.data.streams.reading import Samples, StatefulReading, StreamMark
from lockstep.errors import PeerLost
from lockstep.trees import leaves, map_leaves, to_device


class Pair(NamedTuple):
    image: Any
    name: Any


@dataclass(frozen=True)
class Record:
    image: torch.Tensor
    names: list[str]


def _empty(collate: Any, sample: Any) -> Any:
    return nothing_of(collate([sample]), collate([sample, sample]))


def test_default_collate_empties_to_the_right_dtypes_and_shapes() -> None:
    sample = {"image": torch.ones(3, 4, dtype=torch.float16), "label": 7, "weight": 0.5, "name": "a", "id": np.int32(1)}
    empty = _empty(default_collate, sample)
    assert empty["image"].shape == (0, 3, 4)
    assert empty["image"].dtype == torch.float16
    assert empty["label"].shape == (0,)
    assert empty["label"].dtype == torch.int64
    assert empty["weight"].dtype == torch.float64
    assert empty["id"].dtype == torch.int32
    assert empty["name"] == []


def test_containers_keep_their_types() -> None:
    empty = _empty(default_collate, Pair(torch.ones(2), "x"))
    assert type(empty) is Pair
    assert empty.image.shape == (0, 2)
    assert list(empty.name) == []
    tree: Any = [OrderedDict(a=1), UserDict(b=2), (3,), Record(torch.ones(1), ["n"])]
    doubled = map_leaves(tree, lambda leaf: leaf * 2)
    assert [type(part) for part in doubled] == [OrderedDict, UserDict, tuple, Record]
    assert doubled[1]["b"] == 4
    assert doubled[3].image.tolist() == [2.0]
    assert tree[0]["a"] == 1, "the original must stay as it was"


def test_custom_layouts_are_emptied_along_the_dimension_that_counts_samples() -> None:
    def columns(samples: list[Any]) -> Any:
        """Batch second, lists of per-sample targets, a count, and a constant."""
        return pad_sequence(samples), [{"box": sample} for sample in samples], len(samples), torch.eye(2), "v1"

    padded, targets, count, constant, version = _empty(columns, torch.ones(5, 3))
    assert padded.shape == (5, 0, 3)
    assert targets == []
    assert count == 0
    assert torch.equal(constant, torch.eye(2))
    assert version == "v1"


def test_rows_that_are_concatenated_are_emptied_whole() -> None:
    assert _empty(torch.cat, torch.ones(7, 2)).shape == (0, 2)


@pytest.mark.parametrize(
    "sample",
    [
        np.array(["ab", "c"]),
        np.array(["2026-11-28"], dtype="datetime64[D]"),
        np.array([1, 2], dtype=">i4"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([1, "x"], dtype=object),
        np.arange(3)[::-1],
    ],
)
def test_arrays_of_any_dtype_are_emptied(sample: np.ndarray[Any, Any]) -> None:
    for empty in (_empty(np.stack, sample), _empty(lambda samples: np.stack(samples)[:, ::-1], sample)):
        assert empty.shape == (0, *sample.shape)
        assert empty.dtype == np.stack([sample]).dtype
    assert isinstance(_empty(lambda _: np.array(7), sample), np.ndarray)


def test_sparse_batches_are_emptied() -> None:
    empty = _empty(torch.stack, torch.eye(2).to_sparse())
    assert empty.shape == (0, 2, 2)
    assert empty.layout == torch.sparse_coo


def test_views_by_conjugation_are_fingerprinted() -> None:
    view, like = torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])
    assert fingerprint(view) == fingerprint(like) != fingerprint(view.conj())
    assert fingerprint(view.imag) == fingerprint(like.imag.clone())


def test_dataclass_batches_are_emptied() -> None:
    empty = _empty(lambda samples: Record(torch.stack(samples), ["n"] * len(samples)), torch.ones(2))
    assert empty.image.shape == (0, 2)
    assert empty.names == []


def test_objects_that_move_themselves_are_asked_to() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"packed": packed, "n": 3}, torch.device("cpu"))
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["n"] == 3
    found = list(leaves([torch.ones(1), {"a": (torch.ones(2), "text")}]))
    assert [isinstance(leaf, torch.Tensor) for leaf in found] == [True, True, False]


def test_fingerprints_tell_contents_apart() -> None:
    batch = [torch.arange(4.0), "a", 1, np.arange(3)]
    assert fingerprint(batch) == fingerprint([torch.arange(4.0), "a", 1, np.arange(3)])
    different: list[list[Any]] = [
        [torch.arange(4.0) + 1, "a", 1, np.arange(3)],
        [torch.arange(4.0), "b", 1, np.arange(3)],
        [torch.arange(4.0), "a", 2, np.arange(3)],
        [torch.arange(4.0), "a", 1, np.arange(3) + 1],
        [torch.arange(4.0).bfloat16(), "a", 1, np.arange(3)],
    ]
    assert len({fingerprint(other) for other in [batch, *different]}) == 6
    assert fingerprint([object()]) == fingerprint([object()]), "addresses must not count"


def test_only_of_a_lost_worker_its_death_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("lockstep.data.fetch.time.sleep", waited.append)

    def failing(error: Exception) -> Iterator[Fetched]:
        yield Fetched(None, 1, 1)
        raise error

    theirs = "Caught ConnectionResetError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
    for error in (PeerLost("rank 0 is gone"), ValueError("bad sample"), ConnectionResetError(theirs)):
        with pytest.raises(type(error)):
            list(naming_dead_workers(failing(error)))
        assert not waited
    with pytest.raises(ConnectionResetError):
        list(naming_dead_workers(failing(ConnectionResetError())))
    assert sum(waited) == pytest.approx(20)


def _die() -> Any:
    """Raise what torch raises in whatever the main thread does when a worker has died."""
    raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")


class _Interrupted:
    """A stream with a state, which can be copied, and has a length, unless a worker of another loader dies there."""

    def __init__(self, at: str) -> None:
        self._at = at

    def _do(self, what: str) -> None:
        if what == self._at:
            _die()

    def __len__(self) -> int:
        self._do("len")
        return 8

    def __array__(self, *_: object) -> Any:
        self._do("array")
        return np.zeros(2)

    def __deepcopy__(self, memo: object) -> Any:
        self._do("copy")
        return _Interrupted(self._at)

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def state_dict(self) -> dict[str, Any]:
        self._do("tell")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002  (as the protocol has it)
        self._do("load")


class _FourAtATime:
    samples = 4

    def key_at(self, key: int, position: int) -> int:  # noqa: ARG002  (as the protocol has it)
        return key


def _read_on(stream: Any) -> list[Any]:
    samples = Samples(_FourAtATime(), key=1, epoch_key=1, seeded=True, at_work=None)
    mark = StreamMark(0, 1, 4, "{}", fingerprint([4, 5, 6, 7]))
    with preserved_generators():
        return [*StatefulReading(samples, stream, worker=0, mark=mark).batches()]


def _fetch_one(_: object) -> Any:
    """Draw, so that the sample is fetched again, which does not fail."""
    asked = count()

    def fetch(_: object) -> Any:
        torch.rand(())
        return [0] if next(asked) else _die()

    with preserved_generators():
        return SampleSeeds(looks_at_first=True).fetch(5, [0], fetch, fetch)


_PLACES: dict[str, Callable[[Any], object]] = {
    "load": _read_on,
    "tell": _read_on,
    "copy": copied,
    "array": lambda thing: fingerprint([thing]),
    "len": lambda thing: contents_of(thing),
    "fetch": _fetch_one,
}


@pytest.mark.parametrize("place", _PLACES)
def test_the_death_of_another_loaders_worker_is_not_taken_for_a_failure_of_the_code_that_runs(place: str) -> None:
    thing = _Interrupted(place)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid 4711\) is killed by signal: Killed. $") as raised:
        _PLACES[place](thing)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("error", "tells"),
    [
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that …"), True),
        (RuntimeError("DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details are lost …"), True),
        (RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"), True),
        (
            RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nDataLoader worker (pid 12) is killed"),
            False,
        ),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (ValueError("DataLoader worker (pid 12) is killed by signal: Killed. "), False),
    ],
)
def test_which_errors_tell_of_a_workers_death(error: Exception, tells: bool) -> None:
    assert tells_of_a_death(error) == tells


def test_a_sample_that_stops_an_iteration_is_an_error() -> None:
    class Ends:
        def __getitem__(self, index: int) -> int:
            return next(iter([7][index:]))

    fetching = FetchingDataset(Ends(), default_collate, seeded=True, tells_indices=False)
    assert fetching[BatchKey([0], [0], 1, 1, 5)].batch.tolist() == [7]
    with pytest.raises(RuntimeError, match=r"Ends.__getitem__ or the collate_fn raised StopIteration"):
        fetching[BatchKey([1], [0], 1, 1, 5)]


def test_a_dataset_that_answers_to_any_name_is_no_table() -> None:
    class Forwards:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

        def __getattr__(self, name: str) -> Any:
            return lambda: name

    assert isinstance(contents_of(Forwards()), dict)
