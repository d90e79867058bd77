"""Step time of a replica: lockstep, torch's DDP over gloo and over lockstep's backend, and no communication at all.

Two ranks with one thread each train the same model in all ways within one run. The ways alternate in rounds, so that
whatever else the machine does meets all of them; medians over the rounds, of the slower rank, are shown.

``--compiled`` compares compiled steps instead: a compiled model, and a compiled step with its backward.

    python -m benchmarks.step [--quick] [--write] [--compiled] [--ranks 2] [--backend shm] [--only TEXT]
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
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from benchmarks.models import WORKLOADS, Workload
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep import knobs
from lockstep.identity import Identity

Suspend = Callable[[], AbstractContextManager[None]]
Way = Callable[[nn.Module], tuple[nn.Module, Suspend]]


def _alone(model: nn.Module) -> tuple[nn.Module, Suspend]:
    return model, nullcontext


def _replicate(model: nn.Module) -> tuple[nn.Module, Suspend]:
    replica = lockstep.replicate(model)
    return replica, lambda: lockstep.no_sync(replica)


def _lockstep_ddp(model: nn.Module) -> tuple[nn.Module, Suspend]:
    wrapped = lockstep.DistributedDataParallel(model)
    return wrapped, wrapped.no_sync


def _torch_ddp(model: nn.Module) -> tuple[nn.Module, Suspend]:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=_gloo())
    return wrapped, wrapped.no_sync


def _torch_ddp_views(model: nn.Module) -> tuple[nn.Module, Suspend]:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=_gloo(), gradient_as_bucket_view=True)
    return wrapped, wrapped.no_sync


def _torch_ddp_here(model: nn.Module) -> tuple[nn.Module, Suspend]:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, wrapped.no_sync


@functools.cache
def _gloo() -> dist.ProcessGroup | None:
    """A group of all ranks over gloo, whatever backend is measured."""
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
    return group


ALONE, GLOO, GLOO_VIEWS, HERE, DDP, REPLICATE = WAY_NAMES = (
    "no communication",
    "torch DDP over gloo",
    "the same, views",
    "torch DDP over {backend}, views",
    "lockstep DDP over {backend}",
    "replicate over {backend}",
)
WAYS: dict[str, Way] = dict(
    zip(WAY_NAMES, (_alone, _torch_ddp, _torch_ddp_views, _torch_ddp_here, _lockstep_ddp, _replicate), strict=True)
)


def _compiled(attach: Way) -> Way:
    def attach_and_compile(model: nn.Module) -> tuple[nn.Module, Suspend]:
        attached, suspend = attach(model)
        compiled: Any = torch.compile(attached)
        return compiled, suspend

    return attach_and_compile


ALONE_COMPILED, TORCH_COMPILED, MODEL_COMPILED, STEP_COMPILED = COMPILED_NAMES = (
    "no communication, model compiled",
    "torch DDP over gloo, views, model compiled",
    "replicate over {backend}, model compiled",
    "replicate over {backend}, step compiled",
)
COMPILED_WAYS: dict[str, Way] = {
    ALONE: _alone,
    REPLICATE: _replicate,
    ALONE_COMPILED: _compiled(_alone),
    TORCH_COMPILED: _compiled(_torch_ddp_views),
    MODEL_COMPILED: _compiled(_replicate),
    STEP_COMPILED: _replicate,
}


def _ways(compiled: bool) -> dict[str, Way]:
    return COMPILED_WAYS if compiled else WAYS


def _stepper(workload: Workload, way: str, attach: Way) -> Callable[[], None]:
    torch.manual_seed(0)
    model, suspend = attach(workload.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch: Tensor = workload.batch()
    targets = torch.zeros(len(batch), dtype=torch.int64)
    loss_of = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        for micro_batch in range(workload.accumulate):
            last = micro_batch == workload.accumulate - 1
            with nullcontext() if last else suspend():
                loss_of(model(batch), targets).backward()
        optimizer.step()

    return torch.compile(step) if way == STEP_COMPILED else step


def _measure(workload: Workload, rounds: int, *, compiled: bool) -> dict[str, list[float]]:
    """Seconds of a step, for each way and round."""
    steppers = {way: _stepper(workload, way, attach) for way, attach in _ways(compiled).items()}
    for stepper in steppers.values():
        for _ in range(3):
            stepper()
    seconds: dict[str, list[float]] = {way: [] for way in steppers}
    for number in range(rounds):
        ways = list(steppers)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(workload.steps):
                steppers[way]()
            seconds[way].append((time.perf_counter() - begun) / workload.steps)
    return seconds


def _rank_main(
    identity: Identity, folder: str, backend: str, workloads: list[int], rounds: int, compiled: bool, pipe: Connection
) -> None:
    os.environ.update(
        {
            **identity.to_environment(),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            knobs.STORE: f"{folder}/store",
        }
    )
    torch.set_num_threads(1)
    lockstep.init(backend)
    for index in workloads:
        pipe.send(_measure(WORKLOADS[index], rounds, compiled=compiled))
    lockstep.shutdown()


def _run(
    ranks: int, backend: str, workloads: list[int], rounds: int, *, compiled: bool
) -> list[dict[str, list[float]]]:
    """For each workload: seconds of a step on the slower rank, for each way and round."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            receiving, sending = context.Pipe(duplex=False)
            identity = Identity(rank, ranks, rank, ranks, 0, launched=True)
            process = context.Process(
                target=_rank_main,
                args=(identity, folder, backend, workloads, rounds, compiled, sending),
                daemon=True,
            )
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        results = []
        for _ in workloads:
            by_rank: list[dict[str, list[float]]] = [pipe.recv() for pipe in pipes]
            ways = _ways(compiled)
            results.append({way: [max(each) for each in zip(*(r[way] for r in by_rank), strict=True)] for way in ways})
        for process in processes:
            process.join()
        return results


