"""Many ranks on one machine: ``lockstep run`` beside torchrun, and what it costs to watch over them.

The model is tiny, so what is measured is the launchers. Both ways are started in turn; the clock starts with the
command, and stops when the last rank has taken its first step (replicas over shm, DistributedDataParallel over gloo).
While the ranks train, the launcher's processor time and memory are read from /proc. Then one rank raises an error, and
one gets stuck: how long until the launcher has named it.

    python -m benchmarks.many_ranks [--ranks N] [--rounds N] [--seconds S] [--write]
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.naming import machine_name
from benchmarks.publishing import publish

_SCRIPT = """
import os, sys, time, torch
from pathlib import Path
folder, steps, victim, trouble = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
{begin}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
count = os.open(folder / f"steps-{{rank}}", os.O_WRONLY | os.O_CREAT, 0o600)
for step in range(1, steps + 1):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 1:
        (folder / f"first-{{rank}}").write_text(str(time.monotonic()))
    os.pwrite(count, str(step).encode(), 0)
    if step == 20 and rank == victim:
        (folder / "struck").write_text(str(time.monotonic()))
        if trouble == "raises":
            raise RuntimeError("the wrong turn")
        while True:
            time.sleep(1.0)
{end}
"""
_LOCKSTEP = _SCRIPT.format(
    begin="import lockstep\nrank = lockstep.init().rank\nmodel = lockstep.replicate(torch.nn.Linear(8, 8))", end=""
)
_TORCH = _SCRIPT.format(
    begin=(
        'import torch.distributed as dist\ndist.init_process_group("gloo")\nrank = dist.get_rank()\n'
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))"
    ),
    end="dist.destroy_process_group()",
)
#: Seconds for one start of all ranks.
_LIMIT = 600.0
_ENDLESS = 10**9


@dataclass(frozen=True)
class Way:
    """One way to start N ranks."""

    name: str
    command: tuple[str, ...]
    script: str


_WAYS = (
    Way("lockstep run", ("-m", "lockstep", "run", "-n", "N"), _LOCKSTEP),
    Way("torchrun", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "N"), _TORCH),
)


@dataclass(frozen=True)
class Watch:
    """What it costs to watch over ranks that train."""

    #: Processor seconds per second, of the launcher and of the process that has forked the ranks.
    launcher: float
    zygote: float
    #: Resident memory of each, in MB.
    launcher_mb: float
    zygote_mb: float
    steps_per_second: float


def main() -> None:
    """Measure, print tables, and write them down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="how many")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each way (median is shown)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the launcher is watched")
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/results/")
    options = parser.parse_args()
    ranks = options.ranks
    starts: dict[str, list[tuple[float, float]]] = {way.name: [] for way in _WAYS}
    for number in range(options.rounds):
        for way in _WAYS:
            print(f"round {number + 1} of {options.rounds}: {way.name}", file=sys.stderr)
            starts[way.name].append(_start(way, ranks))
    watch = _watch(ranks, options.seconds)
    victim = ranks * 37 // 64
    raised, ended = _name(ranks, victim, "raises", f"rank {victim} of {ranks} failed: exit code 1")
    stuck, _ = _name(ranks, victim, "gets stuck", f"rank {victim} of {ranks} has held up the others")
    lines = [
        f"# {ranks} ranks on one machine, {time.strftime('%Y-%m-%d')}",
        "",
        machine_name(),
        "",
        f"Medians of {options.rounds}, in seconds from the command; in brackets the fastest and the slowest.",
        "",
        "| | first step of all ranks | of torchrun's | command ended |",
        "|---|---|---|---|",
    ]
    base = statistics.median(first for first, _ in starts["torchrun"])
    for name, rows in starts.items():
        first, total = zip(*rows, strict=True)
        lines.append(f"| {name} | {_spread(first)} | {statistics.median(first) / base:.2f}x | {_spread(total)} |")
    lines += [
        "",
        f"While all ranks train ({watch.steps_per_second:.0f} steps a second), over {options.seconds:g} s:",
        "",
        "| | processor seconds per second | resident memory, MB |",
        "|---|---|---|",
        f"| launcher | {watch.launcher:.3f} | {watch.launcher_mb:.0f} |",
        f"| the process that forked the ranks | {watch.zygote:.3f} | {watch.zygote_mb:.0f} |",
        "",
        f"Rank {victim} is named, with its traceback, {raised:.1f} s after it has raised an error, and the command has "
        f"ended after {ended:.1f} s; it is named {stuck:.1f} s after it got stuck.",
        "",
    ]
    publish("\n".join(lines), name="many_ranks", write=options.write)


def _spread(times: tuple[float, ...]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"


def _start(way: Way, ranks: int) -> tuple[float, float]:
    """Seconds from the command until the last rank has taken its first step, and until the command has ended."""
    begun = time.monotonic()
    with _running(way, ranks, steps=1) as (process, folder):
        _, err = process.communicate(timeout=_LIMIT)
        ended = time.monotonic()
        if process.returncode != 0:
            raise RuntimeError(f"{way.name} ended with exit code {process.returncode}:\n{err.decode()}")
        firsts = [float((folder / f"first-{rank}").read_text()) for rank in range(ranks)]
    return max(firsts) - begun, ended - begun


def _watch(ranks: int, seconds: float) -> Watch:
    """Read what the launcher needs while the ranks train."""
    with _running(_WAYS[0], ranks, steps=_ENDLESS) as (process, folder):
        _wait(lambda: all((folder / f"first-{rank}").exists() for rank in range(ranks)))
        launcher = process.pid
        (zygote,) = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
        began, before, step = time.monotonic(), (_cpu(launcher), _cpu(zygote)), _steps(folder)
        time.sleep(seconds)
        passed = time.monotonic() - began
        return Watch(
            launcher=(_cpu(launcher) - before[0]) / passed,
            zygote=(_cpu(zygote) - before[1]) / passed,
            launcher_mb=_resident(launcher),
            zygote_mb=_resident(zygote),
            steps_per_second=(_steps(folder) - step) / passed,
        )


def _name(ranks: int, victim: int, trouble: str, words: str) -> tuple[float, float]:
    """Seconds until the launcher has said ``words`` of the rank, and until the command has ended, if it does."""
    with _running(_WAYS[0], ranks, steps=_ENDLESS, victim=victim, trouble=trouble) as (process, folder):
        assert process.stderr is not None
        said, deadline = b"", time.monotonic() + _LIMIT
        while words.encode() not in said:
            ready, _, _ = select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(process.stderr.fileno(), 65536) if ready else b""
            if not piece:
                raise RuntimeError(f"{words!r} was not said:\n{said.decode()}")
            said += piece
        named, struck = time.monotonic(), float((folder / "struck").read_text())
        if trouble != "raises":
            return named - struck, named - struck
        _, rest = process.communicate(timeout=_LIMIT)
        if b"RuntimeError: the wrong turn" not in said + rest:
            raise RuntimeError(f"the traceback was not shown:\n{(said + rest).decode()}")
        return named - struck, time.monotonic() - struck


@contextmanager
def _running(
    way: Way, ranks: int, *, steps: int, victim: int = -1, trouble: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the ranks; whatever is left of them in the end is ended."""
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(way.script)
        command = [str(ranks) if word == "N" else word for word in way.command]
        argv = [sys.executable, *command, str(script), name, str(steps), str(victim), trouble]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        try:
            yield process, folder
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_LIMIT:g} s")
        time.sleep(0.05)


def _steps(folder: Path) -> int:
    return int((folder / "steps-0").read_text())


def _cpu(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> float:
    """Resident memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    main()
