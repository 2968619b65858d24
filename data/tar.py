"""Tar bytes -> members -> samples; the only tar parser here.

in: any buffer that holds (part of) a tar  ->  out: `Member`s in order, or one sample as (key, {field: bytes})
Invariant: every header's checksum is verified, so what is yielded is what the tar says; the first header that is cut or broken
ends the walk with `TarDamage`. Names in a tar are never used as paths.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap
from typing import NamedTuple
from zlib import adler32

from .errors import DataError, StaleIndexError

BLOCK = 512
SPARSE = "a sparse file (tar --sparse), which can't be read,"

Buffer = bytes | bytearray | memoryview | mmap
RawMember = tuple[bytes, int, int, int, bool]  # Member's fields, the name still bytes


class Member(NamedTuple):
    """One entry of a tar; positions are in the walked buffer. (A NamedTuple because a frozen dataclass is 4 times slower to make.)"""

    name: str  # utf-8, other bytes as surrogates
    offset: int  # of the first header that belongs to it: its PAX or long-name header where it has one
    data_offset: int
    size: int  # bytes of data, without padding; 0 for directories, links, devices
    is_file: bool


class TarDamage(Exception):
    """A tar is cut or broken at `offset` (in the file); `name` is the member whose data is cut, empty where no header could be read."""

    def __init__(self, offset: int, reason: str, name: bytes = b"") -> None:
        super().__init__(offset, reason, name)
        self.offset = offset
        self.reason = reason
        self.name = name

    def __str__(self) -> str:
        return f"{self.reason} at byte {self.offset}"


def walk(buf: Buffer, start: int = 0, end: int | None = None, base: int = 0) -> Iterator[Member]:
    """Every member of `buf[start:end]`, passing over the zero blocks between joined archives and at the end.

    Positions in the members are positions in `buf`; `base`, where `buf` begins in its file, is added to a `TarDamage`'s offset only.
    """
    for name, offset, data_offset, size, is_file in walk_raw(buf, start, end, base):
        yield Member(name.decode("utf-8", "surrogateescape"), offset, data_offset, size, is_file)


def walk_raw(buf: Buffer, start: int = 0, end: int | None = None, base: int = 0) -> Iterator[RawMember]:
    """`walk` for the hot loops: plain tuples, names as bytes.

    The loop body is what an ordinary file costs; whatever is not one (`_read_member`) may take longer. adler32's low half is
    1 + the sum of the bytes modulo 65521, and so verifies a header's checksum twenty times faster than `sum`.
    """
    end = len(buf) if end is None else end
    first = pos = start  # first: the member's first header; pos: the header to read next
    expected = _ADLER_OF_CHECKSUM.get
    while pos < end:
        head = bytes(buf[pos : pos + BLOCK])
        data = pos + BLOCK
        if (
            data <= end
            and (head[156] == 48 or head[156] == 120)  # "0", a file, or "x", a PAX header
            and expected(head[148:156]) == adler32(head) & 0xFFFF
            and not head[345]  # no prefix
            and head[135] <= 32  # the size field is 11 digits and a terminator
        ):
            try:
                size = int(head[124:135], 8)
            except ValueError:
                size = -1
            if 0 <= size <= end - data:
                stop = data + (size + 511 & -512)
                if head[156] == 48:
                    cut = head.find(0, 0, 100)
                    yield head[:cut] if cut >= 0 else head[:100], first, data, size, True
                    first = pos = stop
                    continue
                if not _changes_member(bytes(buf[data : data + size])):
                    pos = stop
                    continue
        if first == pos and not head[0] and not head.strip(b"\0"):
            first = pos = _skip_zeros(buf, pos, end)
            continue
        member = _read_member(buf, first, end, base)
        yield member
        first = pos = member[2] + (member[3] + 511 & -512)
    if first < end and first != pos:
        _read_member(buf, first, end, base)  # raises: nothing follows an extended header


def split_name(name: str) -> tuple[str, str] | None:
    """A member's name -> (key, field), or None for one that belongs to no sample.

    The key is the path up to the first dot of its last component, the field is the rest, lower-cased (as webdataset has it).
    No sample: no dot, hidden and macOS side files, and webdataset's `__meta__` entries.
    """
    slash = name.rfind("/")
    dot = name.find(".", slash + 1)
    if dot <= slash + 1:
        return None
    if "__" in name:
        first = name.partition("/")[0]
        if first.startswith("__") and first.endswith("__") and len(first) >= 4:
            return None
        if "__MACOSX" in name[: slash + 1].split("/"):
            return None
    return name[:dot], name[dot + 1 :].lower()


def is_header(block: bytes) -> bool:
    """Whether 512 bytes are a tar header whose checksum is right."""
    try:
        return bool(_read_header(block, 0))
    except TarDamage:
        return False


def parse_sample(buf: Buffer, offset: int, shard_name: str) -> tuple[str, dict[str, bytes]]:
    """The bytes of one sample, as the index cuts them -> (key, {field: bytes}). Raises as `locate_fields` does."""
    key, places = locate_fields(buf, offset, shard_name)
    return key, {field: bytes(buf[start : start + size]) for field, (start, size) in places.items()}


def locate_fields(buf: Buffer, offset: int, shard_name: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The bytes of one sample, as the index cuts them -> (key, {field: (start, size) in them}).

    `offset` (of `buf` in the shard) and `shard_name` are for messages. A field that stands there twice raises `DataError` with its
    `key`; bytes that are not exactly one sample raise `StaleIndexError`.
    """
    sample_key = ""
    fields: dict[str, tuple[int, int]] = {}
    doubled = ""
    try:
        for name, start, data_offset, size, is_file in walk(buf, base=offset):
            parts = split_name(name) if is_file else None
            if not fields and (parts is None or start != 0):
                raise _stale(shard_name, offset, "no sample starts there")
            if parts is None:
                continue
            key, field = parts
            if fields and key != sample_key:
                raise _stale(shard_name, offset, f"it holds {sample_key!r} and {key!r}")
            doubled = doubled or (field if field in fields else "")
            sample_key = key
            fields[field] = data_offset, size
    except TarDamage as damage:
        raise _stale(shard_name, offset, str(damage)) from None
    if not fields:
        raise _stale(shard_name, offset, "no sample starts there")
    if doubled:
        raise DataError("the sample has this field twice", doubled, sample_key)
    return sample_key, fields


