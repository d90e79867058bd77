"""Augmentation on the CPU, by torchvision's v2 transforms; and the last part of it, which the device does."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from examples.imagenet.pictures import Transform
from examples.imagenet.vision import require

#: Means and standard deviations of red, green and blue over ImageNet's training pictures, for values from 0 to 1.
_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
#: The test crops this part of a picture's shorter side.
_CROP = 224 / 256


def training(kind: str, size: int) -> Transform:
    """Return a random view of a picture: uint8 [3, size, size].

    Args:
        kind: "imagenet": a random part of 8 to 100 % of the area, resized (C. Szegedy et al., "Going deeper with
            convolutions", 2015); "cifar": shifted by up to 4 pixels (K. He et al., "Deep residual learning for image
            recognition", 2015, section 4.2); both flipped at random. "none": as in the test.
        size: pixels of its sides.
    """
    v2 = require("torchvision.transforms.v2")
    if kind == "none":
        return testing(kind, size)
    if kind == "cifar":
        view = [v2.Resize((size, size)), v2.RandomCrop(size, padding=4)]
    else:
        view = [v2.RandomResizedCrop(size)]
    return cast(Transform, v2.Compose([*view, v2.RandomHorizontalFlip(), v2.PILToTensor()]))


def testing(kind: str, size: int) -> Transform:
    """Return the view of a picture that is tested: its middle, or all of it for ``kind`` "cifar"."""
    v2 = require("torchvision.transforms.v2")
    view = [v2.Resize((size, size))] if kind == "cifar" else [v2.Resize(round(size / _CROP)), v2.CenterCrop(size)]
    return cast(Transform, v2.Compose([*view, v2.PILToTensor()]))


class FromBytes(nn.Module):
    """A model that takes pictures as bytes: uint8 [n, 3, height, width] -> its scores, float32 [n, classes].

    Scales them to the values that networks are trained with, where the model is: a GPU does that in passing.

    Args:
        model: takes float [n, 3, height, width].
        amp: compute in this half-precision type where torch's autocast does so; None: don't.
        channels_last: give the model pictures in that layout.
    """

    #: float32 [1, 3, 1, 1], of values from 0 to 255.
    mean: Tensor
    #: One over the deviation, likewise.
    inverse: Tensor

    def __init__(self, model: nn.Module, *, amp: torch.dtype | None = None, channels_last: bool = False) -> None:
        super().__init__()
        self.model = model
        self._amp = amp
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        mean, deviation = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _DEVIATION))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("inverse", 1 / deviation, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of pictures."""
        # A copy of our own, scaled in place: twice as fast on a CPU as with new memory for each operation.
        pixels = images.to(self.mean.device, torch.float32, non_blocking=True, copy=True, memory_format=self._layout)
        pixels.sub_(self.mean).mul_(self.inverse)
        with torch.autocast(pixels.device.type, self._amp, enabled=self._amp is not None):
            scores: Tensor = self.model(pixels)
        return scores.float()
