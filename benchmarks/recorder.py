"""What a rank's page costs a step: training with it and without it, in pairs, and its events alone. And what it costs
more while the steps are traced.

Two ranks with one thread each train the smallest model of ``benchmarks.step``, whose step is the shortest there is to
hide in. Rounds with and without the page alternate; the figure is the median of the pairs' differences, of the slower
rank. Without it an event still is a call, of a function that does nothing, which is measured alone and added.

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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import lockstep
from benchmarks.models import WORKLOADS
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep import knobs
from lockstep.identity import Identity
from lockstep.job import flight, tracing
from lockstep.job.page import PAGE, Cell

_WORKLOAD = WORKLOADS[0]
#: Steps of one round with the page or without it.
_STEPS = 10
#: Of the step's median.
GOAL = 0.005


class Nothing(flight.Flight):
    """Writes nothing."""

    def enter(self, phase: int) -> None: ...

    def leave(self, phase: int) -> None: ...

    def took_step(self) -> None: ...

    def begin_wait(self, what: str) -> None: ...

    def end_wait(self, *, failed: bool = False) -> None: ...


class _Timed(flight.Flight):
    """Takes the time of each event."""

    def __init__(self) -> None:
        super().__init__(memoryview(bytearray(PAGE)))
        self.seconds: dict[tuple[object, ...], list[float]] = {}
        self._within = False
        for name in ("enter", "leave", "took_step"):
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, event: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            if self._within:  # an event within another is no event of its own
                event(*args)
                return
            self._within = True
            begun = time.perf_counter()
            event(*args)
            self.seconds.setdefault((name, *args), []).append(time.perf_counter() - begun)
            self._within = False

        return timed


@dataclass(frozen=True)
class Measured:
    """What one rank has measured, in seconds of a step, by round."""

    recorded: list[float]
    unrecorded: list[float]
    #: Events of a step.
    events: float
    #: Seconds of the median event of each kind, times how often it comes in a step, in sum.
    alone: float
    #: Seconds of an event that writes nothing: the call alone.
    call: float
    #: Seconds of a step that is traced, and of the first and the last one of its window together.
    traced: list[tuple[float, float]]


def _round(step: Callable[[], None]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(_STEPS):
        step()
    return (time.perf_counter() - begun) / _STEPS


def _make_step() -> Callable[[], None]:
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

    return step


def _traced_round(step: Callable[[], None], folder: str, rank: int, taken: int) -> tuple[float, float]:
    """Return a step's seconds as :func:`_round`, and those of the two others of its window.

    The window is open from before the first step, in which names are written and hooks set, to the end of the last one.
    """
    dist.barrier()
    begun = time.perf_counter()
    tracing.arm(folder, rank=rank, steps=_STEPS + 2, first=taken)
    step()
    around = time.perf_counter() - begun
    within = _round(step)
    begun = time.perf_counter()
    step()
    return within, around + time.perf_counter() - begun


def _measure(rounds: int, folder: str, rank: int) -> Measured:
    writing, nothing, timed = flight.current, Nothing(memoryview(bytearray(PAGE))), _Timed()
    step = _make_step()
    _round(step)
    flight.use(timed)
    _round(step)
    kinds = timed.seconds.values()
    events = sum(len(seconds) for seconds in kinds) / _STEPS
    alone = sum(statistics.median(seconds) * len(seconds) for seconds in kinds) / _STEPS
    times: dict[flight.Flight, list[float]] = {writing: [], nothing: []}
    traced: list[tuple[float, float]] = []
    draw = random.Random(7)  # the same on all ranks
    pages = writing.pages
    assert pages is not None  # it has taken its page
    for _ in range(rounds):
        for which in draw.sample((writing, nothing, None), 3):
            if which is None:
                flight.use(writing)
                traced.append(_traced_round(step, folder, rank, pages.get(rank, Cell.STEPS) - 1))
            else:
                flight.use(which)
                times[which].append(_round(step))
    call = min(timeit.repeat(lambda: nothing.enter(0), number=1000, repeat=20)) / 1000
    flight.use(writing)
    return Measured(times[writing], times[nothing], events, alone, call, traced)


def _rank_main(identity: Identity, folder: str, backend: str, rounds: int, pipe: Connection) -> None:
    os.environ.update({**identity.to_environment(), "OMP_NUM_THREADS": "1", knobs.STORE: f"{folder}/store"})
    torch.set_num_threads(1)
    flight.take(folder, rank=identity.rank, world_size=identity.world_size)
    lockstep.init(backend)
    pipe.send(_measure(rounds, folder, identity.rank))
    lockstep.shutdown()


def _run(ranks: int, backend: str, rounds: int) -> list[Measured]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
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
        return measured


def _report(measured: list[Measured], *, ranks: int, backend: str, rounds: int) -> str:
    recorded = [max(each) for each in zip(*(m.recorded for m in measured), strict=True)]
    unrecorded = [max(each) for each in zip(*(m.unrecorded for m in measured), strict=True)]
    step = statistics.median(unrecorded)
    within = [max(each) for each in zip(*([a for a, _ in m.traced] for m in measured), strict=True)]
    around = [max(each) for each in zip(*([b for _, b in m.traced] for m in measured), strict=True)]
    more = statistics.median(a - b for a, b in zip(within, recorded, strict=True))
    once = statistics.median(a - 2 * b for a, b in zip(around, within, strict=True))
    differences = sorted(a - b for a, b in zip(recorded, unrecorded, strict=True))
    calls = max(m.events * m.call for m in measured)
    alone = max(m.alone for m in measured)
    cost = statistics.median(differences) + calls
    # A distribution-free interval of the median (order statistics, 95 %).
    half = 0.98 * len(differences) ** 0.5
    low = differences[max(0, int(len(differences) / 2 - half))] + calls
    high = differences[min(len(differences) - 1, int(len(differences) / 2 + half))] + calls
    return (
        f"# What a rank's page costs\n\n{machine_name()}.\n{ranks} ranks with 1 thread each over {backend}, "
        f"{_WORKLOAD.name}; {rounds} pairs of rounds of {_STEPS} steps, of the slower rank. In pairs: the median of "
        "the pairs' differences, and its 95 % interval, plus the calls that stay where nothing is written. Event by "
        "event: the median time of each kind of event, timed where it happens, times how often it comes; an upper "
        "bound, for the clock that takes the time is as cold there as what it times.\n\n"
        "| step (µs) | in pairs (µs) | 95 % (µs) | of it | events of a step | event by event (µs) | of it |\n"
        "|---:|---:|---:|---:|---:|---:|---:|\n"
        f"| {step * 1e6:.0f} | {cost * 1e6:.1f} | {low * 1e6:.1f} to {high * 1e6:.1f} | {cost / step:.2%} "
        f"| {measured[0].events:.0f} | {alone * 1e6:.1f} | {alone / step:.2%} |\n\n"
        f"The goal: under {GOAL:.1%} of the step, {GOAL * step * 1e6:.1f} µs.\n\n"
        f"While it is traced (`--trace`) a step takes {more * 1e6:.1f} µs more than with the page, {more / step:.1%}: "
        f"the median of the differences of rounds next to each other. Beginning and ending take {once * 1e6:.0f} µs "
        "once: files, names and hooks.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how much")
    parser.add_argument("--write", action="store_true", help="write it to benchmarks/results/<date>-recorder.md")
    options = parser.parse_args()
    rounds = 200 if options.quick else options.rounds
    measured = _run(options.ranks, options.backend, rounds)
    report = _report(measured, ranks=options.ranks, backend=options.backend, rounds=rounds)
    publish(report, name="recorder", write=options.write)


if __name__ == "__main__":
    main()
