"""One answer for a video from the clips of it that a test shows.

in: a model, uint8 clips (n, clips, 3, T, H, W)  ->  out: logits (n, classes), whose softmax is the answer
Invariant: all clips of a video are in its slot of the batch, so they meet in one place on any number of ranks; the device never holds
more than `at_once` of them as the model's input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ENSEMBLES = ("sum", "max")


def combine(logits: Tensor, how: str, several: bool = False) -> Tensor:
    """Logits of clips (n, clips, classes) -> of videos (n, classes). Classes' probabilities (of each class alone where a video has
    `several` labels) are averaged, or the highest of each is taken; the answer is in logits again."""
    logits = logits.double()  # sums in another order then agree far below what float32 shows
    scores = logits.sigmoid() if several else logits.softmax(-1)
    scores = scores.mean(1) if how == "sum" else scores.amax(1)
    tiny = torch.finfo(torch.float32).tiny
    return (torch.logit(scores, eps=1e-12) if several else scores.clamp(min=tiny).log()).float()


def answer_views(predict: Callable[[Tensor], Tensor], images: Tensor, how: str, at_once: int, several: bool = False) -> Tensor:
    """What `predict`, uint8 (m, 3, T, H, W) -> logits (m, classes), says of each of n videos, from at most `at_once` clips at a time."""
    clips = images.flatten(0, 1)
    logits = torch.cat([predict(part) for part in clips.split(max(1, at_once))])
    return combine(logits.unflatten(0, images.shape[:2]), how, several)
