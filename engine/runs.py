"""Run folders: made once, found again.

in: --output, --name, --resume  ->  out: the folder of this run, the checkpoint to go on from
Invariant: two runs never share a folder; a run that goes on stays in its own.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from data import Shard
from data.pipeline import check_fingerprint, shards_fingerprint

from . import checkpoint
from .metrics import cut_back

MANIFEST, VAL_MANIFEST = "shards.tsv", "val_shards.tsv"
LOCK = "lock"  # held by the rank 0 that writes into the folder
LOCK_SECONDS = 20.0  # the processes of a killed run are gone within 15
_held: dict[Path, TextIO] = {}


def create_folder(output: Path, name: str | None, model: str) -> Path:
    """Make a new folder below output: `name`, or time and model with a number where that is taken. Raises FileExistsError."""
    output.mkdir(parents=True, exist_ok=True)
    if name is not None:
        try:
            (output / name).mkdir()
        except FileExistsError as error:
            raise FileExistsError(error.errno, "another run has just made it; give another --name", str(output / name)) from None
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
    if not name.isprintable() or len(os.fsencode(name)) > 200:
        raise ValueError(f"--name {name[:60]!r}: not for a folder: it must be text of one line and at most 200 bytes; give another")
    if (output / name).exists() and resume != "auto":
        raise ValueError(f"--name {name}: {output / name} exists; go on with --resume auto, or give another name")


def check_output(output: Path) -> None:
    """Raises ValueError where no folder can be made in `output`. Makes nothing itself: the command may still be refused."""
    there = next(folder for folder in (output.absolute(), *output.absolute().parents) if os.path.lexists(folder))
    if not there.is_dir():
        raise ValueError(f"--output {output}: {there} is a file, not a folder; give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {output}: no folder can be made in {there}, it can't be written; give another")


def open_folder(
    output: Path,
    name: str | None,
    model: str,
    *,
    folder: Path | None = None,
    gone_on_from: Path | None = None,
    step: int = 0,
    shards: Sequence[Shard],
    val_shards: Sequence[Shard],
    flags: dict[str, Any],
) -> Path:
    """The folder of this run, for rank 0: a new one, or `folder`, cut back to the `step` of the checkpoint that it goes on from.

    Writes what the run is made of: args.yaml, shards.tsv and val_shards.tsv (path, samples, bytes of each shard, in order).
    """
    folder = folder or create_folder(output, name, model)
    hold(folder)
    checkpoint.sweep(folder / "checkpoints")
    if gone_on_from is not None and folder_of(gone_on_from) == folder.absolute():
        checkpoint.make_last(gone_on_from)
    cut_back(folder, step)
    for listing, listed in ((MANIFEST, shards), (VAL_MANIFEST, val_shards)):
        text = "".join(f"{row}\n" for row in ["path\tsamples\tbytes", *map(_row, listed)])
        (folder / listing).write_bytes(text.encode("utf-8", "surrogateescape"))
    (folder / "args.yaml").write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")
    return folder


def hold(folder: Path, seconds: float = LOCK_SECONDS) -> None:
    """Make this process the only one that writes into a run folder, until it ends. Raises ValueError where another one still
    does after `seconds`."""
    if folder in _held:
        _held.pop(folder).close()
    file = open(folder / LOCK, "a+", encoding="utf-8")  # kept open: closing it gives the lock up
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # POSIX's lock: forked loader workers don't inherit it
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                break  # a file system without locks
        if time.monotonic() > deadline:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise ValueError(f"{folder}: another run trains in it ({holder}): wait for its end, or give another --name")
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[folder] = file


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds a checkpoint to go on from."""
    return any((folder / "checkpoints" / name).exists() for name in (checkpoint.LAST, checkpoint.PREVIOUS))


def folder_of(path: Path) -> Path | None:
    """The run folder that a checkpoint file lies in; None if it lies elsewhere."""
    folder = path.absolute().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "metrics.jsonl").exists() else None


def find_last_run(output: Path, fingerprint: dict[str, Any], model: str | None) -> Path | None:
    """The run folder below `output` with the newest checkpoint whose shards and model (None: any) are these."""
    found = []
    for folder in output.iterdir() if output.is_dir() else ():
        start = _start_line(folder)
        if start.get("fingerprint") == fingerprint and model in (None, start.get("model")) and has_checkpoint(folder):
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


def _row(shard: Shard) -> str:
    path = shard.path.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
    return f"{path}\t{shard.num_samples}\t{shard.num_bytes}"


def check_same_data(saved: dict[str, Any], shards: Sequence[Shard], folder: Path | None) -> None:
    """Raises ValueError where the shards are not those of the checkpoint, of a run in `folder`."""
    try:
        check_fingerprint(saved["stream"]["fingerprint"], shards_fingerprint(shards))
    except ValueError as error:
        raise ValueError(f"--resume: {error}{first_difference(folder, shards) if folder else ''}") from None


def first_difference(folder: Path, shards: Sequence[Shard]) -> str:
    """Which shard differs first from those the run was started on: ". The first ...", or nothing if its list is gone."""
    try:
        rows = (folder / MANIFEST).read_bytes().decode("utf-8", "surrogateescape").split("\n")[1:-1]
    except OSError:
        return ""
    for number, pair in enumerate(itertools.zip_longest(rows, map(_row, shards))):
        old, new = (None if row is None else row.split("\t") for row in pair)
        if old is None or new is None or _unlike(old, new):
            return f". The first shard that differs is number {number}: {_described(old)} then, {_described(new)} now"
    return ""


def _unlike(old: list[str], new: list[str]) -> bool:
    # the folder may have moved as a whole
    return (os.path.basename(old[0]), *old[1:]) != (os.path.basename(new[0]), *new[1:])


def _described(row: list[str] | None) -> str:
    return "none" if row is None else f"{os.path.basename(row[0])} ({row[1]} samples, {row[2]} bytes)"
