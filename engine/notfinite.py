"""Stopping at a loss that is no number, with what led to it.

in: each step's losses, norm and batch  ->  out: notfinite.jsonl and one line, on every rank at the same step
Invariant: nobody waits for a device to know: whether a step's losses were finite is asked when the next one begins, or before anything
of the step is evaluated or saved. So no checkpoint ever holds what such a step made of the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .distributed import Ranks
from .launcher import Stopped
from .metrics import LineFile, to_json

FILE = "notfinite.jsonl"
SHOWN = 3  # samples named in the line


class NotFinite(Stopped):
    """A loss was not finite; raised on every rank at the same step."""


class Watch:
    """Remembers the last step of one rank."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._norms: list[torch.Tensor] = []
        self._finite: torch.Tensor | None = None
        self._event: Any = None

    def note(self, step: int, batch: dict[str, Any], losses: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        """Take in what a step (from 1) did; its losses are (n,), 0 where masked."""
        self._last = {"step": step, "lr": lr, "ids": batch["ids"], "valid": batch["valid"], "losses": losses}
        self._norms = [*self._norms[-1:], norm]
        finite = losses.isfinite().all()
        if losses.is_cuda:
            self._finite = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._finite.copy_(finite, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._finite = finite

    def found(self) -> bool:
        """Whether the last step's losses were not all finite on this rank."""
        if self._finite is None:
            return False
        if self._event is not None:
            self._event.synchronize()
        return not bool(self._finite)

    def stop(self, folder: Path, ranks: Ranks) -> None:
        """Write down and tell what led to it (a collective call). Raises NotFinite."""
        last = self._last
        losses = last["losses"].float().cpu()
        norms = [float(norm) for norm in self._norms]
        bad = [tuple(name) for name, finite in zip(last["ids"], losses.isfinite().tolist(), strict=True) if not finite]
        told = {"step": last["step"], "rank": ranks.rank, "lr": last["lr"], "norms": [repr(norm) for norm in norms]}
        file = LineFile(folder / f"{FILE}" if ranks.rank == 0 else folder / f"{FILE}.rank{ranks.rank}")
        file.write(json.dumps(to_json({**told, "not_finite": bad, "ids": list(last["ids"]), "valid": last["valid"], "losses": losses})))
        file.close()
        everywhere = [name for names in ranks.gather(bad) for name in names]
        some = ", ".join(f"{shard} sample {index} ({key})" for shard, index, key in everywhere[:SHOWN])
        more = f" and {len(everywhere) - SHOWN} more" if len(everywhere) > SHOWN else ""
        norm = f"{norms[-1]:g}" + (f", {norms[0]:g} the step before" if len(norms) > 1 else "")
        raise NotFinite(
            f"the loss of step {last['step']} is not finite, at {some}{more}; learning rate {last['lr']:g}, gradient norm {norm}: "
            f"try a lower --lr, a longer --warmup-epochs or --clip-grad; the batch is in {folder / FILE}, and no checkpoint holds this step"
        )
