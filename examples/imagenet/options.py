"""The options of the command line, and what of them a run must keep when it is resumed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lockstep
from examples.places import accept_local_rank, local_folder, read_devices, refuse_in

Mode = Literal["single", "dp", "ddp", "spawn"]
Norm = Literal["batch", "sync", "group"]

#: What decides which steps a run takes. How many replicas take them, and where, may change.
_KEPT = (
    "arch", "norm", "batch_size", "epochs", "lr", "scale_lr", "momentum", "weight_decay", "warmup_epochs", "schedule",
    "step_size", "gamma", "label_smoothing", "ema", "augment", "image_size", "val_split", "amp", "seed",
)  # fmt: skip
#: What of it decides which model is tested on which pictures.
_TESTED = ("arch", "augment", "image_size", "val_split")
#: In a run's folder: the same in JSON.
_NOTE = "options.json"


@dataclass(frozen=True)
class Options:
    """What the command line says. The defaults of the fields stand in :func:`build_parser` alone."""

    data: Path
    mode: Mode
    #: Of the replicas in --mode dp; otherwise none.
    devices: tuple[str, ...]
    nprocs: int
    #: Host and port where the ranks of several machines meet, or None on one machine.
    address: tuple[str, int] | None
    world_size: int
    rank: int
    backend: str | None
    timeout: float | None
    arch: str
    norm: Norm
    pretrained: Path | None
    val_split: float
    image_size: int
    augment: str
    max_bad_images: int
    workers: int
    batch_size: int
    epochs: int
    lr: float
    scale_lr: bool
    momentum: float
    weight_decay: float
    warmup_epochs: float
    schedule: str
    step_size: int
    gamma: float
    label_smoothing: float
    ema: float
    amp: str
    channels_last: bool
    compile: str | None
    folder: Path
    resume: bool
    evaluate: bool
    save_every: int
    keep: int
    log_every: int
    tensorboard: bool
    seed: int

    def refuse_in(self, world: lockstep.World) -> None:
        """End the program with a message if the options make no sense in this world."""
        refuse_in(world, devices=self.devices, batch_size=world.world_size if self.evaluate else self.batch_size)
        if self.amp == "fp16" and self.device_type(world) != "cuda":
            raise SystemExit(
                "--amp fp16 needs a GPU: its gradients need scaling, which torch does on CUDA devices only; use bf16"
            )

    def device_type(self, world: lockstep.World) -> str:
        """Return where the model is: "cpu" or "cuda"."""
        return torch.device(self.devices[0]).type if self.devices else world.device.type


class Kept:
    """The options of a run, saved with it, so that it is resumed as it was begun and not as something in between."""

    def __init__(self, options: Options, classes: Sequence[str]) -> None:
        self._options = {name: getattr(options, name) for name in _KEPT}
        self._classes = list(classes)

    def state_dict(self) -> dict[str, Any]:
        """Return the options by name, and the names of the classes."""
        return {**self._options, "classes": self._classes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with the options of the run that is resumed.

        Raises:
            lockstep.CheckpointMismatch: one differs, or the classes do.
        """
        differing = self._differences(state, _KEPT)
        if differing:
            raise lockstep.CheckpointMismatch(
                f"a run is resumed with the options that it was begun with, but {'; '.join(differing)}"
            )

    def write(self, folder: Path) -> None:
        """**Rank 0.** Note the options in a run's folder, where people and :meth:`refuse_other` find them."""
        with open(os.open(folder / _NOTE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.state_dict(), file, indent=1)

    def refuse_other(self, folder: Path, *, testing: bool) -> None:
        """Compare with the note in ``folder``, if there is one, before anything is loaded.

        Args:
            folder: of a run.
            testing: compare only what decides which model is tested on which pictures.

        Raises:
            lockstep.CheckpointMismatch: an option differs, or the classes do.
        """
        try:
            state = json.loads((folder / _NOTE).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return  # killed before it was written; the checkpoints have the same
        if not testing:
            self.load_state_dict(state)
            return
        differing = self._differences(state, _TESTED)
        if differing:
            raise lockstep.CheckpointMismatch(
                f"{folder} is tested with the options that it was trained with, but {'; '.join(differing)}; other "
                "pictures can be tested with --pretrained and a weight file of the run"
            )

    def _differences(self, state: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        differing = [
            f"{name.replace('_', '-')} is {self._options[name]} and was {state.get(name)}"
            for name in names
            if state.get(name) != self._options[name]
        ]
        if state.get("classes") != self._classes:
            differing.append(
                f"there are {len(self._classes)} classes, other ones than the {len(state.get('classes', ()))} then"
            )
        return differing


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.imagenet",
        description="Train an image classifier on folders of pictures, in lockstep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="folder with train/<class>/ and val/<class>/")
    _add_places(parser.add_argument_group("where it runs").add_argument)
    _add_data(parser.add_argument_group("model and pictures").add_argument)
    _add_training(parser.add_argument_group("training").add_argument)
    _add_run(parser.add_argument_group("the run").add_argument)
    accept_local_rank(parser)
    return parser


def _add_places(add: Any) -> None:
    add("--mode", choices=("single", "dp", "ddp", "spawn"), help="single: one device; dp: replicas in threads of one "
        "process; ddp: a rank in each process that a launcher started; spawn: starts its own processes (default: ddp "
        "under a launcher or with --dist-url, else single)")  # fmt: skip
    add("--gpus", dest="devices", help="for --mode dp: 4,5,6,7 or cpu,cpu (default: all GPUs, else cpu,cpu)")
    add("--nprocs", type=int, help="for --mode spawn: ranks on this machine (default: its GPUs, else 2)")
    add("--dist-url", help="several machines: tcp://HOST:PORT of the machine with rank 0")
    add("--world-size", type=int, default=-1, help="with --dist-url: machines for --mode spawn, processes for ddp")
    add("--rank", type=int, default=-1, help="with --dist-url: this machine or process among them, from 0")
    add("--backend", "--dist-backend", help="gloo or shm for CPUs, nccl for GPUs (default: as lockstep.init chooses)")
    add("--timeout", type=float, help="seconds that a rank waits for the others (default: 600)")


def _add_data(add: Any) -> None:
    add("-a", "--arch", default="resnet50", help="resnet20-cifar, or a model of torchvision by name")
    add("--norm", choices=("batch", "sync", "group"), default="batch", help="statistics of each replica's batch, of "
        "the batch of all ranks, or none of a batch (a ResNet's layers become group norms)")  # fmt: skip
    add("--sync-bn", action="store_const", const="sync", dest="norm", default=argparse.SUPPRESS,
        help="the same as --norm sync")  # fmt: skip
    add("--pretrained", type=Path, metavar="FILE", help="weights to begin with, or to test with --evaluate: names "
        "with or without 'module.'; a classifier of another size is left out")  # fmt: skip
    add("--val-split", type=float, default=0.0, metavar="FRACTION", help="hold out this part of the training pictures "
        "instead of reading val/")  # fmt: skip
    add("--image-size", type=int, help="pixels (default: 32 for resnet20-cifar, else 224)")
    add("--augment", choices=("imagenet", "cifar", "none"), help="random resized crops, shifts by 4 pixels (both "
        "with flips), or as in the test (default: cifar for resnet20-cifar, else imagenet)")  # fmt: skip
    add("--max-bad-images", type=int, default=10, help="unreadable pictures to skip, by name, before giving up")
    add("-j", "--workers", type=int, default=4, help="processes that read pictures, on each machine")


def _add_training(add: Any) -> None:
    add("-b", "--batch-size", type=int, default=256, help="global batch, over all replicas")
    add("--epochs", type=int, default=90)
    add("--lr", type=float, default=0.1, help="learning rate for a batch of 256; scaled with the batch")
    add("--no-lr-scaling", action="store_false", dest="scale_lr", help="take --lr as it is")
    add("--momentum", type=float, default=0.9)
    add("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay")
    add("--warmup-epochs", type=float, default=5.0, help="the learning rate grows linearly for so long")
    add("--schedule", choices=("cosine", "step"), default="cosine")
    add("--step-size", type=int, default=30, help="for --schedule step: epochs between two drops")
    add("--gamma", type=float, default=0.1, help="for --schedule step: the factor of a drop")
    add("--label-smoothing", type=float, default=0.1)
    add("--ema", type=float, default=0.0, metavar="DECAY", help="average the weights as well, e.g. 0.9999; 0: don't")
    add("--amp", choices=("off", "bf16", "fp16"), default="off", help="compute in half precision; fp16 on GPUs only")
    add("--channels-last", action="store_true", help="pictures in memory as [batch, height, width, channel]")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")


def _add_run(add: Any) -> None:
    add("--folder", type=local_folder, default=Path("runs/imagenet"), help="each run gets a numbered folder in it")
    add("--resume", action="store_true", help="resume the newest run instead of starting a new one")
    add("-e", "--evaluate", action="store_true", help="only test: the newest checkpoint, or --pretrained")
    add("--save-every", type=int, default=0, metavar="STEPS", help="save within epochs too; 0: at their ends only")
    add("--keep", type=int, default=3, help="checkpoints to keep")
    add("--log-every", type=int, default=50, metavar="STEPS", help="steps between two lines of steps.csv")
    add("--no-tensorboard", action="store_false", dest="tensorboard", help="write CSV files only")
    add("--seed", type=int, default=0, help="of weights, order and augmentation")


def parse(arguments: Sequence[str], *, launched: bool) -> Options:
    """Read the command line; what makes no sense ends the program with a message.

    Args:
        arguments: without the program's name.
        launched: whether a launcher started this process as one of several.
    """
    parser = build_parser()
    given = parser.parse_args(arguments)
    _check_numbers(parser, given)
    if given.mode is None:
        given.mode = "ddp" if launched or given.dist_url else "single"
    _check_mode(parser, given, launched)
    given.address = _address(parser, given, launched)
    given.devices = read_devices(parser, given.devices) if given.mode == "dp" else ()
    given.nprocs = given.nprocs or max(2, torch.cuda.device_count())
    if given.arch == "resnet20-cifar":
        given.image_size, given.augment = given.image_size or 32, given.augment or "cifar"
    else:
        given.image_size, given.augment = given.image_size or 224, given.augment or "imagenet"
    del given.dist_url
    return Options(**vars(given))


def _check_numbers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    positive = (
        "batch_size",
        "epochs",
        "lr",
        "step_size",
        "gamma",
        "keep",
        "log_every",
        "nprocs",
        "image_size",
        "timeout",
    )
    for name in positive:
        value = getattr(given, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a positive number")
    for name in ("workers", "save_every", "seed", "max_bad_images", "momentum", "weight_decay", "warmup_epochs"):
        if not getattr(given, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: expected 0 or more")
    for name in ("val_split", "ema", "label_smoothing"):
        if not 0 <= getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: expected 0 or more, and less than 1")


def _check_mode(parser: argparse.ArgumentParser, given: argparse.Namespace, launched: bool) -> None:
    if given.mode != "ddp" and launched:
        parser.error(
            f"--mode {given.mode} is one process, and a launcher started several, which would train by themselves: use "
            "--mode ddp, or start it with python -m examples.imagenet"
        )
    if given.mode == "ddp" and not launched and not given.dist_url:
        parser.error(
            "--mode ddp is one rank of several, and no launcher started this process: lockstep run -n 2 -m "
            "examples.imagenet ..., or --mode spawn, or --dist-url with --world-size and --rank"
        )
    if given.devices is not None and given.mode != "dp":
        parser.error(f"--gpus {given.devices} is for --mode dp; CUDA_VISIBLE_DEVICES chooses devices in other modes")
    if given.nprocs is not None and given.mode != "spawn":
        parser.error(f"--nprocs {given.nprocs} is for --mode spawn")
    if given.mode == "dp" and given.norm == "sync":
        parser.error(
            "--norm sync synchronises processes, and the replicas of --mode dp are threads of one: use --mode ddp or "
            "--mode spawn, or --norm group"
        )


def _address(parser: argparse.ArgumentParser, given: argparse.Namespace, launched: bool) -> tuple[str, int] | None:
    if given.dist_url is None:
        if given.world_size != -1 or given.rank != -1:
            parser.error("--world-size and --rank go with --dist-url; a launcher says by itself where a rank stands")
        return None
    if given.mode not in ("ddp", "spawn"):
        parser.error(f"--dist-url is for --mode spawn and ddp, not {given.mode}")
    if launched:
        parser.error("--dist-url: a launcher started this process and has said where the ranks meet; leave it out")
    host, separator, port = given.dist_url.removeprefix("tcp://").rpartition(":")
    if not given.dist_url.startswith("tcp://") or not separator or not host or not port.isdecimal():
        parser.error(f"--dist-url {given.dist_url}: expected tcp://HOST:PORT")
    if given.world_size < 1 or not 0 <= given.rank < given.world_size:
        parser.error(
            f"--world-size {given.world_size} --rank {given.rank}: with --dist-url expected a size of 1 or more, and a "
            "rank from 0 to one less"
        )
    return host.strip("[]"), int(port)
