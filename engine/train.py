"""The training loop: one stream of masked batches, the same number of steps on every rank.

in: a DDP model, a loader, a schedule  ->  out: trained weights; events at the ends of epochs
Invariant: a step's update is the mean over the valid slots of the whole global batch. What a step does follows from (weights,
position, seed, rank) alone, so a run that is resumed goes on bit for bit as the unbroken one would have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from data import BadSampleBudget, Loader, SampleError

from . import checkpoint, evidence
from .distributed import Ranks
from .launcher import Stopped, StopRequest
from .limits import Setting
from .limits import judge as judge_limits
from .metrics import topk_correct
from .notfinite import Watch
from .progress import BAD, Progress
from .report import Report
from .resources import memory_in_use
from .saver import Clock, Saver
from .step import Outcome, Step
from .trace import write_trace
from .waits import DATA, Totals, Waits
from .weights import set_training


class TooManyBadSamples(Stopped):
    """More of the data is bad than --max-bad accepts; raised on every rank at the same step."""


class Trainer:
    """One rank's part of the training of `model` (what `step` wraps) on `loader`'s stream. `run()` trains to its end.

    evaluate: runs an evaluation, or None; it is run after every `val_interval` epochs and after the last. facts: what a checkpoint
    holds besides. checkpoint_every: also save after so many steps, so many seconds; 0 for never.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        step: Step,
        loader: Loader,
        ranks: Ranks,
        report: Report,
        progress: Progress,
        stop: StopRequest,
        saver: Saver | None,
        waits: Waits,
        setting: Setting,
        evaluate: Callable[[], dict[str, Any]] | None,
        val_interval: int,
        facts: dict[str, Any],
        max_bad: float,
        log_interval: int,
        checkpoint_every: tuple[int, float],
    ) -> None:
        self.model, self.step, self.loader = model, step, loader
        self.ranks, self.report, self.progress, self.stop, self.saver = ranks, report, progress, stop, saver
        self.evaluate, self.val_interval, self.waits, self.setting = evaluate, val_interval, waits, setting
        self.step.tell(waits.lap)
        self.facts, self.budget = facts, BadSampleBudget(max_bad)
        self.log_interval, self.checkpoint_steps = log_interval, checkpoint_every[0]
        self.clock = Clock(checkpoint_every[1] if ranks.rank == 0 else 0)
        self.watch = Watch()
        self.first_error: SampleError | None = None
        self.last_error: SampleError | None = None
        self._window = self._new_window()

    def run(self) -> bool:
        """Train until the stream ends (True), or the ranks have agreed to stop and saved (False)."""
        try:
            finished = self._run()
            self._trace(at_end=True)
            self.report.limits = self._judge(self.waits.close_all())
        except BaseException:
            if self.saver is not None:
                self.saver.join()  # what is being written is whole, and may be what the next start goes on from
            raise
        if self.saver is not None:
            self.saver.wait()
        return finished

    def _run(self) -> bool:
        set_training(self.model)
        self.step.warm_up(self.loader.task.new_batch(-(-self.loader.batch_size // self.ranks.world_size)))
        for position, waited, started, batch in self._batches():
            _, bad, stopping, due, _ = self._step(position, batch)
            self.progress.step += 1
            self.report.batch(self.progress.step, batch)
            self._spend_budget(batch, bad)
            self._log(waited, time.perf_counter() - started)
            self._trace()
            if batch["epoch_end"]:
                self._check_finite()
                self._close_epochs(position)
            if self.checkpoint_steps and self.progress.step % self.checkpoint_steps == 0:
                due = 1
            if batch["epoch_end"] or stopping or due:
                self._save()
            elif self.saver is not None:
                self.saver.poll()
            if stopping and len(self.loader):
                return False
        return True

    def _batches(self) -> Iterator[tuple[int, float, float, dict[str, Any]]]:
        """(position of its first slot, seconds waited, when the wait began, batch) of every step."""
        position = self.loader.position
        started = time.perf_counter()
        self.waits.begin()
        for batch in self.loader:
            self.waits.lap(DATA)
            self.waits.batch(batch["times"])
            yield position, time.perf_counter() - started, started, batch
            position = self.loader.position
            started = time.perf_counter()
            self.waits.begin()

    def _step(self, position: int, batch: dict[str, Any]) -> list[int]:
        """One update; returns what the ranks counted: valid slots, bad samples, who wants to stop, to save, had a wrong loss."""
        counts = torch.tensor([
            int(batch["valid"].sum()), len(batch["errors"]), int(self.stop.requested), int(self.clock.due()), int(self.watch.found()),
        ])  # fmt: skip
        counted = self.ranks.start_sum(counts)  # under way while the device works

        def count() -> int:
            counted.wait()
            if counts[4]:
                self.watch.stop(self.report.folder, self.ranks)
            return int(counts[0])

        outcome = self.step(position, self.progress.step, batch, count)
        if self.report.wants_pictures:
            self.report.pictures(self.step.first_input, self.progress.step)
        self.watch.note(self.progress.step + 1, batch, outcome.losses, self.step.norm, self.step.lr)
        self._add_up(batch, outcome)
        return counts.tolist()

    def _check_finite(self) -> None:
        """Before anything of the last step is told as good or saved: were its losses numbers, on every rank?"""
        if self.ranks.sum(torch.tensor(int(self.watch.found()))):
            self.watch.stop(self.report.folder, self.ranks)

    def _add_up(self, batch: dict[str, Any], outcome: Outcome) -> None:
        losses, valid = outcome.losses.double(), outcome.valid
        bad = batch["error_slots"]
        consumed = batch["valid"].numpy().copy()
        consumed[bad] = True
        self.progress.count(batch["epoch"].numpy()[consumed], batch["sample"].numpy()[consumed], valid.device)
        bad_epochs = batch["epoch"].numpy()[bad]
        epochs = batch["epoch"].to(valid.device, non_blocking=True)
        for epoch, sums in self.progress.sums.items():
            mine = valid & (epochs == epoch)
            correct = topk_correct(outcome.logits, outcome.labels, mine, (1,))[0]
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
            "lr": self.step.lr,
            "grad_norm": float(self.step.norm),
            "samples_per_second": (position - window["position"]) / window["seconds"],
            "data_time": window["waited"] / window["steps"],
            "step_time": window["seconds"] / window["steps"],
            "memory": memory_in_use(self.ranks.device),
        }
        self.report.train(line, correct / samples if samples else None)
        self._window = self._new_window()

    def _close_epochs(self, position: int) -> None:
        """The lines of the epochs that this step completed, and then one evaluation for the last of them."""
        progress, num_samples = self.progress, self.loader.num_samples
        done = range(position // num_samples, self.loader.position // num_samples)
        limits = self._judge(self.waits.close())
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
                "limits": limits,
            })  # fmt: skip
        progress.seconds = progress.waited = 0.0
        last = self.loader.position == self.loader.plan.num_positions
        if self.evaluate is not None and (last or any((epoch + 1) % self.val_interval == 0 for epoch in done)):
            if self.saver is not None:
                self.saver.wait()  # the evaluation forks its workers
            result = self.evaluate()
            self.report.evaluation(epoch=done[-1], step=progress.step, **result)
            progress.judge(done[-1], result)

    def _judge(self, totals: Totals) -> str:
        """What limits all ranks, in a sentence (a collective call)."""
        return judge_limits(self.ranks.gather(totals), self.setting).sentence

    def _trace(self, at_end: bool = False) -> None:
        """Write the profile when all its steps are done (then a collective call)."""
        if self.waits.is_traced(at_end):
            write_trace(self.report.folder / "trace.json", self.ranks, self.waits)
            self.waits.end_spans()

    def _save(self) -> None:
        """Write a checkpoint of the batch trained on last (a collective call; rank 0 writes)."""
        self._check_finite()
        progress, position = self.progress, self.loader.position
        state = progress.state_dict(self.ranks, position // self.loader.num_samples)
        if self.saver is not None:
            content = {
                "version": checkpoint.VERSION,
                "model": self.model.state_dict(),
                "ema": self.step.ema.state_dict() if self.step.ema is not None else None,
                "optimizer": self.step.optimizer.state_dict(),
                "scaler": self.step.scaler.state_dict(),
                "stream": self.loader.state_dict(),
                "progress": state,
                "epoch": max(0, position // self.loader.num_samples - 1),  # the last one completed
                "world_size": self.ranks.world_size,
                **self.facts,
            }
            self.saver.save(content, best=progress.best is not None and progress.best["step"] == progress.step)
