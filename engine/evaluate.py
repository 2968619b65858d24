"""Exact evaluation: every sample counts once, whatever the number of ranks.

in: a model, a loader of one pass  ->  out: {"num_samples", "loss", "top1", "top5", "correct", "bad_samples"}, the same on every rank
Invariant: masked slots add nothing; sums, not means, cross the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from data import Loader, SampleError

from .distributed import Ranks
from .metrics import topk_correct

# what the usual pretrained models expect, for pictures of 0..255: those of ImageNet; and for clips, those of PySlowFast
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)


def normalize(images: torch.Tensor) -> torch.Tensor:
    """uint8 (n, 3, H, W) or clips (n, 3, T, H, W), 0..255 -> float32, about mean 0 and deviation 1 per channel; runs where they are."""
    values = (MEAN, STD) if images.ndim == 4 else (CLIP_MEAN, CLIP_STD)
    mean, std = (torch.tensor(v, device=images.device).view(3, *[1] * (images.ndim - 2)) * 255 for v in values)
    return (images.float() - mean) / std


def predict(images: torch.Tensor, model: nn.Module, device: torch.device) -> torch.Tensor:
    """Logits, float32 (n, classes), of uint8 images."""
    logits: torch.Tensor = model(normalize(images.to(device, non_blocking=True)))
    return logits.float()


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
    on_answer: Callable[[dict[str, Any], torch.Tensor], None] = lambda batch, logits: None,
) -> dict[str, Any]:
    """Run the model (not its DDP wrapper, whose forward would talk to other ranks) over one pass.

    answer: what gives logits (n, classes) for the uint8 images of a batch, where that is more than the model's forward.

    top5 counts min(5, classes). Leaves the model in the mode it was in. `loss` and shares are None where no sample was good.
    """
    answer = answer or partial(predict, model=model, device=ranks.device)
    share_buffers(model)
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=ranks.device)  # samples, loss, top 1, top 5, bad
    for batch in loader:
        labels, valid = (batch[name].to(ranks.device, non_blocking=True) for name in ("label", "valid"))
        logits = answer(batch["image"])
        losses = functional.cross_entropy(logits, labels, reduction="none")
        sums[0] += valid.sum()
        sums[1] += torch.where(valid, losses, 0).double().sum()
        sums[2:4] += topk_correct(logits, labels, valid, (1, 5))
        sums[4] += len(batch["errors"])
        on_batch(batch)
        on_answer(batch, logits)
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
