"""Tars made byte by byte, for the tests: also those that no library writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

POSIX = b"ustar\x0000"
GNU = b"ustar  \0"
V7 = bytes(8)
END = bytes(1024)


def header(
    name: bytes,
    size: int = 0,
    kind: bytes = b"0",
    *,
    magic: bytes = POSIX,
    prefix: bytes = b"",
    size_field: bytes | None = None,
    signed: bool = False,
) -> bytes:
    """One 512-byte header; its checksum is right (over signed bytes if `signed`)."""
    field = b"%011o\0" % size if size_field is None else size_field
    start = struct.pack("100s8s8s8s12s12s", name, b"0000644\0", b"0000000\0", b"0000000\0", field, b"%011o\0" % 1_700_000_000)
    end = struct.pack("1s100s8s32s32s8s8s155s12x", kind, b"", magic, b"", b"", b"", b"", prefix)
    blank = start + b" " * 8 + end
    total = sum(struct.unpack("512b", blank)) if signed else sum(blank)
    return start + b"%06o\0 " % total + end


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(name: bytes | str, data: bytes = b"", kind: bytes = b"0", **more: object) -> bytes:
    raw = name.encode() if isinstance(name, str) else name
    return header(raw, len(data), kind, **more) + pad(data)  # type: ignore[arg-type]


def pax(records: Mapping[str, str], kind: bytes = b"x") -> bytes:
    """An extended header; what it says is about the member after it."""
    body = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        body += str(length).encode() + rest
    return member("PaxHeader/x", body, kind)


def long_name(name: str) -> bytes:
    return member("././@LongLink", name.encode() + b"\0", b"L", magic=GNU)


Sample = tuple[str, Mapping[str, bytes]]


def join_samples(samples: Sequence[Sample]) -> bytes:
    """The members of some samples, without end blocks."""
    return b"".join(member(f"{key}.{field}", data) for key, fields in samples for field, data in fields.items())


def make_samples(num: int, start: int = 0) -> list[Sample]:
    """Samples of two fields; both take one block of data."""
    return [(f"{i:04d}", {"jpg": b"picture %d" % i, "cls": b"%d" % (i % 10)}) for i in range(start, start + num)]


def write_shard(path: Path, num: int, start: int = 0) -> Path:
    path.write_bytes(join_samples(make_samples(num, start)) + END)
    return path
