"""Restart markers for JPEGs: what a crop does not touch can then be jumped over, not only walked over.

in: a JPEG's bytes  ->  out: the same picture with restart markers, or why it stays as it is
Invariant: no coefficient changes, so no pixel does; all segments but the Huffman tables stay as they are, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from . import native
from .tables import SourceError

SHARE = 0.02  # of the bytes, for markers
COST = 5  # bytes that a marker costs: itself, the filled up byte before it, the larger values behind it
_TABLES = (0xC4, 0xDD)  # Huffman tables and the restart interval: these are new

# Why a picture stays as it is.
NO_JPEG = "no JPEG"
PROGRESSIVE = "progressive"
OTHER_CODING = "arithmetic, lossless or of several scans"
MARKED = "with restart markers"
SMALL = "too small"
UNUSUAL = "with bytes behind their end, or damaged"


def add_restarts(data: bytes, share: float = SHARE) -> tuple[bytes, str]:
    """The JPEG with restart markers and ""; the bytes as they were and why where it can't have them. Needs the native part."""
    if not data.startswith(b"\xff\xd8\xff"):
        return data, NO_JPEG
    jpeg = native.open_jpeg(data)
    if jpeg is None:
        return data, OTHER_CODING if _frame(data) not in (0xC0, 0xC1, 0xC2) else UNUSUAL
    if jpeg.progressive:
        return data, PROGRESSIVE
    if jpeg.restart_interval:
        return data, MARKED
    interval = max(1, -(-jpeg.num_mcus * COST // max(1, int(share * len(data)))))
    if interval > 65535 or interval >= jpeg.num_mcus:
        return data, SMALL
    if not data.endswith(b"\xff\xd9"):
        return data, UNUSUAL
    new = native.rewrite_with_restarts(data, interval)
    if new is None:
        return data, OTHER_CODING if data.count(b"\xff\xda") > 1 else UNUSUAL
    old_head, _ = _split(data)
    new_head, new_scan = _split(new)
    kept = [segment for marker, segment in old_head if marker not in _TABLES]
    tables = [segment for marker, segment in new_head if marker in _TABLES]
    return b"".join([b"\xff\xd8", *kept, *tables, new_scan]), ""


def restart_arguments(wanted: bool) -> dict[str, bool]:
    """What dataset.json says of --restart-markers. Raises SourceError where they can't be written."""
    if wanted and (absent := native.why_absent()):
        raise SourceError(f"--restart-markers needs the native part: {absent}")
    return {"restart_markers": True} if wanted else {}


def describe_unmarked(shards: Sequence[Mapping[str, int]], total: int) -> str:
    """One line of what was done to `total` pictures; `shards`: for each, how many were left as they are, by reason."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    line = f"restart markers: {total - counts.total():,} of {total:,} pictures have new ones"
    return f"{line}; left as they are: {reasons}" if reasons else line


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of the segments up to the first scan's header."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield data[at + 1], at, end
        if data[at + 1] == 0xDA:
            return
        at = end


def _frame(data: bytes) -> int | None:
    return next((marker for marker, _, _ in _segments(data) if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)), None)


def _split(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The segments before the first scan as (marker, bytes), and all from the scan's header on."""
    head: list[tuple[int, bytes]] = []
    for marker, start, end in _segments(data):
        if marker == 0xDA:
            return head, data[start:]
        head.append((marker, data[start:end]))
    raise AssertionError("a JPEG without a scan")
