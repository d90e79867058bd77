"""What a stream costs: an epoch of a sharded IterableDataset on 1 and 2 ranks against the plain DataLoader.

The plain DataLoader reads the stream in one process with the global batch size, as a program without lockstep does. Its
epochs and those of the ranks follow each other on the same machine, in random order: the plain loader's on rank 0
alone, while the others wait. An epoch of the ranks takes as long as that of the slowest. Samples are tensors of float32
that cost some microseconds each to make, without and with workers. The figure is the median over pairs of epochs of the
ratio of their times. The samples that each rank reads are counted where they are read.

    python -m benchmarks.streams [--rounds N] [--batches N] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lockstep
from benchmarks.naming import machine_name
from benchmarks.pairs import in_turn, row
from benchmarks.publishing import publish

_BATCH, _WORLDS = 64, (1, 2)
#: Name -> the shape of a sample, additions over all of its elements that it costs, and workers.
_KINDS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "rows of 64 numbers": ((64,), 4, 0),
    "rows of 64 numbers, 2 workers": ((64,), 4, 2),
    "pictures of 3×64×64": ((3, 64, 64), 24, 0),
    "pictures of 3×64×64, 2 workers": ((3, 64, 64), 24, 2),
    "pictures of 3×224×224, 2 workers": ((3, 224, 224), 24, 2),
}


class Pictures(IterableDataset[Tensor]):
    """Random pictures, split among its workers, which count what they read."""

    def __init__(self, count: int, shape: tuple[int, ...], additions: int) -> None:
        self._count, self._shape, self._additions = count, shape, additions
        self.read = torch.zeros(64, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for _ in range(first, self._count, step):
            self.read[first] += 1
            picture = torch.rand(self._shape)
            for _ in range(self._additions):
                picture.add_(1.0)
            yield picture


def _pairs(_: int, name: str, rounds: int, *, batches: int, counts: bool = False) -> list[Any]:
    """A rank: return the seconds of a batch of each round, plain and sharded; or how many samples each rank has read of
    as many as there are in an epoch."""
    world = lockstep.init(timeout=600)
    shape, additions, workers = _KINDS[name]
    stream, alone = (Pictures(_BATCH * batches, shape, additions) for _ in range(2))
    loader = lockstep.shard(DataLoader(stream, batch_size=_BATCH, num_workers=workers))
    plain = DataLoader(alone, batch_size=_BATCH, num_workers=workers)

    def seconds(of: Any) -> float:
        world.barrier()
        begun = time.perf_counter()
        if of is loader or world.is_main:
            for _ in of:
                pass
        return float(world.all_reduce((time.perf_counter() - begun) / batches, "max"))

    if counts:
        epochs = []
        for _ in range(2):
            before = int(stream.read.sum())
            seconds(loader)
            epochs.append(world.gather(torch.tensor([int(stream.read.sum()) - before])))
        return [[int(read) for read in epoch] for epoch in epochs if epoch is not None]
    return in_turn(partial(seconds, plain), partial(seconds, loader), rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    measure = partial(_pairs, batches=options.batches)
    rows = [row(measure, name, ranks, "shm", options.rounds) for name in _KINDS for ranks in _WORLDS]
    counted = [
        f"| {ranks} | {' and '.join(map(str, epoch))} |"
        for ranks in (1, 2, 3)
        for epoch in lockstep.spawn(partial(_pairs, batches=1, counts=True), ("rows of 64 numbers", 1), ranks)[0]
    ]
    report = f"""# What a stream costs

{machine_name()}. Global batches of {_BATCH} samples, {options.batches} an epoch, {options.rounds} pairs of epochs.

| samples | ranks | over | plain DataLoader, ms a batch | sharded, times that (quartiles) |
|---|---|---|---|---|
{chr(10).join(rows)}

What the ranks of a machine read of a stream of {_BATCH} samples, in the first and in the second epoch:

| ranks | read by each |
|---|---|
{chr(10).join(counted)}
"""
    publish(report, name="streams", write=options.write)


if __name__ == "__main__":
    main()
