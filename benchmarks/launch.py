"""How long until the first all-reduce: ``lockstep run`` beside torchrun and ``torch.multiprocessing.spawn``.

All ways are measured in turn within one run, so that a slow minute of the machine hits each of them. The clock starts
when the command is started; rank 0 reads it after its first all-reduce, and the parent after the command has ended.

    python -m benchmarks.launch [--rounds N] [--ranks 2,4] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.naming import machine_name
from benchmarks.publishing import publish

_LOCKSTEP = """
import time, torch, lockstep
w = lockstep.init()
torch.distributed.all_reduce(torch.ones(1))
if w.is_main: print(time.monotonic())
"""
_TORCH = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0: print(time.monotonic())
dist.destroy_process_group()
"""
_TORCH_SPAWN = """
import os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, n):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    dist.init_process_group("gloo", rank=rank, world_size=n)
    dist.all_reduce(torch.ones(1))
    if rank == 0: print(time.monotonic(), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]),), nprocs=int(sys.argv[1]))
"""
_LOCKSTEP_SPAWN = """
import sys, time, torch, lockstep
def work(rank):
    w = lockstep.init()
    torch.distributed.all_reduce(torch.ones(1))
    if rank == 0: print(time.monotonic(), flush=True)
if __name__ == "__main__":
    lockstep.spawn(work, nprocs=int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Way:
    """One way to start N ranks."""

    name: str
    command: tuple[str, ...]
    script: str

    def argv(self, ranks: int, script: Path) -> list[str]:
        """The command line for ``ranks`` ranks."""
        places = {"N": str(ranks), "SCRIPT": str(script), "PORT": str(_free_port())}
        return [sys.executable, *(places.get(word, word) for word in self.command)]


_WAYS = (
    Way("lockstep run", ("-m", "lockstep", "run", "-n", "N", "SCRIPT"), _LOCKSTEP),
    Way("torchrun", ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "N", "SCRIPT"), _TORCH),
    Way("lockstep.spawn", ("SCRIPT", "N"), _LOCKSTEP_SPAWN),
    Way("torch.multiprocessing.spawn", ("SCRIPT", "N", "PORT"), _TORCH_SPAWN),
)


def main() -> None:
    """Measure, print a table, and write it down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (median is shown)")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas between")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    tables = [_table(int(ranks), options.rounds) for ranks in options.ranks.split(",")]
    text = "\n".join([f"# Time to the first all-reduce, {time.strftime('%Y-%m-%d')}", "", machine_name(), "", *tables])
    publish(text, name="launch", write=options.write)


def _table(ranks: int, rounds: int) -> str:
    times: dict[str, list[tuple[float, float]]] = {way.name: [] for way in _WAYS}
    with tempfile.TemporaryDirectory() as folder:
        scripts = {way.name: Path(folder) / f"{number}.py" for number, way in enumerate(_WAYS)}
        for way in _WAYS:
            scripts[way.name].write_text(way.script)
            _measure(way, ranks, scripts[way.name])  # once unmeasured: files come into memory, .pyc are written
        for number in range(rounds):
            print(f"{ranks} ranks: round {number + 1} of {rounds}", file=sys.stderr)
            for way in _WAYS:
                times[way.name].append(_measure(way, ranks, scripts[way.name]))
    return _render(ranks, rounds, times)


def _measure(way: Way, ranks: int, script: Path) -> tuple[float, float]:
    """Seconds to the first all-reduce and to the end."""
    argv = way.argv(ranks, script)
    start = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    end = time.monotonic()
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with exit code {done.returncode}:\n{done.stderr}")
    return float(done.stdout.split()[-1]) - start, end - start


def _render(ranks: int, rounds: int, times: dict[str, list[tuple[float, float]]]) -> str:
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    base = medians["torchrun"]
    lines = [
        f"## {ranks} ranks (medians of {rounds}, seconds; in brackets the fastest and the slowest)",
        "",
        "| | first all-reduce | of torchrun's | command ended | of torchrun's |",
        "|---|---|---|---|---|",
    ]
    for name, (first, total) in medians.items():
        spread = [f"({min(column):.2f}-{max(column):.2f})" for column in zip(*times[name], strict=True)]
        ratios = [f"{first / base[0]:.2f}x", f"{total / base[1]:.2f}x"]
        lines.append(f"| {name} | {first:.2f} {spread[0]} | {ratios[0]} | {total:.2f} {spread[1]} | {ratios[1]} |")
    return "\n".join([*lines, ""])


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
