"""Where each sample of a shard starts: `<shard>.tar.idx`.

in: a plain tar on a local disk  ->  out: N+1 little-endian uint64: where every sample's first header is, and where the last sample ends
Invariant: an index that `load_index` returns describes the file that is there now; its own mtime, set equal to the shard's, is its stamp.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from errno import EACCES
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .errors import ShardError
from .tar import Buffer, TarDamage, split_name, walk, walk_raw


class IndexInfo(NamedTuple):
    """`damage`: one line on what of the shard is lost (reason, offset, bytes), None for a whole shard; `built`: it was written just now."""

    index_path: str
    num_samples: int
    damage: str | None
    built: bool


def read_index(path: str) -> np.ndarray:
    """The offsets in `path`, uint64 (N+1,). Not a memory map: Python's keeps a file descriptor open for each. Raises ValueError."""
    offsets = np.fromfile(path, dtype="<u8")
    if os.path.getsize(path) != offsets.nbytes or not offsets.size or (np.diff(offsets.view(np.int64)) <= 0).any():
        raise ValueError(f"{path}: not an index")
    return offsets


def load_index(tar_path: str, cut: str = "", name: str = "", rebuild: bool = False) -> IndexInfo:
    """Find, check or build the index of `tar_path`; beside it, or in the user's cache where that place can't be written.

    `cut`: why the bytes end before the shard does (a cut gzip), if they do. `name` is the shard's name in messages.
    Raises ShardError for what is no tar.
    """
    name = name or tar_path
    try:
        with open(tar_path, "rb") as file:
            status = os.fstat(file.fileno())
            if not status.st_size:
                raise ShardError(f"{name}: empty (0 bytes): download or make it again")
            buf = mmap(file.fileno(), 0, access=ACCESS_READ)
    except IsADirectoryError:
        raise ShardError(f"{name}: a directory, not a tar") from None
    except OSError as error:
        raise ShardError(f"{name}: can't be read: {error.strerror}") from None
    with buf:
        places = (tar_path + ".idx", _cached_index_path(tar_path, status))
        for place in () if rebuild else places:
            offsets, damage = _check_index(place, buf, status.st_mtime_ns, cut)
            if offsets is not None:
                return IndexInfo(place, len(offsets) - 1, damage, False)
        offsets, damage = _build(buf, cut, name)
    return IndexInfo(_write_somewhere(places, offsets, status.st_mtime_ns, name), len(offsets) - 1, damage, True)


