"""Bytes of local shards: plain tars are read in place, gzip content is decompressed once into the user's cache.

in: a shard's path, or (Shard, sample number)  ->  out: the path of a plain tar, or the bytes of one sample
Invariant: a file that is cut meanwhile is an error that names it, not the end of the process; no more than `max_open` files are open at
a time.
"""

from __future__ import annotations

import os
import stat
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from .cache import cached_path
from .errors import ShardError, StaleIndexError
from .index import read_index
from .native import gathering
from .remote_files import RemoteFiles
from .tar import BLOCK, is_header
from .urls import is_url, redact

if TYPE_CHECKING:
    from .shards import Shard

GZIP = b"\x1f\x8b\x08"
OTHER_COMPRESSION = {  # first bytes -> (what it is, how to undo it)
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
}
CUT_SUFFIX = ".cut.tar"
_KEPT = 64 << 20  # bytes of a batch that `ShardFiles` keeps memory for


def local_tar(path: str) -> str:
    """The path of the plain tar with the content of the shard at `path`: itself, or a decompressed copy in the cache."""
    if is_url(path):
        raise ShardError(f"{redact(path)}: this reads local files only: copy it to a local disk first")
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):  # opening it would wait for a writer
            raise ShardError(f"{path}: can't be read: not a regular file; copy its content to one")
        with open(path, "rb") as file:
            start = file.read(512)
            if start.startswith(GZIP) and not is_header(start):
                return _decompressed(path, file)
    except OSError as error:
        raise ShardError(f"{path}: can't be read: {error.strerror}") from None
    for magic, (kind, command) in OTHER_COMPRESSION.items():
        if start.startswith(magic) and not is_header(start):
            raise ShardError(f"{path}: compressed with {kind}, which has no random access: decompress it first ({command})")
    return path


def cut_reason(tar_path: str) -> str:
    """Why a tar that `local_tar` returned ends before its shard does; empty if it doesn't."""
    return "the gzip stream is cut or broken" if tar_path.endswith(CUT_SUFFIX) else ""


def _decompressed(path: str, file: BinaryIO) -> str:
    """The cached copy of a gzip shard, made if missing; one of a cut shard is named so."""
    stem = cached_path("tar", path, os.fstat(file.fileno()))
    for known in (stem + ".tar", stem + CUT_SUFFIX):
        if os.path.exists(known):
            return known
    temporary = f"{stem}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as out:
            is_cut = _decompress(file, out)
        final = stem + (CUT_SUFFIX if is_cut else ".tar")
        os.replace(temporary, final)
    except OSError as error:
        raise ShardError(
            f"{path}: can't be decompressed into {os.path.dirname(stem)}: {error.strerror}; set XDG_CACHE_HOME to a folder with room"
        ) from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return final


def _decompress(file: BinaryIO, out: BinaryIO) -> bool:
    """Write the members of a gzip file one after the other; True if it is cut or broken (what came out before stays)."""
    file.seek(0)
    decoder = zlib.decompressobj(31)
    is_open = False  # inside a member
    while piece := file.read(1 << 20):
        while piece:
            if not is_open:
                piece = piece.lstrip(b"\0")  # zeros may pad the space between and after members
                if not piece:
                    break
            is_open = True
            before = decoder.copy()
            try:
                out.write(decoder.decompress(piece))
            except zlib.error:
                _salvage(before, piece, out)
                return True
            piece = decoder.unused_data
            if decoder.eof:
                decoder, is_open = zlib.decompressobj(31), False
    return is_open


def _salvage(decoder: zlib._Decompress, piece: bytes, out: BinaryIO) -> None:
    """What comes out of `piece` before its error: zlib gives nothing of a call that fails, so byte by byte."""
    try:
        for i in range(len(piece)):
            out.write(decoder.decompress(piece[i : i + 1]))
    except zlib.error:
        return


