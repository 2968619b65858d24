"""What a run tells, in one place: each event goes to the run folder's files and to the console.

in: what the trainer and the evaluation did  ->  out: lines (engine/metrics.py) and a view (engine/console.py)
Invariant: every rank calls it alike; ranks other than 0 write only their audit and their bad samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import SampleError

from .console import Console
from .metrics import RunLog


class Report:
    """The files and the console of one run, for one rank."""

    def __init__(self, folder: Path, *, rank: int, total: int, epochs: int, start: int, resume_step: int | None, audit: bool) -> None:
        self.folder = folder
        self.log = RunLog(folder, rank, resume_step=resume_step, audit=audit)
        self.console = Console(total=total, epochs=epochs, start=start, enabled=rank == 0, write_text=self.log.text)

    def start(self, lines: Sequence[str], **facts: Any) -> None:
        """The run's first lines: `lines` for people, facts for the log."""
        for line in lines:
            self.console.line(line)
        self.log.metric("start", **facts)

    def batch(self, step: int, batch: dict[str, Any], split: str = "train") -> None:
        """A consumed batch: its ids, and what was bad in it."""
        self.log.audit(step=step, epoch=batch["epoch"], ids=batch["ids"], valid=batch["valid"], split=split)
        for error in batch["errors"]:
            self.error(step, error)

    def error(self, step: int, error: SampleError) -> None:
        """A bad sample."""
        self.log.bad_sample(step, error.as_dict())

    def train(self, line: dict[str, Any], top1: float | None) -> None:
        """The means of a log interval."""
        self.log.metric("train", **line)
        shown = {name: line[name] for name in ("epoch", "step", "samples_seen", "loss", "samples_per_second")}
        self.console.train(top1=top1, data_wait=line["data_time"] / line["step_time"], **shown)

    def epoch(self, line: dict[str, Any]) -> None:
        """The sums of an epoch."""
        self.log.metric("epoch", **line)
        self.console.epoch(**{name: value for name, value in line.items() if name not in ("step", "samples_per_second")})

    def evaluation(self, *, epoch: int, step: int, bad_samples: int, **result: Any) -> None:
        """An evaluation's result."""
        self.log.metric("eval", epoch=epoch, step=step, **result)
        self.console.eval(epoch=epoch, bad_samples=bad_samples, **result)

    def end(self, status: str, *, steps: int, samples_seen: int, best: dict[str, Any] | None, **facts: Any) -> None:
        """The run's last line; closes everything."""
        self.log.metric("end", status=status, steps=steps, samples_seen=samples_seen, best=best, **facts)
        top = f", best top-1 {100 * best['top1']:.2f}% after epoch {best['epoch'] + 1}" if best else ""
        self.console.line(f"{status} at step {steps}{top}; everything is in {self.folder}")
        self.console.close()
        self.log.close()
