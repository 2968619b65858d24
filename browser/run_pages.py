"""Run folders, for people: which there are, their curves, their bad samples.

in: a folder of runs  ->  out: RunView: lines for charts, numbers for tables
Invariant: a run that is being written is read up to its last whole line; only names that the folder lists are ever opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from data.errors import printable
from engine.history import HistoryError, ShardRow, read_manifest

MAX_BAD = 500  # bad samples that a page lists
MAX_LOG = 40  # lines of log.txt


@dataclass(slots=True)
class RunView:
    """One run. `events`: event name -> its lines of metrics.jsonl, in order."""

    name: str
    folder: Path
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def start(self) -> dict[str, Any]:
        """What the run was started with last."""
        return self.events.get("start", [{}])[-1]

    @property
    def state(self) -> str:
        """finished, stopped, evaluated; "open" for a run without an end: it goes on, or was killed."""
        end = self.events.get("end")
        return str(end[-1].get("status", "ended")) if end else "open"

    @property
    def step(self) -> int:
        """The last step that is told."""
        last = (line.get("step") for name in ("train", "epoch") for line in self.events.get(name, [])[-1:])
        return max((int(step) for step in last if _is_number(step)), default=0)

    @property
    def best(self) -> float | None:
        """The best top-1 of its evaluations."""
        found = [line["top1"] for line in self.events.get("eval", ()) if _is_number(line.get("top1"))]
        return max(found, default=None)

    def line(self, event: str, name: str) -> list[tuple[float, float]]:
        """(step, value) of one number of an event."""
        lines = self.events.get(event, ())
        return [(float(one["step"]), float(one[name])) for one in lines if _is_number(one.get("step")) and _is_number(one.get(name))]

    def waits(self) -> list[tuple[float, float]]:
        """(step, share of the time that went by waiting for data)."""
        waited, took = self.line("train", "data_time"), dict(self.line("train", "step_time"))
        return [(step, seconds / took[step]) for step, seconds in waited if took.get(step)]

    def shards(self) -> list[ShardRow]:
        """The training shards, then the validation shards. Raises HistoryError."""
        rows = read_manifest(self.folder / "shards.tsv")
        val = self.folder / "val_shards.tsv"
        return rows + (read_manifest(val) if val.exists() else [])

    def bad_samples(self) -> tuple[list[dict[str, Any]], int]:
        """The first MAX_BAD records of bad_samples.jsonl, each sample once, and how many there are."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for line in _read_lines(self.folder / "bad_samples.jsonl"):
            found.setdefault((str(line.get("shard")), str(line.get("index"))), line)
        return list(found.values())[:MAX_BAD], len(found)

    def log(self) -> str:
        """The end of log.txt."""
        try:
            with open(self.folder / "log.txt", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-MAX_LOG:])


def list_runs(folder: Path) -> list[str]:
    """The names of the run folders in `folder`, the newest first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found.append((os.stat(os.path.join(entry.path, "metrics.jsonl")).st_mtime_ns, entry.name))
            except OSError:
                continue  # not a run
    return [name for _, name in sorted(found, reverse=True)]


def read_run(folder: Path, name: str) -> RunView | None:
    """A run by its name; None for a name that is none of `list_runs`."""
    if name not in list_runs(folder):
        return None
    run, last = RunView(name, folder / name), ""
    for line in _read_lines(run.folder / "metrics.jsonl"):
        last = str(line.get("event"))
        run.events.setdefault(last, []).append(line)
    if "start" in run.events and last != "end":  # what ended before the last start has gone on since
        run.events.pop("end", None)
    return run


def say_number(value: Any) -> str:
    """A number of a log as a page has it; what is there in its place, if it is none."""
    return f"{value:,}" if _is_number(value) else printable(str(value))


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is no object, or cut, is passed over: a page should show the rest."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    value = json.loads(line) if line.endswith(b"\n") else None
                except (ValueError, RecursionError):  # deeper than anyone writes
                    value = None
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a page can show it: finite, and no larger than a float may be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


__all__ = ["HistoryError", "RunView", "list_runs", "read_run", "say_number"]
