"""Mixup and CutMix: pictures of a batch blended with, or pasted into, each other.

in: the model's input (n, 3, H, W) or (n, 3, T, H, W), targets, which slots are valid, a Generator  ->  out: mixed input, float targets
Invariant: a function of the batch and the generator's state; a valid slot mixes with a valid slot only, a masked one with itself.
Partners are slots of the same rank, so on another number of processes other pictures meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .losses import soft_targets


@dataclass(frozen=True, slots=True)
class Mixing:
    """Zhang et al. 2017 (mixup: blend) and Yun et al. 2019 (cutmix: paste). Each is the parameter of a Beta(a, a) distribution that the
    share of the other picture comes from, 0: never. With both, a step takes one or the other with equal chances.
    """

    mixup: float
    cutmix: float
    num_classes: int

    def __bool__(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`valid` is on the CPU. The images given are not changed."""
        pastes = self.cutmix > 0 and (self.mixup == 0 or rng.random() < 0.5)
        alpha = self.cutmix if pastes else self.mixup
        kept = float(rng.beta(alpha, alpha))
        partners = torch.from_numpy(draw_partners(valid.numpy(), rng)).to(images.device)
        others = images[partners]
        if pastes:
            top, bottom, left, right = draw_box(images.shape[-2], images.shape[-1], 1 - kept, rng)
            mixed = images.clone()
            mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
            kept = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
        else:
            mixed = images * kept + others * (1 - kept)
        shares = soft_targets(targets, self.num_classes)
        return mixed, shares * kept + shares[partners] * (1 - kept)


def draw_partners(valid: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whom each slot mixes with: int64 (n,). The valid ones in a random order, each with the next."""
    partners = np.arange(len(valid))
    order = rng.permutation(np.flatnonzero(valid))
    partners[order] = np.roll(order, -1)
    return partners


def draw_box(height: int, width: int, share: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """top, bottom, left, right of a box of that share of the area around a random point, cut at the borders."""
    high, wide = int(height * share**0.5), int(width * share**0.5)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = y - high // 2, x - wide // 2
    return max(top, 0), min(top + high, height), max(left, 0), min(left + wide, width)
