"""Streams of other libraries that split themselves by rank: what their users write, one function for each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lockstep
from tests.ecosystem.library_rows import write_archives
from tests.ecosystem.ranks import Arrays, join, net, weights

#: The rows of the whole stream.
ROWS = 43


def row_at(number: int) -> dict[str, Any]:
    """A row: what it is made of is told by its first number."""
    numbers = np.random.default_rng(number).standard_normal(12)
    numbers[0] = number
    return {"x": numbers, "y": number % 4}


def webdataset_parts(folder: Path, rank: int, size: int, option: str) -> IterableDataset[Any]:  # noqa: ARG001
    """Archives of unequal sizes, of which each rank reads every n-th; or ``one`` archive alone."""
    import webdataset

    pattern = str(folder / ("data-0.tar" if option == "one" else "data-{0..2}.tar"))
    split = webdataset.split_by_node
    data = webdataset.WebDataset(pattern, shardshuffle=False, nodesplitter=split, empty_check=False)
    return data.decode().to_tuple("npy", "cls").map(lambda row: {"x": row[0], "y": row[1]})  # type: ignore[no-any-return]


def datasets_parts(folder: Path, rank: int, size: int, option: str) -> IterableDataset[Any]:  # noqa: ARG001
    """A table as a stream of shards, split by node; ``shuffled`` has a buffer, of which its state knows nothing."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rows = [row_at(number) for number in range(ROWS)]
    table = Dataset.from_dict({"x": [row["x"] for row in rows], "y": [row["y"] for row in rows]})
    data: Any = split_dataset_by_node(table.to_iterable_dataset(num_shards=2 * size), rank=rank, world_size=size)
    return data.shuffle(seed=1, buffer_size=10) if option == "shuffled" else data  # type: ignore[no-any-return]


def litdata_parts(folder: Path, rank: int, size: int, option: str) -> IterableDataset[Any]:  # noqa: ARG001
    """Chunks, of which each rank has as many samples as any, or one less."""
    import litdata

    return litdata.StreamingDataset(str(folder), drop_last=False)  # type: ignore[no-any-return]


def lancedb_parts(folder: Path, rank: int, size: int, option: str) -> IterableDataset[Any]:  # noqa: ARG001
    """A table in as many splits as there are ranks."""
    import lancedb
    from lancedb.streaming import StreamingDataset

    table = lancedb.connect(str(folder)).open_table("rows")
    return StreamingDataset(table, rank=rank, world_size=size, shuffle_seed=3)  # type: ignore[no-any-return]


def streaming_parts(folder: Path, rank: int, size: int, option: str) -> IterableDataset[Any]:  # noqa: ARG001
    """MosaicML's shards, on each rank equally many samples: it repeats some."""
    from streaming import StreamingDataset

    return StreamingDataset(local=str(folder), batch_size=4, shuffle=False)  # type: ignore[no-any-return]


class OfGrain(IterableDataset[Any]):
    """Samples of a ``grain.MapDataset``, which is no dataset of torch's: what its users write for a DataLoader."""

    def __init__(self, data: Any) -> None:
        self._data, self._reader, self._state = data, None, None

    def __iter__(self) -> Any:
        worker = get_worker_info()
        data = self._data if worker is None else self._data[worker.id :: worker.num_workers]
        self._reader = iter(data.to_iter_dataset())
        if self._state is not None:
            self._reader.set_state(self._state)
        return self._reader

    def state_dict(self) -> Any:
        """The reader's position."""
        return self._state if self._reader is None else self._reader.get_state()

    def load_state_dict(self, state: Any) -> None:
        """Begin there."""
        self._state = state


def grain_parts(folder: Path, rank: int, size: int, option: str) -> IterableDataset[Any]:  # noqa: ARG001
    """A shuffled range, of which each rank takes every n-th."""
    import grain

    return OfGrain(grain.MapDataset.range(ROWS).seed(1).shuffle()[rank::size].map(row_at))


def write_webdataset(folder: Path) -> None:
    """Archives of 25, 11 and 7 samples."""
    write_archives(folder, [25, 11, 7], row_at)


def write_litdata(folder: Path) -> None:
    """Chunks of ten samples."""
    import litdata

    litdata.optimize(row_at, inputs=list(range(ROWS)), output_dir=str(folder), chunk_size=10, num_workers=1)


def write_lancedb(folder: Path) -> None:
    """A table."""
    import lancedb

    rows = [{"x": row["x"].tolist(), "y": row["y"]} for row in map(row_at, range(ROWS))]
    lancedb.connect(str(folder)).create_table("rows", rows)


def write_streaming(folder: Path) -> None:
    """Shards of some samples."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "ndarray", "y": "int"}, size_limit=1500) as writer:
        for number in range(ROWS):
            writer.write(row_at(number))


PARTS: dict[str, Callable[[Path, int, int, str], IterableDataset[Any]]] = {
    "webdataset": webdataset_parts,
    "datasets": datasets_parts,
    "litdata": litdata_parts,
    "lancedb": lancedb_parts,
    "mosaicml-streaming": streaming_parts,
    "grain": grain_parts,
}
#: Those of which shard can't know that they split themselves.
SAID = {"grain"}
WRITERS: dict[str, Callable[[Path], None]] = {
    "webdataset": write_webdataset,
    "litdata": write_litdata,
    "lancedb": write_lancedb,
    "mosaicml-streaming": write_streaming,
}


def write(library: str, folder: str) -> None:
    """Write what the stream of a library is read from."""
    Path(folder).mkdir()
    if library in WRITERS:
        WRITERS[library](Path(folder))


def _collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.stack([torch.as_tensor(row["x"], dtype=torch.float64) for row in rows])
    return inputs, torch.tensor([int(row["y"]) for row in rows])


def parts(
    backend: str,
    library: str,
    folder: str,
    option: str = "",
    workers: int = 0,
    stop: int = 0,
    states: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Train on the parts; return the samples' numbers, the weights, the state after ``stop`` batches, warnings."""
    rank, size = join(backend)
    # (Workers that are forked from a process with LanceDB's threads end by a signal.)
    context = "spawn" if workers and library == "lancedb" else None
    data = PARTS[library](Path(folder), rank, size, option)
    plain = DataLoader(data, 6, collate_fn=_collate, num_workers=workers, multiprocessing_context=context)
    loader = lockstep.shard(plain, stream="parts" if library in SAID else None)
    model = lockstep.replicate(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches: list[list[int]] = []
    state = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if states is not None:
            loader.load_state_dict(states[rank])
        for inputs, targets in loader:
            batches.append(inputs[:, 0].long().tolist())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if len(batches) == stop:
                state = json.loads(json.dumps(loader.state_dict()))
    said = [str(each.message) for each in caught if "rank " in str(each.message)]
    return {"batches": batches, "weights": weights(model), "state": state, "said": said}


def alone(batches: list[list[int]]) -> Arrays:
    """What one process trains on the same global batches, without lockstep."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for numbers in batches:
        inputs, targets = _collate([row_at(number) for number in numbers])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)
