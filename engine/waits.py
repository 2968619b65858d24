"""Who waits for whom: a rank's time by what it did.

in: laps of the trainer, the times that come with each batch  ->  out: the totals of each rank, which engine/limits.py puts in words
Invariant: measuring waits for no device and no rank. What a start costs (the warm-up, and the steps whose batches no worker had time to
make ahead) is in no total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

# What a trainer does in a step. data: waiting for a batch; count: waiting until all ranks are as far; backward: with the exchange of
# gradients; logs, evaluations and checkpoints are not in it.
DATA, TRANSFER, FORWARD, COUNT, BACKWARD, UPDATE = "data", "transfer", "forward", "count", "backward", "update"
OWN = (DATA, TRANSFER, FORWARD)  # what no other rank has a part in


@dataclass(slots=True)
class Totals:
    """Seconds of one rank in `steps` steps. trainer: by what the trainer did; loader: by what its workers did, summed over them.
    own_squares: of each step the seconds of OWN, squared, summed: it says how much they vary."""

    trainer: dict[str, float] = field(default_factory=dict)
    loader: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    own_squares: float = 0.0

    @property
    def seconds(self) -> float:
        """The trainer's time in steps."""
        return sum(self.trainer.values())

    @property
    def own(self) -> float:
        """Seconds of OWN, a step on average."""
        return sum(self.trainer.get(name, 0.0) for name in OWN) / max(1, self.steps)

    @property
    def own_variance(self) -> float:
        """Of that average: the square of how far it may be off by chance."""
        spread = max(0.0, self.own_squares / max(1, self.steps) - self.own**2)
        return spread / max(1, self.steps - 1)

    def share(self, name: str) -> float:
        """Of the trainer's time, what went by with `name`."""
        return self.trainer.get(name, 0.0) / (self.seconds or 1.0)

    def add_step(self, laps: Mapping[str, float]) -> None:
        """Add a step of the trainer."""
        self.steps += 1
        self.own_squares += sum(laps.get(name, 0.0) for name in OWN) ** 2
        _add(self.trainer, laps)

    def add(self, other: Totals) -> None:
        """Add another stretch of time."""
        self.steps += other.steps
        self.own_squares += other.own_squares
        _add(self.trainer, other.trainer)
        _add(self.loader, other.loader)


class Waits:
    """One rank's measurements. `lap` like data/timing.py's; on a GPU the moments are CUDA events, read when they have passed.

    num_workers: of this rank; until each has given a batch nothing counts. profile: steps whose spans are kept.
    """

    def __init__(self, device: torch.device, *, num_workers: int, profile: int = 0) -> None:
        self.profile, self.start_up = profile, max(1, num_workers)
        self.spans: list[tuple[str, float, float]] | None = [] if profile else None
        self.worker_spans: list[tuple[int, list[tuple[str, float, float]]]] = []
        self._now, self._all = Totals(), Totals()
        self._num_batches = self._num_ended = 0
        self._step: dict[str, float] = {}  # the laps of the step that is under way
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, float, Any]] = []
        self._last: float | None = None

    def begin(self) -> None:
        """A step begins: what was since the last one is not counted."""
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        """What the trainer did since the last lap was `name`. Before the first `begin` nothing counts."""
        if self._last is None:
            return
        now = perf_counter()
        if self.spans is not None:
            self.spans.append((name, self._last, now))
        if self._on_gpu:
            self._mark(name, now - self._last)
        else:
            self._count(name, now - self._last)
        self._last = now

    def batch(self, times: Mapping[str, Any]) -> None:
        """The times that came with a batch."""
        self._num_batches += 1
        if self._num_batches > self.start_up:
            _add(self._now.loader, times["seconds"])
        if self.spans is not None and "spans" in times:
            self.worker_spans.append((times["worker"], times["spans"]))

    def close(self) -> Totals:
        """The totals since the last time, for an epoch's line; they are added to those of the run."""
        self._read_events()
        self._end_step()
        now, self._now = self._now, Totals()
        self._all.add(now)
        return now

    def close_all(self) -> Totals:
        """The totals of the run."""
        self.close()
        return self._all

    def is_traced(self, at_end: bool) -> bool:
        """Whether all the spans that are wanted are there."""
        return self.spans is not None and (at_end or self._num_batches >= self.profile)

    def end_spans(self) -> None:
        """Keep no more."""
        self.spans, self.worker_spans = None, []

    def _count(self, name: str, seconds: float) -> None:
        if name == DATA:
            self._end_step()
        self._step[name] = self._step.get(name, 0.0) + seconds

    def _end_step(self) -> None:
        if self._step:
            self._num_ended += 1
            if self._num_ended > self.start_up:
                self._now.add_step(self._step)
        self._step = {}

    def _mark(self, name: str, seconds: float) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((name, seconds, event))
        if len(self._events) > 1000:
            self._read_events(keep=100)

    def _read_events(self, keep: int = 0) -> None:
        """Device time between events that have passed; `keep`: of the newest, which may not have.

        The device waits for data only while it has nothing to do: never longer than the process waits, nor than the gap between the
        last update and the batch (in which a log or an evaluation may be, too).
        """
        ready = self._events[: len(self._events) - keep]
        if not self._on_gpu or len(ready) < 2:
            return
        ready[-1][2].synchronize()
        for (_, _, before), (name, waited, after) in zip(ready[:-1], ready[1:], strict=True):
            seconds = before.elapsed_time(after) / 1000
            self._count(name, min(seconds, waited) if name == DATA else seconds)
        self._events = self._events[len(ready) - 1 :]


def _add(mine: dict[str, float], theirs: Mapping[str, float]) -> None:
    for name, seconds in theirs.items():
        mine[name] = mine.get(name, 0.0) + seconds
