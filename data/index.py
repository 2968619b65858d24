"""Where each sample of a shard starts: `<shard>.tar.idx`.

in: a plain tar on a local disk  ->  out: N+1 little-endian uint64: where every sample's first header is, and where the last sample ends
Invariant: an index that `load_index` names describes the file that is there now; its own mtime, set equal to the shard's, is its stamp.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .cache import cached_path, is_writable
from .errors import ShardError
from .native import gathering
from .tar import Buffer, TarDamage, split_name, walk, walk_raw

MAX_END = 1 << 20  # bytes of zeros at the end; tar writes up to 10,240, and a few tools fill up larger records


class IndexInfo(NamedTuple):
    """`damage`: one line on what of the shard is lost (why, where, how much), None for a whole one; `built`: written just now."""

    index_path: str
    num_samples: int
    damage: str | None
    built: bool


def read_index(path: str) -> np.ndarray:
    """The offsets in `path`, uint64 (N+1,). No memory map: Python's keeps a file descriptor open for each. Raises ValueError, OSError."""
    offsets = np.fromfile(path, dtype="<u8")
    if os.path.getsize(path) != offsets.nbytes or not offsets.size or (np.diff(offsets.view("<i8")) <= 0).any() or offsets[0] >> 63:
        raise ValueError(f"{path}: not an index of a tar")
    return offsets


def load_index(tar_path: str, cut: str = "", name: str = "", rebuild: bool = False) -> IndexInfo:
    """Find, check or build the index of `tar_path`; it lies beside it, or in the user's cache where that place can't be written.

    `cut`: why the bytes end before the shard does (a cut gzip), if they do. `name` is the shard's name in messages.
    Raises ShardError for what is no tar.
    """
    name = name or tar_path
    buf, status = map_tar(tar_path, cut, name)
    with buf:
        beside = tar_path + ".idx"
        index_path = beside if is_writable(os.path.dirname(os.path.abspath(beside))) else ""
        for place in () if rebuild else (beside,) if index_path else (beside, cached_path("index", tar_path, status) + ".idx"):
            checked = _check_index(place, buf, status.st_mtime_ns, cut)
            if checked is not None:
                return IndexInfo(place, *checked, False)
        offsets, damage = _build(buf, cut, name)
        index_path = _write_somewhere(index_path, tar_path, status, offsets, name)
    return IndexInfo(index_path, len(offsets) - 1, damage, True)


def map_tar(tar_path: str, cut: str = "", name: str = "") -> tuple[mmap, os.stat_result]:
    """The bytes of a tar, mapped, and its status. Raises ShardError where there are none."""
    name = name or tar_path
    try:
        with open(tar_path, "rb") as file:
            status = os.fstat(file.fileno())
            if not status.st_size:
                raise ShardError(f"{name}: {cut or 'empty (0 bytes)'}: no tar in it; download or make it again")
            return mmap(file.fileno(), 0, access=ACCESS_READ), status
    except OSError as error:
        raise ShardError(f"{name}: can't be read: {error.strerror}") from None


def build_index(tar_path: str, cut: str = "", name: str = "") -> tuple[np.ndarray, str | None]:
    """Walk a whole tar -> (offsets, damage). `cut` and `name` as in `load_index`. Raises ShardError for what is no tar."""
    name = name or tar_path
    with map_tar(tar_path, cut, name)[0] as buf:
        return _build(buf, cut, name)


