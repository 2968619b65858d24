"""Run folders: made once, found again.

in: --output, --name, --resume  ->  out: the folder of this run, the checkpoint to go on from
Invariant: two runs never share a folder; a run that goes on stays in its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data import Shard

from .checkpoint import LAST, PREVIOUS

MANIFEST = "shards.tsv"


class AlreadyFinished(Exception):
    """The run that --resume names has nothing left to train."""


def create_folder(output: Path, name: str | None, model: str) -> Path:
    """Make a new folder below output: `name`, or time and model with a number where that is taken. Raises FileExistsError."""
    output.mkdir(parents=True, exist_ok=True)
    if name is not None:
        (output / name).mkdir()
        return output / name
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    for number in range(1, 1000):
        folder = output / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"{output}: a thousand runs named {stem} are there")


def check_name(output: Path, name: str, resume: str | None) -> None:
    """Raises ValueError where `--name` can't be a new folder."""
    if name in ("", ".", "..") or "/" in name or os.sep in name:
        raise ValueError(f"--name {name!r}: it must be the name of a folder, not a path; --output says where it is made")
    if (output / name).exists() and resume != "auto":
        raise ValueError(f"--name {name}: {output / name} exists; go on with --resume auto, or give another name")


def check_output(output: Path) -> None:
    """Raises ValueError where no folder can be made in `output`."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {output}: no folder can be made there ({error.strerror}); give another") from error
    if not os.access(output, os.W_OK):
        raise ValueError(f"--output {output}: it can't be written; give another")


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds a checkpoint to go on from."""
    return any((folder / "checkpoints" / name).is_file() for name in (LAST, PREVIOUS))


def folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint file lies in; None if it lies elsewhere."""
    folder = checkpoint.resolve().parent.parent
    return folder if checkpoint.resolve().parent.name == "checkpoints" and (folder / "metrics.jsonl").exists() else None


def find_last_run(output: Path, fingerprint: dict[str, Any], model: str) -> Path | None:
    """The run folder below `output` with the newest checkpoint whose shards and model are these."""
    found = []
    for folder in output.iterdir() if output.is_dir() else ():
        start = _start_line(folder)
        if start.get("fingerprint") == fingerprint and start.get("model") == model and has_checkpoint(folder):
            times = [path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*.pt")]
            found.append((max(times), folder))
    return max(found)[1] if found else None


def _start_line(folder: Path) -> dict[str, Any]:
    try:
        with open(folder / "metrics.jsonl", encoding="utf-8") as file:
            line = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return line if isinstance(line, dict) else {}


def write_manifest(folder: Path, shards: Sequence[Shard], flags: dict[str, Any]) -> None:
    """Write shards.tsv (path, samples, bytes of each training shard, in order) and args.yaml."""
    rows = "".join(f"{_quoted(shard.path)}\t{shard.num_samples}\t{shard.num_bytes}\n" for shard in shards)
    (folder / MANIFEST).write_text("path\tsamples\tbytes\n" + rows, encoding="utf-8", errors="surrogateescape")
    (folder / "args.yaml").write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")


def first_difference(folder: Path, shards: Sequence[Shard]) -> str:
    """Which shard differs first from those the run was started on: ". The first ...", or nothing if its list is gone."""
    try:
        rows = (folder / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    except OSError:
        return ""
    now = [f"{_quoted(shard.path)}\t{shard.num_samples}\t{shard.num_bytes}" for shard in shards]
    for i in range(max(len(rows), len(now))):
        old, new = (side[i].split("\t") if i < len(side) else None for side in (rows, now))
        if old is None or new is None or _unlike(old, new):
            return f". The first shard that differs is number {i}: {_described(old)} then, {_described(new)} now"
    return ""


def _unlike(old: list[str], new: list[str]) -> bool:
    # the folder may have moved as a whole
    return (os.path.basename(old[0]), *old[1:]) != (os.path.basename(new[0]), *new[1:])


def _described(row: list[str] | None) -> str:
    return "none" if row is None else f"{os.path.basename(row[0])} ({row[1]} samples, {row[2]} bytes)"
