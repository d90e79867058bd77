"""A picture of what a model sees: pictures, what is on them, and what it takes them for, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from examples.imagenet.vision import require
from examples.segmentation.shapes import IGNORED

Pixels = npt.NDArray[np.uint8]
_MARGIN = 6
#: Rows of a picture that are shown at least.
_LEAST = 128


def palette() -> Pixels:
    """Return a colour for each number in a mask, as Pascal VOC has them: [256, 3].

    The bits of the number are dealt to red, green and blue in turn, from the highest bit of each down.
    """
    colours = np.zeros((256, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            place = 3 * bit + channel
            if place < 8:
                colours[:, channel] |= ((np.arange(256) >> place & 1) << (7 - bit)).astype(np.uint8)
    colours[IGNORED] = (224, 224, 192)
    return colours


def draw(path: Path, rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Write a PNG with a row for each picture (uint8 [3, h, w]), its mask and what was guessed (both [h, w]).

    Pixels that do not count are pale in the mask.
    """
    colours = palette()
    strips = [
        _beside([picture.permute(1, 2, 0).numpy(), colours[mask.numpy()], colours[guess.numpy()]])
        for picture, mask, guess in rows
    ]
    page = _framed(strips, axis=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        require("PIL.Image").fromarray(page).save(file, format="PNG", optimize=True)


def _beside(parts: Sequence[Pixels]) -> Pixels:
    zoom = max(1, -(-_LEAST // parts[0].shape[0]))
    return _framed([part.repeat(zoom, 0).repeat(zoom, 1) for part in parts], axis=1, outer=False)


def _framed(parts: Sequence[Pixels], *, axis: int, outer: bool = True) -> Pixels:
    """Put parts one after the other along an axis, with a white margin; the other axis is filled up."""
    other = 1 - axis
    most = max(part.shape[other] for part in parts)
    length = sum(part.shape[axis] for part in parts) + _MARGIN * (len(parts) - 1)
    shape = (length, most, 3) if axis == 0 else (most, length, 3)
    page = np.full(shape, 255, np.uint8)
    at = 0
    for part in parts:
        rows = slice(at, at + part.shape[0]) if axis == 0 else slice(0, part.shape[0])
        columns = slice(0, part.shape[1]) if axis == 0 else slice(at, at + part.shape[1])
        page[rows, columns] = part
        at += part.shape[axis] + _MARGIN
    return np.pad(page, ((_MARGIN,) * 2, (_MARGIN,) * 2, (0, 0)), constant_values=255) if outer else page
