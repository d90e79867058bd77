"""The options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lockstep
from examples.places import accept_local_rank, local_folder, read_devices, refuse_in

Mode = Literal["dp", "ddp", "single"]
#: What decides which steps a run takes; the learning rate's schedule depends on all of them.
KEPT = ("epochs", "batch_size", "lr", "seed", "lines", "longest", "stream")


@dataclass(frozen=True)
class Options:
    """What the command line says. The defaults of the fields stand in :func:`parse` alone."""

    mode: Mode
    epochs: int
    batch_size: int
    lr: float
    seed: int
    lines: int
    test_lines: int
    longest: int
    stream: bool
    workers: int
    backend: str | None
    #: Of the replicas in --mode dp; otherwise none.
    devices: tuple[str, ...]
    folder: Path
    save_every: int
    resume: bool
    evaluate: bool
    picture: Path | None

    def refuse_in(self, world: lockstep.World) -> None:
        """End the program with a message if the mode and the number of processes make no sense together."""
        if self.mode != "ddp" and world.world_size > 1:
            raise SystemExit(
                f"--mode {self.mode} is one process, and this is rank {world.rank} of {world.world_size}: "
                "start it with python -m examples.crnn, or use --mode ddp"
            )
        refuse_in(world, devices=self.devices, batch_size=world.world_size if self.evaluate else self.batch_size)


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; what makes no sense ends the program with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.crnn",
        description="Train a text recogniser on lines of handwritten digits, in lockstep.",
    )
    add = parser.add_argument
    add("--mode", choices=("dp", "ddp", "single"), default="ddp", help="ddp: a replica in each process that lockstep "
        "run started; dp: replicas in threads of one process; single: one device (default: ddp)")  # fmt: skip
    add("--epochs", type=int, default=6, help="passes over the training lines (default: 6)")
    add("-b", "--batch-size", type=int, default=64, help="global batch, over all replicas (default: 64)")
    add("--lr", type=float, default=4e-3, help="AdamW's highest learning rate (default: 0.004)")
    add("--seed", type=int, default=0, help="seed of weights, order and training lines (default: 0)")
    add("--lines", type=int, default=20480, help="training lines (default: 20480)")
    add("--test-lines", type=int, default=1000, help="test lines, the same for every seed (default: 1000)")
    add("--longest", type=int, default=7, help="digits in the longest line (default: 7)")
    add("--stream", action="store_true", help="read the lines as a stream, once on each machine")
    add("-j", "--workers", type=int, default=0, help="processes that render lines (default: 0, the training one does)")
    add("--backend", help="of the process group: nccl on GPUs, shm or gloo on the CPU (default: what fits)")
    add("--gpus", "--devices", dest="devices", help="for --mode dp: 0,1 or cpu,cpu (default: all GPUs, else cpu,cpu)")
    add("--folder", type=local_folder, default=Path("runs/crnn"), help="(default: runs/crnn)")
    add("--save-every", type=int, default=0, help="steps between checkpoints within an epoch (default: 0, none)")
    add("--resume", action="store_true", help="resume the newest run instead of starting a new one")
    add("--evaluate", action="store_true", help="only test the newest run's newest checkpoint")
    add("--picture", type=Path, help="at the end, write a PNG of a few test lines with what the model read")
    accept_local_rank(parser)
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "lr", "lines", "test_lines", "longest"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected a positive number")
    for name in ("workers", "save_every", "seed"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 0 or more")
    if options.stream and options.workers:
        parser.error(f"--stream --workers {options.workers}: the stream is read by the process that trains")
    if options.devices is not None and options.mode != "dp":
        parser.error(f"--gpus {options.devices}: --mode {options.mode} does not choose devices; it is for --mode dp")
    options.devices = read_devices(parser, options.devices) if options.mode == "dp" else ()
    return Options(**vars(options))
