"""Pictures per second of the ImageNet recipe's input, against a plain DataLoader with as many workers.

Both read the same JPEG files, crop, resize and flip them with torchvision's v2 transforms, and hand over normalised
float32 batches on the CPU. The plain one is torchvision's ImageFolder under torch's DataLoader, whose workers hand over
floats. The recipe's workers hand over bytes, which are scaled where the model is (here: in this process, within the
time that is measured), and seed every sample. The two alternate in rounds; workers are started before the clock.

    python -m benchmarks.imagenet_input [--quick] [--write] [--archive PICTURES.tar] [-j 2]

Without an archive of pictures, some are made. With a torchvision whose compiled operators do not fit torch, start it
with PYTHONPATH=tests/site, as the tests do.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.imagenet import data, transforms
from examples.imagenet.folders import find
from examples.imagenet.options import parse
from examples.imagenet.vision import require
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from benchmarks.naming import machine_name
from benchmarks.publishing import publish

_BATCH = 64

#: Each call is a pass over all pictures.
Pass = Callable[[], Iterator[Tensor]]


def make_pictures(folder: Path, count: int) -> None:
    """JPEGs of the usual size of ImageNet's, of smooth colours with some noise."""
    generator = np.random.default_rng(0)
    (folder / "made").mkdir(parents=True)
    for number in range(count):
        coarse = generator.integers(0, 256, (12, 16, 3)).astype(np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + generator.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "made" / f"{number:04d}.jpg", quality=90)


def repeat_pictures(folder: Path, count: int) -> None:
    """Links to the pictures there, until there are ``count``: a pass must be long against its beginning."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(max(0, count - len(files))):
        original = files[number % len(files)]
        (original.parent / f"again-{number:05d}{original.suffix}").hardlink_to(original)


def ours(folder: Path, size: int, workers: int) -> Pass:
    """**Collective.** The recipe's loader and the scaling that it leaves to the model's device."""
    options = parse([str(folder), "-b", str(_BATCH), "-j", str(workers), "--image-size", str(size)], launched=False)
    listing = find(folder, val_split=0.0, only_val=False).train
    if listing is None:
        raise RuntimeError(f"{folder}: no pictures to train on")
    loader = data.shared(options, listing, transforms.training("imagenet", size), shuffle=True, at_least=1)
    scale = transforms.FromBytes(nn.Identity())
    return lambda: (scale(batch.images) for batch in loader)


def plain(folder: Path, size: int, workers: int) -> Pass:
    """What one writes without the recipe."""
    v2, folders = require("torchvision.transforms.v2"), require("torchvision.datasets")
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    dataset = folders.ImageFolder(str(folder / "train"), transform)
    loader: Iterable[Any] = DataLoader(
        dataset, batch_size=_BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: (images for images, _ in loader)


def rate(begin: Pass) -> float:
    """Pictures per second of a pass."""
    begun = time.perf_counter()
    pictures = sum(len(images) for images in begin())
    return pictures / (time.perf_counter() - begun)


def measure(folder: Path, size: int, workers: int, rounds: int) -> dict[str, list[float]]:
    """**Collective.** Rates of both ways, round by round."""
    ways = {"plain DataLoader": plain(folder, size, workers), "the recipe": ours(folder, size, workers)}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for begin in ways.values():
        rate(begin)  # starts the workers, and brings the files into memory
    for number in range(rounds):
        for way in list(ways) if number % 2 else reversed(list(ways)):
            rates[way].append(rate(ways[way]))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="a tar file with <class>/<picture> somewhere below")
    parser.add_argument("-j", "--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--pictures", type=int, default=512, help="in a pass; those there are repeated")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-imagenet-input.md")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        if options.archive is not None:
            with tarfile.open(options.archive) as tar:
                tar.extractall(folder / "unpacked", filter="data")
            unpacked = next(path.parent.parent for path in (folder / "unpacked").rglob("*") if path.is_file())
            unpacked.rename(folder / "train")
        else:
            make_pictures(folder / "train", 80)
        repeat_pictures(folder / "train", options.pictures)
        (folder / "val").symlink_to("train")
        lockstep.init("gloo")
        rates = measure(folder, options.size, options.workers, rounds)
        lockstep.shutdown()
    report = _report(rates, options, rounds)
    publish(report, name="imagenet-input", write=options.write)


def _report(rates: dict[str, list[float]], options: argparse.Namespace, rounds: int) -> str:
    source = "80 made-up pictures" if options.archive is None else f"the pictures of {options.archive.name}"
    # Ratios within each round, so that a slow minute does not count for one way only.
    ratio = statistics.median(a / b for a, b in zip(rates["the recipe"], rates["plain DataLoader"], strict=True))
    rows = [
        f"| {way} | {statistics.median(each):.0f} | {min(each):.0f} to {max(each):.0f} |" for way, each in rates.items()
    ]
    return "\n".join(
        [
            "# Input of the ImageNet recipe",
            "",
            f"{machine_name()}.",
            f"{options.pictures} JPEGs in a pass ({source}, repeated), random resized crops to {options.size} pixels "
            f"and flips, batches of {_BATCH}, {options.workers} workers, {rounds} rounds; pictures per second.",
            "",
            "| way | median | range |",
            "|---|---:|---:|",
            *rows,
            "",
            f"The recipe against the plain DataLoader, median of the rounds' ratios: {ratio:.2f}x (above 1.00 the "
            "recipe is faster; goal: at least 1.00).",
            "",
        ]
    )


if __name__ == "__main__":
    main()
