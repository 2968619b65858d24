"""How far a run is: what a checkpoint keeps besides the weights and the stream's state.

in: what each step consumed  ->  out: sums and a sketch of the epoch under way, over all ranks when asked
Invariant: between two steps only the epoch under way is open; a resumed run closes it with the numbers of the unbroken one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import evidence
from .distributed import Ranks

SAMPLES, LOSS, CORRECT, BAD = range(4)  # the columns of an epoch's sums


@dataclass
class Progress:
    """sums: epoch -> float64 (4,), this rank's samples, loss sum, correct and bad samples. sketches: epoch -> `evidence` of it.

    seconds, waited: wall time of the epoch under way, and how much of that went by waiting for data.
    """

    step: int = 0
    bad: int = 0
    best: dict[str, Any] | None = None  # {"epoch", "step", "top1"} of the best evaluation, with several labels a sample also "map"
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    sketches: dict[int, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0
    waited: float = 0.0

    def count(self, epochs: np.ndarray, samples: np.ndarray, device: torch.device) -> None:
        """Open the epochs that a step touched, and note the samples that it consumed (good or bad): int64 (n,) each."""
        for epoch in np.unique(epochs).tolist():
            self.sums.setdefault(epoch, torch.zeros(4, dtype=torch.float64, device=device))
            evidence.add(self.sketches.setdefault(epoch, evidence.new_sketch()), samples[epochs == epoch])

    def judge(self, epoch: int, result: dict[str, Any]) -> None:
        """Take note of an evaluation after an epoch: the best one has the highest "map" where there is one, else "top1"."""
        name = "map" if "map" in result else "top1"
        value = result[name] or 0.0
        if self.best is None or value > self.best[name]:
            self.best = {"epoch": epoch, "step": self.step, "top1": result["top1"] or 0.0, name: value}

    def close(self, epoch: int) -> None:
        """Forget an epoch that is told."""
        self.sums.pop(epoch, None)
        self.sketches.pop(epoch, None)

    def sums_of(self, epoch: int) -> torch.Tensor:
        """This rank's sums of an epoch, on the CPU; zeros where it has met none of its samples."""
        return self.sums.get(epoch, torch.zeros(4, dtype=torch.float64)).cpu().clone()

    def sketch_of(self, epoch: int) -> torch.Tensor:
        """This rank's sketch of an epoch, as a tensor; zeros where it has met none of its samples."""
        return torch.from_numpy(self.sketches.get(epoch, evidence.new_sketch()).copy())

    def state_dict(self, ranks: Ranks, epoch: int) -> dict[str, Any]:
        """The state over all ranks (a collective call); `epoch` is the one under way."""
        told = {"step": self.step, "bad": self.bad, "best": self.best, "seconds": self.seconds, "waited": self.waited}
        return {**told, "epoch": epoch, "sums": ranks.sum(self.sums_of(epoch)), "sketch": ranks.sum(self.sketch_of(epoch))}

    @classmethod
    def from_state(cls, state: dict[str, Any], rank: int, device: torch.device) -> Progress:
        """Rank 0 takes the sums; the others begin at zero, whatever the world size was."""
        progress = cls(state["step"], state["bad"], state["best"], seconds=state["seconds"], waited=state["waited"])
        if rank == 0:
            progress.sums[state["epoch"]] = state["sums"].to(device)
            progress.sketches[state["epoch"]] = state["sketch"].numpy().copy()
        return progress
