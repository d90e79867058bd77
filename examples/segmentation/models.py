"""The network by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.imagenet.models import with_norm
from examples.imagenet.vision import require
from examples.segmentation.options import Options


def build(options: Options, classes: int) -> nn.Module:
    """Return a new network with random weights, on the CPU.

    It is one of torchvision's kind: float [n, 3, height, width] -> ``{"out": scores, "aux": scores}``, each
    [n, classes, height, width], without "aux" if there is no auxiliary classifier.
    """
    if options.arch == "fcn_small":
        model = fcn_small(options.width, classes, aux=options.aux_loss)
    else:
        segmentation = require("torchvision.models.segmentation")
        names = require("torchvision.models").list_models(module=segmentation)
        if options.arch not in names:
            raise SystemExit(f"-a {options.arch}: unknown. There are fcn_small and torchvision's {', '.join(names)}")
        extra: dict[str, Any] = {} if options.arch.startswith("lraspp") else {"aux_loss": options.aux_loss}
        model = getattr(segmentation, options.arch)(weights=None, weights_backbone=None, num_classes=classes, **extra)
    return with_norm(model, options.norm, options.arch)


def fcn_small(width: int, classes: int, *, aux: bool) -> nn.Module:
    """Return torchvision's FCN on a network of four stages, which works at 1/4 of the resolution.

    Without dropout, which a small network does not need: with ``--norm group`` any number of replicas then trains the
    same.
    """
    fcn = require("torchvision.models.segmentation.fcn")
    head = fcn.FCNHead
    model: nn.Module = fcn.FCN(Backbone(width), head(8 * width, classes), head(4 * width, classes) if aux else None)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


class Backbone(nn.Module):
    """float [n, 3, height, width] -> maps at 1/4 of the resolution: "out" of 8 width channels, "aux" of 4 width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = _convolved(3, width, stride=2)
        self.stage1 = _convolved(width, 2 * width, stride=2)
        # Dilated, as in torchvision's: they look further around without a lower resolution.
        self.stage2 = _convolved(2 * width, 4 * width, dilation=2)
        self.stage3 = _convolved(4 * width, 8 * width, dilation=4)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        maps = self.stage2(self.stage1(self.stem(pictures)))
        return {"out": self.stage3(maps), "aux": maps}


def _convolved(channels: int, wider: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, wider, 3, stride=stride, padding=dilation, dilation=dilation, bias=False),
        nn.BatchNorm2d(wider),
        nn.ReLU(),
        nn.Conv2d(wider, wider, 3, padding=dilation, dilation=dilation, bias=False),
        nn.BatchNorm2d(wider),
        nn.ReLU(),
    )


def grouped(model: Any, options: Options) -> list[dict[str, Any]]:
    """Return the parameters for SGD: the auxiliary classifier of torchvision's networks learns ten times as fast."""
    aux = getattr(model, "aux_classifier", None)
    fast = [] if aux is None or options.arch == "fcn_small" else list(aux.parameters())
    ids = set(map(id, fast))
    groups: list[dict[str, Any]] = [{"params": [param for param in model.parameters() if id(param) not in ids]}]
    return [*groups, {"params": fast, "lr": 10 * options.lr}] if fast else groups


class FromBytes(nn.Module):
    """A network that takes pictures as bytes, and scales them where it is: uint8 [n, 3, height, width]."""

    #: float32 [1, 3, 1, 1], of values from 0 to 255: of ImageNet's pictures.
    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name, values in (("mean", (0.485, 0.456, 0.406)), ("deviation", (0.229, 0.224, 0.225))):
            self.register_buffer(name, 255 * torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        pixels = (pictures.to(self.mean.device, torch.float32) - self.mean) / self.deviation
        scores: dict[str, Tensor] = self.model(pixels)
        return scores
