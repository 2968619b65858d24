"""Checking a run's audit: every sample once an epoch, every rank at every step.

in: audit/rank<r>.jsonl of a run folder, its History  ->  out: a line for every epoch and evaluation, and Findings
Invariant: read step by step, all ranks side by side; memory holds one epoch's counts, however long the audit is.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .history import History, HistoryError, Start, read_objects
from .tally import BadSamples, Places, Tally

TRAIN, VAL = "train", "val"


class Line(NamedTuple):
    """A rank's part of a global batch: of a training step, or the nth of the evaluation after it (0 in training).

    late: it stands behind a later one in its file, and (step, is_val, nth) are that one's.
    """

    step: int
    is_val: bool
    nth: int
    late: bool
    rank: int
    epoch: list[int]
    ids: list[list[Any]]
    valid: list[bool]


def read_lines(path: Path, rank: int) -> Iterator[Line]:
    """The lines of one rank's audit. Raises HistoryError."""
    place, nth = (0, False), 0
    for number, line in read_objects(path):
        try:
            step, split, epoch, ids, valid = (line[name] for name in ("step", "split", "epoch", "ids", "valid"))
            fits = isinstance(step, int) and split in (TRAIN, VAL) and len(epoch) == len(ids) == len(valid)
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise HistoryError(f"{path}:{number}: not a line of an audit: it needs step, epoch, ids, valid and split")
        before, place = place, max(place, (step, split == VAL))
        nth = nth + 1 if place == before and place[1] else 0
        yield Line(*place, nth, (step, split == VAL) < place, rank, epoch, ids, valid)


def read_groups(folder: Path) -> Iterator[tuple[list[Line], bool]]:
    """(the lines of one global batch, whether it is the last), in the order of steps. Raises HistoryError."""
    paths = {int(p.stem[4:]): p for p in (folder / "audit").glob("rank*.jsonl") if p.stem[4:].isdigit()}
    if not paths:
        raise HistoryError(f"{folder / 'audit'}: no rank0.jsonl: there is an audit only of a run started with --audit")
    merged = heapq.merge(*(read_lines(path, rank) for rank, path in sorted(paths.items())), key=lambda line: line[:3])
    groups = (list(group) for _, group in itertools.groupby(merged, key=lambda line: line[:3]))
    group = next(groups, None)
    if group is None:
        raise HistoryError(f"{folder / 'audit'}: no line yet: this run has not finished a step")
    for following in groups:
        yield group, False
        group = following
    yield group, True


@dataclass
class Findings:
    """What is wrong: kind -> the first case, how many there are."""

    cases: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, kind: str, case: str, times: int = 1) -> None:
        if times > 0:
            first, before = self.cases.get(kind, (case, 0))
            self.cases[kind] = first, before + times

    def lines(self) -> list[str]:
        return [f"{kind}: {first}" + (f" ({times:,} in all)" if times > 1 else "") for kind, (first, times) in self.cases.items()]