def write_index(index_path: str, offsets: np.ndarray, mtime_ns: int) -> None:
    """Write `offsets` under a unique temporary name, stamp it with the shard's mtime and rename it into place.

    Several jobs may do so at once: what they write is the same.
    """
    temporary = os.path.join(os.path.dirname(index_path), f".{os.path.basename(index_path)[-100:]}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(np.asarray(offsets, dtype="<u8").tobytes())
        os.utime(temporary, ns=(mtime_ns, mtime_ns))
        os.replace(temporary, index_path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@dataclass(slots=True)
class _Walked:
    """How far a walk has come."""

    starts: list[int]  # of samples
    prefix: bytes = b"\0"  # what the names of the open sample's members start with: its key and a dot
    position: int = 0  # behind the last member and its padding
    sample_end: int = 0


def _walk_whole(buf: Buffer, walked: _Walked) -> None:
    """In C where that can be: ordinary members there, others here, and more of them the longer none is ordinary. Raises TarDamage."""
    most, fast, more = 1, gathering.is_there(), True
    while more:
        if fast:
            found, num_members, walked.position, walked.prefix = gathering.walk(buf, walked.position, walked.prefix)
            walked.starts += found
            walked.sample_end = walked.position if num_members else walked.sample_end
            most = 1 if num_members > 16 else min(2 * most, 1024)
        more = _walk_slowly(buf, walked, most if fast else None)


def _walk_slowly(buf: Buffer, walked: _Walked, most: int | None) -> bool:
    """Take `most` members at most; whether there is another. Raises TarDamage."""
    starts, prefix, position, sample_end = walked.starts, walked.prefix, walked.position, walked.sample_end
    try:
        for number, (raw_name, offset, data_offset, size, is_file) in enumerate(walk_raw(buf, position)):
            if number == most:
                return True
            if offset != position:
                prefix = b"\0"  # zero blocks: another archive begins, and with it another sample
            position = data_offset + (size + 511 & -512)
            if not is_file:
                continue
            if not raw_name.startswith(prefix) or b"/" in raw_name[len(prefix) :] or prefix.startswith(b"__"):
                parts = split_name(raw_name.decode("utf-8", "surrogateescape"))
                if parts is None:
                    continue
                name_prefix = parts[0].encode("utf-8", "surrogateescape") + b"."
                if name_prefix != prefix:
                    starts.append(offset)
                    prefix = name_prefix
            sample_end = position
        return False
    finally:
        walked.prefix, walked.position, walked.sample_end = prefix, position, sample_end


def _build(buf: Buffer, cut: str, name: str) -> tuple[np.ndarray, str | None]:
    """The offsets of the whole samples in `buf`, and what is lost."""
    walked = _Walked([])
    damage: TarDamage | None = None
    try:
        _walk_whole(buf, walked)
    except TarDamage as found:
        if not walked.position and not found.name and buf[found.offset + 257 : found.offset + 262] != b"ustar":
            raise not_a_tar(name, bytes(buf[:64])) from None
        damage = found
    starts, position, sample_end = walked.starts, walked.position, min(walked.sample_end, len(buf))
    damage = damage or _find_cut(buf, position, cut)
    closed = damage is not None and position < damage.offset  # zero blocks ended the last archive: its last sample is whole
    if damage is not None and starts and not closed and not _is_whole(buf, starts, sample_end, damage.name):
        sample_end = starts.pop()
    return np.array([*starts, sample_end], dtype="<u8"), _say_damage(damage, len(starts), sample_end, len(buf))


def _find_cut(buf: Buffer, position: int, cut: str) -> TarDamage | None:
    """Where bytes are missing though no header says so. `position`: the end of the last member's padding, which no writer leaves out."""
    if cut or position > len(buf) or position % 512:
        return TarDamage(len(buf), cut or "cut in the padding of the last member")
    if len(buf) - position > MAX_END:
        return TarDamage(position, "nothing but zeros, as a download leaves that made room and broke off,")
    return None


def _is_whole(buf: Buffer, starts: list[int], end: int, damaged_name: bytes) -> bool:
    """Whether the last sample before a damage has all its fields.

    It has if the damaged member is known to be another sample's; else if it has every field of the sample before it.
    """
    last = _list_names(buf, starts[-1], end)
    damaged = split_name(damaged_name.decode("utf-8", "surrogateescape"))
    if damaged is not None:
        return damaged[0] != last[0][0]
    before = _list_names(buf, starts[-2], starts[-1]) if len(starts) > 1 else []
    return {field for _, field in before} <= {field for _, field in last}


def _list_names(buf: Buffer, start: int, end: int) -> list[tuple[str, str]]:
    """(key, field) of the members of one sample."""
    return [parts for member in walk(buf, start, end) if member.is_file and (parts := split_name(member.name)) is not None]


def _say_damage(damage: TarDamage | None, num_samples: int, end: int, size: int) -> str | None:
    """One line; the loss is estimated by the mean size of the samples that are there. `end`: of the last of them."""
    if damage is None:
        return None
    samples = f"{num_samples} sample{'' if num_samples == 1 else 's'}"
    num_lost = round((size - end) * num_samples / end) if end else 0
    estimate = f" (about {num_lost:,} sample{'' if num_lost == 1 else 's'})" if num_lost else ""
    return f"{damage.reason} at byte {damage.offset}: {size - end} bytes after its first {samples} are not used{estimate}"


def _check_index(path: str, buf: Buffer, mtime_ns: int, cut: str) -> tuple[int, str | None] | None:
    """(number of samples, damage) if the index at `path` describes `buf`, else None.

    Headers must parse at the first and the last sample's offset, and only zero blocks may follow the last entry. What else may
    follow, a damaged part or trailing directories, is trusted where the stamp says that the index was made from this very file.
    """
    try:
        is_fresh = os.stat(path).st_mtime_ns == mtime_ns
        offsets = read_index(path)
    except (OSError, ValueError):
        return None
    num_samples, end = len(offsets) - 1, int(offsets[-1])
    if end > len(buf) or (not num_samples and end):
        return None
    if not all(_starts_sample(buf, int(offset)) for offset in offsets[:-1][[0, -1] if num_samples else []]):
        return None
    position, follows = end, False  # follows: a member of a sample, after the last
    try:
        for member in walk(buf, end):
            position = member.data_offset + (member.size + 511 & -512)
            follows = follows or (member.is_file and split_name(member.name) is not None)
            if not is_fresh:
                return None
        damage = _find_cut(buf, position, cut)
    except TarDamage as found:
        damage = found
    if (damage is None and follows) or (damage is not None and not is_fresh):
        return None
    return num_samples, _say_damage(damage, num_samples, end, len(buf))


def _starts_sample(buf: Buffer, offset: int) -> bool:
    try:
        member = next(walk(buf, offset))
    except (TarDamage, StopIteration):
        return False
    return member.offset == offset and member.is_file and split_name(member.name) is not None


def _write_somewhere(beside: str, tar_path: str, status: os.stat_result, offsets: np.ndarray, name: str) -> str:
    """Write the index to `beside`, or into the cache where that is empty or fails; the path it got."""
    if beside:
        try:
            write_index(beside, offsets, status.st_mtime_ns)
            return beside
        except OSError:
            pass  # a full or read-only file system: the cache may be on another
    cached = cached_path("index", tar_path, status) + ".idx"
    try:
        write_index(cached, offsets, status.st_mtime_ns)
    except OSError as error:
        raise ShardError(
            f"{name}: no place for its index: {cached}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return cached


def not_a_tar(name: str, start: bytes) -> ShardError:
    lower = start.lstrip().lower()
    if lower.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ShardError(f"{name}: a web page, not a tar: its download failed; download it again")
    if lower.startswith(b"version https://git-lfs"):
        return ShardError(f"{name}: a Git LFS pointer, not a tar: fetch the file itself with git lfs pull")
    if start.startswith(b"PK\x03\x04"):
        return ShardError(f"{name}: a zip, not a tar: make shards of it with scripts/make_shards.py")
    return ShardError(f"{name}: not a tar (it starts with {start[:16]!r})")
