"""Residual networks over clips: C2D, I3D and Slow, and the parts that SlowFast is made of.

in: num_classes, options  ->  out: an nn.Module, float (n, 3, T, H, W) -> logits (n, num_classes)
Invariant: parameters have PySlowFast's names and shapes, so its published checkpoints load with strict=True.
Sources: Wang et al., Non-local neural networks, 2018 (C2D, I3D); Feichtenhofer et al., SlowFast networks, 2019 (Slow).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BLOCKS = (3, 4, 6, 3)  # of 50 layers
NONLOCAL_TYPES = ("softmax", "dot_product")


@dataclass(frozen=True, slots=True)
class Options:
    """What a model of this family can be asked for by `--model-kwargs`; the defaults are the published models'."""

    width_per_group: int = 64
    num_groups: int = 1
    blocks: Sequence[int] = BLOCKS
    dropout: float = 0.5
    bn_momentum: float = 0.1
    bn_eps: float = 1e-5
    zero_init_final_bn: bool = True
    nonlocal_blocks: Mapping[int, Sequence[int]] | None = None  # stage 2..5 -> blocks that a non-local block follows
    nonlocal_type: str = "softmax"

    def __post_init__(self) -> None:
        if len(self.blocks) != 4 or min(self.blocks) < 1:
            raise ValueError(f"blocks={list(self.blocks)}: there are four stages of at least one block each")
        if self.width_per_group < 1 or self.num_groups < 1:
            raise ValueError(f"width_per_group={self.width_per_group}, num_groups={self.num_groups}: both are at least 1")
        if self.nonlocal_type not in NONLOCAL_TYPES:
            raise ValueError(f"nonlocal_type={self.nonlocal_type}: it is one of {', '.join(NONLOCAL_TYPES)}")
        for stage, places in (self.nonlocal_blocks or {}).items():
            if stage not in range(2, 6) or not set(places) <= set(range(self.blocks[stage - 2])):
                raise ValueError(f"nonlocal_blocks {stage}: {list(places)}: stages are 2..5, and blocks count from 0 within a stage")

    def norm(self, channels: int) -> nn.BatchNorm3d:
        return nn.BatchNorm3d(channels, eps=self.bn_eps, momentum=self.bn_momentum)


