"""Checkpoints that survive what happens to files.

in: a dict of tensors and plain values  ->  out: last.pt, previous.pt, best.pt; and back
Invariant: at every moment one whole checkpoint lies on the disk under its name. All load with weights_only=True.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
VERSION = 1


def save(folder: Path, checkpoint: dict[str, Any], best: bool = False) -> None:
    """Write last.pt (what it was becomes previous.pt); with `best` also best.pt. Raises OSError, and then nothing has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{LAST}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if (folder / LAST).exists():
            _replace_by_link(folder / LAST, folder / PREVIOUS)
        os.replace(part, folder / LAST)
        if best:
            _replace_by_link(folder / LAST, folder / BEST)
        _sync_folder(folder)
    except OSError as error:
        part.unlink(missing_ok=True)
        reason = f"the checkpoint could not be written ({error.strerror}); the one before it is whole"
        raise OSError(error.errno, reason, str(folder)) from error


def _replace_by_link(source: Path, target: Path) -> None:
    """Make target the same file as source without a moment in which either is missing."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, part)
    os.replace(part, target)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(folder: Path) -> None:
    """Remove what a killed writer left; for one process, before the first save."""
    for part in folder.glob("*.part"):
        part.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read a checkpoint, or the last one of a run folder: (checkpoint, a warning or None).

    A damaged last.pt falls back to previous.pt, and the warning says so. Raises ValueError, one line, where none can be read.
    """
    path = resolve(path)
    damage = _damage(path)
    if damage is None:
        return _read(path), None
    previous = path.with_name(PREVIOUS)
    if path.name == LAST and previous.exists() and _damage(previous) is None:
        return _read(previous), f"{path} is damaged ({damage}): going on from {previous.name}, the one before it"
    raise ValueError(f"{path}: not a whole checkpoint ({damage}); give another file to --resume")


def resolve(path: Path) -> Path:
    """The checkpoint file that a path to a file, a checkpoints folder or a run folder means. Raises ValueError."""
    for candidate in (path, path / LAST, path / "checkpoints" / LAST):
        if candidate.is_file():
            return candidate
        previous = candidate.with_name(PREVIOUS)
        if candidate.name == LAST and previous.is_file():
            return previous
    raise ValueError(f"--resume {path}: there is no checkpoint; give a .pt file, a run folder, or auto")


def _damage(path: Path) -> str | None:
    """What is wrong with the file, by the checksums that torch.save writes; None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None if bad is None else f"checksum of {bad}"


def _read(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types here, all of them about the file
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: torch can't load it with weights_only=True ({reason})") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("version") != VERSION:
        raise ValueError(f"{path}: not a checkpoint of this program's version {VERSION}")
    return checkpoint
