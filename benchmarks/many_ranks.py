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
import itertools, os, sys, time, torch
from pathlib import Path
folder, victim, trouble = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
{begin}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
count = os.open(folder / f"steps-{{rank}}", os.O_WRONLY | os.O_CREAT, 0o600)
for step in itertools.count(1):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 1:
        (folder / f"taken-{{rank}}").write_text(str(time.monotonic()))
        (folder / f"taken-{{rank}}").rename(folder / f"first-{{rank}}")
    os.pwrite(count, str(step).encode(), 0)
    if step == 20 and rank == victim:
        (folder / "struck").write_text(str(time.monotonic()))
        if trouble == "raises":
            raise RuntimeError("the wrong turn")
        while True:
            time.sleep(1.0)
"""
_LOCKSTEP = _SCRIPT.format(
    begin="import lockstep\nrank = lockstep.init().rank\nmodel = lockstep.replicate(torch.nn.Linear(8, 8))"
)
_TORCH = _SCRIPT.format(
    begin=(
        'import torch.distributed as dist\ndist.init_process_group("gloo")\nrank = dist.get_rank()\n'
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))"
    )
)
#: Seconds for one start of all ranks.
_LIMIT = 600.0


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no ranks are left behind
    ranks = options.ranks
    starts: dict[str, list[float | None]] = {way.name: [] for way in _WAYS}
    for number in range(options.rounds):
        for way in _WAYS:
            print(f"round {number + 1} of {options.rounds}: {way.name}", file=sys.stderr)
            starts[way.name].append(_start(way, ranks))
    watch = _watch(ranks, options.seconds)
    victim = ranks * 37 // 64
    raised, ended = _name(ranks, victim, "raises", f"rank {victim} of {ranks} failed: exit code 1")
    stuck, _ = _name(ranks, victim, "gets stuck", f"rank {victim} of {ranks} has held up the others")
    base = _median(starts["torchrun"])
    lines = [
        f"# {ranks} ranks on one machine, {time.strftime('%Y-%m-%d')}",
        "",
        machine_name(),
        "",
        f"Medians of {options.rounds}, in seconds from the command; in brackets the fastest and the slowest; lost: it "
        f"ended by itself, or there was no step of all ranks within {_LIMIT:g} s.",
        "",
        "| | first step of all ranks | of torchrun's |",
        "|---|---|---|",
    ]
    for name, seconds in starts.items():
        median = _median(seconds)
        ratio = f"{median / base:.2f}x" if median is not None and base is not None else ""
        lines.append(f"| {name} | {_render(seconds)} | {ratio} |")
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


def _median(seconds: list[float | None]) -> float | None:
    taken = [each for each in seconds if each is not None]
    return statistics.median(taken) if taken else None


def _render(seconds: list[float | None]) -> str:
    taken = [each for each in seconds if each is not None]
    lost = "" if len(taken) == len(seconds) else f"{len(seconds) - len(taken)} of {len(seconds)} lost"
    if not taken:
        return lost
    shown = f"{statistics.median(taken):.1f} ({min(taken):.1f}-{max(taken):.1f})"
    return f"{shown}, {lost}" if lost else shown


def _start(way: Way, ranks: int) -> float | None:
    """Seconds from the command until the last rank has taken its first step; None: it came to no such step."""
    begun = time.monotonic()
    with _running(way, ranks) as (process, folder):
        if not _wait_for_all(process, folder, ranks):
            return None
        return max(float((folder / f"first-{rank}").read_text()) for rank in range(ranks)) - begun


def _watch(ranks: int, seconds: float) -> Watch:
    """Read what the launcher needs while the ranks train."""
    with _running(_WAYS[0], ranks) as (process, folder):
        if not _wait_for_all(process, folder, ranks):
            raise RuntimeError(f"{ranks} ranks did not start:\n{(folder / 'stderr').read_text()}")
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
    with _running(_WAYS[0], ranks, victim=victim, trouble=trouble) as (process, folder):
        said = folder / "stderr"
        if not _wait(lambda: words in said.read_text()):
            raise RuntimeError(f"{words!r} was not said:\n{said.read_text()}")
        named, struck = time.monotonic(), float((folder / "struck").read_text())
        if trouble != "raises":
            return named - struck, named - struck
        process.wait(timeout=_LIMIT)
        ended = time.monotonic()
        if "RuntimeError: the wrong turn" not in said.read_text().partition(words)[2]:
            raise RuntimeError(f"the traceback was not shown:\n{said.read_text()}")
        return named - struck, ended - struck


@contextmanager
def _running(
    way: Way, ranks: int, *, victim: int = -1, trouble: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the ranks, with what they say in ``stderr`` of their folder; in the end they are ended."""
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(way.script)
        command = [str(ranks) if word == "N" else word for word in way.command]
        argv = [sys.executable, *command, str(script), name, str(victim), trouble]
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            yield process, folder
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=120)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait_for_all(process: subprocess.Popen[bytes], folder: Path, ranks: int) -> bool:
    """Wait until every rank has taken its first step; False if the command ends before."""
    firsts = [folder / f"first-{rank}" for rank in range(ranks)]
    _wait(lambda: process.poll() is not None or all(first.exists() for first in firsts))
    return process.poll() is None and all(first.exists() for first in firsts)


def _wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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
