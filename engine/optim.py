"""Optimizers by name, and the learning rate as a function of the position in the stream.

in: a model and numbers  ->  out: a torch optimizer; a position in samples  ->  out: a learning rate
Invariant: lr_at is pure, so a resumed run gets the same rate at the same position, whatever its batch size is now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Groups = list[dict[str, Any]]


def _sgd(groups: Groups, lr: float, momentum: float) -> Optimizer:
    return SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)  # torch refuses Nesterov without momentum


def _adamw(groups: Groups, lr: float, momentum: float) -> Optimizer:
    return AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=True)


def _adam(groups: Groups, lr: float, momentum: float) -> Optimizer:
    return Adam(groups, lr=lr, betas=(momentum, 0.999), fused=True)


# fused: one pass over the memory of all parameters, on GPUs and CPUs
OPTIMIZERS: dict[str, Callable[[Groups, float, float], Optimizer]] = {"sgd": _sgd, "adamw": _adamw, "adam": _adam}


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _step(progress: float) -> float:
    # A tenth after each third: epochs 30 and 60 of 90, as in He et al. 2015 and pytorch/examples.
    return 0.1 ** sum(progress >= milestone for milestone in (1 / 3, 2 / 3))


def _linear(progress: float) -> float:
    return 1.0 - progress


def _constant(progress: float) -> float:
    return 1.0


# share of the way from the warm-up's end to the run's end (0..1) -> share of the base rate
SCHEDULES: dict[str, Callable[[float], float]] = {"cosine": _cosine, "step": _step, "linear": _linear, "constant": _constant}


def number_layers(model: nn.Module) -> dict[str, int]:
    """Parameter name -> its layer, from 0 at the input; the last is the head.

    A layer is what its parameters' names share up to the first part with a digit in it (layer1.0, conv1, blocks.3, encoder_layer_0); what
    has norms and biases only belongs to the layer before it.
    """
    layers: dict[str, int] = {}
    known: dict[str, int] = {}
    number = -1
    with_matrices = {_stem(name) for name, parameter in model.named_parameters() if parameter.ndim > 1}
    for name, _ in model.named_parameters():
        stem = _stem(name)
        if stem not in known:
            if stem in with_matrices or number < 0:
                number += 1
            known[stem] = number
        layers[name] = known[stem]
    return layers


def _stem(name: str) -> str:
    parts = name.split(".")[:-1]
    # the number may be a part of its own, and then the container's name stands before it
    digits = next((place for place, part in enumerate(parts, 1) if any(c.isdigit() for c in part)), len(parts))
    if digits < len(parts) and parts[digits].isdigit():
        digits += 1
    return ".".join(parts[:digits])


def head_names(model: nn.Module) -> frozenset[str]:
    """The parameters of the last module that has any: what turns features into classes."""
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    return frozenset(name for name, _ in model.named_parameters() if name.rpartition(".")[0] == last)


def split_groups(model: nn.Module, weight_decay: float, layer_decay: float = 1.0, backbone_scale: float = 1.0) -> Groups:
    """Split the trained parameters: matrices and filters decay, norms and biases (one dimension or none) don't.

    "lr_scale" is a group's share of the learning rate: `layer_decay` for each layer between it and the head (Clark et al. 2020), times
    `backbone_scale` for all but the head.
    """
    layers, head = number_layers(model), head_names(model)
    top = max(layers.values())
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0 if name in head else backbone_scale * layer_decay ** (top - layers[name])
        decays = parameter.ndim > 1
        new = {"params": [], "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
        groups.setdefault((scale, decays), new)["params"].append(parameter)
    return [groups[key] for key in sorted(groups, reverse=True)]


def check_optimizer(opt: str, sched: str) -> None:
    """Raises ValueError for a name that is in no table."""
    if opt not in OPTIMIZERS:
        raise ValueError(f"--opt {opt}: no such optimizer; use one of {', '.join(OPTIMIZERS)}")
    if sched not in SCHEDULES:
        raise ValueError(f"--sched {sched}: no such schedule; use one of {', '.join(SCHEDULES)}")


def create_optimizer(
    model: nn.Module, opt: str, lr: float, momentum: float, weight_decay: float, layer_decay: float = 1.0, backbone_scale: float = 1.0
) -> Optimizer:
    """Make the optimizer `opt`; `momentum` is SGD's (Nesterov) or Adam's first beta. See `split_groups` for the last two."""
    return OPTIMIZERS[opt](split_groups(model, weight_decay, layer_decay, backbone_scale), lr, momentum)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give it the moments of a checkpoint; what the flags say now (weight decay, momentum) stays, as torch would not have it."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def scale_lr(opt: str, base: float, batch_size: int) -> float:
    """The rate for a global batch of one given for 256: in proportion for SGD (Goyal et al. 2017), by the square root for Adam(W).

    The root is how timm scales adaptive optimizers; it meets ConvNeXt's 0.004 at 4,096.
    """
    return base * (batch_size / 256 if opt == "sgd" else math.sqrt(batch_size / 256))


def default_lr(opt: str, batch_size: int) -> float:
    """The rate for a global batch: SGD 0.1 at 256, Adam(W) 0.001 at 256."""
    return scale_lr(opt, 0.1 if opt == "sgd" else 1e-3, batch_size)


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
    """Give every group of the optimizer its share of this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
