"""What the recipes' command lines have in common: where a job runs, and where it saves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep


def local_folder(text: str) -> Path:
    """Return the folder that an option names, which must be on this machine: a run is saved there."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL; name a folder, such as where the storage is mounted")
    return Path(text)


def accept_local_rank(parser: argparse.ArgumentParser) -> None:
    """Take the ``--local_rank=K`` that torch.distributed.launch and lockstep.launch pass, and ignore it:
    lockstep.init() reads the same from the environment."""
    hidden = argparse.SUPPRESS
    parser.add_argument("--local_rank", "--local-rank", action=_Ignored, type=int, default=hidden, help=hidden)


class _Ignored(argparse.Action):
    def __call__(self, *_: Any) -> None:
        """Keep nothing."""


def read_devices(parser: argparse.ArgumentParser, text: str | None) -> tuple[str, ...]:
    """Return the devices of --mode dp; by default all CUDA devices, or else two replicas on the CPU."""
    if text is None:
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count())) or ("cpu", "cpu")
    names = [name.strip() for name in text.split(",")]
    names = [f"cuda:{int(name)}" if name.isdecimal() else name for name in names]
    for name in names:
        if name != "cpu" and not (name.startswith("cuda:") and name[5:].isdecimal()):
            parser.error(
                f"--gpus {text}: {name!r} is not a device: expected numbers of GPUs or cpu, as in 0,1 or cpu,cpu"
            )
    return tuple(names)


def refuse_in(world: lockstep.World, *, devices: Sequence[str], batch_size: int) -> None:
    """End the program with a message if the world has not what the options ask for; on every rank.

    Args:
        world: where the options are to be followed.
        devices: of the replicas in threads.
        batch_size: global.
    """
    there = torch.cuda.device_count()
    absent = [name for name in devices if name != "cpu" and int(name.removeprefix("cuda:")) >= there]
    if absent:
        raise SystemExit(
            f"--gpus: there is no {', '.join(absent)} here; torch sees {there} GPU(s), numbered from 0 (those in "
            "CUDA_VISIBLE_DEVICES, if it is set); --gpus cpu,cpu makes replicas on the CPU"
        )
    if batch_size < world.world_size:
        raise SystemExit(
            f"--batch-size {batch_size} is smaller than the world of {world.world_size} ranks: it is the global batch, "
            "of which every rank gets a part; use a larger one, or fewer ranks"
        )
