"""Optimizers by name, and the learning rate as a function of the position in the stream.

in: a model and numbers  ->  out: a torch optimizer; a position in samples  ->  out: a learning rate
Invariant: lr_at is pure, so a resumed run gets the same rate at the same position, whatever its batch size is now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

Groups = list[dict[str, Any]]


def _sgd(groups: Groups, lr: float, momentum: float) -> Optimizer:
    return SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)  # torch refuses Nesterov without momentum


def _adamw(groups: Groups, lr: float, momentum: float) -> Optimizer:
    return AdamW(groups, lr=lr, betas=(momentum, 0.999))


OPTIMIZERS: dict[str, Callable[[Groups, float, float], Optimizer]] = {"sgd": _sgd, "adamw": _adamw}


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _step(progress: float) -> float:
    # A tenth after each third: epochs 30 and 60 of 90, as in He et al. 2015 and pytorch/examples.
    return 0.1 ** sum(progress >= milestone for milestone in (1 / 3, 2 / 3))


def _constant(progress: float) -> float:
    return 1.0


# share of the way from the warm-up's end to the run's end (0..1) -> share of the base rate
SCHEDULES: dict[str, Callable[[float], float]] = {"cosine": _cosine, "step": _step, "constant": _constant}


def decay_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Split the trained parameters: matrices and filters decay, norms and biases (one dimension or none) don't."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def check_optimizer(opt: str, sched: str) -> None:
    """Raises ValueError for a name that is in no table."""
    if opt not in OPTIMIZERS:
        raise ValueError(f"--opt {opt}: no such optimizer; use one of {', '.join(OPTIMIZERS)}")
    if sched not in SCHEDULES:
        raise ValueError(f"--sched {sched}: no such schedule; use one of {', '.join(SCHEDULES)}")


def create_optimizer(model: nn.Module, opt: str, lr: float, momentum: float, weight_decay: float) -> Optimizer:
    """Make the optimizer `opt`; `momentum` is SGD's (Nesterov) or AdamW's first beta."""
    return OPTIMIZERS[opt](decay_groups(model, weight_decay), lr, momentum)


def default_lr(opt: str, batch_size: int) -> float:
    """The rate for a global batch: SGD 0.1 per 256 (linear, Goyal et al. 2017), AdamW 0.001 at 256 (square root).

    The root is how timm scales adaptive optimizers; it meets ConvNeXt's 0.004 at 4,096.
    """
    if opt == "adamw":
        return 1e-3 * math.sqrt(batch_size / 256)
    return 0.1 * batch_size / 256


def lr_at(
    position: float,
    *,
    total: float,
    warmup: float,
    base_lr: float,
    warmup_lr: float,
    min_lr: float = 0.0,
    sched: str = "cosine",
) -> float:
    """The rate of a step that starts at `position`; position, total (the run's end) and warmup are in samples.

    Linear from `warmup_lr` at 0 to `base_lr` at `warmup`, then the schedule over the rest; cosine ends at `min_lr`.
    The warm-up's line meets the schedule, so there is no jump.
    """
    if position < warmup:
        return warmup_lr + (base_lr - warmup_lr) * position / warmup
    progress = (position - warmup) / (total - warmup) if total > warmup else 0.0
    return min_lr + (base_lr - min_lr) * SCHEDULES[sched](min(progress, 1.0))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every group of the optimizer this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
