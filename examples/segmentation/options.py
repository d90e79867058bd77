"""The options of the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lockstep
from examples.places import accept_local_rank, local_folder, read_devices, refuse_in

Mode = Literal["single", "dp", "ddp"]
#: What decides which steps a run takes. How many replicas take them, and where, may change.
KEPT = (
    "arch", "width", "norm", "aux_loss", "epochs", "batch_size", "slices", "lr", "momentum", "weight_decay", "seed",
    "pictures", "size", "base_size", "crop_size", "stream",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the command line says. The defaults of the fields stand in :func:`build_parser` alone."""

    data: Path | None
    classes: int
    pictures: int
    test_pictures: int
    size: int
    base_size: int
    crop_size: int
    stream: bool
    workers: int
    mode: Mode
    #: Of the replicas in --mode dp; otherwise none.
    devices: tuple[str, ...]
    backend: str | None
    arch: str
    width: int
    norm: str
    aux_loss: bool
    epochs: int
    batch_size: int
    slices: int
    lr: float
    momentum: float
    weight_decay: float
    seed: int
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
                "start it with python -m examples.segmentation, or use --mode ddp"
            )
        refuse_in(world, devices=self.devices, batch_size=world.world_size if self.evaluate else self.batch_size)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.segmentation",
        description="Train a network that says of each pixel what it belongs to, in lockstep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_data(parser.add_argument_group("pictures").add_argument)
    _add_places(parser.add_argument_group("where it runs").add_argument)
    _add_training(parser.add_argument_group("model and training").add_argument)
    _add_run(parser.add_argument_group("the run").add_argument)
    accept_local_rank(parser)
    return parser


def _add_data(add: Any) -> None:
    add("--data", type=Path, metavar="FOLDER", help="real pictures: JPEGImages/, SegmentationClass/ and "
        "ImageSets/Segmentation/{train,val}.txt, as Pascal VOC has them; left out: shapes that are drawn")  # fmt: skip
    add("--classes", type=int, default=21, help="with --data: classes in the masks, the background among them")
    add("--pictures", type=int, default=2048, help="without --data: pictures to draw and train on")
    add("--test-pictures", type=int, default=200, help="without --data: pictures to test on, the same for every seed")
    add("--size", type=int, default=64, help="without --data: pixels of their sides")
    add("--base-size", type=int, default=520, help="with --data: pixels of the shorter side in a test; in training "
        "half to twice as many")  # fmt: skip
    add("--crop-size", type=int, default=480, help="with --data: pixels of the sides of what is cut out in training")
    add("--stream", action="store_true", help="read the pictures to train on as a stream, once on each machine")
    add("-j", "--workers", type=int, default=0, help="processes that read or draw pictures, on each machine")


def _add_places(add: Any) -> None:
    add("--mode", choices=("single", "dp", "ddp"), help="single: one device; dp: replicas in threads of one process; "
        "ddp: a rank in each process that a launcher started (default: ddp under a launcher, else single)")  # fmt: skip
    add("--gpus", "--devices", dest="devices", help="for --mode dp: 0,1 or cpu,cpu (default: all GPUs, else cpu,cpu)")
    add("--backend", help="see lockstep.init (default: what the machine suggests)")


def _add_training(add: Any) -> None:
    add("-a", "--arch", default="fcn_small", help="fcn_small, or torchvision's name, such as fcn_resnet50 and "
        "deeplabv3_resnet50")  # fmt: skip
    add("--width", type=int, default=16, help="for fcn_small: channels of its first layer")
    add("--norm", choices=("batch", "sync", "group"), default="batch", help="statistics of each replica's batch (with "
        "--slices: of each slice), of the batch of all ranks, or none of a batch (group norms)")  # fmt: skip
    add("--no-aux-loss", action="store_false", dest="aux_loss", help="leave out the loss of the auxiliary classifier")
    add("--epochs", type=int, default=20, help="passes over the training pictures")
    add("-b", "--batch-size", type=int, default=16, help="global batch, over all replicas")
    add("--slices", type=int, default=0, help="cut each batch into so many parts, for the same bits on any number of "
        "ranks; 0: each replica has one part")  # fmt: skip
    add("--lr", type=float, default=0.1, help="SGD's learning rate; ten times as much for the auxiliary classifier "
        "of torchvision's")  # fmt: skip
    add("--momentum", type=float, default=0.9)
    add("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay")
    add("--seed", type=int, default=0, help="of weights, order, augmentation and the shapes to train on")


def _add_run(add: Any) -> None:
    add("--folder", type=local_folder, default=Path("runs/segmentation"), help="each run gets a numbered folder in it")
    add("--save-every", type=int, default=0, metavar="STEPS", help="save within epochs too; 0: at their ends only")
    add("--resume", action="store_true", help="resume the newest run instead of starting a new one")
    add("-e", "--evaluate", action="store_true", help="only test the newest run's newest checkpoint")
    add("--picture", type=Path, metavar="FILE", help="at the end, write a PNG of four test pictures, what is on them "
        "and what the model sees")  # fmt: skip


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; what makes no sense ends the program with a message."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    for name in ("classes", "pictures", "test_pictures", "size", "base_size", "crop_size", "width", "epochs",
                 "batch_size", "lr"):  # fmt: skip
        if not getattr(given, name) > 0:
            parser.error(f"--{name} {getattr(given, name)}: expected a positive number".replace("_", "-"))
    for name in ("workers", "slices", "momentum", "weight_decay", "seed", "save_every"):
        if not getattr(given, name) >= 0:
            parser.error(f"--{name} {getattr(given, name)}: expected 0 or more".replace("_", "-"))
    if given.stream and given.workers:
        parser.error(f"--stream --workers {given.workers}: the stream is read by the process that trains")
    if given.mode is None:
        # Not asked of lockstep.init(): a program that makes no sense should end before it joins a world.
        given.mode = "ddp" if "RANK" in os.environ else "single"
    if given.devices is not None and given.mode != "dp":
        parser.error(f"--gpus {given.devices} is for --mode dp; CUDA_VISIBLE_DEVICES chooses devices in other modes")
    if given.norm == "sync" and (given.mode == "dp" or given.slices):
        parser.error(
            "--norm sync makes ranks wait for each other in every layer, which neither the threads of --mode dp nor "
            "slices can do: leave it out, or use --norm group"
        )
    given.devices = read_devices(parser, given.devices) if given.mode == "dp" else ()
    return Options(**vars(given))
