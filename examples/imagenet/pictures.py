"""From files to batches: what the workers do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from examples.imagenet.folders import Listing
from examples.imagenet.vision import require

#: From a PIL image to uint8 [3, height, width].
Transform = Callable[[Any], Tensor]


class Sample(NamedTuple):
    """One picture, or why there is none."""

    #: uint8 [3, height, width], or None.
    image: Tensor | None
    label: int
    #: Its path below the data's folder.
    name: str
    #: Why it could not be read, or "".
    reason: str


class Batch(NamedTuple):
    """The readable pictures of a slice of the global batch, and the others' names."""

    #: uint8 [n, 3, height, width]. As bytes, a quarter of what workers have to hand over as floats.
    images: Tensor
    #: int64 [n].
    labels: Tensor
    #: (name, reason) of each picture that could not be read.
    unreadable: list[tuple[str, str]]


class Pictures(Dataset[Sample]):
    """Pictures of a listing, transformed."""

    def __init__(self, listing: Listing, transform: Transform) -> None:
        self.listing = listing
        self._transform = transform

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> Sample:
        name, label = self.listing.name(index), int(self.listing.labels[index])
        picture, reason = decode(os.path.join(self.listing.root, name))
        return Sample(None if picture is None else self._transform(picture), label, name, reason)


def decode(path: str) -> tuple[Any | None, str]:
    """Return the picture in a file as a PIL image in RGB, or None and the reason why not."""
    image = require("PIL.Image")
    try:
        with open(path, "rb") as file:
            return image.open(file).convert("RGB"), ""
    except Exception as error:  # noqa: BLE001  (decoders fail in many ways; each is named, counted and limited)
        # Not its path again, nor the address of an object, which would differ from rank to rank.
        words = str(error).split(path)[0].split(" <")[0].strip(" :'\"") or "no reason given"
        return None, f"{type(error).__name__}: {words}"


class Collate:
    """Makes a batch of what could be read."""

    def __init__(self, image_size: int) -> None:
        self._size = image_size

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Stack the pictures that are there; there may be none."""
        views = [sample.image for sample in samples if sample.image is not None]
        # In a worker torch's own function stacks them where the main process can read them, without another copy.
        images = default_collate(views) if views else torch.empty(0, 3, self._size, self._size, dtype=torch.uint8)
        labels = torch.tensor([sample.label for sample in samples if sample.image is not None], dtype=torch.int64)
        return Batch(images, labels, [(sample.name, sample.reason) for sample in samples if sample.image is None])