def _stale(shard_name: str, offset: int, why: str) -> StaleIndexError:
    return StaleIndexError(
        f"{shard_name}: its index does not fit it: sample at byte {offset}: {why}; delete the .idx file or run scripts/index_shards.py"
    )


# checksum field (8 bytes) -> low half of the adler32 of any header whose unsigned sum it states; filled by `_read_header`
_ADLER_OF_CHECKSUM: dict[bytes, int] = {}


def _read_member(buf: Buffer, first: int, end: int, base: int) -> RawMember:
    """The member whose first header is at `first`, whatever kind it is of. Damage in any of its headers is said to be at `first`."""
    pos, damaged_at = first, base + first
    long_name = pax_name = b""
    pax_size: int | None = None
    while True:
        head = _read_header(bytes(buf[pos : min(pos + BLOCK, end)]), damaged_at)
        kind = head[156:157]
        data = pos + BLOCK
        if kind not in b"LKxX":
            break
        size = _read_size(head, damaged_at)
        if size > end - data:
            raise TarDamage(damaged_at, "cut in an extended header")
        body = bytes(buf[data : data + size])
        if kind == b"L":
            long_name = body.partition(b"\0")[0]
        elif kind != b"K":  # K is the target of a link
            pax_name, pax_size = _read_pax(body, damaged_at)
        pos = data + (size + 511 & -512)
    if kind == b"S":
        raise TarDamage(damaged_at, SPARSE)
    name = pax_name or long_name or _read_name(head)
    # v7 marks a directory by a slash; links, devices, directories and fifos have no data, whatever their size field says
    no_data = kind in b"123456" or (kind == b"\0" and name.endswith(b"/"))
    size = 0 if no_data else pax_size if pax_size is not None else _read_size(head, damaged_at)
    if size > end - data:
        shown = name.decode("utf-8", "backslashreplace")
        raise TarDamage(damaged_at, f"the data of {shown!r} is cut ({max(0, end - data)} of {size} bytes are there)", name)
    return name, first, data, size, kind in b"07\0" and not no_data


