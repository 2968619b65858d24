"""Who waits for whom: a rank's time in words.

in: laps of the trainer, the times that come with each batch  ->  out: the totals of every rank; one sentence on what limits the run
Invariant: `judge` is pure: the sentence follows from the totals alone. Measuring waits for no device and no rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from data.timing import COLLATE, DECODE, HAND_OVER, READ, STAGES, TRANSFORM, WAIT, WORK

# What a trainer does in a step. data: waiting for a batch; count: waiting until all ranks are as far; backward: with the exchange of
# gradients; other: logs, evaluations and checkpoints are not in it.
DATA, TRANSFER, FORWARD, COUNT, BACKWARD, UPDATE = "data", "transfer", "forward", "count", "backward", "update"
WORTH_SAYING = 0.05  # a share of the time below which nobody waits

WORDS = {
    READ: "reading takes", STAGES: "your own stages take", DECODE: "decoding takes", TRANSFORM: "cropping and resizing takes",
    COLLATE: "putting batches together takes", HAND_OVER: "handing batches over takes",
}  # fmt: skip


@dataclass(slots=True)
class Totals:
    """Seconds of one rank. trainer: by what the trainer did; loader: by what its workers did, summed over them."""

    trainer: dict[str, float] = field(default_factory=dict)
    loader: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def seconds(self) -> float:
        """The trainer's time in steps."""
        return sum(self.trainer.values())

    def add(self, other: Totals) -> None:
        """Add another stretch of time."""
        self.steps += other.steps
        for mine, theirs in ((self.trainer, other.trainer), (self.loader, other.loader)):
            for name, seconds in theirs.items():
                mine[name] = mine.get(name, 0.0) + seconds


