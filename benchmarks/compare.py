"""What it costs to compare replicas while they train: training with it and without it, in pairs, and by the clock.

Two ranks with one thread each train the same model with AdamW twice, with ``compare_every="auto"`` and with None.
Rounds of both alternate; the figure is the median of the pairs' differences, of the slower rank. It is small against
what else a machine does, so the time within the comparison is taken as well, as a part of all time of those rounds.

    python -m benchmarks.compare [--quick] [--write] [--ranks 2] [--backend shm] [--only TEXT]
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from benchmarks.models import WORKLOADS, Workload
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep import knobs
from lockstep.ddp.api import replica_of
from lockstep.ddp.drift import DriftCheck
from lockstep.identity import Identity

#: Of the training time.
GOAL = 0.005
#: Seconds of a round, and comparisons in it at least: the schedule goes by the time between two of them.
_ROUND, _COMPARISONS = 0.3, 3


@dataclass(frozen=True)
class Measured:
    """What one rank has measured, in seconds of a step, by round."""

    compared: list[float]
    plain: list[float]
    #: Seconds within comparisons and of all rounds with them, and how many comparisons there were.
    within: float
    all: float
    comparisons: int
    #: Bytes that are compared, and steps in which all are.
    size: int
    steps: float


class _Clock:
    """Takes the time that a rank spends in comparing."""

    def __init__(self, drift: DriftCheck) -> None:
        self.seconds, self.count = 0.0, 0
        for name in ("fill", "judge"):
            setattr(drift, name, functools.partial(self._timed, getattr(drift, name)))

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - begun
            self.count += 1


def _make_step(workload: Workload, compare_every: Any) -> tuple[Callable[[], None], DriftCheck | None]:
    torch.manual_seed(0)
    model = lockstep.replicate(workload.build(), compare_every=compare_every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = workload.batch()
    targets = torch.zeros(len(batch), dtype=torch.int64)
    loss_of = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        for micro_batch in range(workload.accumulate):
            with lockstep.no_sync(model) if micro_batch < workload.accumulate - 1 else torch.enable_grad():
                loss_of(model(batch), targets).backward()
        optimizer.step()

    return step, replica_of(model).checks.drift


def _round(step: Callable[[], None], steps: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begun) / steps


def _measure(workload: Workload, rounds: int) -> Measured:
    comparing, drift = _make_step(workload, "auto")
    plain, _ = _make_step(workload, None)
    assert drift is not None
    for step in (plain, comparing):
        _round(step, 10)
    while drift._schedule.step < 40:
        _round(comparing, 10)
    steps = max(_agree(_ROUND / _round(plain, 10)), _COMPARISONS << max(0, drift._schedule.exponent))
    _round(comparing, 2 * steps)  # until it compares as often as it will
    clock = _Clock(drift)
    times: dict[str, list[float]] = {"compared": [], "plain": []}
    for number in range(rounds):
        pair = [("compared", comparing), ("plain", plain)]
        for name, step in pair if number % 2 else reversed(pair):
            times[name].append(_round(step, steps))
    parts, (count, every) = len(drift._parts), drift._schedule._pace()
    return Measured(
        **times,
        within=clock.seconds,
        all=sum(times["compared"]) * steps,
        comparisons=clock.count // 2,
        size=sum(item.nbytes for item in drift._holdings.items),
        steps=-(-parts // count) * every,
    )


def _agree(steps: float) -> int:
    """Return the same number of steps on every rank."""
    return max(1, round(lockstep.world().all_reduce(steps, "min")))


def _rank_main(identity: Identity, folder: str, backend: str, which: list[int], rounds: int, pipe: Connection) -> None:
    os.environ.update({**identity.to_environment(), "OMP_NUM_THREADS": "1", knobs.STORE: f"{folder}/store"})
    torch.set_num_threads(1)
    lockstep.init(backend)
    pipe.send([_measure(WORKLOADS[index], rounds) for index in which])
    lockstep.shutdown()


def _run(ranks: int, backend: str, which: list[int], rounds: int) -> list[list[Measured]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            receiving, sending = context.Pipe(duplex=False)
            identity = Identity(rank, ranks, rank, ranks, 0, launched=True)
            arguments = (identity, folder, backend, which, rounds, sending)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        measured: list[list[Measured]] = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
        return measured


def _row(workload: Workload, ranks: list[Measured]) -> str:
    compared = [max(each) for each in zip(*(m.compared for m in ranks), strict=True)]
    plain = [max(each) for each in zip(*(m.plain for m in ranks), strict=True)]
    ratios = sorted(one / other - 1 for one, other in zip(compared, plain, strict=True))
    half = 0.98 * len(ratios) ** 0.5  # order statistics, 95 %
    low, high = ratios[max(0, int(len(ratios) / 2 - half))], ratios[min(len(ratios) - 1, int(len(ratios) / 2 + half))]
    slowest = max(ranks, key=lambda m: m.within / m.all)
    each = slowest.within / max(1, slowest.comparisons)
    return (
        f"| {workload.name} | {statistics.median(plain) * 1e3:.2f} | {statistics.median(ratios):+.2%} "
        f"| {low:+.2%} to {high:+.2%} | {slowest.within / slowest.all:.2%} | {each * 1e6:.0f} "
        f"| {slowest.size / 2**20:.1f} | {slowest.steps:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="only the workloads whose names contain this")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how much")
    parser.add_argument("--write", action="store_true", help="write it to benchmarks/results/<date>-compare.md")
    options = parser.parse_args()
    which = [index for index, workload in enumerate(WORKLOADS) if options.only in workload.name]
    rounds = 6 if options.quick else options.rounds
    measured = _run(options.ranks, options.backend, which, rounds)
    rows = [_row(WORKLOADS[index], list(of)) for index, of in zip(which, zip(*measured, strict=True), strict=True)]
    report = "\n".join(
        [
            f"# What comparing replicas costs\n\n{machine_name()}.\n{options.ranks} ranks with 1 thread each over "
            f"{options.backend}, AdamW; {rounds} pairs of rounds, of the slower rank. In pairs: the median of the "
            "pairs' differences, and its 95 % interval. By the clock: the time within comparisons, of all time of the "
            f"rounds with them. The goal: at most {GOAL:.1%}.\n",
            "| | step (ms) | in pairs | 95 % | by the clock | one comparison (µs) | MiB | all within (steps) |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )
    publish(report, name="compare", write=options.write)


if __name__ == "__main__":
    main()
