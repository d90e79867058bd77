"""What the recorder costs a step: training with it and without it, in pairs, and an event of it alone.

Two ranks with one thread each train the smallest model of ``benchmarks.step``, whose step is the shortest there is to
hide in. Rounds with and without the recorder alternate; the figure is the median of the pairs' differences, of the
slower rank. Without it an event still is a call, of a function that does nothing, which is measured alone and added.

    python -m benchmarks.recorder [--quick] [--write] [--ranks 2] [--backend shm]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import timeit
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers

import lockstep
from benchmarks.models import WORKLOADS
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep import caller, knobs
from lockstep.identity import Identity
from lockstep.recorder import torch_hooks, writer
from lockstep.recorder.reader import Pages

_WORKLOAD = WORKLOADS[0]
#: Steps of one round with the recorder or without it.
_STEPS = 100
#: Of the step's median.
GOAL = 0.01


class _Nothing(writer.Recorder):
    """A recorder that records nothing."""

    def enter(self, phase: int) -> None: ...

    def resume(self, phase: int) -> None: ...

    def took_step(self) -> None: ...

    def begin_wait(self, what: str, *, counts: bool = True) -> None: ...

    def end_wait(self, *, failed: bool = False) -> None: ...


class _Timed(writer.Recorder):
    """A recorder that takes the time of each event, by its kind."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.seconds: dict[tuple[str, int], list[float]] = {}
        self._within = False

    def enter(self, phase: int) -> None:
        begun = time.perf_counter()
        super().enter(phase)
        self._note("enter", phase, time.perf_counter() - begun)

    def resume(self, phase: int) -> None:
        begun = time.perf_counter()
        super().resume(phase)
        self._note("resume", phase, time.perf_counter() - begun)

    def took_step(self) -> None:
        self._within = True  # it may resume a phase, which is no event of its own
        begun = time.perf_counter()
        super().took_step()
        seconds = time.perf_counter() - begun
        self._within = False
        self._note("took_step", 0, seconds)

    def _note(self, kind: str, phase: int, seconds: float) -> None:
        if not self._within:
            self.seconds.setdefault((kind, phase), []).append(seconds)


@dataclass(frozen=True)
class Measured:
    """What one rank has measured, in seconds of a step, by round."""

    recorded: list[float]
    unrecorded: list[float]
    #: Events of a step.
    events: float
    #: Seconds of the median event of each kind, times how often it comes in a step, in sum.
    alone: float
    #: Seconds of an event that records nothing: the call alone.
    call: float


def _memory() -> memoryview:
    return memoryview(bytearray(4096))


def _round(steps: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        _step()
    return (time.perf_counter() - begun) / steps


def _step() -> None:
    """Replaced in each rank by a step of the model."""
    raise NotImplementedError


def _prepare() -> None:
    global _step
    torch.manual_seed(0)
    model = lockstep.replicate(_WORKLOAD.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = _WORKLOAD.batch()
    targets = torch.zeros(len(batch), dtype=torch.int64)
    loss_of = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch), targets).backward()
        optimizer.step()

    _step = step


def _measure(rounds: int) -> Measured:
    recording, nothing, timed = writer.current, _Nothing(_memory()), _Timed(_memory())
    _prepare()
    _round(20)
    # The recorder looks for the program's line: what takes the time is to be no line of the program.
    caller._ours[__file__] = True
    writer.use(timed)
    _round(_STEPS)
    kinds = timed.seconds.values()
    events = sum(len(seconds) for seconds in kinds) / _STEPS
    alone = sum(statistics.median(seconds) * len(seconds) for seconds in kinds) / _STEPS
    times: dict[bool, list[float]] = {True: [], False: []}
    draw = random.Random(7)  # the same on all ranks
    for _ in range(rounds):
        for recorded in draw.sample((True, False), 2):
            writer.use(recording if recorded else nothing)
            times[recorded].append(_round(_STEPS))
    call = min(timeit.repeat(lambda: nothing.enter(0), number=1000, repeat=20)) / 1000
    writer.use(recording)
    return Measured(times[True], times[False], events, alone, call)


def _rank_main(identity: Identity, folder: str, backend: str, rounds: int, pipe: Connection) -> None:
    os.environ.update({**identity.to_environment(), "OMP_NUM_THREADS": "1", knobs.STORE: f"{folder}/store"})
    torch.set_num_threads(1)
    writer.take(folder, rank=identity.rank, local_rank=identity.local_rank)
    lockstep.init(backend)
    torch_hooks.watch_optimizers(optimizers)
    pipe.send(_measure(rounds))
    lockstep.shutdown()


def _run(ranks: int, backend: str, rounds: int) -> list[Measured]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        pages = Pages(Path(folder), ranks)
        pipes, processes = [], []
        for rank in range(ranks):
            receiving, sending = context.Pipe(duplex=False)
            identity = Identity(rank, ranks, rank, ranks, 0, launched=True)
            process = context.Process(target=_rank_main, args=(identity, folder, backend, rounds, sending), daemon=True)
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        measured: list[Measured] = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
        pages.close()
        return measured


def _report(measured: list[Measured], *, ranks: int, backend: str, rounds: int) -> str:
    recorded = [max(each) for each in zip(*(m.recorded for m in measured), strict=True)]
    unrecorded = [max(each) for each in zip(*(m.unrecorded for m in measured), strict=True)]
    step = statistics.median(unrecorded)
    differences = sorted(a - b for a, b in zip(recorded, unrecorded, strict=True))
    calls = max(m.events * m.call for m in measured)
    alone = max(m.alone for m in measured)
    cost = statistics.median(differences) + calls
    # A distribution-free interval of the median (order statistics, 95 %).
    half = 0.98 * len(differences) ** 0.5
    low = differences[max(0, int(len(differences) / 2 - half))] + calls
    high = differences[min(len(differences) - 1, int(len(differences) / 2 + half))] + calls
    return (
        f"# What the recorder costs\n\n{machine_name()}.\n{ranks} ranks with 1 thread each over {backend}, "
        f"{_WORKLOAD.name}; {rounds} pairs of rounds of {_STEPS} steps, of the slower rank. In pairs: the median of "
        "the pairs' differences, and its 95 % interval, plus the calls that stay where nothing is recorded. Event by "
        "event: the median time of each kind of event, timed where it happens, times how often it comes; an upper "
        "bound, for the clock that takes the time is as cold there as what it times.\n\n"
        "| step (µs) | in pairs (µs) | 95 % (µs) | of it | events of a step | event by event (µs) | of it |\n"
        "|---:|---:|---:|---:|---:|---:|---:|\n"
        f"| {step * 1e6:.0f} | {cost * 1e6:.1f} | {low * 1e6:.1f} to {high * 1e6:.1f} | {cost / step:.2%} "
        f"| {measured[0].events:.0f} | {alone * 1e6:.1f} | {alone / step:.2%} |\n\n"
        f"The goal: under {GOAL:.0%} of the step, {GOAL * step * 1e6:.1f} µs.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how much")
    parser.add_argument("--write", action="store_true", help="write it to benchmarks/results/<date>-recorder.md")
    options = parser.parse_args()
    rounds = 20 if options.quick else options.rounds
    measured = _run(options.ranks, options.backend, rounds)
    report = _report(measured, ranks=options.ranks, backend=options.backend, rounds=rounds)
    publish(report, name="recorder", write=options.write)


if __name__ == "__main__":
    main()
