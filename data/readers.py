"""The bytes of one picture, from a folder, a tar or a zip.

in: an `Entry` that says where the picture lies  ->  out: its bytes
Invariant: one read per picture; readers pickle, and files stay open per process only. What can't be read raises DataError or
OSError, and only that picture is lost.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import DataError


class Entry(NamedTuple):
    """One picture: its name, label and split ("" without splits), size in bytes (-1 unknown), and where it lies."""

    name: str
    label: str
    split: str
    size: int
    where: Any


class FolderReader(NamedTuple):
    """Reads files of a folder; `where` is a path in it (or an absolute one, from a table)."""

    root: str

    def read(self, entry: Entry) -> bytes:
        with open(os.path.join(self.root, entry.where), "rb", buffering=0) as file:
            return file.read()


class TarReader(NamedTuple):
    """Reads members of a plain tar; `where` is the offset of the data."""

    path: str

    def read(self, entry: Entry) -> bytes:
        return _read_at(self.path, entry.where, entry.size)


class ZipReader(NamedTuple):
    """Reads members of a zip without its directory; `where` is (header offset, stored bytes, method, crc)."""

    path: str

    def read(self, entry: Entry) -> bytes:
        offset, stored, method, crc = entry.where
        header = _read_at(self.path, offset, 30)
        if header[:4] != b"PK\x03\x04":
            raise DataError("the zip has no header where its directory says")
        name, extra = struct.unpack_from("<HH", header, 26)
        data = _read_at(self.path, offset + 30 + name + extra, stored)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompress(data, -15, entry.size)
            except zlib.error as error:
                raise DataError(f"damaged in the zip: {error}") from error
        if len(data) != entry.size or zlib.crc32(data) != crc:
            raise DataError("damaged in the zip: wrong checksum")
        return data


@lru_cache(maxsize=8)
def _open_once(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def _read_at(path: str, offset: int, size: int) -> bytes:
    data = os.pread(_open_once(path), size, offset)
    if len(data) != size:  # cut since it was listed, or more than the system reads at once
        raise DataError(f"only {len(data)} of {size} bytes at offset {offset} of {os.path.basename(path)}")
    return data