def _read_header(head: bytes, damaged_at: int) -> bytes:
    """`head`, if it is a header whose checksum is right."""
    if len(head) < BLOCK:
        raise TarDamage(damaged_at, "cut in a header")
    field = head[148:156]
    if _ADLER_OF_CHECKSUM.get(field) == adler32(head) & 0xFFFF:
        return head
    try:
        stated = _parse_number(field)
    except ValueError:
        stated = -1
    without_field = head[:148] + b" " * 8 + head[156:]
    if stated == sum(without_field):
        if len(_ADLER_OF_CHECKSUM) > 100_000:
            _ADLER_OF_CHECKSUM.clear()
        _ADLER_OF_CHECKSUM[field] = adler32(head) & 0xFFFF
    elif stated != sum(struct.unpack("512b", without_field)):  # some old tars summed signed bytes
        raise TarDamage(damaged_at, "broken header")
    return head


def _read_name(head: bytes) -> bytes:
    """The name of a header without extensions; the prefix is one only in POSIX headers (GNU's keep times there)."""
    name = head[:100].partition(b"\0")[0]
    if head[257:263] == b"ustar\0" and head[345]:
        return head[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _read_size(head: bytes, damaged_at: int) -> int:
    try:
        size = _parse_number(head[124:136])
    except ValueError:
        size = -1
    if size < 0:
        raise TarDamage(damaged_at, "broken size in a header")
    return size


def _parse_number(field: bytes) -> int:
    """Octal digits with any padding, or base-256: the first byte has its high bit set and the rest is a big-endian number."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1  # else negative, or beyond any file
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _changes_member(pax: bytes) -> bool:
    """Whether a PAX header may say more than times and owners."""
    return b"path=" in pax or b"size=" in pax or b"GNU.sparse" in pax


def _read_pax(body: bytes, offset: int) -> tuple[bytes, int | None]:
    """The (path, size) that a PAX header states; b"" and None where it doesn't. Records are `LENGTH KEY=VALUE\\n`."""
    name, size = b"", None
    if not _changes_member(body):
        return name, size
    pos = 0
    while pos < len(body) and body[pos]:
        length, _, _ = body[pos : pos + 20].partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(body) - pos:
            raise TarDamage(offset, "broken PAX header")
        key, equals, value = body[pos + len(length) + 1 : pos + int(length) - 1].partition(b"=")
        if not equals:
            raise TarDamage(offset, "broken PAX header")
        if key.startswith(b"GNU.sparse"):
            raise TarDamage(offset, SPARSE)
        if key == b"path":
            name = value
        elif key == b"size" and value:
            if not value.isdigit() or len(value) > 20:  # more is no size of a file; int() refuses thousands of digits
                raise TarDamage(offset, "broken PAX header")
            size = int(value)
        pos += int(length)
    return name, size


def _skip_zeros(buf: Buffer, pos: int, end: int) -> int:
    """The first block at or after `pos` that is not all zeros, or `end`."""
    step = 16 * BLOCK
    while pos < end:
        piece = bytes(buf[pos : min(pos + step, end)])
        rest = piece.lstrip(b"\0")
        if rest:
            return pos + (len(piece) - len(rest)) // BLOCK * BLOCK
        pos += len(piece)
        step = 1 << 20
    return end