def _table(workloads: list[int], results: list[dict[str, list[float]]], backend: str) -> str:
    lines = [
        "| model | "
        + " | ".join(f"{way.format(backend=backend)} (ms)" for way in WAYS)
        + " | replicate: more than without communication | of what torch adds over gloo | replicate / torch, views "
        + "| DDP / torch |",
        "|---|" + "---:|" * (len(WAYS) + 4),
    ]
    for index, seconds in zip(workloads, results, strict=True):
        cells = [f"{statistics.median(each) * 1e3:.2f}" for each in seconds.values()]
        # Ratios within each round, so that a slow minute does not count for one way only.
        more = _ratio(seconds[REPLICATE], seconds[ALONE]) - 1
        added = statistics.median(
            (ours - alone) / (torchs - alone)
            for ours, torchs, alone in zip(seconds[REPLICATE], seconds[GLOO_VIEWS], seconds[ALONE], strict=True)
        )
        views, copies = _ratio(seconds[REPLICATE], seconds[GLOO_VIEWS]), _ratio(seconds[DDP], seconds[GLOO])
        cells += [f"{more:+.0%}", f"{added:.2f}", f"{views:.2f}", f"{copies:.2f}"]
        lines.append(f"| {WORKLOADS[index].name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _compiled_table(workloads: list[int], results: list[dict[str, list[float]]], backend: str) -> str:
    lines = [
        "| model | "
        + " | ".join(f"{way.format(backend=backend)} (ms)" for way in COMPILED_WAYS)
        + " | model compiled / torch, compiled | step compiled / torch, compiled |",
        "|---|" + "---:|" * (len(COMPILED_WAYS) + 2),
    ]
    for index, seconds in zip(workloads, results, strict=True):
        cells = [f"{statistics.median(each) * 1e3:.2f}" for each in seconds.values()]
        cells += [f"{_ratio(seconds[way], seconds[TORCH_COMPILED]):.2f}" for way in (MODEL_COMPILED, STEP_COMPILED)]
        lines.append(f"| {WORKLOADS[index].name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    parser.add_argument("--only", default="", help="only models with this text in their name")
    parser.add_argument("--compiled", action="store_true", help="compare compiled steps; needs a C++ compiler")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/<date>-step.md")
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    chosen = [index for index, workload in enumerate(WORKLOADS) if options.only in workload.name]
    results = _run(options.ranks, options.backend, chosen, rounds, compiled=options.compiled)
    taken = (
        f"{machine_name()}.\n{options.ranks} ranks with 1 thread each, lockstep over {options.backend}, {rounds} "
        "rounds; medians of the slower rank, in milliseconds. "
    )
    if options.compiled:
        report = (
            f"# Step time of compiled code (forward, backward, SGD)\n\n{taken}torch.compile with inductor. The "
            "last two columns are medians of the rounds' ratios of whole steps. Below 1.00 lockstep is faster.\n\n"
            f"{_compiled_table(chosen, results, options.backend)}\n"
        )
        publish(report, name="step-compiled", write=options.write)
        return
    report = (
        f"# Step time (forward, backward, SGD)\n\n{taken}The last four "
        "columns are medians of the rounds' ratios: replicate against no communication; what replicate adds to a step "
        "against what torch's DDP with gradient_as_bucket_view=True adds over gloo; the whole steps of the two; "
        "lockstep's DDP against torch's over gloo, both with default arguments. Below 1.00 lockstep is faster.\n\n"
        f"{_table(chosen, results, options.backend)}\n"
    )
    publish(report, name="step", write=options.write)


if __name__ == "__main__":
    main()
