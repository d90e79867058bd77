"""What it costs a step to see why it takes as long as it does: the record, the summary, the log, ``runs top``.

Two ranks with one thread each train the smallest model of ``benchmarks.step`` under ``lockstep run``. Rounds of five
kinds follow each other in random order, the same on both ranks: nothing is seen (the ranks write no pages, and the
launcher is stopped by a signal); the launcher looks, sums up and records; the script also logs its loss in each step,
for a line a second; somebody also watches with ``lockstep runs top``; and so, with a line every 50 steps. The figure is
the median, over blocks of the five, of the difference to the round in which nothing is seen, of the slower rank.

    python -m benchmarks.seeing [--blocks N] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.naming import machine_name
from benchmarks.publishing import publish

#: Steps of a round, after those that are not timed.
_STEPS, _WARM = 200, 20
_KINDS = {
    "nothing": "nothing is seen",
    "launcher": "the summary and the record",
    "log": "and `lockstep.Log` in each step, a line a second",
    "top": "and `lockstep runs top` watches",
    "lines": "a line every 50 steps instead, which is 24 lines a second",
}
#: Milliseconds of a step.
_GOAL = 0.02


def _train(folder: Path, blocks: int, top: int) -> None:
    """A rank: writes the seconds of a step of each round, by kind."""
    import torch
    import torch.distributed as dist

    import lockstep
    from benchmarks.models import WORKLOADS
    from benchmarks.recorder import Nothing
    from lockstep.job import flight
    from lockstep.job.page import PAGE

    torch.set_num_threads(1)
    world, workload = lockstep.init(), WORKLOADS[0]
    model = lockstep.replicate(workload.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = workload.batch()
    targets = torch.zeros(len(batch), dtype=torch.int64)
    log = lockstep.Log(folder / "metrics.jsonl", seconds=1.0)
    often = lockstep.Log(folder / "often.jsonl", every=50)
    seen, unseen = flight.current, Nothing(memoryview(bytearray(PAGE)))
    zygote = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    launcher = int(zygote[1])
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    draw = random.Random(7)
    for _ in range(blocks):
        for kind in draw.sample(list(_KINDS), len(_KINDS)):
            if world.rank == 0:
                os.kill(launcher, signal.SIGSTOP if kind == "nothing" else signal.SIGCONT)
                os.kill(top, signal.SIGCONT if kind in ("top", "lines") else signal.SIGSTOP)
            flight.use(unseen if kind == "nothing" else seen)
            begun = 0.0
            for step in range(_WARM + _STEPS):
                if step == _WARM:
                    dist.barrier()
                    begun = time.perf_counter()
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(batch), targets)
                loss.backward()
                optimizer.step()
                if kind in ("log", "top"):
                    log(loss=loss)
                if kind == "lines":
                    often(loss=loss)
            times[kind].append((time.perf_counter() - begun) / _STEPS)
            flight.use(seen)
    if world.rank == 0:
        os.kill(launcher, signal.SIGCONT)
        os.kill(top, signal.SIGKILL)
    (folder / f"times-{world.rank}").write_text(json.dumps(times))
    log.close()
    often.close()


def _measure(blocks: int) -> list[dict[str, list[float]]]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        # A terminal for lockstep runs top, whose screen nobody keeps. It begins when the run can be found.
        screen, terminal = pty.openpty()
        watch = f"exec {sys.executable} -m lockstep runs top {folder}/logs/"
        script = f"until [ -e {folder}/logs/run.json ]; do sleep 0.1; done; {watch}"
        top = subprocess.Popen(["/bin/sh", "-c", script], stdout=terminal, stderr=terminal)
        threading.Thread(target=_drain, args=(screen,), daemon=True).start()
        run = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--log-dir", str(folder / "logs")]
        try:
            subprocess.run([*run, "-m", __spec__.name, "--rank", name, str(blocks), str(top.pid)], check=True)
        finally:
            top.kill()
            top.wait()
            os.close(terminal)
        return [json.loads((folder / f"times-{rank}").read_text()) for rank in range(2)]


def _drain(screen: int) -> None:
    while True:
        try:
            os.read(screen, 65536)
        except OSError:
            return


def _report(measured: list[dict[str, list[float]]], blocks: int) -> str:
    times = {
        kind: [max(pair) * 1e3 for pair in zip(*(rank[kind] for rank in measured), strict=True)] for kind in _KINDS
    }
    bare = times["nothing"]
    rows = [f"| {_KINDS['nothing']} | {statistics.median(bare):.3f} | | |"]
    for kind in list(_KINDS)[1:]:
        differences = sorted(seen - unseen for seen, unseen in zip(times[kind], bare, strict=True))
        half = 0.98 * len(differences) ** 0.5
        low = differences[max(0, int(len(differences) / 2 - half))]
        high = differences[min(len(differences) - 1, int(len(differences) / 2 + half))]
        figures = f"{statistics.median(times[kind]):.3f} | {statistics.median(differences):+.4f}"
        rows.append(f"| {_KINDS[kind]} | {figures} | {low:+.4f} to {high:+.4f} |")
    lines = [
        f"# What it costs a step to be seen\n\n{machine_name()}.",
        f"2 ranks with 1 thread each over shm, MLP, 0.03 M; {blocks} blocks of five rounds of {_STEPS} steps, of the",
        "slower rank; medians, and the interval of the median difference.\n",
        "| | ms a step | difference | 95 % |\n|---|---:|---:|---:|",
        *rows,
        f"\nThe goal: at most {_GOAL} ms.\n",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100, help="how many times the five kinds of rounds")
    parser.add_argument("--write", action="store_true", help="write it to benchmarks/results/<date>-seeing.md")
    parser.add_argument("--rank", nargs=3, metavar=("FOLDER", "BLOCKS", "TOP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _train(Path(options.rank[0]), int(options.rank[1]), int(options.rank[2]))
        return
    publish(_report(_measure(options.blocks), options.blocks), name="seeing", write=options.write)


if __name__ == "__main__":
    main()
