"""Which streams say that they split themselves by rank; the libraries themselves are in tests/ecosystem."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from lockstep.data.streams.self_splitting import read_stream_option, split_of


class Stream(IterableDataset[int]):
    """A dataset of a library that is not installed here: only what is asked of it."""

    def __init__(self, **said: Any) -> None:
        self.__dict__.update(said)

    def __iter__(self) -> Iterator[int]:
        return iter(())


def _library(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _split(rank: int, ranks: int) -> Stream:
    return Stream(_distributed=SimpleNamespace(rank=rank, world_size=ranks))


def _read(said: object, dataset: object) -> str | None:
    return read_stream_option(said, dataset, rank=1, world_size=3)


def test_a_stream_that_says_nothing_is_read_whole() -> None:
    assert _read(None, Stream()) is None
    assert _read("whole", Stream()) is None
    assert _read("parts", Stream()) == 'stream="parts"'
    with pytest.raises(ValueError, match='expected "whole"'):
        _read("some", Stream())


def test_hugging_face_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read(None, _split(1, 3)) is None, "of an unknown library"
    _library(monkeypatch, "datasets", IterableDataset=Stream)
    assert _read(None, _split(1, 3)) == "datasets.split_dataset_by_node"
    assert _read(None, Stream(_distributed=None)) is None
    assert _read(None, _split(0, 1)) is None, "all of it is one part"
    assert _read("whole", _split(1, 3)) is None, "the user's word counts"
    for rank, ranks in [(0, 3), (1, 2)]:
        with pytest.raises(ValueError, match=f"for rank {rank} of {ranks}, and this is rank 1 of 3"):
            _read(None, _split(rank, ranks))


def test_webdataset_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def split_by_node(urls: Any) -> Any:
        return urls

    _library(monkeypatch, "webdataset", DataPipeline=Stream, split_by_node=split_by_node)
    assert _read(None, Stream(pipeline=[[], split_by_node])) == "webdataset.split_by_node"
    assert _read(None, Stream(pipeline=[[]])) is None


def test_litdata_and_mosaicml_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(rank=1, num_ranks=3)
    _library(monkeypatch, "litdata", StreamingDataset=Stream)
    assert split_of(Stream(distributed_env=SimpleNamespace(global_rank=1, world_size=3))) == (
        "litdata.StreamingDataset",
        1,
        3,
    )
    assert _read(None, Stream(distributed_env=SimpleNamespace(global_rank=0, world_size=1))) is None, "made before init"
    monkeypatch.delitem(sys.modules, "litdata")
    _library(monkeypatch, "streaming", StreamingDataset=Stream)
    assert _read(None, Stream()) is None, "a module of the user's"
    _library(monkeypatch, "streaming.base.world", World=SimpleNamespace(detect=lambda: world))
    assert _read(None, Stream()) == "streaming.StreamingDataset"
    assert split_of([1, 2]) is None


def test_lancedb_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _library(monkeypatch, "lancedb.streaming", StreamingDataset=Stream)
    assert _read(None, Stream(_rank=1, _world_size=3)) == "lancedb.streaming.StreamingDataset"
    with pytest.raises(ValueError, match="for rank 0 of 2, and this is rank 1 of 3"):
        _read(None, Stream(_rank=0, _world_size=2))


@pytest.mark.parametrize("name", ["datasets", "webdataset", "streaming", "litdata", "lancedb.streaming"])
def test_a_module_of_the_users_may_have_a_librarys_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _library(monkeypatch, name)
    assert _read(None, Stream()) is None
