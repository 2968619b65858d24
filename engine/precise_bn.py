"""Batch norm statistics of the weights as they are, in place of those that trail behind training.

in: a model, training batches  ->  out: the same model with new running means and variances, alike on every rank
Invariant: means over batches and ranks (Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021): the order does not matter; nothing of the
training's own stream is consumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .distributed import Ranks
from .forward import Forward


@torch.no_grad()
def refresh_batch_norm(model: nn.Module, batches: Iterable[dict[str, Any]], num_batches: int, ranks: Ranks, forward: Forward) -> None:
    """Set the statistics of every batch norm layer that trains to their means over `num_batches` global batches (a collective call).

    Modules stay in the mode they are in; of the layers, only the statistics change.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not layers:
        return
    modes = {module: module.training for module in model.modules()}
    before = [(layer, layer.momentum, None if layer.num_batches_tracked is None else layer.num_batches_tracked.clone()) for layer in layers]
    model.eval()
    for layer in layers:
        layer.train()
        layer.momentum = None  # torch's way to say: the mean of all batches
        layer.reset_running_stats()
    for batch in itertools.islice(batches, num_batches):
        (images,) = forward.move(batch["image"])
        forward.logits(model, forward.pictures(images))
    for layer, momentum, counter in before:
        for statistic in (layer.running_mean, layer.running_var):
            assert statistic is not None
            statistic.copy_(ranks.sum(statistic.cpu().double()) / ranks.world_size)
        layer.momentum = momentum
        if layer.num_batches_tracked is not None and counter is not None:
            layer.num_batches_tracked.copy_(counter)
    for module, training in modes.items():
        module.training = training
