"""An average of the weights over the steps, which often does better than the weights themselves (Polyak and Juditsky 1992).

in: a model after each step  ->  out: a second model, for evaluation
Invariant: what it holds follows from the weights of every step, so a checkpoint holds it, and a resumed run's is bit-identical.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Ema:
    """`average` = decay * average + (1 - decay) * model, batch norm's statistics included; counters are copied.

    The first steps take less of the past, (1 + step) / (10 + step), as TensorFlow's ExponentialMovingAverage does: a short run is
    not dragged back to its random start. `state`: an average to go on from; without it, it starts as the model is.
    """

    def __init__(self, model: nn.Module, decay: float, state: dict[str, Any] | None = None) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        if state is not None:
            self.model.load_state_dict(state)
        self._averages, self._sources = list(self.model.state_dict().values()), list(model.state_dict().values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        floats = [pair for pair in zip(self._averages, self._sources, strict=True) if pair[0].is_floating_point()]
        torch._foreach_lerp_([a for a, _ in floats], [b for _, b in floats], 1 - decay)
        for average, source in zip(self._averages, self._sources, strict=True):
            if not average.is_floating_point():
                average.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()
