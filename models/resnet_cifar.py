"""The residual network for 32x32 pictures of He et al. 2015 (arXiv 1512.03385, section 4.2).

in: num_classes  ->  out: an nn.Module, (n, 3, 32, 32) -> (n, num_classes); other sizes work too
Invariant: the parameter count is the paper's (0.27 M for 20 layers): shortcuts have no parameters (its option A).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut; where the width grows, that skips pixels and adds zero channels."""

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride
        self.new_channels = width - in_width

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            x = functional.pad(x, (0, 0, 0, 0, self.new_channels // 2, self.new_channels - self.new_channels // 2))
        return functional.relu(x + y)


class CifarResNet(nn.Module):
    """6 * blocks + 2 layers: a stem, three stages of `blocks` blocks (widths 16, 32, 64), the mean, a linear."""

    def __init__(self, blocks: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages: list[nn.Module] = []
        in_width = 16
        for width in (16, 32, 64):
            for index in range(blocks):
                stages.append(Block(in_width, width, stride=2 if index == 0 and width > 16 else 1))
                in_width = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(in_width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(images)))
        return self.head(self.blocks(x).mean((2, 3)))


def resnet20(num_classes: int) -> nn.Module:
    """Build ResNet-20: 20 layers, 0.27 M parameters."""
    return CifarResNet(3, num_classes)
