"""All-reduce over shm, gloo and MPI on one host, interleaved: milliseconds, and the fraction of the copy limit.

``python -m benchmarks.collectives [--ranks 2 4] [--sizes 1KB 4MB] [--seconds 0.5] [--write]``

Each figure is the median over repeated calls on rank 0 after a warm-up; the backends take turns, several times for each
size, so that a busy moment of the machine hits all of them. MPI (mpi4py with mpich, from the ``bench`` extra) runs in
its own processes, started by mpirun, right after the other two of the same number of ranks; it is left out where it is
not installed.

*Copy limit*: the time that one core needs to copy the tensor within memory. An all-reduce of ordinary tensors must read
and write at least that much on each rank.

*Allocated*: the tensor comes from the group's ``allocate_tensor``, as a replica's buckets do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.naming import machine_name
from benchmarks.publishing import publish

SIZES = {
    "1KB": 2**10,
    "16KB": 2**14,
    "256KB": 2**18,
    "4MB": 2**22,
    "26MB": 26 * 2**20,
    "67MB": 67 * 10**6 // 4 * 4,
    "256MB": 2**28,
}
#: How often the backends take turns.
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=0.5, help="per backend and size")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-collectives.md")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {name: SIZES[name] for name in options.sizes}
    if options.mpi_rank:
        _measure_mpi(sizes, options.seconds)
        return
    report = f"# All-reduce on one host\n\n{machine_name()}.\n"
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_measure, (ranks, folder, sizes, options.seconds), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
            figures = json.loads(Path(folder, "figures").read_text())
        figures |= _run_mpi(ranks, options)
        report += _table(ranks, figures, sizes)
    publish(report, name="collectives", write=options.write)


def _measure(rank: int, ranks: int, folder: str, sizes: dict[str, int], seconds: float) -> None:
    import lockstep  # noqa: F401  (registers the backend)

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "shm")}
    allocate: Any = groups["shm"].allocate_tensor
    figures: dict[str, dict[str, float]] = {}
    for name, size in sizes.items():
        tensor, copy = torch.ones(size // 4), torch.empty(size // 4)
        shared = allocate(size // 4, dtype=torch.float32)
        steps = {
            "shm": partial(dist.all_reduce, tensor, group=groups["shm"]),
            "shm, allocated": partial(dist.all_reduce, shared, group=groups["shm"]),
            "gloo": partial(dist.all_reduce, tensor, group=groups["gloo"]),
        }
        times: dict[str, list[float]] = {way: [] for way in (*steps, "copy")}
        for _ in range(TURNS):
            for way, step in steps.items():
                times[way] += _times(step, seconds / TURNS)
            times["copy"] += _local_times(partial(copy.copy_, tensor), seconds / 4 / TURNS) if rank == 0 else [0.0]
            dist.barrier(group=groups["shm"])
        for way, values in times.items():
            figures.setdefault(way, {})[name] = statistics.median(values) * 1e3
        del shared, steps
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _times(step: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each call of a collective; every rank makes the same number of calls."""
    for _ in range(3):
        step()
    begun = time.perf_counter()
    step()
    count = torch.tensor([max(5, min(2000, int(seconds / (time.perf_counter() - begun))))])
    dist.broadcast(count, 0)
    times: list[float] = []
    for _ in range(int(count)):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times


def _local_times(step: Callable[[], Any], seconds: float) -> list[float]:
    times: list[float] = []
    limit = time.perf_counter() + seconds
    while time.perf_counter() < limit or len(times) < 5:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times


# --- MPI -------------------------------------------------------------------------------------------------------------


def _run_mpi(ranks: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    probe = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, check=False)
    if launcher is None or probe.returncode != 0:
        return {}
    command = [launcher, "-n", str(ranks), sys.executable, __file__, "--mpi-rank", "--seconds", str(options.seconds)]
    done = subprocess.run([*command, "--sizes", *options.sizes], capture_output=True, text=True, check=True)
    return {"mpi": json.loads(done.stdout.strip().splitlines()[-1])}


def _measure_mpi(sizes: dict[str, int], seconds: float) -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    figures = {}
    for name, size in sizes.items():
        array, out = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)

        def step(array: Any = array, out: Any = out) -> None:
            world.Allreduce(array, out, op=MPI.SUM)

        for _ in range(3):
            step()
        begun = time.perf_counter()
        step()
        count = world.bcast(max(5, min(2000, int(seconds / (time.perf_counter() - begun)))))
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        figures[name] = statistics.median(times) * 1e3
    if world.Get_rank() == 0:
        print(json.dumps(figures))


def _table(ranks: int, figures: dict[str, dict[str, float]], sizes: dict[str, int]) -> str:
    names = [name for name in ("shm", "shm, allocated", "gloo", "mpi", "copy") if name in figures]
    ratios = ["shm / gloo", "shm / mpi", "copy / shm", "copy / allocated"]
    lines = [
        f"\n## {ranks} ranks on {len(os.sched_getaffinity(0))} cores\n",
        "float32 sum, medians in milliseconds; copy: one core copies the tensor.\n",
        "| size | " + " | ".join([*names, *ratios]) + " |",
        "|---" + "|---:" * (len(names) + len(ratios)) + "|",
    ]
    for size in sizes:
        row = {name: figures[name][size] for name in names}
        cells = [f"{row[name]:.4f}" for name in names]
        cells += [f"{row['shm'] / row['gloo']:.3f}", f"{row['shm'] / row['mpi']:.2f}" if "mpi" in row else "-"]
        cells += [f"{row['copy'] / row['shm']:.0%}", f"{row['copy'] / row['shm, allocated']:.0%}"]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
