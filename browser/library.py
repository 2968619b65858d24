"""Sets of shards as one row of samples, with what is known of each.

in: shards, the checks of them as they come  ->  out: samples by number; numbers by key, class, shard, brokenness
Invariant: a sample is found by its number at once, however many there are; lists of numbers are ascending.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from data.errors import ShardError
from data.found import ShardCheck, escape_key
from data.shards import Shard
from data.viewing import SampleView, view_samples

MAX_FOUND = 10_000  # samples that a search lists

Label = int | str | None


@dataclass(slots=True)
class Health:
    """What a check found in one shard: `labels` holds a number of `ShardSet.labels` for each sample, -1 for none."""

    check: ShardCheck
    labels: np.ndarray


@dataclass(slots=True)
class ShardSet:
    """Some shards in their order. `health` fills up while they are checked; it stays empty where nobody checks them."""

    shards: Sequence[Shard]
    names: Sequence[str] = ()  # of the classes
    health: dict[int, Health] = field(default_factory=dict)
    labels: list[int | str] = field(default_factory=list)
    counts: Counter[int | str] = field(default_factory=Counter)
    checking: bool = False
    failed: str = ""
    ends: np.ndarray = field(init=False)
    _codes: dict[int | str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.ends = np.cumsum([shard.num_samples for shard in self.shards]) if self.shards else np.zeros(0, np.int64)

    @property
    def num_samples(self) -> int:
        """Of all shards."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def place(self, number: int) -> tuple[int, int]:
        """(number of the shard, index in it). Raises IndexError."""
        if not 0 <= number < self.num_samples:
            raise IndexError(number)
        shard = int(np.searchsorted(self.ends, number, side="right"))
        return shard, number - self.start(shard)

    def start(self, shard: int) -> int:
        """The number of a shard's first sample."""
        return int(self.ends[shard]) - self.shards[shard].num_samples

    def view(self, number: int) -> SampleView:
        """A sample. Raises IndexError, ShardError."""
        shard, index = self.place(number)
        return view_samples(self.shards[shard], index, 1)[0]

    def views(self, numbers: Iterable[int]) -> list[tuple[int, SampleView | ShardError]]:
        """Samples, each with its number; one whose shard can't be read any more is the reason why."""
        found: list[tuple[int, SampleView | ShardError]] = []
        for number in numbers:
            try:
                found.append((number, self.view(number)))
            except ShardError as error:
                found.append((number, error))
        return found

    def label_of(self, number: int) -> Label:
        """The label that the check read; None while it is not known."""
        shard, index = self.place(number)
        health = self.health.get(shard)
        code = -1 if health is None or index >= len(health.labels) else int(health.labels[index])
        return self.labels[code] if code >= 0 else None

    def say_label(self, label: Label) -> str:
        """A label in words."""
        if isinstance(label, int) and 0 <= label < len(self.names):
            return self.names[label]
        return "" if label is None else str(label)

    def reason_of(self, number: int) -> str:
        """Why a sample is bad; empty where it isn't, or nobody knows yet."""
        shard, index = self.place(number)
        health = self.health.get(shard)
        if health is None or index not in health.check.bad_indexes:
            return ""
        for error in health.check.bad:
            if error.index == index:
                return f"{error.field}: {error.reason}" if error.field else error.reason
        return "bad"

    def add(self, shard: int, check: ShardCheck) -> None:
        """Take in the check of a shard."""
        with self._lock:
            for label in check.labels:
                if label is not None and label not in self._codes:
                    self._codes[label] = len(self.labels)
                    self.labels.append(label)
            codes = [-1 if label is None else self._codes[label] for label in check.labels]
            self.counts.update(check.classes)
            check.labels = []
            self.health[shard] = Health(check, np.array(codes, np.int32))

    def follow(self, checks: Iterable[ShardCheck]) -> None:
        """Take in the checks of all shards, in order, as they come: for a thread of its own."""
        self.checking = True
        try:
            for shard, check in enumerate(checks):
                self.add(shard, check)
        except ShardError as error:
            self.failed = str(error)
        finally:
            self.checking = False

    def of_shard(self, shard: int) -> range:
        """The numbers of a shard's samples."""
        return range(self.start(shard), int(self.ends[shard]))

    def of_class(self, label: int | str) -> np.ndarray:
        """The samples of a class, among those that are checked."""
        code = self._codes.get(label, -2)
        return self._gather(lambda health: np.flatnonzero(health.labels == code))

    def broken(self) -> np.ndarray:
        """The bad samples, among those that are checked."""
        return self._gather(lambda health: np.array(health.check.bad_indexes, np.int64))

    def search(self, text: str) -> np.ndarray:
        """The samples whose key holds `text`, among those that are checked; the first MAX_FOUND."""
        wanted = escape_key(text)
        found: list[int] = []
        for shard, health in sorted(self.health.items()):
            if len(found) >= MAX_FOUND:
                break
            found += [self.start(shard) + i for i in _search(health.check.keys, wanted, MAX_FOUND - len(found))]
        return np.array(found, np.int64)

    def find(self, shard: str, index: int, key: str) -> int | None:
        """The number of the sample that a record names: shard file name, index, key. None where it is not (or no longer) there."""
        for number, one in enumerate(self.shards):
            if one.name == shard and 0 <= index < one.num_samples:
                try:
                    if not key or view_samples(one, index, 1)[0].key == key:
                        return self.start(number) + index
                except ShardError:
                    continue
        return None

    def _gather(self, indexes: object) -> np.ndarray:
        parts = [self.start(shard) + indexes(health) for shard, health in sorted(self.health.items())]  # type: ignore[operator]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _search(keys: bytes, wanted: bytes, limit: int) -> list[int]:
    """The lines of `keys` that hold `wanted`."""
    found: list[int] = []
    position = keys.find(wanted) if wanted else -1
    if position < 0:
        return found
    line_ends = np.flatnonzero(np.frombuffer(keys, np.uint8) == 10)
    while position >= 0 and len(found) < limit:
        line = int(np.searchsorted(line_ends, position))
        found.append(line)
        if line >= len(line_ends):
            break
        position = keys.find(wanted, int(line_ends[line]) + 1)
    return found
