"""Intersection over union, and how many pixels are right, from one matrix of counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.segmentation.shapes import IGNORED


def confusion(guesses: Tensor, truths: Tensor, classes: int) -> Tensor:
    """Return how many pixels of class i were taken for class j: int64 [classes, classes], on the CPU.

    Matrices of other pictures, and of other ranks, are added to it: every pixel is counted once.

    Args:
        guesses: int64, any shape: numbers below ``classes``.
        truths: the same, or 255 for pixels that do not count.
        classes: how many there are.
    """
    counts = truths != IGNORED
    places = truths[counts] * classes + guesses[counts]
    return torch.bincount(places.cpu(), minlength=classes**2).view(classes, classes)


@dataclass(frozen=True)
class Score:
    """What a test found; made of the matrix of all pictures."""

    #: int64 [classes, classes].
    matrix: Tensor

    @property
    def ious(self) -> list[float]:
        """Of each class: pixels that are and were taken for it, of those that are or were. NaN: there are none."""
        right = self.matrix.diagonal().double()
        either = self.matrix.sum(0) + self.matrix.sum(1) - right
        return list((right / either).tolist())

    @property
    def mean_iou(self) -> float:
        """The mean over classes that are on any picture or were seen on one."""
        return float(torch.tensor(self.ious, dtype=torch.float64).nanmean())

    @property
    def accuracy(self) -> float:
        """Pixels whose class is right, of all that count."""
        return float(self.matrix.diagonal().sum() / self.matrix.sum())

    def __str__(self) -> str:
        return f"mean IoU {self.mean_iou:.4f}, {self.accuracy:.4f} of {int(self.matrix.sum()):,} pixels right"
