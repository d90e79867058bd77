"""What the tests of the ImageNet recipe share: folders of pictures, and the recipe on ranks of the harness."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from examples.imagenet.main import main
from examples.imagenet.records import read_table
from PIL import Image

from tests.harness import run_ranks

ROOT = Path(__file__).parents[1]
#: A folder for PYTHONPATH, which makes torchvision loadable in every process.
SITE = ROOT / "tests" / "site"
#: Real pictures lie beside the checkout, where they are at hand.
DATA = ROOT.parent / "shared" / "data"

#: Pixels of a side of the pictures that are made, and of those that are trained on.
SIZE = 16
#: Small, without batch statistics, every step written down.
COMMON = (
    "-a", "resnet20-cifar", "-j", "0", "--norm", "group", "--no-tensorboard", "--log-every", "1",
    "--warmup-epochs", "1", "--lr", "0.2", "--image-size", str(SIZE),
)  # fmt: skip


def sample(name: str) -> Path:
    """A tar file of real pictures; skips the test where it is absent."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the real pictures of {name} are not at hand (looked in {DATA})")
    return path


def unpack(archive: Path, folder: Path, *, per_class: int) -> Path:
    """The first ``per_class`` pictures of each folder in an archive; the folder they are in."""
    taken: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            parent = os.path.dirname(member.name)
            if member.isfile() and taken.setdefault(parent, 0) < per_class:
                taken[parent] += 1
                tar.extract(member, folder, filter="data")
    return folder / archive.name.removesuffix(".tar")


def make_pictures(
    folder: Path, *, train: int, val: int, classes: Sequence[str] = ("blue", "green", "red"), size: int = SIZE
) -> Path:
    """JPEGs of noise with a tint that tells the class, each picture another."""
    generator = np.random.default_rng(7)
    for part, count in (("train", train), ("val", val)):
        for tint, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 160, (size, size, 3))
                pixels[:, :, 2 - tint % 3] += 90
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{number:03d}.jpg", quality=95)
    return folder


def alone_or_launched(arguments: Sequence[str], launched: bool) -> str:
    """Run the recipe on this rank; what it printed on standard output."""
    if not launched:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(arguments)
    return output.getvalue()


def recipe(ranks: int | None, *arguments: str | Path) -> str:
    """Run the recipe on so many ranks, or as a process that nobody launched; what rank 0 printed."""
    words = [str(argument) for argument in arguments]
    outputs = run_ranks(alone_or_launched, ranks or 1, words, ranks is not None)
    return str(outputs[0])


def losses(folder: Path) -> list[float]:
    """The loss of every step of the run in ``folder``."""
    return [float(row["loss"]) for row in read_table(folder / "run-001" / "steps.csv")]


def last_line(text: str) -> str:
    """What the test at the end found, without where."""
    return text.strip().splitlines()[-1].partition(", over")[0]
