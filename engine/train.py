"""The training loop: one stream of masked batches, the same number of steps on every rank.

in: a DDP model, a loader, a schedule  ->  out: trained weights; events at the ends of epochs
Invariant: a step's update is the mean over the valid slots of the whole global batch. What a step does follows from (weights,
position, seed, rank) alone, so a run that is resumed goes on bit for bit as the unbroken one would have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from data import BadSampleBudget, Loader, SampleError

from . import checkpoint, evidence
from .distributed import Ranks
from .evaluate import normalize
from .launcher import Stopped, StopRequest
from .metrics import topk_correct
from .optim import set_lr
from .progress import BAD, Progress
from .report import Report

STEP = 3  # purpose of the seed of torch's own generators, beside those of data/plan.py


class TooManyBadSamples(Stopped):
    """More of the data is bad than --max-bad accepts; raised on every rank at the same step."""


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for one step: dropout and the like don't depend on the steps before it."""
    state = np.random.SeedSequence((seed, step, STEP, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give it the moments of a checkpoint; what the flags say now (weight decay, momentum) stays, as torch would not have it."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def warm_up(model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> None:
    """One discarded forward and backward.

    DDP re-orders its gradient buckets after its first backward, which changes the order in which floats are added: without
    this, the first step after a resume would round differently from the same step of the unbroken run.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    functional.cross_entropy(model(normalize(batch["image"].to(device))), batch["label"].to(device)).backward()
    with torch.no_grad():
        for buffer, saved in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(saved)
    model.zero_grad(set_to_none=True)


class Trainer:
    """One rank's part of the training of `model` on `loader`'s stream. `run()` trains to its end.

    schedule: position -> learning rate. evaluate: runs an evaluation, or None. facts: what a checkpoint holds besides.
    """

    def __init__(
        self,
        *,
        model: DistributedDataParallel,
        loader: Loader,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        ranks: Ranks,
        report: Report,
        progress: Progress,
        stop: StopRequest,
        evaluate: Callable[[], dict[str, Any]] | None,
        facts: dict[str, Any],
        max_bad: float,
        log_interval: int,
        checkpoint_interval: int,
    ) -> None:
        self.model, self.loader, self.optimizer, self.schedule = model, loader, optimizer, schedule
        self.ranks, self.report, self.progress, self.stop = ranks, report, progress, stop
        self.evaluate, self.facts, self.budget = evaluate, facts, BadSampleBudget(max_bad)
        self.log_interval, self.checkpoint_interval = log_interval, checkpoint_interval
        self.first_error: SampleError | None = None
        self.last_error: SampleError | None = None
        self._window = self._new_window()

    def run(self) -> bool:
        """Train until the stream ends (True), or the ranks have agreed to stop and saved (False)."""
        self.model.train()
        warm_up(self.model, self.loader.task.new_batch(-(-self.loader.batch_size // self.ranks.world_size)), self.ranks.device)
        for position, waited, started, batch in self._batches():
            valid, bad, stopping = self._step(position, batch)
            self.progress.step += 1
            self.report.batch(self.progress.step, batch)
            self._spend_budget(batch, bad)
            self._log(waited, time.perf_counter() - started)
            if batch["epoch_end"]:
                self._close_epochs(position)
            due = self.checkpoint_interval and self.progress.step % self.checkpoint_interval == 0
            if batch["epoch_end"] or stopping or due:
                self._save()
            if stopping and len(self.loader):
                return False
        return True

    def _batches(self) -> Iterator[tuple[int, float, float, dict[str, Any]]]:
        """(position of its first slot, seconds waited, when the wait began, batch) of every step."""
        position = self.loader.position
        started = time.perf_counter()
        for batch in self.loader:
            yield position, time.perf_counter() - started, started, batch
            position = self.loader.position
            started = time.perf_counter()

    def _step(self, position: int, batch: dict[str, Any]) -> list[int]:
        """One update; returns what the ranks counted: valid slots, bad samples, whether anyone wants to stop."""
        device = self.ranks.device
        counts = torch.tensor([int(batch["valid"].sum()), len(batch["errors"]), int(self.stop.requested)])
        counted = self.ranks.start_sum(counts)  # under way while the device works
        seed_step(self.loader.plan.seed, self.progress.step, self.ranks.rank)
        set_lr(self.optimizer, self.schedule(position))
        labels, valid = (batch[name].to(device, non_blocking=True) for name in ("label", "valid"))
        logits = self.model(normalize(batch["image"].to(device, non_blocking=True))).float()
        losses = torch.where(valid, functional.cross_entropy(logits, labels, reduction="none"), 0)
        counted.wait()
        # DDP takes the mean over ranks; the mean wanted is over the valid slots of all ranks
        (losses.sum() * (self.ranks.world_size / max(int(counts[0]), 1))).backward()
        if counts[0]:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._add_up(batch, losses.detach().double(), logits.detach(), labels, valid)
        return counts.tolist()

    def _add_up(self, batch: dict[str, Any], losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> None:
        bad = batch["error_slots"]
        consumed = batch["valid"].numpy().copy()
        consumed[bad] = True
        self.progress.count(batch["epoch"].numpy()[consumed], batch["sample"].numpy()[consumed], valid.device)
        bad_epochs = batch["epoch"].numpy()[bad]
        epochs = batch["epoch"].to(valid.device, non_blocking=True)
        for epoch, sums in self.progress.sums.items():
            mine = valid & (epochs == epoch)
            correct = topk_correct(logits, labels, mine, (1,))[0]
            values = torch.stack([mine.sum().double(), torch.where(mine, losses, 0).sum(), correct.double()])
            sums[:BAD] += values
            sums[BAD] += int((bad_epochs == epoch).sum())
            self._window["sums"] += values

    def _spend_budget(self, batch: dict[str, Any], bad: int) -> None:
        for error in batch["errors"]:
            self.first_error = self.first_error or error
            self.last_error = error
        self.progress.bad += bad
        if bad and self.budget.exceeded(self.progress.bad, self.loader.position):
            known = [pair for pair in self.ranks.gather((self.first_error, self.last_error)) if pair[0]]
            raise TooManyBadSamples(
                f"{self.progress.bad} of {self.loader.position} samples are bad, more than --max-bad {self.budget.share:g} accepts: "
                f"the first is {known[0][0]}; the last is {known[-1][1]}; all are in bad_samples.jsonl"
            )

    def _new_window(self) -> dict[str, Any]:
        zeros = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        return {"sums": zeros, "steps": 0, "waited": 0.0, "seconds": 0.0, "position": self.loader.position}

    def _log(self, waited: float, took: float) -> None:
        window = self._window
        window["steps"] += 1
        window["waited"] += waited
        window["seconds"] += took
        self.progress.waited += waited
        self.progress.seconds += took
        self.report.console.advance(self.loader.position)
        if self.progress.step % self.log_interval and len(self.loader):
            return
        samples, loss, correct = self.ranks.sum(window["sums"].cpu()).tolist()
        position = self.loader.position
        line = {
            "epoch": (position - 1) // self.loader.num_samples,
            "step": self.progress.step,
            "samples_seen": position,
            "loss": loss / samples if samples else None,
            "lr": self.optimizer.param_groups[0]["lr"],
            "samples_per_second": (position - window["position"]) / window["seconds"],
            "data_time": window["waited"] / window["steps"],
            "step_time": window["seconds"] / window["steps"],
        }
        self.report.train(line, correct / samples if samples else None)
        self._window = self._new_window()

    def _close_epochs(self, position: int) -> None:
        """The lines of the epochs that this step completed, and then one evaluation for the last of them."""
        progress, num_samples = self.progress, self.loader.num_samples
        done = range(position // num_samples, self.loader.position // num_samples)
        for epoch in done:
            samples, loss, correct, bad = self.ranks.sum(progress.sums_of(epoch)).tolist()
            verdict = evidence.judge(self.ranks.sum(progress.sketch_of(epoch)).numpy(), num_samples)
            progress.close(epoch)
            seconds = progress.seconds / len(done)
            self.report.epoch({
                "epoch": epoch,
                "step": progress.step,
                "samples": int(samples),
                "bad_samples": int(bad),
                "seen": verdict.seen,
                "distinct": verdict.distinct if self.loader.is_exact else None,  # of a stream nobody knows
                "repeated": verdict.repeated if self.loader.is_exact else None,
                "missed": verdict.missed if self.loader.is_exact else None,
                "loss": loss / samples if samples else None,
                "top1": correct / samples if samples else None,
                "seconds": seconds,
                "samples_per_second": samples / seconds,
                "data_wait": progress.waited / progress.seconds,
            })  # fmt: skip
        progress.seconds = progress.waited = 0.0
        if self.evaluate is not None:
            result = self.evaluate()
            self.report.evaluation(epoch=done[-1], step=progress.step, **result)
            top1 = result["top1"] or 0.0
            if progress.best is None or top1 > progress.best["top1"]:
                progress.best = {"epoch": done[-1], "step": progress.step, "top1": top1}

    def _save(self) -> None:
        """Write a checkpoint of the batch trained on last (a collective call; rank 0 writes)."""
        progress, position = self.progress, self.loader.position
        state = progress.state_dict(self.ranks, position // self.loader.num_samples)
        if self.ranks.rank == 0:
            content = {
                "version": checkpoint.VERSION,
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "stream": self.loader.state_dict(),
                "progress": state,
                "epoch": max(0, position // self.loader.num_samples - 1),  # the last one completed
                "world_size": self.ranks.world_size,
                **self.facts,
            }
            best = progress.best is not None and progress.best["step"] == progress.step
            checkpoint.save(self.report.folder / "checkpoints", content, best=best)
