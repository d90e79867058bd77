"""The loaders of a run: global batches of pictures and masks, each rank's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lockstep
from examples.imagenet.vision import require
from examples.segmentation.folders import VOC, Folder
from examples.segmentation.options import Options
from examples.segmentation.shapes import CLASSES, IGNORED, Shapes
from examples.stream import Stream

#: The test shapes are the same whatever the seed of a run, so that runs can be compared.
_TEST_SEED = 0
#: Drawn pictures that are tested at once, over all ranks.
_TEST_BATCH = 50


class Batch(NamedTuple):
    """Pictures of one size. Any part of it along dimension 0 is a batch again."""

    #: uint8 [n, 3, height, width].
    pictures: Tensor
    #: int64 [n, height, width]: classes, and 255 for pixels that do not count.
    masks: Tensor


@dataclass(frozen=True)
class Data:
    """What a run trains and tests on."""

    classes: tuple[str, ...]
    #: Of an epoch.
    steps: int
    train: lockstep.ShardedLoader
    test: lockstep.ShardedLoader


def load(world: lockstep.World, options: Options) -> Data:
    """**Collective.** Find or draw the pictures and share them among the ranks."""
    train, test = datasets(options)
    if len(train) < options.batch_size:
        raise SystemExit(f"--batch-size {options.batch_size}: there are {len(train)} pictures to train on")
    classes: tuple[str, ...] = CLASSES
    at_once = _TEST_BATCH
    if options.data is not None:
        classes = VOC if options.classes == len(VOC) else tuple(map(str, range(options.classes)))
        at_once = 1  # on each rank: real pictures have different sizes, and padding would change what is seen at edges
    # The last pictures of an epoch are left out if they are no full batch, as in torchvision's recipe: a rank with one
    # of them, or none, has no batch statistics.
    pictures = Stream(train, seed=options.seed) if options.stream else train
    batches = _batches(options, pictures, options.batch_size, shuffle=not options.stream, drop_last=True)
    tested = _batches(options, test, max(world.world_size, at_once), shuffle=False, drop_last=False)
    # Replicas in threads each fetch their own part from the CPU's memory; a copy on one device would be in the way.
    to_device = options.mode != "dp"
    return Data(
        classes,
        len(batches),
        lockstep.shard(batches, to_device=to_device, slices=options.slices or None),
        lockstep.shard(tested, to_device=to_device),
    )


def datasets(options: Options) -> tuple[Any, Any]:
    """Return the pictures to train on and those to test on."""
    if options.data is None:
        size = options.size
        return (
            Shapes(options.pictures, size=size, split="train", seed=options.seed),
            Shapes(options.test_pictures, size=size, split="test", seed=_TEST_SEED),
        )
    return (
        Folder(options.data, "train", classes=options.classes, transform=training(options)),
        Folder(options.data, "val", classes=options.classes, transform=testing(options)),
    )


def training(options: Options) -> Any:
    """Return the random view of a picture and its mask: resized, mirrored, and a part cut out."""
    v2, tensors = require("torchvision.transforms.v2"), require("torchvision.tv_tensors")
    fill = {tensors.Image: 0, tensors.Mask: IGNORED}
    return v2.Compose(
        [
            v2.RandomResize(options.base_size // 2, options.base_size * 2, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomCrop(options.crop_size, pad_if_needed=True, fill=fill),
        ]
    )


def testing(options: Options) -> Any:
    """Return the view of a picture and its mask that is tested: all of it."""
    return require("torchvision.transforms.v2").Resize(options.base_size, antialias=True)


def _batches(
    options: Options, dataset: Dataset[Any], batch_size: int, *, shuffle: bool, drop_last: bool
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=options.workers,
        collate_fn=collate,
    )


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Return pictures of one size as a batch."""
    pictures, masks = zip(*samples, strict=True)
    return Batch(torch.stack(pictures), torch.stack(masks).long())
