"""What a run folder tells of its stream: its shards, its flags, its starts, and how far it came. No torch, so scripts start at once.

in: shards.tsv, val_shards.tsv, args.yaml and metrics.jsonl of a run folder  ->  out: History
Invariant: every step that counts belongs to one start, and stands at the position that start gives it. A start that a later one
went back behind (no checkpoint came of it) counts for nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.plan import Plan

MANIFEST, VAL_MANIFEST = "shards.tsv", "val_shards.tsv"
STREAM_FLAGS = ("seed", "no_shuffle", "shuffle_block", "lanes", "epochs")


class HistoryError(ValueError):
    """A run folder that can't be read; the message is one line."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard as the run saw it: absolute path, samples, size of the file in bytes."""

    path: str
    num_samples: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The file name, as audits have it."""
        return os.path.basename(self.path)


@dataclass(frozen=True, slots=True)
class Start:
    """The steps of one start that count: those after `step`, over the positions [position, end)."""

    step: int
    position: int
    end: int
    batch_size: int
    world_size: int

    @property
    def last_step(self) -> int:
        """The last step before the next start's, or of the training."""
        return self.step + -(-(self.end - self.position) // self.batch_size)

    def position_after(self, step: int) -> int:
        """Samples seen after a step of this start."""
        return min(self.position + (step - self.step) * self.batch_size, self.end)


@dataclass(frozen=True, slots=True)
class History:
    """A run, as its folder tells it. `shards` is empty for a run that only evaluated.

    told_step: the highest step in metrics.jsonl. ended: its last word is an `end` line, so nobody writes to the folder.
    evaluations: step -> num_samples of its `eval` line.
    """

    folder: Path
    flags: dict[str, Any]
    shards: list[ShardRow]
    val_shards: list[ShardRow]
    starts: list[Start]
    told_step: int
    ended: bool
    evaluations: dict[int, int]

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def last_step(self) -> int:
        """The step with which training ends."""
        return self.starts[-1].last_step

    def start_of(self, step: int) -> Start:
        """The start that took this step."""
        return next((start for start in reversed(self.starts) if start.step < step), self.starts[0])

    def plan(self, start: Start) -> Plan:
        """The plan that a start followed; its positions end where they ended then."""
        flags = self.flags
        epochs = max(1, -(-start.end // self.num_samples))  # --epochs may have been raised at a later start
        counts = np.array([shard.num_samples for shard in self.shards], np.int64)
        return Plan(counts, epochs, flags["seed"], not flags["no_shuffle"], flags["shuffle_block"], flags["lanes"])


def read_history(folder: Path) -> History:
    """Read a run folder. Raises HistoryError, one line, for one that lacks or contradicts something."""
    if not folder.is_dir():
        raise HistoryError(f"{folder}: no such folder; give a run folder, for example runs/{folder.name}")
    flags = _read_flags(folder / "args.yaml")
    shards = read_manifest(folder / MANIFEST)
    val_shards = read_manifest(folder / VAL_MANIFEST) if (folder / VAL_MANIFEST).exists() else []
    num_samples = sum(shard.num_samples for shard in shards)
    path = folder / "metrics.jsonl"
    starts: list[dict[str, Any]] = []
    evaluations: dict[int, int] = {}
    told_step, ended = 0, False
    try:
        for _, line in read_objects(path):
            event = line.get("event")
            if event == "start":
                starts.append(line)
                ended = False
                continue
            if event == "eval":
                evaluations[line["step"]] = line["num_samples"]
            ended = event == "end"
            told_step = max(told_step, line["steps" if ended else "step"])
        if not starts:
            raise HistoryError(f"{path}: no start line: this run has not begun a step")
        if shards and starts[-1]["num_samples"] != num_samples:
            told = starts[-1]["num_samples"]
            raise HistoryError(f"{folder}: {MANIFEST} lists {num_samples} samples, metrics.jsonl tells of {told}: not of one run")
        placed = _place_starts(starts, flags["epochs"] * num_samples)
    except (KeyError, TypeError) as error:
        raise HistoryError(f"{path}: a line lacks a field or has a wrong one ({error}): not written by run.py?") from None
    return History(folder, flags, shards, val_shards, placed, told_step, ended, evaluations)


def _place_starts(lines: Iterable[dict[str, Any]], total: int) -> list[Start]:
    """The starts whose steps count, each from its line; `total` is the position where training ends."""
    starts: list[Start] = []
    for line in lines:
        for name, low in ("samples_seen", 0), ("batch_size", 1), ("world_size", 1):
            if not isinstance(line[name], int) or line[name] < low:
                raise TypeError(f"{name} is {line[name]!r}")
        position, batch_size = line["samples_seen"], line["batch_size"]
        while starts and starts[-1].position >= position:
            starts.pop()  # it was killed before its first checkpoint
        if "step" in line:
            step = line["step"]
        elif starts:
            before = starts[-1]
            step = before.step + -(-(position - before.position) // before.batch_size)
        else:  # a checkpoint from elsewhere may begin a folder
            step = line["total_steps"] - -(-(total - position) // batch_size) if position and total else 0
        if starts:
            starts[-1] = replace(starts[-1], end=position)
        starts.append(Start(step, position, total, batch_size, line["world_size"]))
    return starts


def _read_flags(path: Path) -> dict[str, Any]:
    try:
        flags = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HistoryError(f"{path}: can't be read ({error.strerror}): is {path.parent} a run folder?") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise HistoryError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    for name in STREAM_FLAGS:
        if not isinstance(flags, dict) or not isinstance(flags.get(name), int):
            raise HistoryError(f"{path}: {name} is missing or no whole number: not written by run.py?")
    return flags


def read_manifest(path: Path) -> list[ShardRow]:
    """The rows of a shards.tsv, in order. Raises HistoryError."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise HistoryError(f"{path}: can't be read ({error.strerror}): is {path.parent} a run folder?") from None
    rows = []
    for number, line in enumerate(text.split("\n")[1:-1], 2):
        columns = line.split("\t")
        if len(columns) != 3 or not (columns[1].isdigit() and columns[2].isdigit()):
            raise HistoryError(f"{path}:{number}: not `path<tab>samples<tab>bytes`: {line[:80]!r}")
        rows.append(ShardRow(_unquoted(columns[0]), int(columns[1]), int(columns[2])))
    return rows


def _unquoted(path: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"t": "\t", "n": "\n"}.get(match[1], match[1]), path)


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file of JSON lines. A last line that is cut off is passed over: its writer was killed, or is at it.

    Raises HistoryError.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if not isinstance(value, dict):
                    raise HistoryError(f"{path}:{number}: not a JSON object: {line[:60]!r}")
                yield number, value
    except OSError as error:
        raise HistoryError(f"{path}: can't be read ({error.strerror}): is {path.parent} a run folder?") from None
