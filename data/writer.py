"""Samples become shards: tars whose bytes depend on the samples alone, with an index and a checksum.

in: (key, {field: bytes}) in order, file by file  ->  out: `000.tar`, `000.tar.idx`, and `dataset.json` beside them
Invariant: a shard has its final name only when all of it is on the disk; no clock, user or machine is in its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from .index import write_index

BLOCK = 512
_FLUSH = 4 << 20  # bytes gathered before they are hashed and written: few calls
_LARGEST = 8**11 - 1  # what eleven octal digits hold
_NAME = 100  # bytes of a ustar name field
# All of a ustar header but name, size, checksum and type: mode 0644, user and group 0 without names, time 0.
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2
_TIME = b"00000000000\0"
_AFTER_TYPE = b"\0" * 100 + b"ustar\x0000" + b"\0" * 247  # no link, user, group, device or prefix
_CONSTANT_SUM = sum(_BEFORE_SIZE) + sum(_TIME) + 8 * ord(" ") + sum(_AFTER_TYPE)  # the checksum counts itself as blanks


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What dataset.json says of one shard: file name, samples, size in bytes, sha256 of the file, field names."""

    name: str
    samples: int
    bytes: int
    sha256: str
    fields: tuple[str, ...]


def shard_names(count: int) -> list[str]:
    """`000.tar`, `001.tar`, ...: at least three digits, as many as the last number needs."""
    width = max(3, len(str(count - 1)))
    return [f"{number:0{width}d}.tar" for number in range(count)]


def tar_header(name: str, size: int) -> bytes:
    """The header of one file: 512 bytes, or 512 more for every 512 of a PAX record where the name is too long."""
    raw = name.encode("utf-8", "surrogateescape")
    if size > _LARGEST:
        raise ValueError(f"{name}: {size} bytes are more than a tar member holds (8 GiB): leave it out")
    if len(raw) <= _NAME:
        return _header(raw, size, b"0")
    record = _pax_record(b"path", raw)
    return _header(b"././@PaxHeader", len(record), b"x") + _padded(record) + _header(raw[:_NAME], size, b"0")


def _header(raw: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o\0" % size
    checksum = _CONSTANT_SUM + sum(raw) + sum(digits) + kind[0]
    name = raw.ljust(_NAME, b"\0")
    return b"%b%b%b%b%06o\0 %b%b" % (name, _BEFORE_SIZE, digits, _TIME, checksum, kind, _AFTER_TYPE)


def _pax_record(key: bytes, value: bytes) -> bytes:
    """`<length> key=value\\n`, where the length counts its own digits."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % BLOCK)


class ShardWriter:
    """One shard in the making: `add` samples, then `finish` (all on the disk, no name yet), then `publish`. Hashing and writing, which
    hold no lock of Python's, go on in a thread while the next samples are read.

    The two last steps are apart so that a caller can note the record before the shard appears: whoever finds the shard
    after a crash then finds its record too. As a context manager it publishes at the end, or leaves nothing behind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        folder, name = os.path.split(self.path)
        self._part = os.path.join(folder, f".{name}.{os.getpid()}.part")
        self._file = open(self._part, "wb", buffering=0)
        self._hash = hashlib.sha256()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0  # bytes, those under way included
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None
        self._offsets: list[int] = []
        self._fields: set[str] = set()
        self._last_key = ""
        self.record: ShardRecord | None = None

    def add(self, key: str, fields: Mapping[str, bytes]) -> None:
        """Append one sample. Two neighbours with one key would be read as one sample, so that is refused."""
        if not key or "." in key.rpartition("/")[2] or key == self._last_key or not fields:
            what = "is empty, has a dot, has no fields, or is that of the sample before"
            raise ValueError(f"{self.path}: the key {key!r} {what}: give each sample its own")
        self._offsets.append(self._written + self._pending_bytes)
        pending = self._pending
        for field, data in fields.items():
            header = tar_header(f"{key}.{field}", len(data))
            padding = -len(data) % BLOCK
            pending += (header, data, bytes(padding))
            self._pending_bytes += len(header) + len(data) + padding
        self._fields.update(fields)
        self._last_key = key
        if self._pending_bytes >= _FLUSH:
            self._flush()

    def finish(self) -> ShardRecord:
        """Write the rest and the index, and make sure that the disk has them."""
        self._offsets.append(self._written + self._pending_bytes)
        self._pending.append(bytes(2 * BLOCK))  # the end of an archive
        self._pending_bytes += 2 * BLOCK
        self._flush()
        self._settle()
        self._thread.shutdown()
        os.fsync(self._file.fileno())
        stamp = os.fstat(self._file.fileno()).st_mtime_ns
        self._file.close()
        # Before the shard has its name: a shard that is there after a crash has its index.
        write_index(self.path + ".idx", np.array(self._offsets, "<u8"), stamp)
        fields = tuple(sorted(self._fields))
        name = os.path.basename(self.path)
        self.record = ShardRecord(name, len(self._offsets) - 1, self._written, self._hash.hexdigest(), fields)
        return self.record

    def publish(self) -> None:
        """Give the finished shard its name."""
        assert self.record is not None, "publish() comes after finish()"
        replace_durably(self._part, self.path)

    def discard(self) -> None:
        """Leave no trace of an unfinished shard."""
        self._thread.shutdown()
        self._file.close()
        if os.path.exists(self._part):
            os.unlink(self._part)

    def _flush(self) -> None:
        self._settle()  # one piece at a time is under way: two of _FLUSH are in memory
        self._under_way = self._thread.submit(self._store, self._pending)
        self._written += self._pending_bytes
        self._pending, self._pending_bytes = [], 0

    def _settle(self) -> None:
        """Wait for what is under way; raises what it raised."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _store(self, pieces: list[bytes]) -> None:
        data = b"".join(pieces)
        self._hash.update(data)
        view = memoryview(data)
        while view:  # an unbuffered file may take less than it is given
            view = view[self._file.write(view) :]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif self.record is None:
            self.finish()
            self.publish()


def replace_durably(part: str, path: str) -> None:
    """Rename a file whose bytes are on the disk, and make sure that the new name is there too."""
    os.replace(part, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_dataset_json(
    path: str | os.PathLike[str],
    splits: Mapping[str, Iterable[ShardRecord]],
    classes: Iterable[str],
    arguments: Mapping[str, Any],
    **more: Any,
) -> None:
    """Write the summary of a set of shards, whole or not at all; `more` are further entries of the file."""
    described = {}
    fields: set[str] = set()
    for split, records in splits.items():
        shards = [{"name": r.name, "samples": r.samples, "bytes": r.bytes, "sha256": r.sha256} for r in records]
        fields.update(*(record.fields for record in records))
        totals = {"samples": sum(r.samples for r in records), "bytes": sum(r.bytes for r in records)}
        described[split] = {"shards": shards, **totals}
    content = {
        "version": 1,
        "splits": described,
        "classes": list(classes),
        "fields": sorted(fields),
        "arguments": dict(arguments),
        **more,
    }
    part = f"{os.fspath(path)}.{os.getpid()}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    replace_durably(part, os.fspath(path))
