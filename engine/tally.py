"""Counting who was consumed in one epoch, in about a byte a sample.

in: shard file names and indexes of consumed samples  ->  out: how many were distinct, repeated, bad, of no shard
Invariant: seen = distinct + repeated + unknown for any input, and distinct is never more than the samples there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .history import HistoryError, ShardRow, read_objects


class Places:
    """(shard file name, index) -> a place in one array of counts.

    An audit names shards by file name alone. Where several shards share one, their samples of one index share a place, which
    then takes as many as there are of them: `capacity` (None where every place takes one).
    """

    def __init__(self, shards: Sequence[ShardRow]) -> None:
        sizes: dict[str, int] = {}
        for shard in shards:
            sizes[shard.name] = max(sizes.get(shard.name, 0), shard.num_samples)
        self._codes = {name: code for code, name in enumerate(sizes)}
        self._sizes = np.array([*sizes.values(), 0], np.int64)  # the last is for names that nobody has
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.num_samples = sum(shard.num_samples for shard in shards)
        self.size = int(self._sizes.sum())
        self.shared = sorted(name for name, times in Counter(shard.name for shard in shards).items() if times > 1)
        self.capacity: np.ndarray | None = None
        if self.shared:
            self.capacity = np.zeros(self.size, np.int32)
            for shard in shards:
                start = self._starts[self._codes[shard.name]]
                self.capacity[start : start + shard.num_samples] += 1

    def find(self, names: Iterable[str], indexes: np.ndarray) -> np.ndarray:
        """The place of each sample, int64; -1 for one that no shard holds."""
        code_of, nobody = self._codes.get, len(self._codes)
        codes = np.fromiter((code_of(name, nobody) for name in names), np.int64, len(indexes))
        there = (indexes >= 0) & (indexes < self._sizes[codes])
        return np.where(there, self._starts[codes] + indexes, -1)


class Tally:
    """What was consumed of one epoch. `close` gives its memory back; what comes later still is a repeat."""

    def __init__(self, places: Places) -> None:
        self._capacity = places.capacity
        # a count stops at the highest that fits: what matters is whether a place has more than it takes
        self._counts: np.ndarray | None = np.zeros(places.size, np.uint8 if places.capacity is None else np.int32)
        self._distinct = 0
        self.seen = self.bad = self.masked = self.unknown = 0

    def add(self, places: np.ndarray, num_bad: int) -> None:
        """Count consumed samples, `num_bad` of which were bad; -1 is one that no shard holds."""
        self.bad += num_bad
        self.seen += len(places)
        self.unknown += int((places < 0).sum())
        if self._counts is not None:
            where, times = np.unique(places[places >= 0], return_counts=True)
            most = np.iinfo(self._counts.dtype).max
            self._counts[where] += np.minimum(times, most - self._counts[where]).astype(self._counts.dtype)

    @property
    def is_open(self) -> bool:
        return self._counts is not None

    @property
    def distinct(self) -> int:
        """How many samples were consumed, each counted once."""
        if self._counts is None:
            return self._distinct
        if self._capacity is None:
            return int(np.count_nonzero(self._counts))
        return int(np.minimum(self._counts, self._capacity).sum())

    @property
    def repeated(self) -> int:
        """How often a sample was consumed that had been before."""
        return self.seen - self.unknown - self.distinct

    def close(self) -> None:
        """No more is expected: keep the figures only."""
        self._distinct, self._counts = self.distinct, None


class BadSamples:
    """bad_samples.jsonl, sorted by step and rank: 32 bytes a line. Raises HistoryError."""

    def __init__(self, path: Path) -> None:
        self._codes: dict[str, int] = {}
        rows: Iterable[tuple[int, int, int, int]] = self._read(path) if path.exists() else ()
        columns = [("step", np.int64), ("rank", np.int64), ("shard", np.int64), ("index", np.int64)]
        self._rows = np.sort(np.fromiter(rows, np.dtype(columns)), order=("step", "rank"))
        self._steps = np.ascontiguousarray(self._rows["step"])

    def _read(self, path: Path) -> Iterable[tuple[int, int, int, int]]:
        for number, line in read_objects(path):
            try:
                yield line["step"], line["rank"], self._codes.setdefault(line["shard"], len(self._codes)), line["index"]
            except (KeyError, TypeError) as error:
                raise HistoryError(f"{path}:{number}: no bad sample ({error}): not written by run.py?") from None

    def of_step(self, step: int) -> Counter[tuple[int, str, int]]:
        """(rank, shard file name, index) of the bad samples of a step; one that stands there twice counts twice."""
        first, last = np.searchsorted(self._steps, [step, step + 1])
        if first == last:
            return Counter()
        names = list(self._codes)
        return Counter((rank, names[code], index) for _, rank, code, index in self._rows[first:last].tolist())
