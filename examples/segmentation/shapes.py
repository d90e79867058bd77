"""Pictures of shapes, drawn by seed: something to segment that needs no files.

Everything about a picture is drawn from a generator of its own, seeded by (seed, split, index), so it is the same on
every rank, in any order, in any worker and after a resume. Colours and places say nothing of a shape: what tells a
circle from a square is its outline alone. As in Pascal VOC, a thin band along the outlines has no class.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

Split = Literal["train", "test"]
CLASSES = ("background", "circle", "square", "triangle")
#: The class of pixels that do not count, as in the masks of Pascal VOC.
IGNORED = 255

_SPLITS = {"train": 0, "test": 1}
#: Pixels on either side of an outline that have no class.
_BAND = 0.75

Floats = npt.NDArray[np.float64]


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """``count`` pictures of one split: uint8 [3, size, size], and the class of each pixel: uint8 [size, size]."""

    def __init__(self, count: int, *, size: int, split: Split, seed: int) -> None:
        self._count, self._size, self._key = count, size, (seed, _SPLITS[split])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"picture {index} of {self._count}")
        picture, mask = draw(self._size, np.random.default_rng([*self._key, index]))
        return torch.from_numpy(picture), torch.from_numpy(mask)


def draw(size: int, generator: np.random.Generator) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return a picture of one to three shapes, later ones over earlier, and its mask."""
    y, x = np.mgrid[:size, :size] + 0.5
    picture = np.empty((3, size, size))
    picture[:] = generator.uniform(0, 255, (3, 1, 1))
    picture += generator.uniform(-60, 60, (3, 1, 1)) * (x / size - 0.5)
    mask = np.zeros((size, size), np.uint8)
    for _ in range(generator.integers(1, 4)):
        kind = int(generator.integers(1, len(CLASSES)))
        radius = generator.uniform(0.16, 0.3) * size
        centre = generator.uniform(0.15 * size, 0.85 * size, 2)
        inside = depth(kind, x - centre[0], y - centre[1], radius, turn=generator.uniform(0, 2 * np.pi))
        picture[:, inside > 0] = generator.uniform(0, 255, (3, 1))
        mask[inside > 0] = kind
        mask[np.abs(inside) < _BAND] = IGNORED
    picture += generator.normal(0, 8, picture.shape)
    return np.clip(picture, 0, 255).astype(np.uint8), mask


def depth(kind: int, x: Floats, y: Floats, radius: float, *, turn: float) -> Floats:
    """Return how far inside a shape around the origin each point is, in pixels; negative outside.

    Args:
        kind: its class.
        x: of the points.
        y: likewise.
        radius: of a circle of about the same area.
        turn: radians by which the shape is turned.
    """
    if kind == 1:
        return np.asarray(radius - np.hypot(x, y))
    corners = {2: 4, 3: 3}[kind]
    # The distance from the middle of a regular polygon to its sides, for the area of the circle.
    apothem = radius * np.sqrt(np.pi / (corners * np.tan(np.pi / corners)))
    angles = turn + 2 * np.pi * np.arange(corners) / corners
    beyond = [x * np.cos(angle) + y * np.sin(angle) for angle in angles]
    return np.asarray(apothem - np.max(beyond, axis=0))
