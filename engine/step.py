"""One update of the weights: a rank's part of the global batch through model and loss, gradients over all ranks, the optimizer.

in: a masked batch, the count of valid slots over all ranks (under way)  ->  out: changed weights; the losses and logits of the slots
Invariant: the update is the mean over the valid slots of the whole global batch, however it is cut into ranks and micro-batches. It
follows from (weights, position, seed, step, rank) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .ema import Ema
from .forward import Forward
from .losses import Loss, masked_losses
from .mixing import Mixing
from .optim import load_optimizer, set_lr
from .waits import BACKWARD, COUNT, FORWARD, TRANSFER, UPDATE

STEP, MIXING = 3, 4  # purposes of seeds, beside those of data/plan.py


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for one step: dropout and the like don't depend on the steps before it."""
    state = np.random.SeedSequence((seed, step, STEP, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found, on the device: losses (n,), logits (n, classes), labels as in the batch, valid (n,)."""

    losses: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


class Step:
    """Made once for a run; called for every batch.

    schedule: position -> learning rate. grad_accum: micro-batches that a rank's part is cut into. clip_grad: the most that the norm of
    all gradients may be, 0 for no limit. `norm` is that norm at the last step, before clipping, on the device; `lr` its learning rate.
    """

    def __init__(
        self,
        *,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        forward: Forward,
        loss: Loss,
        smoothing: float,
        mixing: Mixing,
        grad_accum: int,
        clip_grad: float,
        ema: Ema | None,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.forward = model, optimizer, schedule, forward
        self.loss, self.smoothing, self.mixing = loss, smoothing, mixing
        self.grad_accum, self.clip_grad, self.ema = grad_accum, clip_grad, ema
        self.seed, self.rank, self.world_size = seed, rank, world_size
        # without fp16 it does nothing: bfloat16 has float32's range
        self.scaler = torch.amp.GradScaler(forward.device.type, enabled=forward.dtype is torch.float16)
        self.norm, self.lr = torch.zeros((), device=forward.device), 0.0
        self.lap: Callable[[str], None] = lambda name: None  # is told what has just been done
        self.first_input: torch.Tensor | None = None  # what the model saw first, for people to look at

    def tell(self, lap: Callable[[str], None]) -> None:
        """`lap` hears what has just been done. Before the model's own forward the ranks wait for each other, to share buffers."""
        self.lap = lap
        if getattr(self.model, "_compiled_call_impl", None) is None:  # a hook would cut a compiled graph
            self.model.module.register_forward_pre_hook(lambda module, inputs: lap(COUNT))  # not self: a cycle would keep the model

    def warm_up(self, batch: dict[str, torch.Tensor]) -> None:
        """One discarded forward and backward.

        DDP re-orders its gradient buckets after its first backward, which changes the order in which floats are added: without
        this, the first step after a resume would round differently from the same step of the unbroken run.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        images, labels = self.forward.move(batch["image"], batch["label"])
        parts = zip(self.forward.pictures(images).tensor_split(self.grad_accum), labels.tensor_split(self.grad_accum), strict=True)
        part, targets = next(iter(parts))
        self.loss(self.forward.logits(self.model, part), targets, self.smoothing).sum().backward()
        with torch.no_grad():
            for buffer, saved in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        self.model.zero_grad(set_to_none=True)

    def load(self, optimizer: dict[str, Any], scaler: dict[str, Any] | None) -> None:
        """Go on with the optimizer and the scale of a checkpoint (None: of one that had none)."""
        load_optimizer(self.optimizer, optimizer)
        if scaler and self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler)

    def __call__(self, position: int, step: int, batch: dict[str, Any], count: Callable[[], int]) -> Outcome:
        """Step number `step`, from 0, at `position` of the stream. `count` waits for the number of valid slots over all ranks."""
        seed_step(self.seed, step, self.rank)
        self.lr = self.schedule(position)
        set_lr(self.optimizer, self.lr)
        images, labels, valid = self.forward.move(batch["image"], batch["label"], batch["valid"])
        images, targets = self.forward.pictures(images), labels
        if self.mixing:
            rng = np.random.default_rng((self.seed, step, MIXING, self.rank))
            images, targets = self.mixing(images, targets, batch["valid"], rng)
        if self.first_input is None:
            self.first_input = images
        self.lap(TRANSFER)
        losses, logits, counted = self._backward(images, targets, valid, count)
        self._update(counted)
        if self.ema is not None and counted:
            self.ema.update(step)
        self.lap(UPDATE)
        return Outcome(losses, logits, labels, valid)

    def _backward(
        self, images: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, count: Callable[[], int]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Gradients of all micro-batches; the ranks exchange them once, with the last."""
        cut = [tensor.tensor_split(self.grad_accum) for tensor in (images, targets, valid)]
        found = []
        for number, (part, target, mask) in enumerate(zip(*cut, strict=True), 1):
            with nullcontext() if number == self.grad_accum else self.model.no_sync():
                logits = self.forward.logits(self.model, part)
                losses = masked_losses(self.loss, logits, target, mask, self.smoothing)
                self.lap(FORWARD)
                counted = count()
                self.lap(COUNT)
                # DDP takes the mean over ranks; the mean wanted is over the valid slots of all ranks
                self.scaler.scale(losses.sum() * (self.world_size / max(counted, 1))).backward()
                self.lap(BACKWARD)
            found.append((losses.detach(), logits.detach()))
        return torch.cat([part for part, _ in found]), torch.cat([part for _, part in found]), counted

    def _update(self, counted: int) -> None:
        if counted:
            self.scaler.unscale_(self.optimizer)
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            self.norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if self.clip_grad:
                nn.utils.clip_grads_with_norm_(parameters, self.clip_grad, self.norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
