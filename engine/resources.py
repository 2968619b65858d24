"""What a model costs: parameters, operations, memory. Worked out on the meta device, so the largest is looked at in no time.

in: a model, the size of a batch  ->  out: counts and bytes
Invariant: what is estimated is called an estimate; what is in use is asked of the machine.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Cost:
    """parameters; multiply-adds of one picture's forward, twice that in FLOPs; bytes that a forward in training keeps for its backward."""

    parameters: int
    flops: int
    saved: int


def measure(model: nn.Module, images: torch.Tensor) -> Cost:
    """What `model` (on the meta device, in training mode) costs for a batch of `images` (n, 3, H, W), also there."""
    from torch.utils.flop_counter import FlopCounterMode

    storages: dict[int, int] = {}
    held: list[Any] = []  # an id means nothing once its owner is gone
    own = {id(parameter) for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in own:
            storage = tensor.untyped_storage()
            held.append(storage)
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, counter.get_total_flops() // len(images), sum(storages.values()) // len(images))


def memory_in_use(device: torch.device) -> int:
    """The most memory that this process has used, in bytes: of the GPU, or (on the CPU) of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
