"""From a batch's uint8 pictures to a model's logits: onto the device, normalised, in the precision and memory order that were asked for.

in: uint8 (n, 3, H, W) on the CPU  ->  out: float32 (n, 3, H, W) on the device; float32 logits (n, classes)
Invariant: training, evaluation and the discarded first step all go through here, so what a model sees is said in one place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

# what the usual pretrained models expect, for pictures of 0..255: those of ImageNet; and for clips, those of PySlowFast
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)
AMP: dict[str, torch.dtype | None] = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def normalize(images: torch.Tensor) -> torch.Tensor:
    """uint8 (n, 3, H, W) or clips (n, 3, T, H, W), 0..255 -> float32, about mean 0 and deviation 1 per channel; runs where they are."""
    mean, std = _statistics(images)
    return (images.float() - mean) / std


def denormalize(images: torch.Tensor) -> torch.Tensor:
    """The other way: float32 as the model sees it -> uint8 as a person does."""
    mean, std = _statistics(images)
    return (images * std + mean).round().clamp(0, 255).to(torch.uint8)


def _statistics(images: torch.Tensor) -> list[torch.Tensor]:
    values = (MEAN, STD) if images.ndim == 4 else (CLIP_MEAN, CLIP_STD)
    return [torch.tensor(v, device=images.device).view(3, *[1] * (images.ndim - 2)) * 255 for v in values]


class Forward:
    """How batches reach a model on `device`; amp: a name in AMP.

    On a GPU the copies run on a stream of their own, beside what the model computes; they overlap because the loader pins its
    memory and nothing here waits for the device.
    """

    def __init__(self, device: torch.device, amp: str = "off", channels_last: bool = False) -> None:
        self.device, self.dtype, self.channels_last = device, AMP[amp], channels_last
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The tensors on the device."""
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        with torch.cuda.stream(self._stream):
            moved = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in moved:
            tensor.record_stream(current)  # else its memory may be given away while the model still reads it
        return moved

    def pictures(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 pictures on the device -> the model's input."""
        images = normalize(images)
        order = torch.channels_last if images.ndim == 4 else torch.channels_last_3d
        return images.contiguous(memory_format=order) if self.channels_last else images

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward in the precision asked for."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def logits(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """A model's output for its input, float32 (n, classes)."""
        with self.autocast():
            output: torch.Tensor = model(images)
        return output.float()

    def answer(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """A model's logits for the uint8 images of a batch, as the loader gives them."""
        (moved,) = self.move(images)
        return self.logits(model, self.pictures(moved))
