"""What can be wrong with the user's data, as types.

in: reasons found while reading  ->  out: exceptions that carry where and why
Invariant: a fault of one sample is a `DataError` (it masks a slot), a fault of a shard is a `ShardError` (it stops the run with
one line); anything else that is raised is a fault of the code and is never caught on the way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


class DataError(ValueError):
    """One sample's bytes are bad: raised while parsing, decoding or labelling it; becomes a `SampleError` record."""

    def __init__(self, reason: str, field: str = "", key: str = "") -> None:
        super().__init__(reason, field, key)  # all in args, so that it pickles
        self.reason = reason
        self.field = field
        self.key = key

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}" if self.field else self.reason


class ShardError(ValueError):
    """A shard, an index or a pattern that the run can't start with; the message is one line that names it."""


class StaleIndexError(ShardError):
    """The index of a shard does not describe the file that is there now."""


class LoaderError(RuntimeError):
    """The machine could not carry a batch from a worker to its rank; the message is one line that says what to change."""


def printable(text: str) -> str:
    """Text from the data for one line on a terminal: line ends, escape sequences and what is not Unicode become backslash escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(frozen=True, slots=True)
class SampleError:
    """One bad sample: where it stands (`shard` file name, `index` in it, `key`), which `field`, and why."""

    shard: str
    index: int
    key: str
    field: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.shard} sample {self.index}" + (f" ({self.key})" if self.key else "")
        return printable(f"{where}: {self.field + ': ' if self.field else ''}{self.reason}")

    def as_dict(self) -> dict[str, str | int]:
        """The record as it is written to bad_samples.jsonl."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BadSampleBudget:
    """How much bad data a run accepts: a share of the samples seen, and at least FLOOR samples."""

    share: float
    floor: int = 10

    def exceeded(self, bad: int, seen: int) -> bool:
        """Whether `bad` of `seen` samples is too many."""
        return bad > max(self.floor, self.share * seen)
