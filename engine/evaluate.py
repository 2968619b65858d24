"""Exact evaluation: every sample counts once, whatever the number of ranks.

in: a model, a loader of one pass  ->  out: {"num_samples", "loss", "top1", "top5", "correct", "bad_samples"}, the same on every rank
Invariant: masked slots add nothing; sums, not means, cross the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from data import Loader, SampleError

from .distributed import Ranks
from .metrics import topk_correct

# what the usual pretrained models expect, for pictures of 0..255
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalize(images: torch.Tensor) -> torch.Tensor:
    """uint8 (n, 3, H, W), 0..255 -> float32, ImageNet's mean 0 and deviation 1 per channel; runs where the pictures are."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
    return (images.float() - mean) / std


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
) -> dict[str, Any]:
    """Run the model (not its DDP wrapper, whose forward would talk to other ranks) over one pass.

    top5 counts min(5, classes). Leaves the model in the mode it was in. `loss` and shares are None where no sample was good.
    """
    share_buffers(model)
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=ranks.device)  # samples, loss, top 1, top 5, bad
    for batch in loader:
        labels, valid = (batch[name].to(ranks.device, non_blocking=True) for name in ("label", "valid"))
        logits = model(normalize(batch["image"].to(ranks.device, non_blocking=True))).float()
        losses = functional.cross_entropy(logits, labels, reduction="none")
        sums[0] += valid.sum()
        sums[1] += torch.where(valid, losses, 0).double().sum()
        sums[2:4] += topk_correct(logits, labels, valid, (1, 5))
        sums[4] += len(batch["errors"])
        on_batch(batch)
        for error in batch["errors"]:
            on_error(error)
    model.train(was_training)
    samples, loss, top1, top5, bad = ranks.sum(sums.cpu()).tolist()
    return {
        "num_samples": int(samples),
        "loss": loss / samples if samples else None,
        "top1": top1 / samples if samples else None,
        "top5": top5 / samples if samples else None,
        "correct": int(top1),
        "bad_samples": int(bad),
    }
