"""All-reduce over shm, gloo and MPI on one host, interleaved: milliseconds, and the fraction of the copy limit.

``python -m benchmarks.collectives [--ranks 2 4] [--sizes 1KB 4MB] [--seconds 0.5] [--json FILE]``

Each measurement is the median over repeated calls on rank 0 after a warm-up; the backends take turns per size, so that
a busy moment of the machine hits all of them. MPI (mpi4py with mpich, from the ``bench`` extra) runs in its own
processes, started by mpirun, right after the other two of the same number of ranks; it is left out where it is not
installed.

*Copy limit*: the time that one core needs to copy the tensor within memory. An all-reduce of ordinary tensors must read
and write at least that much on each rank.
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

SIZES = {"1KB": 2**10, "16KB": 2**14, "256KB": 2**18, "4MB": 2**22, "26MB": 26 * 2**20, "67MB": 67 * 10**6 // 4 * 4}
LARGE = {"256MB": 2**28}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=[*SIZES, *LARGE])
    parser.add_argument("--seconds", type=float, default=0.5, help="per backend and size")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {name: {**SIZES, **LARGE}[name] for name in options.sizes}
    if options.mpi_rank:
        _measure_mpi(sizes, options.seconds)
        return
    results = {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_measure, (ranks, folder, sizes, options.seconds), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
            figures = json.loads(Path(folder, "figures").read_text())
        figures |= _run_mpi(ranks, options)
        results[ranks] = figures
        _print(ranks, figures, sizes)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def _measure(rank: int, ranks: int, folder: str, sizes: dict[str, int], seconds: float) -> None:
    import lockstep  # noqa: F401  (registers the backend)

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "shm")}
    allocate = getattr(groups["shm"], "allocate_tensor", None)
    figures: dict[str, dict[str, float]] = {}
    for name, size in sizes.items():
        tensor = torch.ones(size // 4)
        times = {
            backend: _median(partial(dist.all_reduce, tensor, group=group), seconds)
            for backend, group in groups.items()
        }
        if allocate is not None:
            shared = allocate(size // 4, dtype=torch.float32)
            times["shm, allocated"] = _median(partial(dist.all_reduce, shared, group=groups["shm"]), seconds)
        copy = torch.empty_like(tensor)
        times["copy"] = _local_median(partial(copy.copy_, tensor), seconds / 4) if rank == 0 else 0.0
        dist.barrier(group=groups["shm"])
        for backend, value in times.items():
            figures.setdefault(backend, {})[name] = value
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _median(step: Callable[[], Any], seconds: float) -> float:
    """Median milliseconds of a collective; every rank makes the same number of calls."""
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
    return statistics.median(times) * 1e3


def _local_median(step: Callable[[], Any], seconds: float) -> float:
    times: list[float] = []
    limit = time.perf_counter() + seconds
    while time.perf_counter() < limit or len(times) < 5:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


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


def _print(ranks: int, figures: dict[str, dict[str, float]], sizes: dict[str, int]) -> None:
    print(f"\n{ranks} ranks on {len(os.sched_getaffinity(0))} cores, float32 sum, milliseconds (median)")
    names = [name for name in ("shm", "shm, allocated", "gloo", "mpi", "copy") if name in figures]
    print(f"{'size':>8}" + "".join(f"{name:>16}" for name in names) + f"{'shm/gloo':>10}{'shm/mpi':>9}{'of copy':>9}")
    for size in sizes:
        row = {name: figures[name][size] for name in names}
        mpi = f"{row['shm'] / row['mpi']:9.2f}" if "mpi" in row else f"{'-':>9}"
        print(
            f"{size:>8}"
            + "".join(f"{row[name]:16.4f}" for name in names)
            + f"{row['shm'] / row['gloo']:10.3f}{mpi}{row['copy'] / row['shm']:9.0%}"
        )


if __name__ == "__main__":
    main()