class Waits:
    """One rank's measurements. `lap` like data/timing.py's; on a GPU the moments are CUDA events, read when they have passed.

    processes: of this machine, that share its cores. profile: steps whose spans are kept.
    """

    def __init__(self, device: torch.device, *, num_workers: int, processes: int = 1, profile: int = 0) -> None:
        self.num_workers, self.processes, self.profile = num_workers, processes, profile
        self.spans: list[tuple[str, float, float]] | None = [] if profile else None
        self.worker_spans: list[tuple[int, list[tuple[str, float, float]]]] = []
        self._now, self._all = Totals(), Totals()
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, Any]] = []
        self._last = perf_counter()

    def begin(self) -> None:
        """A step begins: what was since the last one is not counted."""
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        """What the trainer did since the last lap was `name`."""
        now = perf_counter()
        if self.spans is not None:
            self.spans.append((name, self._last, now))
        if self._on_gpu and name != DATA:
            self._mark(name)
        else:
            self._now.trainer[name] = self._now.trainer.get(name, 0.0) + now - self._last
        self._last = now

    def batch(self, times: Mapping[str, Any]) -> None:
        """The times that came with a batch."""
        self._now.steps += 1
        loader = self._now.loader
        for name, seconds in times["seconds"].items():
            loader[name] = loader.get(name, 0.0) + seconds
        if self.spans is not None and "spans" in times:
            self.worker_spans.append((times["worker"], times["spans"]))
        if self._on_gpu:
            self._mark("")

    def close(self) -> Totals:
        """The totals since the last time, for an epoch's line; they are added to those of the run."""
        self._read_events()
        now, self._now = self._now, Totals()
        self._all.add(now)
        return now

    def close_all(self) -> Totals:
        """The totals of the run."""
        self.close()
        return self._all

    def judge(self, ranks: Sequence[Totals]) -> Verdict:
        """What limits these ranks."""
        return judge(ranks, self.num_workers, self.processes, device="cuda" if self._on_gpu else "cpu")

    def is_traced(self, at_end: bool) -> bool:
        """Whether all the spans that are wanted are there."""
        return self.spans is not None and (at_end or self._all.steps + self._now.steps >= self.profile)

    def end_spans(self) -> None:
        """Keep no more."""
        self.spans, self.worker_spans = None, []

    def _mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((name, event))
        if len(self._events) > 1000:
            self._read_events(keep=100)

    def _read_events(self, keep: int = 0) -> None:
        """Device time between events that have passed; `keep`: of the newest, which may not have."""
        ready = self._events[: len(self._events) - keep]
        if not self._on_gpu or len(ready) < 2:
            return
        ready[-1][1].synchronize()
        for (_, before), (name, after) in zip(ready[:-1], ready[1:], strict=True):
            if name:
                self._now.trainer[name] = self._now.trainer.get(name, 0.0) + before.elapsed_time(after) / 1000
        self._events = self._events[len(ready) - 1 :]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits a run. limit: "data", "rank" or "model"; rank: which one; what: the loader's or the trainer's part; share: of the time
    that is lost by it."""

    limit: str
    rank: int
    what: str
    share: float
    sentence: str


def judge(ranks: Sequence[Totals], num_workers: int, processes: int = 1, cores: int | None = None, device: str = "cpu") -> Verdict:
    """What limits these ranks. `processes`: of this machine, that share `cores`.

    One rank that the others wait for comes first, then data that all wait for, then the model.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    share_of_cores = max(1, cores // processes)
    own = [sum(totals.trainer.get(name, 0.0) for name in (DATA, TRANSFER, FORWARD)) for totals in ranks]
    slow = max(range(len(ranks)), key=lambda rank: own[rank])
    usual = sorted(own)[(len(own) - 1) // 2]
    others = [_share(totals, COUNT) + _beyond_least(ranks, rank) for rank, totals in enumerate(ranks) if rank != slow]
    waited = sum(others) / len(others) if others else 0.0
    if waited >= WORTH_SAYING and own[slow] > 1.1 * usual:
        if _beyond_usual(ranks, slow, DATA) > _beyond_usual(ranks, slow, FORWARD):
            return _blame_data(ranks, slow, True, num_workers, share_of_cores, device)
        return _blame_rank(ranks, slow, waited, own[slow], usual, device)
    late = max(range(len(ranks)), key=lambda rank: _share(ranks[rank], DATA))
    if _share(ranks[late], DATA) >= WORTH_SAYING:
        return _blame_data(ranks, late, False, num_workers, share_of_cores, device)
    total = sum(totals.seconds for totals in ranks) or 1.0
    busy = sum(totals.trainer.get(name, 0.0) for totals in ranks for name in (FORWARD, BACKWARD, UPDATE)) / total
    sentence = (
        f"the model limits: forward, backward and update take {_percent(busy)} of the time, data is waited for "
        f"{_percent(_share(ranks[late], DATA))}; {'--amp bf16' if device == 'cuda' else 'more cores or a GPU'} or a smaller model would be "
        "faster, more workers would not"
    )
    return Verdict("model", slow, BACKWARD, busy, sentence)


def _blame_rank(ranks: Sequence[Totals], slow: int, waited: float, own: float, usual: float, device: str) -> Verdict:
    steps = max(1, ranks[slow].steps)
    who = "GPUs" if device == "cuda" else "the other ranks"
    sentence = (
        f"{who} wait {_percent(waited)} of the time for rank {slow}: until its backward it takes "
        f"{1000 * own / steps:.0f} ms a step, and others {1000 * usual / steps:.0f} ms; look at what else runs on its machine"
    )
    return Verdict("rank", slow, FORWARD, waited, sentence)


def _blame_data(ranks: Sequence[Totals], late: int, alone: bool, num_workers: int, cores: int, device: str) -> Verdict:
    """alone: the other ranks have their data in time."""
    loader, share = ranks[late].loader, _share(ranks[late], DATA)
    work = {name: loader.get(name, 0.0) for name in WORK}
    total = sum(work.values()) or 1.0
    what = max(work, key=lambda name: work[name])
    who = "GPUs wait" if device == "cuda" else "the ranks wait" if len(ranks) > 1 else "the trainer waits"
    who = f"rank {late} waits" if alone else who
    more = min(cores, max(num_workers + 1, round(num_workers / max(0.1, 1 - share))))
    sentence = (
        f"{who} {_percent(share)} of the time for data: {WORDS[what]} {_percent(work[what] / total)} of worker time; "
        f"{_advice(what, num_workers, more, alone)}"
    )
    return Verdict("data", late, what, share, sentence)


def _advice(what: str, num_workers: int, more: int, alone: bool) -> str:
    raise_workers = f"raise -j from {num_workers} to {more}" if more > num_workers else ""
    if what == READ:
        where = "that machine's disk" if alone else "the disk"
        change = f"{where} is slow: copy the shards to a faster one, or use a smaller --shuffle-block, so that neighbours are read together"
        return f"{change}; {raise_workers} to have more reads under way" if raise_workers else change
    if what == STAGES:
        return f"make them faster, or {raise_workers}" if raise_workers else "make them faster"
    if what in (DECODE, TRANSFORM):
        smaller = "make shards of smaller pictures (make_shards.py --resize 256)"
        return f"{raise_workers}, or {smaller}" if raise_workers else f"all cores are used: {smaller}"
    return f"{raise_workers}, or use a smaller --img-size" if raise_workers else "use a smaller --img-size"


def _share(totals: Totals, name: str) -> float:
    return totals.trainer.get(name, 0.0) / (totals.seconds or 1.0)


def _beyond_usual(ranks: Sequence[Totals], rank: int, name: str) -> float:
    """Seconds that a rank spends on something beyond what is usual."""
    spent = [totals.trainer.get(name, 0.0) for totals in ranks]
    return spent[rank] - sorted(spent)[(len(spent) - 1) // 2]


def _beyond_least(ranks: Sequence[Totals], rank: int) -> float:
    """The share of a rank's time that its backward took longer than the fastest one's: it waited for gradients meanwhile."""
    least = min(totals.trainer.get(BACKWARD, 0.0) for totals in ranks)
    return max(0.0, ranks[rank].trainer.get(BACKWARD, 0.0) - least) / (ranks[rank].seconds or 1.0)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


__all__ = ["Totals", "Verdict", "Waits", "judge", "WAIT"]
