"""What a sharded loader costs beside torch's own with its DistributedSampler: time a batch, and to the first one.

Two ranks go through epochs of both loaders in turn, in random order, and do nothing with the batches of 64 samples a
rank; the figure is the median over pairs of epochs of the ratio of their times, of the slower rank. For the first
batch of an epoch each loader has a process of its own, for whose memory the peak is read as well.

    python -m benchmarks.loader [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lockstep
from benchmarks.naming import machine_name
from benchmarks.pairs import in_turn
from benchmarks.publishing import publish

_RANKS, _A_RANK, _FEATURES = 2, 64, 32
_SAMPLES, _LONG = 20_000, (10_000, 1_000_000, 100_000_000)


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows of a tensor, one at a time, as most data sets in memory are written."""

    def __init__(self) -> None:
        self.rows = torch.randn(_SAMPLES, _FEATURES)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index % 10


class Noisy(Rows):
    """Adds noise of torch's to each row."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row, label = super().__getitem__(index)
        return row + 0.1 * torch.randn(_FEATURES), label


class Flipped(Rows):
    """Draws from Python's and NumPy's generators for each row."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row, label = super().__getitem__(index)
        return (row.flip(0) if random.random() < 0.5 else row) * float(np.random.rand()), label


class Table(Rows):
    """Fetches the rows of a batch at once, as tables on disk do."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [*zip(self.rows[indices].unbind(), [index % 10 for index in indices], strict=True)]


class Numbers(Dataset[int]):
    """As many samples as it is told, and no data."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


KINDS: dict[str, Any] = {
    "rows": Rows,
    "rows, noise of torch": Noisy,
    "rows, random and NumPy": Flipped,
    "rows, a batch at once": Table,
    "TensorDataset": lambda: TensorDataset(Rows().rows, torch.arange(_SAMPLES) % 10),
}


def _pairs(_: int, kind: str, workers: int, rounds: int) -> list[tuple[float, float]]:
    """A rank: return the seconds of a batch in each round, of torch's loader and of the sharded one."""
    world = lockstep.init(timeout=300)
    dataset = KINDS[kind]()
    options: dict[str, Any] = {"persistent_workers": workers > 0}
    own = DataLoader(
        dataset,
        _A_RANK,
        sampler=DistributedSampler(dataset, world.world_size, world.rank),
        num_workers=workers,
        **options,
    )
    sharded = lockstep.shard(
        DataLoader(dataset, _A_RANK * world.world_size, shuffle=True, num_workers=workers * world.world_size, **options)
    )

    def go(loader: Any) -> float:
        world.barrier()
        begun = time.perf_counter()
        number = sum(1 for _ in loader)
        return float(world.all_reduce((time.perf_counter() - begun) / number, "max"))

    return in_turn(partial(go, own), partial(go, sharded), rounds=rounds)


def _first_batch(is_sharded: bool, length: int, to: Any) -> None:
    """Tell the seconds to the first batch of two epochs, and how much memory they took in MB."""
    dataset = Numbers(length)
    world = lockstep.init()
    if is_sharded:
        loader: Any = lockstep.shard(DataLoader(dataset, _A_RANK, shuffle=True))
    else:
        loader = DataLoader(dataset, _A_RANK, sampler=DistributedSampler(dataset, world.world_size, world.rank))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(2):
        begun = time.perf_counter()
        next(iter(loader))
        seconds.append(time.perf_counter() - begun)
    to.send((*seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def _row(kind: str, workers: int, rounds: int) -> str:
    pairs = lockstep.spawn(_pairs, (kind, workers, rounds), _RANKS)[0]
    own, sharded = (statistics.median(pair[way] for pair in pairs) * 1e6 for way in (0, 1))
    ratio = statistics.median(second / first for first, second in pairs)
    more = (sharded - own) / _A_RANK
    return f"| {kind} | {workers} | {own:,.0f} | {sharded:,.0f} | **{ratio:.2f}** | {more:+.1f} |"


def _long_row(length: int) -> str:
    cells = []
    for is_sharded in (False, True):
        here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(target=_first_batch, args=(is_sharded, length, there))
        process.start()
        first, second, megabytes = here.recv()
        process.join()
        cells += [f"{first:.3f}", f"{second:.3f}", f"{megabytes:,.0f}"]
    return f"| {length:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = [_row(kind, workers, options.rounds) for workers in (0, 2) for kind in KINDS]
    long_rows = [_long_row(length) for length in _LONG]
    report = f"""# What a sharded loader costs beside torch's own

{machine_name()}. {_RANKS} ranks, {_A_RANK} samples of {_FEATURES} numbers a rank and batch, {_SAMPLES:,} samples,
{options.rounds} pairs of epochs; torch's loader has its DistributedSampler. Workers are those of a rank.

| data set | workers | torch, µs a batch | lockstep, µs a batch | times that | µs a sample more |
|---|---|---|---|---|---|
{chr(10).join(rows)}

The first batch of the first and the second epoch of one process, in seconds, and what the peak of its memory rose by:

| samples | torch | 2nd | MB | lockstep | 2nd | MB |
|---|---|---|---|---|---|---|
{chr(10).join(long_rows)}
"""
    publish(report, name="loader", write=options.write)


if __name__ == "__main__":
    main()