class Auditor:
    """Takes the global batches in order, and keeps what they add up to."""

    def __init__(self, history: History) -> None:
        self.history, self.findings = history, Findings()
        self.places, self.val_places = Places(history.shards), Places(history.val_shards)
        self.epochs: dict[int, Tally] = {}
        self.passes: dict[int, Tally] = {}  # by the step they came after
        self._open: dict[bool, list[int]] = {False: [], True: []}  # whether passes -> keys of tallies that are still open
        self.masks: Counter[str] = Counter()
        self.reached = history.starts[0].step  # the last step that all ranks took
        self._bad_samples = BadSamples(history.folder / "bad_samples.jsonl")
        self._bad_of_step: tuple[int, Counter[tuple[int, str, int]]] = (-1, Counter())

    def take(self, group: list[Line], is_last: bool) -> bool:
        """Check and count one global batch; False if it is still under way, and so counts for nothing yet."""
        step, is_val, nth = group[0][:3]
        start = self.history.start_of(step)
        ranks = Counter(line.rank for line in group if not line.late)
        lacking = [str(rank) for rank in range(start.world_size) if not ranks[rank]]
        if lacking and self._may_grow(step, is_val, is_last):
            return False
        name = f"evaluation after step {step}, batch {nth}" if is_val else f"step {step}"
        self.findings.add("uneven", f"{name}: no line of rank {', '.join(lacking)}", len(lacking))
        for rank, times in ranks.items():
            self.findings.add("uneven", f"{name}: {times} lines of rank {rank}", times - 1)
            self.findings.add("uneven", f"{name}: a line of rank {rank}, of {start.world_size} ranks", int(rank >= start.world_size))
        late = [line.rank for line in group if line.late]
        self.findings.add("out of order", f"after {name}: a line of an earlier one, of rank {'/'.join(map(str, late))}", len(late))
        if not is_val:
            self._check_step(step)
        self._count(group, start, name)
        return True

    def _may_grow(self, step: int, is_val: bool, is_last: bool) -> bool:
        """Whether ranks may just not have come to it: training keeps them within a step of each other, an evaluation does not."""
        if self.history.ended:
            return False
        return step not in self.history.evaluations if is_val else is_last and step > self.history.told_step

    def _check_step(self, step: int) -> None:
        self.findings.add("steps missing", f"{self.reached + 1}..{step - 1}", step - 1 - self.reached)
        self.findings.add("too many steps", f"step {step} of {self.history.last_step}", int(step > self.history.last_step))
        self.reached = step

    def _count(self, group: list[Line], start: Start, name: str) -> None:
        """Add a global batch to its epochs, slot by slot: consumed, bad, or masked, and why."""
        step, is_val = group[0][:2]
        ids = [i for line in group for i in line.ids]
        try:
            shards, indexes, _ = zip(*ids, strict=True)
            index, epoch = np.array(indexes, np.int64), np.array([e for line in group for e in line.epoch], np.int64)
            valid = np.array([v for line in group for v in line.valid], bool)
        except (TypeError, ValueError, OverflowError) as error:
            raise HistoryError(f"{self.history.folder / 'audit'}: {name}: not [shard, index, key], epoch and valid ({error})") from None
        end_epoch = 1 if is_val else ceil(start.end / max(1, self.history.num_samples))
        padding = np.concatenate([self._padding(line, start, name) for line in group])
        bad = self._explain_masks(group, name, valid, padding, epoch >= end_epoch)
        self.findings.add("past the end", f"{name}: a sample of epoch {epoch.max()} counts", int((valid & (epoch >= end_epoch)).sum()))
        places = self.val_places if is_val else self.places
        where = places.find(map(str, shards), index)
        tallies = self.passes if is_val else self.epochs
        for number in [number for number in self._open[is_val] if number < (step if is_val else epoch.min())]:
            self._open[is_val].remove(number)
            tallies[number].close()  # what comes in order is past it
        for e in np.unique(epoch[epoch < end_epoch]).tolist():
            mine, number = epoch == e, step if is_val else e
            if number not in tallies:
                tallies[number] = Tally(places)
                self._open[is_val].append(number)
            tally = tallies[number]
            tally.add(where[mine & (valid | bad)], int((mine & bad).sum()))
            tally.masked += int((mine & ~valid).sum())
        unknown = (valid | bad) & (where < 0)
        if unknown.any():
            self.findings.add("unknown", f"{name}: no shard holds {ids[int(unknown.argmax())]}", int(unknown.sum()))

    def _explain_masks(self, group: list[Line], name: str, valid: np.ndarray, padding: np.ndarray, past_end: np.ndarray) -> np.ndarray:
        """Why each masked slot is; returns which of them are bad samples."""
        rank = np.repeat([line.rank for line in group], [len(line.ids) for line in group])
        ids = [i for line in group for i in line.ids]
        bad = np.zeros(len(valid), bool)
        for slot in np.flatnonzero(~valid & ~padding & ~past_end).tolist():
            bad[slot] = self._is_bad(group[0].step, (int(rank[slot]), ids[slot][0], ids[slot][1]))
            self.findings.add("masked", f"{name}: rank {rank[slot]}: {ids[slot]} for no known reason", int(not bad[slot]))
        padded, past = ~valid & padding, ~valid & past_end & ~padding
        self.masks.update({"padding": int(padded.sum()), "past the end": int(past.sum()), "bad": int(bad.sum())})
        return bad

    def _padding(self, line: Line, start: Start, name: str) -> np.ndarray:
        """Which slots of a line are there only because the ranks' shares differ by one."""
        width = ceil(start.batch_size / start.world_size)
        if len(line.ids) != width:
            self.findings.add("uneven", f"{name}: rank {line.rank} has {len(line.ids)} slots, not {width}")
        share = (line.rank + 1) * start.batch_size // start.world_size - line.rank * start.batch_size // start.world_size
        return np.arange(len(line.ids)) >= share

    def _is_bad(self, step: int, sample: tuple[int, str, int]) -> bool:
        if self._bad_of_step[0] != step:
            self._bad_of_step = step, self._bad_samples.of_step(step)
        left = self._bad_of_step[1]
        left[sample] -= 1
        return left[sample] >= 0

    def finish(self) -> list[str]:
        """One line for every epoch and evaluation; what they lack becomes findings."""
        history, lines = self.history, []
        told = history.told_step if history.shards else 0
        self.findings.add("steps missing", f"{self.reached + 1}..{told}, which metrics.jsonl tells of", told - self.reached)
        first = history.starts[0].position
        last_step = max(self.reached, told)
        position = history.start_of(last_step).position_after(last_step) if last_step > history.starts[0].step else first
        size = history.num_samples
        for epoch in range(first // size, ceil(position / size)) if size else ():
            due = min(position, (epoch + 1) * size) - max(first, epoch * size)
            is_open = position < (epoch + 1) * size
            lines.append(self._describe(f"train epoch {epoch}", self.epochs.get(epoch), due, size, is_open))
        for step in sorted(self.passes.keys() | history.evaluations.keys()):
            lines.append(self._describe_pass(step))
        return lines

    def _describe_pass(self, step: int) -> str:
        name, tally = f"evaluation after step {step}", self.passes.get(step)
        counted = self.history.evaluations.get(step)
        good = tally.seen - tally.bad if tally else 0
        if counted is None:
            self.findings.add("evaluation without result", name, int(self.history.ended or step < self.reached))
        elif counted != good:
            self.findings.add("evaluation differs", f"{name}: its result is of {counted} samples, its audit of {good}")
        size = self.val_places.num_samples
        return self._describe(name, tally, 0 if counted is None else size, size, counted is None)

    def _describe(self, name: str, tally: Tally | None, due: int, size: int, is_open: bool) -> str:
        tally = tally or Tally(Places([]))
        missed = max(0, due - tally.distinct)
        self.findings.add("repeated", f"{name}: {tally.repeated:,} samples", tally.repeated)
        self.findings.add("missed", f"{name}: {missed:,} samples", missed)
        state = f"open, {due:,} of {size:,} due" if is_open else f"{size:,} samples"
        return (
            f"{name} ({state}): {tally.seen:,} seen, {tally.distinct:,} distinct, {tally.repeated:,} repeated, {missed:,} missed, "
            f"{tally.bad:,} bad, {tally.masked:,} slots masked"
        )

    def describe_steps(self) -> str:
        """Which steps there are, on how many ranks, and why slots were masked."""
        starts = [start for start in self.history.starts if start.step < self.reached]
        ranks = ", then ".join(str(start.world_size) for start in starts) or str(self.history.starts[-1].world_size)
        masks = ", ".join(f"{count:,} {why}" for why, count in self.masks.items() if count) or "none"
        steps = f"steps {self.history.starts[0].step + 1}..{self.reached}" if starts else "no training step"
        return f"{steps} on {ranks} ranks; masked slots: {masks}"
