"""A network of a few thousand parameters that learns small pictures on a CPU in seconds.

in: num_classes  ->  out: an nn.Module, (n, 3, H, W) or clips (n, 3, T, H, W) of any H, W from 8 up -> (n, num_classes)
Invariant: it has what a real network has that can go wrong (batch norm, dropout, biases), so tests run on it.
"""

from __future__ import annotations

from torch import Tensor, nn

LAYERS = ((8, 2), (16, 2), (24, 1))  # width, stride of each 3x3 convolution
DROPOUT = 0.2


class Tiny(nn.Module):
    """Three convolutions with batch norm; a 4x4 grid of means over what they see goes to one linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, stride in LAYERS:
            layers += [nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(4)  # not 1: where a stroke is tells digits apart
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(channels * 16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim == 5:  # a clip counts as the mean of its frames
            frames = images.transpose(1, 2)
            means = self.pool(self.features(frames.flatten(0, 1))).flatten(1).unflatten(0, frames.shape[:2]).mean(1)
        else:
            means = self.pool(self.features(images)).flatten(1)
        return self.head(self.dropout(means))
