"""A nine-layer residual network for 32x32 pictures that a CPU trains in minutes: David Page's ResNet-9 of 2018 (DAWNBench), narrow.

in: num_classes  ->  out: an nn.Module, (n, 3, 32, 32) -> (n, num_classes); other sizes from 8 up work too
Invariant: most of its work is in a few wide convolutions, which a CPU does faster per operation than ResNet-20's many narrow ones.
"""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (32, 48, 96, 192)
LOGIT_SCALE = 0.125  # Page's: the largest of each channel's values would give logits far too sure of themselves


def convolution(in_width: int, width: int) -> nn.Sequential:
    """A 3x3 convolution with batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(in_width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two convolutions around a shortcut; nothing after the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ResNet9(nn.Module):
    """A stem, then three times a convolution and a pooling by 2, the first and the last followed by a residual pair; a linear."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [convolution(3, WIDTHS[0])]
        for number in range(3):
            stages += [convolution(WIDTHS[number], WIDTHS[number + 1]), nn.MaxPool2d(2)]
            if number != 1:
                stages.append(Residual(WIDTHS[number + 1]))
        self.features = nn.Sequential(*stages)
        self.head = nn.Linear(WIDTHS[-1], num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).amax((2, 3))) * LOGIT_SCALE


def resnet9(num_classes: int) -> nn.Module:
    """Build it: 0.93 M parameters, 58 million multiplications for a picture of 32x32."""
    return ResNet9(num_classes)