def build_index(tar_path: str) -> tuple[np.ndarray, str | None]:
    """Walk a whole tar -> (offsets, damage)."""
    with open(tar_path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as buf:
        return _build(buf, "", tar_path)


def write_index(index_path: str, offsets: np.ndarray, mtime_ns: int) -> None:
    """Write `offsets` under a unique temporary name, stamp it with the shard's mtime and rename it into place."""
    temporary = os.path.join(os.path.dirname(index_path), f".{os.path.basename(index_path)}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(np.asarray(offsets, dtype="<u8").tobytes())
        os.utime(temporary, ns=(mtime_ns, mtime_ns))
        os.replace(temporary, index_path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _build(buf: Buffer, cut: str, name: str) -> tuple[np.ndarray, str | None]:
    """Offsets of the whole samples in `buf`, and what is lost."""
    starts: list[int] = []
    prefix = b"\0"  # of the names that go on with the open sample: its key and a dot
    position = sample_end = 0
    damage: TarDamage | None = None
    try:
        for raw_name, offset, data_offset, size, is_file in walk_raw(buf):
            if offset != position:
                prefix = b"\0"  # zero blocks: another archive begins, and with it another sample
            position = data_offset + (size + 511 & -512)
            if not is_file:
                continue
            if not raw_name.startswith(prefix) or b"/" in raw_name[len(prefix) :] or prefix.startswith(b"__"):
                parts = split_name(raw_name.decode("utf-8", "surrogateescape"))
                if parts is None:
                    continue
                key = parts[0].encode("utf-8", "surrogateescape") + b"."
                if key != prefix:
                    starts.append(offset)
                    prefix = key
            sample_end = position
    except TarDamage as found:
        if not position and buf[found.offset + 257 : found.offset + 262] != b"ustar":
            raise _not_a_tar(name, bytes(buf[:BLOCK_SHOWN])) from None
        damage = found
    if damage is None and cut and position >= len(buf):
        damage = TarDamage(len(buf), cut)
    sample_end = min(sample_end, len(buf))
    if damage is not None and starts and prefix != b"\0" and not _is_whole(buf, starts, sample_end, damage.name):
        sample_end = starts.pop()
    if damage is None and cut:
        damage = TarDamage(len(buf), cut)
    offsets = np.array([*starts, sample_end], dtype="<u8")
    return offsets, _say_damage(damage, len(buf) - sample_end)


BLOCK_SHOWN = 64


def _is_whole(buf: Buffer, starts: list[int], end: int, next_name: bytes) -> bool:
    """Whether the last sample before a damage has all its fields.

    It has if the damaged member is known to be another sample's; else if it has all the fields of the sample before it.
    """
    next_parts = split_name(next_name.decode("utf-8", "surrogateescape"))
    if next_parts is not None:
        last = _sample_parts(buf, starts[-1], end)
        return next_parts[0] != last[0][0]
    if len(starts) < 2:
        return True
    before = {field for _, field in _sample_parts(buf, starts[-2], starts[-1])}
    return before <= {field for _, field in _sample_parts(buf, starts[-1], end)}


def _sample_parts(buf: Buffer, start: int, end: int) -> list[tuple[str, str]]:
    return [p for m in walk(buf, start, end) if m.is_file and (p := split_name(m.name))]


def _say_damage(damage: TarDamage | None, num_lost: int) -> str | None:
    return None if damage is None else f"{damage}; the last {num_lost} bytes are not used"


def _check_index(path: str, buf: Buffer, mtime_ns: int, cut: str) -> tuple[np.ndarray | None, str | None]:
    """(offsets, damage) if the index at `path` describes `buf`, else (None, None)."""
    try:
        fresh = os.stat(path).st_mtime_ns == mtime_ns
        offsets = read_index(path)
    except (OSError, ValueError):
        return None, None
    end = int(offsets[-1])
    if end > len(buf):
        return None, None
    if not fresh and not all(_starts_sample(buf, int(offset)) for offset in offsets[[0, -2]][: len(offsets) - 1]):
        return None, None
    try:
        tail = list(walk(buf, end))
    except TarDamage as damage:
        return (offsets, _say_damage(damage, len(buf) - end)) if fresh else (None, None)
    if tail and (not fresh or any(m.is_file and split_name(m.name) for m in tail)) and not cut:
        return None, None
    return offsets, _say_damage(TarDamage(len(buf), cut), len(buf) - end) if cut else None


def _starts_sample(buf: Buffer, offset: int) -> bool:
    try:
        member = next(walk(buf, offset))
    except (TarDamage, StopIteration):
        return False
    return member.offset == offset and member.is_file and split_name(member.name) is not None


def _cached_index_path(tar_path: str, status: os.stat_result) -> str:
    from .store import cache_dir  # store imports this module

    stamp = f"{os.path.abspath(tar_path)}\0{status.st_size}\0{status.st_mtime_ns}"
    digest = hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(cache_dir(), "index", f"{os.path.basename(tar_path)}-{digest}.idx")


def _write_somewhere(places: tuple[str, str], offsets: np.ndarray, mtime_ns: int, name: str) -> str:
    """Write the index to the first of `places` that takes it."""
    for place in places:
        try:
            folder = os.path.dirname(place)
            os.makedirs(folder, exist_ok=True)
            if not os.stat(folder).st_mode & 0o222:  # marked read-only: root could write there, and must not
                raise PermissionError(EACCES, os.strerror(EACCES))
            write_index(place, offsets, mtime_ns)
            return place
        except OSError as error:
            reason = f"{place}: {error.strerror}"
    raise ShardError(
        f"{name}: no place to write its index: {reason}; set XDG_CACHE_HOME to a folder that can be written"
    )


def _not_a_tar(name: str, start: bytes) -> ShardError:
    lower = start.lstrip().lower()
    if lower.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ShardError(f"{name}: a web page, not a tar: the download failed; download it again")
    if lower.startswith(b"version https://git-lfs"):
        return ShardError(f"{name}: a Git LFS pointer, not a tar: run git lfs pull")
    return ShardError(f"{name}: not a tar (it starts with {start[:16]!r})")
