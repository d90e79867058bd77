"""A short job: every two ranks average something over lockstep's process group; rank 0 prints the times as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from lockstep import accelerator
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.init import init, shutdown
from lockstep.tools.doctor.facts import place

#: Seconds that a collective may wait here.
_LIMIT = 30.0
#: Elements (float32) of the messages that tell the latency, and the bytes a second.
_FEW, _MANY = 2, 4 << 20
#: The smaller size that replaces the second if a part of this size takes longer than these seconds.
_PART, _SLOW = 64 << 10, 0.05
_REPEATS = 5
#: Ranks of which every two are measured.
_ALL_PAIRS = 8


def main() -> None:
    """Take part in the job as one of its ranks."""
    world = init(timeout=_LIMIT)
    places: list[Any] = all_gather_records(place(), world.group)
    pairs = []
    for pair in _pairs(world.world_size):
        group = dist.new_group(list(pair), timeout=timedelta(seconds=_LIMIT))
        measured = _measure(group, world.rank, pair, world.device) if world.rank in pair else None
        found = all_gather_records(measured, world.group)
        pairs.append(found[pair[0]])
    if world.rank == 0:
        backend = dist.get_backend()
        json.dump({"backend": backend, "device": world.device.type, "places": places, "pairs": pairs}, sys.stdout)
        print(flush=True)
    shutdown()


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Return every two ranks; where there are many, each with the next one: a bad link shows in both of its pairs."""
    if ranks <= _ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def _measure(group: Any, rank: int, pair: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Return the median seconds of an all-reduce of a few and of many bytes between two ranks, and whether the sums
    were right."""
    few, right = _time(group, rank, pair, device, _FEW)
    part, right_too = _time(group, rank, pair, device, _PART)
    elements = _MANY if part < _SLOW else _PART
    many, right_also = _time(group, rank, pair, device, elements)
    return {
        "ranks": list(pair),
        "few": few,
        "many": many,
        "bytes": elements * 4,
        "right": right and right_too and right_also,
    }


def _time(group: Any, rank: int, pair: tuple[int, int], device: torch.device, elements: int) -> tuple[float, bool]:
    own = torch.arange(elements, dtype=torch.float32, device=device).remainder_(1000) + rank
    expected = (own - rank) * 2 + sum(pair)
    times, right = [], True
    for _ in range(_REPEATS):
        values = own.clone()
        dist.barrier(group)
        accelerator.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
        right = right and torch.equal(values, expected)
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)  # both are to go on in the same way
    return float(slowest), right


if __name__ == "__main__":
    main()
