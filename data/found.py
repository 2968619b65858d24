"""What a check found in a shard.

in: a sample's fields, sizes, labels, one after the other (data/checking.py)  ->  out: ShardCheck, which data/verdict.py judges
Invariant: its memory is bounded by the number of samples: what differs from sample to sample is counted up to MAX_KINDS kinds.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .errors import SampleError

MAX_LISTED = 1000  # bad samples of a shard that are kept one by one; all are counted
MAX_KINDS = 10_000  # sets of fields, picture sizes: beyond it the rest is counted together
OTHERS = "(others)"


@dataclass(slots=True)
class FieldSizes:
    """How many samples have a field, and the bytes that it takes."""

    count: int = 0
    total: int = 0
    least: int = 1 << 62
    most: int = 0

    def add(self, size: int) -> None:
        self.merge(FieldSizes(1, size, size, size))

    def merge(self, other: FieldSizes) -> None:
        self.count += other.count
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)


@dataclass(slots=True)
class ShardCheck:
    """What was found in the shard at `path`.

    error: why it can't be used at all; damage: what of it is lost. index: "fits", "stale" or "absent". sha256: of the file, where it
    was asked for. tar_path, offsets: as `Shard` and its index have them. field_sets: which fields samples have together -> how many
    do, and the first such sample. bad: the first MAX_LISTED of `bad_indexes`. key_hashes, content_hashes: uint64 (N,); a content
    hash of 0 means none.
    """

    path: str
    num_bytes: int = 0
    error: str = ""
    damage: str | None = None
    index: str = "absent"
    sha256: str = ""
    tar_path: str = ""
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64))
    fields: dict[str, FieldSizes] = field(default_factory=dict)
    field_sets: dict[tuple[str, ...], tuple[int, int, str]] = field(default_factory=dict)
    classes: Counter[int | str] = field(default_factory=Counter)
    picture_sizes: Counter[str] = field(default_factory=Counter)
    picture_modes: Counter[str] = field(default_factory=Counter)
    bad: list[SampleError] = field(default_factory=list)
    bad_indexes: list[int] = field(default_factory=list)
    key_hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    content_hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    keys: bytes = b""  # joined by line ends, each escaped so that it has none
    labels: list[int | str | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The file name."""
        return os.path.basename(self.path)

    @property
    def num_samples(self) -> int:
        """Whole samples in it."""
        return len(self.offsets) - 1


def count_kind(counter: Counter[str], what: str) -> None:
    """Count one more of a kind; beyond MAX_KINDS kinds, of the others."""
    counter[what if what in counter or len(counter) < MAX_KINDS else OTHERS] += 1


def escape_key(key: str) -> bytes:
    """A key without line ends, in UTF-8 whatever it was."""
    return key.encode("utf-8", "backslashreplace").replace(b"\n", b"\\n")
