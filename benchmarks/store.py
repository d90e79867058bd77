"""What a save to an object store takes, beside one to a disk, and reading it back.

The same state, a model and its Adam, from the same ranks, in turns; medians are shown, with the fastest and the slowest
round. The store is moto's server of S3's protocol on this machine: a program in Python with one lock, which keeps the
objects in memory and computes a digest of each. So these figures say what the way to a store costs here, and not what a
store can do; a store's own limit is measured by giving its address.

    python -m benchmarks.store [--write] [--megabytes 64] [--ranks 2] [--rounds 5] [--address s3://bucket/run]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import lockstep
from benchmarks.checkpoint import State
from benchmarks.naming import machine_name
from benchmarks.publishing import publish


def measure(_rank: int, folders: list[str], megabytes: int, rounds: int) -> list[tuple[list[float], list[float]]]:
    """**Collective.** Save to each folder in turn and read it back. Return the seconds of each, folder by folder."""
    world = lockstep.init()
    state = State(megabytes)
    runs = [lockstep.Checkpointer(folder, model=state.model, optimizer=state.optimizer, keep=1) for folder in folders]
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in folders]
    for number in range(rounds + 1):
        for run, (saving, reading) in zip(runs, taken, strict=True):
            run.step = number
            world.barrier()
            begun = time.perf_counter()
            run.save()
            world.barrier()
            middle = time.perf_counter()
            run.restore()
            world.barrier()
            if number:  # the first one opens connections and makes memory
                saving.append(middle - begun)
                reading.append(time.perf_counter() - middle)
    return taken


def main() -> None:
    """Measure, and print or write a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--address")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-store-")))
        address = options.address
        if address is None:
            from tests.stores import s3  # the tests' server

            os.environ.update(stack.enter_context(s3(folder)).environment)
            address = "s3://bucket/run"
        folders = [str(folder / "run"), address]
        ranks = lockstep.spawn(measure, args=(folders, options.megabytes, options.rounds), nprocs=options.ranks)
        taken = ranks[0]
    rows = [
        f"| {name} | {what} | {_in_words(seconds, options.megabytes)} |"
        for name, both in zip(("disk", options.address or "moto's server"), taken, strict=True)
        for what, seconds in zip(("save", "restore"), both, strict=True)
    ]
    head = [
        "# What a save to an object store takes, beside one to a disk",
        "",
        f"{options.megabytes} MB of state, {options.ranks} ranks, medians of {options.rounds} rounds "
        f"(fastest to slowest), on {machine_name()}.",
        "",
        "| | | MB/s | seconds |",
        "|---|---|---|---|",
    ]
    publish("\n".join([*head, *rows]) + "\n", name="store", write=options.write)


def _in_words(seconds: list[float], megabytes: int) -> str:
    middle = statistics.median(seconds)
    return f"{megabytes / middle:.0f} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
