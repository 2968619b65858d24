"""Checkpoints that survive what happens to files.

in: a dict of tensors and plain values  ->  out: last.pt, previous.pt, best.pt, step-N.pt; and back
Invariant: at every moment one whole checkpoint lies on the disk under its name. All load with weights_only=True.
"""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
VERSION = 1
KEYS = frozenset({"version", "model", "optimizer", "stream", "progress", "epoch", "world_size", "num_threads", "class_names", "flags"})
ADDED = frozenset({"ema", "scaler"})  # keys that checkpoints of older versions of this program lack

INNER = (  # what a resume, an evaluation or predict.py reads of these
    "stream.version", "stream.seed", "stream.samples_seen", "stream.shuffle", "stream.shuffle_block", "stream.lanes",
    "stream.fingerprint.shards", "stream.fingerprint.samples", "stream.fingerprint.bytes", "stream.fingerprint.hash",
    "progress.step", "progress.bad", "progress.best", "progress.seconds", "progress.waited", "progress.epoch", "progress.sums",
    "progress.sketch", "flags.model", "flags.num_classes", "flags.img_size", "flags.task", "flags.opt",
)  # fmt: skip


class _File(io.BufferedWriter):
    """A file that remembers its write error: torch reports a full disk as an assertion of its own, which hides the reason."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def save(folder: Path, checkpoint: dict[str, Any], best: bool = False, keep: int = 0) -> None:
    """Write last.pt (what it was becomes previous.pt); with `best` also best.pt. Raises OSError, and then nothing has changed.

    The newest `keep` are also there as step-N.pt, N being their step.
    """
    assert checkpoint.keys() - ADDED == KEYS, sorted((checkpoint.keys() - ADDED) ^ KEYS)
    part = folder / f"{LAST}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(part, checkpoint)
        if (folder / LAST).exists():
            _replace_by_link(folder / LAST, folder / PREVIOUS)
        os.replace(part, folder / LAST)
        if best:
            _replace_by_link(folder / LAST, folder / BEST)
        if keep:
            _replace_by_link(folder / LAST, folder / f"step-{checkpoint['progress']['step']:08d}.pt")
            for old in sorted(folder.glob("step-*.pt"))[:-keep]:
                old.unlink()
        _sync_folder(folder)
    except OSError as error:
        sweep(folder)
        reason = f"no checkpoint could be written ({error.strerror}); the one before it is whole: make room, then go on with --resume auto"
        raise OSError(error.errno, reason, str(folder)) from error


def _write(path: Path, checkpoint: dict[str, Any]) -> None:
    with _File(open(path, "wb", buffering=0)) as file:
        try:
            torch.save(checkpoint, cast(Any, file))
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise
        file.flush()
        os.fsync(file.fileno())


def _replace_by_link(source: Path, target: Path) -> None:
    """Make target the same file as source without a moment in which either is missing."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, part)
    os.replace(part, target)
    part.unlink(missing_ok=True)  # a rename between two names of one file leaves both


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(folder: Path) -> None:
    """Remove what a killed or failed writer left; for one process, while none writes."""
    for part in folder.glob("*.part"):
        part.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Any], Path, str | None]:
    """Read a checkpoint, or the last one of a run folder: (checkpoint, the file it is from, a warning or None).

    A damaged last.pt falls back to previous.pt, and the warning says so. Raises ValueError, one line, where none can be read.
    """
    path = resolve(path)
    try:
        return read(path), path, None
    except Damaged as error:
        previous = path.with_name(PREVIOUS)
        if path.name != LAST:
            raise
        try:
            older = read(previous)
        except ValueError:
            raise error from None
        return older, previous, f"{path} is damaged ({error.reason}): going on from {previous.name}, the one before it"


def read(path: Path) -> dict[str, Any]:
    """The checkpoint in a file, on the CPU. Raises ValueError, one line, for a file that is none of ours or not whole."""
    damage = _damage(path)
    if damage is not None:
        raise Damaged(path, damage)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types here, all of them about the file
        raise Damaged(path, f"torch can't load it with weights_only=True: {_one_line(error)[:200]}") from None
    if not isinstance(checkpoint, dict) or not KEYS <= checkpoint.keys() or not isinstance(checkpoint["model"], dict):
        raise ValueError(f"--resume {path}: not a checkpoint of a run, which holds {', '.join(sorted(KEYS))}; give another file")
    if checkpoint["version"] != VERSION:
        raise ValueError(f"--resume {path}: its version is {checkpoint['version']}, and this program reads version {VERSION}")
    for keys in INNER:
        value = checkpoint
        for key in keys.split("."):
            if not isinstance(value, dict) or key not in value:
                raise ValueError(f"--resume {path}: not a checkpoint of a run: it holds no {keys}; give another file")
            value = value[key]
    return checkpoint


def check_weights(path: Path, weights: dict[str, Any], model: nn.Module) -> None:
    """Raises ValueError, one line, where a checkpoint's weights are not those of the model (which may be on the meta device)."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__ for name, value in weights.items()}
    for name in [*wanted, *found]:
        now, then = wanted.get(name, "none"), found.get(name, "none")
        if now != then:
            raise ValueError(f"--resume {path}: its weights are another model's: {name} is {then} there, {now} in the model; give another")


class Damaged(ValueError):
    """A checkpoint file that can't be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"--resume {path}: not a whole checkpoint ({reason}); give another file")
        self.reason = reason


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def make_last(path: Path) -> None:
    """Make the checkpoint that a run goes on from its last one: what is last.pt now may be damaged, or of a later step."""
    if path.name != LAST:
        _replace_by_link(path, path.with_name(LAST))


def resolve(path: Path) -> Path:
    """The checkpoint file that a path to a file, a checkpoints folder or a run folder means. Raises ValueError."""
    for candidate in (path, path / LAST, path / "checkpoints" / LAST):
        if candidate.is_file():
            return candidate
        if candidate.name == LAST and candidate.is_dir():
            raise ValueError(f"--resume {candidate}: a folder, not a checkpoint: move it away, then resume again")
        previous = candidate.with_name(PREVIOUS)
        if candidate.name == LAST and previous.is_file():
            return previous
    raise ValueError(f"--resume {path}: there is no checkpoint; give a .pt file, a run folder, or auto")


def _damage(path: Path) -> str | None:
    """What is wrong with the file, by the checksums that torch.save writes; None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # of a damaged directory zipfile makes errors of many types
        return _one_line(error)
    return None if bad is None else f"the checksum of {bad} is wrong"
