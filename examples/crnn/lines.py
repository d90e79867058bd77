"""Lines of handwritten digits, composed from scikit-learn's pictures: the data of the recipe.

Note [Seeded lines]
~~~~~~~~~~~~~~~~~~~
Everything about a line (how many digits, which pictures, slant, size, spacing, height, strength of the ink) is drawn
from its own generator, seeded by (seed, split, index). So a line is the same on every rank, in any order, in any
worker and after a resume, and nothing has to be rendered before training begins. The 1,797 pictures are split into
those to train on and those to test on before any line is composed: no picture is in lines of both kinds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

Split = Literal["train", "test"]
#: What tells the seeds of the two splits apart.
_SPLITS: dict[str, int] = {"train": 0, "test": 1}

#: Pixels of a line from top to bottom.
HEIGHT = 12
#: Widths are multiples of this, which is how many columns of pixels the model reads as one step of time.
STEP = 2
#: Pixels of scikit-learn's pictures, in both directions.
_SIDE = 8
#: Columns beside a picture that its slant may reach into.
_REACH = 4

Floats = npt.NDArray[np.float32]


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """``count`` lines of one split: an image [1, 12, width] (float32 in 0..1) and its digits [length] (int64).

    Args:
        pictures: the split's digits: images [n, 1, 8, 8] float32 in 0..1, labels [n] int64.
        split: which lines to draw; ``pictures`` must be of that split.
        count: how many lines.
        seed: of all lines.
        longest: digits in the longest line; lengths are uniform from 1.

    Raises:
        ValueError: ``count`` or ``longest`` is below 1, or the split is unknown.
    """

    def __init__(self, pictures: TensorDataset, *, split: Split, count: int, seed: int = 0, longest: int = 7) -> None:
        if split not in _SPLITS:
            raise ValueError(f"split={split!r}: expected one of {', '.join(map(repr, _SPLITS))}")
        if count < 1 or longest < 1:
            raise ValueError(f"count={count}, longest={longest}: expected at least 1 line of at least 1 digit")
        images, labels = pictures.tensors
        # A margin of one pixel, so that what is sampled between pixels fades out at the edges.
        self._pictures: Floats = np.pad(images[:, 0].numpy(), ((0, 0), (1, 1), (1, 1)))
        self._labels = labels.numpy()
        self._split = _SPLITS[split]
        self._count = count
        self._seed = seed
        self._longest = longest

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"line {index} of {self._count}")
        draw = np.random.default_rng([self._seed, self._split, index])
        chosen = draw.integers(len(self._labels), size=draw.integers(1, self._longest + 1))
        image = compose(self._pictures[chosen], draw)
        return torch.from_numpy(image).unsqueeze(0), torch.from_numpy(self._labels[chosen])


def compose(pictures: Floats, draw: np.random.Generator) -> Floats:
    """Write padded pictures [n, 10, 10] side by side: [12, width], width a multiple of 2."""
    n = len(pictures)
    scale = draw.uniform(0.9, 1.2) * draw.uniform(0.95, 1.05, n)
    slant = draw.uniform(-0.35, 0.35) + draw.uniform(-0.08, 0.08, n)
    loose = draw.uniform(-0.5, 2.5)  # the hand that writes a line spaces it evenly, more or less
    gaps = loose + draw.uniform(-0.5, 1.5, n)
    gaps[0] = draw.uniform(2, 6)
    left = np.cumsum(gaps) + np.concatenate([[0.0], np.cumsum(scale[:-1] * _SIDE)])
    top = (HEIGHT - scale * _SIDE) / 2 + draw.uniform(-0.5, 0.5) + draw.uniform(-0.4, 0.4, n)
    width = left[-1] + scale[-1] * _SIDE + draw.uniform(2, 6)
    line = np.zeros((HEIGHT, STEP * int(np.ceil(width / STEP))), np.float32)
    first = np.floor(left).astype(np.int64) - _REACH
    for start, patch in zip(first, _warp(pictures, left - first, top, scale, slant), strict=True):
        # Overlapping ink is no darker than ink; what a slant pushes over the line's edge is cut off.
        low, high = max(0, start), min(line.shape[1], start + patch.shape[1])
        part = line[:, low:high]
        np.maximum(part, patch[:, low - start : high - start], out=part)
    line *= np.float32(draw.uniform(0.6, 1.0))
    return line


def _warp(
    pictures: Floats,
    left: npt.NDArray[np.float64],
    top: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    slant: npt.NDArray[np.float64],
) -> Floats:
    """Each picture, placed, scaled and slanted, on a patch of its own: [n, 12, columns], by bilinear sampling."""
    columns = int(np.ceil(scale.max() * _SIDE)) + 2 * _REACH + 1
    y = np.arange(HEIGHT)[None, :, None]
    x = np.arange(columns)[None, None, :]
    left, top, scale, slant = (values[:, None, None] for values in (left, top, scale, slant))
    # Where in the padded picture each pixel of the patch comes from; the middle of the line stays in its place.
    rows = np.clip((y - top) / scale + 1, 0, _SIDE + 1 - 1e-6)
    across = (x - left - slant * ((HEIGHT - 1) / 2 - y)) / scale + 1
    rows, across = np.broadcast_arrays(rows, np.clip(across, 0, _SIDE + 1 - 1e-6))
    above, before = rows.astype(np.int64), across.astype(np.int64)
    down, right = rows - above, across - before
    which = np.arange(len(pictures))[:, None, None]
    upper = pictures[which, above, before] * (1 - right) + pictures[which, above, before + 1] * right
    lower = pictures[which, above + 1, before] * (1 - right) + pictures[which, above + 1, before + 1] * right
    return (upper * (1 - down) + lower * down).astype(np.float32)


class Batch(NamedTuple):
    """Lines padded to the longest of them. Any part of it along dimension 0 is a batch again."""

    #: [lines, 1, 12, widest] float32.
    images: Tensor
    #: [lines] int64: columns of pixels that belong to each line.
    widths: Tensor
    #: [lines, longest] int64, padded with zeros.
    digits: Tensor
    #: [lines] int64: digits of each line.
    lengths: Tensor


def collate(lines: list[tuple[Tensor, Tensor]]) -> Batch:
    """Return lines of different widths and lengths as one batch."""
    widths = torch.tensor([image.shape[-1] for image, _ in lines])
    lengths = torch.tensor([len(digits) for _, digits in lines])
    images = torch.zeros(len(lines), 1, HEIGHT, int(widths.max()))
    padded = torch.zeros(len(lines), int(lengths.max()), dtype=torch.int64)
    for row, (image, digits) in enumerate(lines):
        images[row, :, :, : image.shape[-1]] = image
        padded[row, : len(digits)] = digits
    return Batch(images, widths, padded, lengths)
