"""How long a job of two machines stands still when a rank is killed or a machine joins: ``--rdzv`` beside torchrun.

The machines are two launchers on this one, with a rank each, and the ranks run the same script under both: a small
model over gloo, saved every ten steps by lockstep's Checkpointer. torchrun is measured as it comes and with
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``. All ways are measured in turn within one run. The clock starts at SIGKILL, or
when a step is the last one before the machine joins, and stops when every rank has taken a step again.

    python -m benchmarks.restart [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep.launch.ports import free_port

_SCRIPT = """
import os, sys, time, torch, lockstep
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
world = lockstep.init("gloo", timeout=30)
model = lockstep.replicate(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=16))
saved = lockstep.Checkpointer(folder / "run", model=model, optimizer=optimizer, loader=loader)
log = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
for epoch in saved.epochs(epochs):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        os.write(log, f"{time.monotonic()} {world.rank} {world.world_size}\\n".encode())
        time.sleep(0.02)
        if saved.step % 10 == 0:
            saved.save()
"""
#: Seconds after which a job that has not gone on is given up.
_LIMIT = 90.0


@dataclass(frozen=True)
class Way:
    """One way to start a machine's part of a job."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str]

    def start(self, nodes: str, port: int, script: Path, folder: Path) -> subprocess.Popen[bytes]:
        """Start one machine."""
        places = {"NODES": nodes, "ENDPOINT": f"127.0.0.1:{port}"}
        argv = [sys.executable, *(places.get(word, word) for word in self.command), str(script), str(folder), "25"]
        output = (folder / "output").open("ab")
        return subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **self.env})


_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", "NODES", "--nproc-per-node", "1", "--max-restarts", "5"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "ENDPOINT", "--rdzv-id", "job"),
    *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"),
)
_WAYS = (
    Way(
        "lockstep run --rdzv",
        (
            *("-m", "lockstep", "run", "--nnodes", "NODES", "-n", "1", "--max-restarts", "5"),
            *("--rdzv", "ENDPOINT", "--regroup-after", "0"),
        ),
        {},
    ),
    Way("torchrun", _TORCHRUN, {}),
    Way("torchrun, store not shared", _TORCHRUN, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
)


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    at: float
    rank: int
    world_size: int
    pid: int


def main() -> None:
    """Measure, print a table, and write it down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (median is shown)")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    found: dict[str, list[list[float | None]]] = {way.name: [] for way in _WAYS}
    for number in range(options.rounds):
        for way in _WAYS:
            print(f"round {number + 1} of {options.rounds}: {way.name}", file=sys.stderr)
            found[way.name].append([*_with_a_job(way, "2", _kill), *_with_a_job(way, "1:3", _join)])
    lines = [
        f"# Two machines: a rank is killed, a machine joins, {time.strftime('%Y-%m-%d')}",
        "",
        machine_name(),
        "",
        f"Medians of {options.rounds}, in seconds; in brackets the fastest and the slowest; lost: no step of all ranks "
        f"within {_LIMIT:g} s.",
        "",
        "| | first step of all | rank killed, to the next step of all | machine joins, without a step |",
        "|---|---|---|---|",
    ]
    for name, rows in found.items():
        cold, killed, _, joined = (_render(column) for column in zip(*rows, strict=True))
        lines.append(f"| {name} | {cold} | {killed} | {joined} |")
    publish("\n".join([*lines, ""]), name="restart", write=options.write)


def _render(column: tuple[float | None, ...]) -> str:
    times = [seconds for seconds in column if seconds is not None]
    lost = "" if len(times) == len(column) else f"{len(column) - len(times)} of {len(column)} lost"
    if not times:
        return lost
    shown = f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"
    return f"{shown}, {lost}" if lost else shown


def _with_a_job(
    way: Way, nodes: str, disturb: Callable[[Path, Callable[[], object]], float | None]
) -> list[float | None]:
    """Seconds to the first step of two machines, and what the disturbance costs; None: the job did not go on."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as undo:
        folder, port = Path(name), free_port()
        script = folder / "train.py"
        script.write_text(_SCRIPT)

        def start() -> None:
            machine = way.start(nodes, port, script, folder)
            undo.callback(_end, machine)

        begun = time.monotonic()
        start()
        start()
        if not _wait(lambda: _ranks(_steps(folder), begun) >= 2):
            raise RuntimeError(f"{way.name} did not start:\n{(folder / 'output').read_text()}")
        first = max(min(step.at for step in _steps(folder) if step.rank == rank) for rank in range(2)) - begun
        time.sleep(1.0)
        return [first, disturb(folder, start)]


def _end(machine: subprocess.Popen[bytes]) -> None:
    machine.send_signal(signal.SIGINT)
    try:
        machine.wait(20)
    except subprocess.TimeoutExpired:
        machine.kill()
        machine.wait()


def _kill(folder: Path, _start: Callable[[], object]) -> float | None:
    """Kill rank 1."""
    os.kill(next(step.pid for step in _steps(folder) if step.rank == 1), signal.SIGKILL)
    struck = time.monotonic()
    time.sleep(0.2)  # what the other rank was just writing
    after = time.monotonic()
    if not _wait(lambda: _ranks(_steps(folder), after) >= 2):
        return None
    steps = [step for step in _steps(folder) if step.at > after]
    return max(min(step.at for step in steps if step.rank == rank) for rank in range(2)) - struck


def _join(folder: Path, start: Callable[[], object]) -> float | None:
    """Start a third machine; what counts is how long there is no step."""
    start()
    if not _wait(lambda: any(step.world_size == 3 for step in _steps(folder))):
        return None
    steps = _steps(folder)
    joined = min(step.at for step in steps if step.world_size == 3)
    return joined - max(step.at for step in steps if step.world_size == 2 and step.at < joined)


def _wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _ranks(steps: list[Step], since: float) -> int:
    return len({step.rank for step in steps if step.at > since})


def _steps(folder: Path) -> list[Step]:
    found = []
    for log in folder.glob("*.log"):
        for line in log.read_text().splitlines():
            at, rank, world_size = line.split()
            found.append(Step(float(at), int(rank), int(world_size), int(log.stem)))
    return sorted(found, key=lambda step: step.at)


if __name__ == "__main__":
    main()
