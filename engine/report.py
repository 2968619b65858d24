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
from .forward import denormalize
from .metrics import RunLog
from .scores import ClassCounts, write_classes


def shares(batch_size: int, world_size: int) -> str:
    """How a global batch is cut: "4 x 64", or "3 processes, 85 or 86 each"."""
    low, rest = divmod(batch_size, world_size)
    return f"{world_size} processes, {low} or {low + 1} each" if rest else f"{world_size} x {low}"


def count_workers(num_workers: int) -> str:
    """ "1 worker", "2 workers"."""
    return f"{num_workers} worker{'s' if num_workers != 1 else ''}"


def opening_lines(facts: dict[str, Any], class_names: Sequence[str] | None) -> list[str]:
    """What was chosen, for people: the first lines of a run. `facts`: those of its start event."""
    some = f" ({', '.join(class_names[:5])}{', ...' if len(class_names) > 5 else ''})" if class_names else ""
    classes = f"{facts['num_classes']} class{'es' if facts['num_classes'] != 1 else ''}{some}"
    shards = f"{facts['num_shards']:,} shard{'s' if facts['num_shards'] != 1 else ''}"
    frames = facts.get("num_frames")
    samples, one = ("pictures", "picture") if frames is None else (f"clips of {frames} frames", "clip")
    cost = f" ({facts['parameters']:,} parameters, {facts['flops'] / 1e6:,.0f} MFLOPs a {one})" if "parameters" in facts else ""
    lines = [
        f"global batch {facts['batch_size']} = {shares(facts['batch_size'], facts['world_size'])}",
        f"{facts['num_samples']:,} samples in {shards}, {classes}, {samples} of {facts['img_size']}x{facts['img_size']}",
        f"model {facts['model']}{cost}, {facts['opt']} lr {facts['lr']:g}, {facts['epochs']} epochs, "
        f"{facts['device']}, {count_workers(facts['workers'])} a process",
    ]
    if facts["batch_size"] > facts["num_samples"] and facts["total_steps"]:
        lines.append(f"warning: the global batch exceeds the {facts['num_samples']} samples of an epoch: a step holds several epochs")
    return lines


class Report:
    """The files and the console of one run, for one rank."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        total: int,
        epochs: int,
        start: int,
        resume_step: int | None,
        audit: bool,
        world_size: int = 1,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.class_names, self.world_size = folder, class_names, world_size
        self.wants_pictures = rank == 0  # until it has some
        self.limits = ""  # what limits the run, in a sentence
        self.log = RunLog(folder, rank, resume_step=resume_step, audit=audit)
        self.console = Console(total=total, epochs=epochs, start=start, enabled=rank == 0, write_text=self.log.text)

    def start(self, lines: Sequence[str], **facts: Any) -> None:
        """The run's first lines: `lines` for people, facts for the log."""
        for line in lines:
            self.console.line(line)
        self.log.metric("start", **facts)

    def batch(self, step: int, batch: dict[str, Any], split: str = "train") -> None:
        """A consumed batch: its ids, and what was bad in it."""
        if split != "test":  # an audit is of what trains and chooses the model
            self.log.audit(step=step, epoch=batch["epoch"], ids=batch["ids"], valid=batch["valid"], split=split)
        for error in batch["errors"]:
            self.error(step, error)

    def error(self, step: int, error: SampleError) -> None:
        """A bad sample."""
        self.log.bad_sample(step, error.as_dict())

    def train(self, line: dict[str, Any], top1: float | None) -> None:
        """The means of a log interval."""
        self.log.metric("train", **line)
        shown = {name: line[name] for name in ("epoch", "step", "samples_seen", "loss", "lr", "grad_norm", "samples_per_second")}
        self.console.train(top1=top1, data_wait=line["data_time"] / line["step_time"], world_size=self.world_size, **shown)

    def pictures(self, images: Any, step: int) -> None:
        """The first pictures that the model sees, for TensorBoard: float (n, 3, H, W), normalised."""
        self.wants_pictures = False
        pictures = denormalize(images[:16].float())
        middle = pictures if pictures.ndim == 4 else pictures[:, :, pictures.shape[2] // 2]  # of a clip
        self.log.pictures("first batch", middle, step)

    def epoch(self, line: dict[str, Any]) -> None:
        """The sums of an epoch."""
        self.log.metric("epoch", **line)
        left_out = ("step", "samples", "samples_per_second", "limits")
        self.console.epoch(**{name: value for name, value in line.items() if name not in left_out})
        self.console.line(line["limits"])

    def evaluation(
        self, *, epoch: int, step: int, bad_samples: int, counts: ClassCounts, precision: Any = None, **result: Any
    ) -> None:
        """An evaluation's result; the files of the one before are written over."""
        self.log.metric("eval", epoch=epoch, step=step, **result)
        self.console.eval(epoch=epoch, bad_samples=bad_samples, **result)
        if self.log.rank == 0:
            write_classes(self.folder, counts, self.class_names, precision)

    def test(self, *, step: int, counts: ClassCounts, precision: Any = None, **result: Any) -> None:
        """The result of the test."""
        self.log.metric("test", step=step, **result)
        self.console.test(**result)

    def end(self, status: str, *, steps: int, samples_seen: int, best: dict[str, Any] | None, **facts: Any) -> None:
        """The run's last line; closes everything."""
        limits = {"limits": self.limits} if self.limits else {}
        self.log.metric("end", status=status, steps=steps, samples_seen=samples_seen, best=best, **limits, **facts)
        mean = f", mAP {100 * best['map']:.2f}%" if best and "map" in best else ""
        top = f", best top-1 {100 * best['top1']:.2f}%{mean} after epoch {best['epoch'] + 1} (best.pt)" if best else ""
        if status == "stopped":
            self.console.line("SIGTERM came, and the run is saved: the same command with --resume auto goes on")
        if self.limits:
            self.console.line(f"over the whole run, {self.limits}")
        self.console.line(f"{status} at step {steps}{top}; everything is in {self.folder}")
        self.console.close()
        self.log.close()