class ShardFiles:
    """Reads samples by number, keeping the last `max_open` shards open. One per worker: it is not for several threads; it pickles."""

    def __init__(self, max_open: int = 64) -> None:
        self._max_open = max_open
        self._open: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()
        self._rows: dict[str, tuple[int, ...]] = {}  # of open shards, as `gathering.find_places` takes them
        self._buffer = np.empty(0, np.uint8)  # of `read_many`: new memory would be given page by page, for each batch again
        self.remote = RemoteFiles()

    def read(self, shard: Shard, i: int) -> tuple[bytes, int]:
        """(the bytes of sample `i`, their offset in the tar), as `parse_sample` takes them."""
        if shard.remote is not None:
            return self.remote.read(shard, i)
        fd, offsets = self._opened(shard)
        if not 0 <= i < len(offsets) - 1:
            raise _outside(shard, len(offsets) - 1, i)
        start, end = int(offsets[i]), int(offsets[i + 1])
        data = b""
        while len(data) < end - start:  # Linux reads at most 2 GiB at once
            try:
                more = os.pread(fd, end - start - len(data), start + len(data))
            except OSError as error:  # a disk or a network folder that fails
                raise _unreadable(shard, start + len(data), error.strerror) from None
            if not more:
                raise StaleIndexError(_ends_early(shard, start + len(data), i))
            data += more
        return data, start

    def read_many(
        self, shards: Sequence[Shard], shard: np.ndarray, index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Samples `index` of the shards numbered `shard`, int64 (n,) each, in the order of the disk, neighbours with one read.

        (data, place, size, offset): sample i is data[place[i] : place[i] + size[i]] and stands at `offset` in its tar; places are multiples
        of 512, `data` is as long as whole blocks, and good until the next call.
        """
        if len(self._buffer) > _KEPT:
            self._buffer = np.empty(0, np.uint8)
        order = np.lexsort((index, shard))
        runs = np.split(order, np.flatnonzero(np.diff(shard[order])) + 1)
        numbers = [int(shard[run[0]]) for run in runs]
        place, size, offset = np.empty((3, len(order)), np.int64)
        used = 0
        local = gathering.is_there() and all(shards[number].remote is None for number in numbers)
        for first in range(0, len(runs), self._max_open):  # as many shards as may be open
            here = runs[first : first + self._max_open]
            those = [shards[number] for number in numbers[first : first + self._max_open]]
            if local:
                used = self._read_fast(those, np.concatenate(here), shard, index, used, (offset, size, place))
                continue
            for where, run in zip(those, here, strict=True):
                size[run] = self._sizes(where, index[run])
                padded = -(-size[run] // BLOCK) * BLOCK
                place[run] = used + np.cumsum(padded) - padded
                used += int(padded.sum())
                self._reserve(used)
                offset[run] = self._read_into(self._buffer.data, place[run], where, index[run])
        return self._buffer[:used], place, size, offset

    def _read_fast(
        self, shards: Sequence[Shard], order: np.ndarray, shard: np.ndarray, index: np.ndarray, used: int, out: tuple[np.ndarray, ...]
    ) -> int:
        """The same in C, for local shards, `order` being that of the disk; returns how much of the buffer is used."""
        opened = [self._opened(one) for one in shards]
        rows = [self._rows.get(one.tar_path) or self._map(one, *entry) for one, entry in zip(shards, opened, strict=True)]
        table = np.array(rows, np.int64)
        start, size, place = out
        end = gathering.find_places(order, shard, index, table, used, start, size, place)
        if end < 0:
            which = np.unique(shard[order]).tolist().index(shard[-1 - end])
            raise _outside(shards[which], len(opened[which][1]) - 1, int(index[-1 - end]))
        self._reserve(end)
        failed, error = gathering.read(order, shard, table, start, size, place, self._buffer)
        if failed >= 0:
            which = np.unique(shard[order]).tolist().index(shard[failed])
            if error:
                raise _unreadable(shards[which], int(start[failed]), os.strerror(error))
            raise StaleIndexError(_ends_early(shards[which], os.fstat(opened[which][0]).st_size, int(index[failed])))
        return end

    def _map(self, shard: Shard, fd: int, offsets: np.ndarray) -> tuple[int, ...]:
        length = os.fstat(fd).st_size
        row = (offsets.ctypes.data, len(offsets) - 1, fd, gathering.map_file(fd, length), length)
        self._rows[shard.tar_path] = row
        return row

    def _drop(self) -> None:
        """Close the shard that was open longest."""
        path, (fd, _) = self._open.popitem(last=False)
        os.close(fd)
        if row := self._rows.pop(path, None):
            gathering.unmap(*row[3:])

    def _reserve(self, size: int) -> None:
        """Make the buffer at least so long; what is in it stays."""
        if size > len(self._buffer):
            larger = np.empty(size + size // 4 + -(size + size // 4) % BLOCK, np.uint8)
            larger[: len(self._buffer)] = self._buffer
            self._buffer = larger

    def _read_into(self, buf: memoryview, place: np.ndarray, shard: Shard, index: np.ndarray) -> np.ndarray:
        """Put the samples `index` (int64 (n,), rising) at `place` (n,) of `buf`; their offsets in the tar."""
        if shard.remote is not None:
            return self.remote.read_into(buf, place, shard, index)
        fd, offsets = self._opened(shard)
        start = offsets[index].astype(np.int64)
        end = offsets[index + 1].astype(np.int64)
        first = np.flatnonzero(np.r_[True, (start[1:] != end[:-1]) | (place[1:] - place[:-1] != end[:-1] - start[:-1])])
        last = np.r_[first[1:], len(index)] - 1
        for a, at, stop in zip(place[first].tolist(), start[first].tolist(), end[last].tolist(), strict=True):
            while at < stop:  # Linux reads at most 2 GiB at once
                try:
                    got = os.preadv(fd, [buf[a : a + stop - at]], at)
                except OSError as error:
                    raise _unreadable(shard, at, error.strerror) from None
                if not got:
                    raise StaleIndexError(_ends_early(shard, os.fstat(fd).st_size, int(index[np.searchsorted(end, at, side="right")])))
                a, at = a + got, at + got
        return start

    def _sizes(self, shard: Shard, index: np.ndarray) -> np.ndarray:
        """Bytes of the samples `index` (int64 (n,), rising), int64 (n,)."""
        _, offsets = self._opened(shard)
        if not 0 <= index[0] <= index[-1] < len(offsets) - 1:
            raise _outside(shard, len(offsets) - 1, int(index[0] if index[0] < 0 else index[-1]))
        return (offsets[index + 1] - offsets[index]).astype(np.int64)

    def close(self) -> None:
        self.remote.close()
        while self._open:
            self._drop()

    def _opened(self, shard: Shard) -> tuple[int, np.ndarray]:
        if shard.remote is not None:
            return self.remote.opened(shard)
        entry = self._open.get(shard.tar_path)
        if entry is not None:
            self._open.move_to_end(shard.tar_path)
            return entry
        try:
            offsets = read_index(shard.index_path)
            fd = os.open(shard.tar_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ShardError(f"{error.filename}: can't be read any more: {error.strerror}") from None
        except ValueError as error:
            raise StaleIndexError(f"{error}; delete it or run scripts/index_shards.py") from None
        self._open[shard.tar_path] = fd, offsets
        if len(self._open) > self._max_open:
            self._drop()
        return fd, offsets

    def __reduce__(self) -> tuple[type[ShardFiles], tuple[int]]:
        return ShardFiles, (self._max_open,)

    def __del__(self) -> None:
        self.close()


def _unreadable(shard: Shard, position: int, why: str | None) -> ShardError:
    return ShardError(f"{shard.path}: can't be read at byte {position}: {why}")


def _outside(shard: Shard, num_samples: int, i: int) -> StaleIndexError:
    return StaleIndexError(f"{shard.name}: its index changed under the run ({num_samples} samples, sample {i} asked for)")


def _ends_early(shard: Shard, position: int, i: int) -> str:
    return (
        f"{shard.name}: its index does not fit it: the file ends at byte {position}, before sample {i} does; "
        "delete the .idx file or run scripts/index_shards.py"
    )
