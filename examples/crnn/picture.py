"""A picture of lines and what was read on them, as a PNG (written here: 20 lines are no reason for a dependency)."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from examples.crnn.reading import Reading

Pixels = npt.NDArray[np.uint8]

#: Pixels of the picture for one of a line's.
_ZOOM = 4
_MARGIN = 8
#: Five rows of three dots for each digit, from the top left.
_FONT = (
    "###|#.#|#.#|#.#|###", ".#.|##.|.#.|.#.|###", "###|..#|###|#..|###", "###|..#|.##|..#|###", "#.#|#.#|###|..#|..#",
    "###|#..|###|..#|###", "###|#..|###|#.#|###", "###|..#|.#.|.#.|.#.", "###|#.#|###|#.#|###", "###|#.#|###|..#|###",
)  # fmt: skip
_RIGHT = (0, 120, 60)
_WRONG = (200, 30, 30)
_TRUTH = (130, 130, 130)


def draw(path: Path, images: Sequence[Tensor], readings: Sequence[Reading], truths: Sequence[Reading]) -> None:
    """Write a PNG: lines [1, 12, width] one under the other, and beside each what was read.

    Green if that is right; red, with what is written there in grey, if it is not.
    """
    rows = zip(images, readings, truths, strict=True)
    strips = [_strip(1 - image[0].numpy(), reading, truth) for image, reading, truth in rows]
    left = max(strip[0].shape[1] for strip in strips)
    width = left + _MARGIN + max(strip[1].shape[1] for strip in strips)
    height = sum(strip[0].shape[0] + _MARGIN for strip in strips)
    page = np.full((height + _MARGIN, width + 2 * _MARGIN, 3), 255, np.uint8)
    top = _MARGIN
    for line, text in strips:
        _paste(page, line, top, _MARGIN)
        _paste(page, text, top + (line.shape[0] - text.shape[0]) // 2, 2 * _MARGIN + left)
        top += line.shape[0] + _MARGIN
    save(path, page)


def _strip(paper: npt.NDArray[np.float32], reading: Reading, truth: Reading) -> tuple[Pixels, Pixels]:
    grey = np.kron(paper, np.ones((_ZOOM, _ZOOM), np.float32)) * 255
    line = np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    if reading == truth:
        return line, _text(reading, _RIGHT)
    return line, np.concatenate([_text(reading, _WRONG), _text(truth, _TRUTH)], axis=1)


def _text(digits: Reading, colour: tuple[int, int, int]) -> Pixels:
    """Return digits as a picture: 5 dots high, 4 wide each, and 4 more after the last."""
    dots = np.zeros((5, 4 * len(digits) + 4), bool)
    for place, digit in enumerate(digits):
        rows = _FONT[digit].split("|")
        dots[:, 4 * place : 4 * place + 3] = [[dot == "#" for dot in row] for row in rows]
    dots = np.kron(dots, np.ones((_ZOOM, _ZOOM), bool))
    return np.where(dots[:, :, None], np.array(colour, np.uint8), np.uint8(255))


def _paste(page: Pixels, part: Pixels, top: int, left: int) -> None:
    page[top : top + part.shape[0], left : left + part.shape[1]] = part


def save(path: Path, pixels: Pixels) -> None:
    """Write [height, width, 3] as an 8-bit RGB PNG (ISO/IEC 15948), readable by its owner."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each row unfiltered
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
