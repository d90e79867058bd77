"""A small ResNet for pictures of 32 x 32 pixels."""

from __future__ import annotations

from torch import Tensor, nn


class ResNetCifar(nn.Module):
    """6 n + 2 layers for small pictures: [batch, 3, height, width] -> [batch, classes].

    Source: K. He, X. Zhang, S. Ren and J. Sun, "Deep Residual Learning for Image Recognition", 2015, arXiv:1512.03385,
    section 4.2, with its shortcuts without parameters ("option A"). n = 3 makes 20 layers and 0.27 million parameters
    for 10 classes.
    """

    def __init__(self, blocks: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        stages, width = [], 16
        for wider in (16, 32, 64):
            first = Block(width, wider)
            stages.append(nn.Sequential(first, *(Block(wider, wider) for _ in range(blocks - 1))))
            width = wider
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Scores of pictures."""
        scores: Tensor = self.classifier(self.stages(self.stem(images)))
        return scores


class Block(nn.Module):
    """Two convolutions beside a shortcut. Where the width doubles, the picture's sides are halved."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self._added = wider - width
        stride = 2 if self._added else 1
        self.layers = nn.Sequential(
            nn.Conv2d(width, wider, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(inplace=True),
            nn.Conv2d(wider, wider, 3, padding=1, bias=False),
            nn.BatchNorm2d(wider),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[batch, width, h, w] -> [batch, wider, h, w] or, where the width grows, half of h and w."""
        shortcut = images
        if self._added:
            before = self._added // 2
            channels = (0, 0, 0, 0, before, self._added - before)
            shortcut = nn.functional.pad(images[:, :, ::2, ::2], channels)
        return nn.functional.relu(shortcut + self.layers(images))
