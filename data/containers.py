"""Which video format bytes have, and whether they are all there.

in: the bytes of one file  ->  out: the format as FFmpeg calls it
Invariant: pure; looks at a few headers only. FFmpeg's own guess is never asked for: among its formats are lists that name other files.
"""

from __future__ import annotations

from .errors import DataError

_MOV_BOXES = frozenset([b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp"])
_SEGMENT = b"\x18\x53\x80\x67"  # the Matroska element that holds everything but the header


def check_container(data: memoryview) -> str:
    """The name of the format that the bytes show, as FFmpeg calls it. Raises DataError: none that is read here, or cut."""
    start = bytes(data[:12])
    if start[4:8] in _MOV_BOXES:
        kind, end = "mov", _end_of_boxes(data)
    elif start[:4] == b"\x1aE\xdf\xa3":
        kind, end = "matroska", _end_of_matroska(data)
    elif start[:4] == b"RIFF" and start[8:12] == b"AVI ":
        kind, end = "avi", _end_of_riff(data)
    else:
        raise DataError(f"not a video: {len(data)} bytes that start with {start[:8]!r}" if data else "the file is empty")
    if end > len(data):
        raise DataError(f"the video is cut: its parts go on to byte {end:,} at least, and {len(data):,} are there")
    return kind


def _end_of_boxes(data: memoryview) -> int:
    """Where the last top-level box of an MP4 or MOV file ends, as it says itself."""
    position = 0
    while position + 8 <= len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0:  # to the end of the file
            return len(data)
        if size < 8:
            return position  # no box: bytes that somebody put behind
        position += size
    return position


def _end_of_matroska(data: memoryview) -> int:
    """Where the segment ends; 0 where it doesn't say (a live recording)."""
    length, size = _element_size(data, 4)
    position = 4 + length + size
    if bytes(data[position : position + 4]) != _SEGMENT:
        return 0
    length, size = _element_size(data, position + 4)
    return 0 if size == (1 << 7 * length) - 1 else position + 4 + length + size


def _element_size(data: memoryview, position: int) -> tuple[int, int]:
    """(bytes of the number, the number) of an EBML size."""
    first = data[position] if position < len(data) else 0
    length = 9 - first.bit_length()
    value = int.from_bytes(data[position : position + length], "big")
    return length, value & ((1 << 7 * length) - 1)


def _end_of_riff(data: memoryview) -> int:
    """Where the last RIFF chunk of an AVI file ends (files over 1 GiB have several)."""
    position = 0
    while bytes(data[position : position + 4]) == b"RIFF":
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8 + size + size % 2
    return position - 1  # the last may lack its padding