class Stem(nn.Module):
    """(n, 3, T, H, W) -> (n, width, T, H/4, W/4)."""

    def __init__(self, width: int, kernel: int, options: Options) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, width, (kernel, 7, 7), stride=(1, 2, 2), padding=(kernel // 2, 3, 3), bias=False)
        self.bn = options.norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool_layer = nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool_layer(self.relu(self.bn(self.conv(x))))


class Stems(nn.Module):
    """A stem for each pathway."""

    def __init__(self, widths: Sequence[int], kernels: Sequence[int], options: Options) -> None:
        super().__init__()
        for pathway, (width, kernel) in enumerate(zip(widths, kernels, strict=True)):
            self.add_module(f"pathway{pathway}_stem", Stem(width, kernel, options))

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [stem(x) for stem, x in zip(self.children(), xs, strict=True)]


class Bottleneck(nn.Module):
    """Kernels (t, 1, 1), (1, 3, 3) and (1, 1, 1), each with a batch norm."""

    def __init__(self, in_width: int, inner: int, width: int, kernel: int, stride: int, groups: int, options: Options) -> None:
        super().__init__()
        self.a = nn.Conv3d(in_width, inner, (kernel, 1, 1), padding=(kernel // 2, 0, 0), bias=False)
        self.a_bn = options.norm(inner)
        self.a_relu = nn.ReLU(inplace=True)
        self.b = nn.Conv3d(inner, inner, (1, 3, 3), stride=(1, stride, stride), padding=(0, 1, 1), groups=groups, bias=False)
        self.b_bn = options.norm(inner)
        self.b_relu = nn.ReLU(inplace=True)
        self.c = nn.Conv3d(inner, width, 1, bias=False)
        self.c_bn = options.norm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a_relu(self.a_bn(self.a(x)))
        x = self.b_relu(self.b_bn(self.b(x)))
        return self.c_bn(self.c(x))


class Block(nn.Module):
    """A bottleneck around a shortcut, which has a convolution where width or size change."""

    def __init__(self, in_width: int, inner: int, width: int, kernel: int, stride: int, groups: int, options: Options) -> None:
        super().__init__()
        self.shortcut = in_width != width or stride != 1
        if self.shortcut:
            self.branch1 = nn.Conv3d(in_width, width, 1, stride=(1, stride, stride), bias=False)
            self.branch1_bn = options.norm(width)
        self.branch2 = Bottleneck(in_width, inner, width, kernel, stride, groups, options)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.branch1_bn(self.branch1(x)) if self.shortcut else x
        return self.relu(shortcut + self.branch2(x))


class NonLocal(nn.Module):
    """Every place looks at all places, of half the height and width (Wang et al. 2018, section 3.3)."""

    def __init__(self, width: int, kind: str, options: Options) -> None:
        super().__init__()
        self.inner, self.kind = width // 2, kind
        self.conv_theta = nn.Conv3d(width, self.inner, 1)
        self.conv_phi = nn.Conv3d(width, self.inner, 1)
        self.conv_g = nn.Conv3d(width, self.inner, 1)
        self.conv_out = nn.Conv3d(self.inner, width, 1)
        self.bn = options.norm(width)
        self.pool = nn.MaxPool3d((1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x)
        query = self.conv_theta(x).flatten(2).transpose(1, 2)  # (n, places, inner)
        key, value = self.conv_phi(pooled).flatten(2), self.conv_g(pooled).flatten(2)
        affinity = query @ key
        if self.kind == "softmax":
            affinity = (affinity * self.inner**-0.5).softmax(2)
        else:
            affinity = affinity / affinity.shape[2]
        seen = (affinity @ value.transpose(1, 2)).transpose(1, 2)
        return x + self.bn(self.conv_out(seen.unflatten(2, x.shape[2:])))


class Stage(nn.Module):
    """The blocks of one stage, for each pathway. kernels: per pathway, the temporal kernel of each block in turn."""

    def __init__(
        self,
        number: int,
        in_widths: Sequence[int],
        inners: Sequence[int],
        widths: Sequence[int],
        kernels: Sequence[Sequence[int]],
        options: Options,
    ) -> None:
        super().__init__()
        num_blocks, stride = options.blocks[number - 2], 1 if number == 2 else 2
        self.names: list[list[str]] = []
        for pathway, (in_width, inner, width) in enumerate(zip(in_widths, inners, widths, strict=True)):
            names = []
            for index in range(num_blocks):
                kernel = kernels[pathway][index % len(kernels[pathway])]
                block = Block(in_width, inner, width, kernel, 1 if index else stride, options.num_groups, options)
                names.append(f"pathway{pathway}_res{index}")
                self.add_module(names[-1], block)
                in_width = width
                if pathway == 0 and index in (options.nonlocal_blocks or {}).get(number, ()):
                    names.append(f"pathway{pathway}_nonlocal{index}")
                    self.add_module(names[-1], NonLocal(width, options.nonlocal_type, options))
            self.names.append(names)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        outputs = []
        for names, x in zip(self.names, xs, strict=True):
            for name in names:
                x = self.get_submodule(name)(x)
            outputs.append(x)
        return outputs


class Head(nn.Module):
    """Means over all frames and a window of `pool` places, dropout, one linear layer.

    Pictures larger than those trained on have several windows. In eval mode the answer is then the logarithm of the mean of the
    windows' probabilities, whose softmax is that mean (fully convolutional testing).
    """

    def __init__(self, widths: Sequence[int], num_classes: int, pool: int | None, dropout: float) -> None:
        super().__init__()
        self.pool = pool
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(sum(widths), num_classes)

    def forward(self, xs: list[Tensor]) -> Tensor:
        x = torch.cat([self._means(x) for x in xs], 1)  # (n, widths, windows down, windows across)
        logits = self.projection(self.dropout(x.permute(0, 2, 3, 1)))
        if self.training:
            return logits.mean((1, 2))
        if logits.shape[1:3] == (1, 1):
            return logits[:, 0, 0]
        return logits.float().softmax(-1).mean((1, 2)).log()

    def _means(self, x: Tensor) -> Tensor:
        x = x.mean(2)
        height, width = x.shape[2:]
        window = (min(self.pool or height, height), min(self.pool or width, width))
        return nn.functional.avg_pool2d(x, window, stride=1)


def pool_size(img_size: int | None) -> int | None:
    """Side of the last stage's maps for pictures of img_size: the head's window. None: whatever comes."""
    return None if img_size is None else math.ceil(img_size / 32)


def initialize(model: nn.Module, zero_init_final_bn: bool) -> None:
    """He's normal draws for convolutions (fan out), 0.01 for the head; the last norm of each block starts at zero, where wished:
    every block begins as its shortcut (Goyal et al., Accurate large minibatch SGD, 2017)."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, NonLocal):
            nn.init.zeros_(module.bn.weight)
        elif isinstance(module, Bottleneck) and zero_init_final_bn:
            nn.init.zeros_(module.c_bn.weight)


class ResNet3d(nn.Module):
    """One pathway. kernels: the temporal kernels of the stem and of the four stages' blocks; pool: frames that a maximum after
    the first stage takes together."""

    def __init__(self, num_classes: int, img_size: int | None, kernels: Sequence[Sequence[int]], pool: int, options: Options) -> None:
        super().__init__()
        width, inner = options.width_per_group, options.width_per_group * options.num_groups
        self.s1 = Stems([width], kernels[0], options)
        in_width = width
        for number in range(2, 6):
            factor = 2 ** (number - 2)
            stage = Stage(number, [in_width], [inner * factor], [4 * width * factor], [kernels[number - 1]], options)
            self.add_module(f"s{number}", stage)
            in_width = 4 * width * factor
        self.pathway0_pool = nn.MaxPool3d((pool, 1, 1))
        self.head = Head([in_width], num_classes, pool_size(img_size), options.dropout)
        initialize(self, options.zero_init_final_bn)

    def forward(self, clips: Tensor) -> Tensor:
        x = self.s1([clips])
        x = [self.pathway0_pool(y) for y in self.get_submodule("s2")(x)]
        for name in ("s3", "s4", "s5"):
            x = self.get_submodule(name)(x)
        return self.head(x)


def _build(
    num_classes: int, img_size: int | None = None, *, kernels: Sequence[Sequence[int]], pool: int, **options: Any
) -> nn.Module:
    return ResNet3d(num_classes, img_size, kernels, pool, Options(**options))


# num_classes, img_size, options -> the model. 8x8: made for 8 frames, every 8th of a video at 30 frames a second.
c2d_8x8_r50 = partial(_build, kernels=((1,), (1,), (1,), (1,), (1,)), pool=2)
i3d_8x8_r50 = partial(_build, kernels=((5,), (3,), (3, 1), (3, 1), (1, 3)), pool=2)
slow_8x8_r50 = partial(_build, kernels=((1,), (1,), (1,), (3,), (3,)), pool=1)
