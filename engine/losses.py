"""The loss of each slot.

in: logits float32 (n, classes); targets: classes int64 (n,), or shares of each class, any dtype (n, classes)  ->  out: float32 (n,)
Invariant: one number per slot, never a mean: which slots count, and over how many the mean goes, is the step's to say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from data.tasks import has_several_labels

Loss = Callable[[Tensor, Tensor, float], Tensor]


def soft_targets(targets: Tensor, num_classes: int) -> Tensor:
    """Targets as float32 shares (n, classes)."""
    if targets.ndim == 1:
        return functional.one_hot(targets, num_classes).float()
    return targets.float()


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Cross entropy, also with soft targets; `smoothing` of each target is spread over all classes (Szegedy et al. 2015)."""
    targets = targets if targets.ndim == 1 else targets.float()
    return functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """One yes-or-no question a class, the mean over the classes: for several labels a sample, or for one (Wightman et al. 2021)."""
    shares = soft_targets(targets, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]
    return functional.binary_cross_entropy_with_logits(logits, shares, reduction="none").mean(1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "bce": binary_cross_entropy}


def masked_losses(loss: Loss, logits: Tensor, targets: Tensor, valid: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss of each slot, 0 where masked; `where`, not a product: a masked slot's may be infinite."""
    return torch.where(valid, loss(logits, targets, smoothing), 0)


def default_loss(task: str) -> str:
    """The name in LOSSES that a task takes when none is said."""
    return "bce" if has_several_labels(task) else "ce"
