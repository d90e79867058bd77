"""The models that the benchmarks train: small enough for two CPU cores, and unlike each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """A perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Transformer(nn.Module):
    """A small encoder that classifies sequences of tokens."""

    def __init__(self, *, tokens: int = 2000, width: int = 256, layers: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.encode(self.embed(tokens)).mean(1))
        return scores


class _Residual(nn.Module):
    """Two 3x3 convolutions and a way around them (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or into != out:
            self.around = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.around(images))


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet-18 for images of 32x32: a 3x3 stem and no pooling before the first stage."""
    stages: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    into = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages += [_Residual(into, out, stride), _Residual(out, out, 1)]
        into = out
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class ManySmall(nn.Module):
    """A thousand small parameters: what counts is the cost of each, not of its memory."""

    def __init__(self, count: int = 1000, width: int = 32) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((width,), 1.0)) for _ in range(count)])
        self.classify = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        scores: Tensor = self.classify(x)
        return scores


@dataclass(frozen=True)
class Workload:
    """A model, and a rank's batch for it."""

    name: str
    build: Callable[[], nn.Module]
    #: Inputs of one rank's batch.
    batch: Callable[[], Tensor]
    #: Steps of a round: enough to be measured, few enough that rounds alternate.
    steps: int
    #: Backward passes for each optimizer step; all but the last inside no_sync.
    accumulate: int = 1


WORKLOADS = [
    Workload("MLP, 0.03 M", lambda: mlp(64, 256, 64, 10), lambda: torch.randn(32, 64), 60),
    Workload("MLP, 6 M", lambda: mlp(784, 2048, 2048, 256, 10), lambda: torch.randn(32, 784), 4),
    Workload("transformer, 7 M", Transformer, lambda: torch.randint(2000, (4, 32)), 3),
    Workload("ResNet-18, 32x32", resnet18, lambda: torch.randn(4, 3, 32, 32), 2),
    Workload("1,000 small parameters", ManySmall, lambda: torch.randn(8, 32), 8),
    Workload("MLP, 6 M, 4 x accumulated", lambda: mlp(784, 2048, 2048, 256, 10), lambda: torch.randn(32, 784), 2, 4),
]
