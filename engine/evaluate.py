"""Exact evaluation: every sample counts once, whatever the number of ranks.

in: a model, a loader of one pass  ->  out: {"num_samples", "loss", "top1", "top5", "correct", "bad_samples", ...}, the same on every rank
Invariant: masked slots add nothing; sums, not means, cross the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from data import Loader, SampleError

from .distributed import Ranks
from .forward import Forward
from .losses import Loss, cross_entropy, masked_losses
from .metrics import topk_correct
from .predictions import Predictions, write_predictions
from .scores import ClassCounts, average_precision


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers: between two steps each has its own batch norm statistics."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    ranks: Ranks,
    on_batch: Callable[[dict[str, Any]], None] = lambda batch: None,
    on_error: Callable[[SampleError], None] = lambda error: None,
    answer: Callable[[torch.Tensor], torch.Tensor] | None = None,
    forward: Forward | None = None,
    loss: Loss = cross_entropy,
    write_to: Path | None = None,
) -> dict[str, Any]:
    """Run the model (not its DDP wrapper, whose forward would talk to other ranks) over one pass.

    answer: what gives logits (n, classes) for the uint8 images of a batch, where that is more than the model's forward. write_to: a file
    for the scores of every sample.

    top5 counts min(5, classes). Leaves every module in the mode it was in. `loss` and shares are None where no sample was good.
    With one label a sample "mean_class_top1" is the mean of the classes' accuracies; with several, "top1" tells how often the highest
    score is one of them, and "map" is the mean over the classes of the average precision. Besides, for files: "counts" (ClassCounts),
    and with several labels "precision", each class's on rank 0.
    """
    forward = forward or Forward(ranks.device)
    answer = answer or partial(forward.answer, model)
    share_buffers(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=ranks.device)  # samples, loss, top 1, top 5, bad
    counts, predictions, several = ClassCounts(), Predictions(), False
    for batch in loader:
        labels, valid = forward.move(batch["label"], batch["valid"])
        several = labels.ndim == 2
        logits = answer(batch["image"])
        sums[0] += valid.sum()
        sums[1] += masked_losses(loss, logits, labels, valid).double().sum()
        sums[2:4] += topk_correct(logits, labels, valid, (1, 5))
        sums[4] += len(batch["errors"])
        counts.add(logits, labels, valid)
        if several or write_to is not None:
            predictions.add(batch, logits)
        on_batch(batch)
        for error in batch["errors"]:
            on_error(error)
    for module, training in modes.items():
        module.training = training
    samples, total_loss, top1, top5, bad = ranks.sum(sums.cpu()).tolist()
    counts.sum(ranks.sum)
    result: dict[str, Any] = {
        "num_samples": int(samples),
        "loss": total_loss / samples if samples else None,
        "top1": top1 / samples if samples else None,
        "top5": top5 / samples if samples else None,
        "correct": int(top1),
        "bad_samples": int(bad),
        "counts": counts,
    }
    rows = predictions.collect(ranks) if several or write_to is not None else None
    if rows is not None and write_to is not None:
        write_predictions(write_to, rows)
    if not several:
        return result | {"mean_class_top1": counts.mean_accuracy}
    precision = None if rows is None else average_precision(rows["scores"], rows["labels"])
    told = precision is not None and not np.isnan(precision).all()
    mean = float(np.nanmean(precision)) if precision is not None and told else None
    return result | {"map": ranks.broadcast(mean), "precision": precision}
