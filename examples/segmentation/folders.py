"""Real pictures with masks, in the folders of the Pascal VOC challenge (http://host.robots.ox.ac.uk/pascal/VOC/)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.imagenet.vision import require
from examples.segmentation.shapes import IGNORED

#: The classes of Pascal VOC, in the order of the numbers in its masks.
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table",
    "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip


class Folder(Dataset[tuple[Tensor, Tensor]]):
    """Pictures and masks of ``ImageSets/Segmentation/<part>.txt``, transformed.

    Each is uint8 [3, height, width] and uint8 [height, width]; how large they are depends on the transform.

    Args:
        root: has ``JPEGImages``, ``SegmentationClass`` and ``ImageSets/Segmentation``.
        part: "train" or "val".
        classes: masks hold numbers below this, and 255 where no class counts.
        transform: takes and returns a picture and a mask, both of torchvision's kinds of tensor.

    Raises:
        SystemExit: the list or a file in it is not there.
    """

    def __init__(self, root: Path, part: str, *, classes: int, transform: Any) -> None:
        listing = root / "ImageSets" / "Segmentation" / f"{part}.txt"
        try:
            names = listing.read_text().split()
        except OSError as error:
            raise SystemExit(f"{listing}: {error.strerror}; expected the names of pictures, one in a line") from error
        if not names:
            raise SystemExit(f"{listing} names no pictures")
        self._files = [
            (root / "JPEGImages" / f"{name}.jpg", root / "SegmentationClass" / f"{name}.png") for name in names
        ]
        missing = [file for pair in self._files for file in pair if not file.is_file()]
        if missing:
            raise SystemExit(
                f"{listing} names pictures of which {len(missing)} files are not there, such as {missing[0]}"
            )
        self._classes, self._transform = classes, transform

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, mask = self._files[index]
        tensors = require("torchvision.tv_tensors")
        pixels, labels = self._transform(
            tensors.Image(read_picture(picture)), tensors.Mask(read_mask(mask, self._classes))
        )
        return pixels.as_subclass(Tensor), labels.as_subclass(Tensor)


def read_picture(path: Path) -> Tensor:
    """Return the pixels of a picture: uint8 [3, height, width]."""
    with require("PIL.Image").open(path) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()


def read_mask(path: Path, classes: int) -> Tensor:
    """Return the numbers in a mask, whatever colours its palette gives them: uint8 [height, width].

    Raises:
        ValueError: it is no picture of numbers, or has one that is neither a class nor 255.
    """
    with require("PIL.Image").open(path) as picture:
        if picture.mode not in ("P", "L"):
            raise ValueError(f"{path} has colours ({picture.mode}); expected a mask with a palette, or in grey")
        mask = torch.from_numpy(np.array(picture))
    other = sorted(set(mask.unique().tolist()) - {*range(classes), IGNORED})
    if other:
        raise ValueError(
            f"{path} has {other[0]} in it; expected 0 to {classes - 1}, or {IGNORED} where no class counts"
        )
    return mask
