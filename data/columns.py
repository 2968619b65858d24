"""The samples of a batch all at once: their headers are checked and read as arrays, their fields are places in one buffer.

in: a buffer with one sample after the other, where each starts  ->  out: `Columns`: {field: (start, size) of every slot}, and the keys
Invariant: what comes out is what `tar.locate_fields` says of each sample, in C (native/samples.c) as with numpy. Every checksum is
verified, and whatever is not an ordinary header goes through it, so that a stale index, a doubled field or a long name is found and told
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import DataError
from .ids import Keys
from .native import gathering
from .tar import BLOCK, locate_fields

_NAME = 100  # bytes of a name field
_POWERS = 8.0 ** np.arange(10, -1, -1)  # of the eleven octal digits of a size: below 2^33, exact as floats
_POWERS_OF_SUM = 8.0 ** np.arange(5, -1, -1)
_PAIRS = np.uint64(0x00FF00FF00FF00FF)


@dataclass(frozen=True, slots=True)
class Columns:
    """`fields`: name -> (start, size) in `data`, int64 (n,) each, a row a slot; size -1 where the sample has no such field.
    `present` bool (n,): the slots that have a sample at all."""

    data: np.ndarray  # uint8
    fields: dict[str, tuple[np.ndarray, np.ndarray]]
    present: np.ndarray

    def sample(self, slot: int) -> dict[str, bytes]:
        """One slot as {field: bytes}."""
        rows = ((name, int(start[slot]), int(size[slot])) for name, (start, size) in self.fields.items())
        return {name: self.data[start : start + size].tobytes() for name, start, size in rows if size >= 0}


def columns_of(samples: Sequence[Mapping[str, Any]], num_slots: int) -> Columns:
    """The columns of sample dicts, each with its `__slot__`; what is not bytes is passed over."""
    fields: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    present = np.zeros(num_slots, bool)
    pieces: list[Any] = []
    position = 0
    for sample in samples:
        present[sample["__slot__"]] = True
        for name, value in sample.items():
            if isinstance(value, bytes | bytearray | memoryview):
                _put(fields, num_slots, name, sample["__slot__"], position, len(value))
                pieces.append(value)
                position += len(value)
    return Columns(np.frombuffer(b"".join(pieces), np.uint8), fields, present)


def parse_samples(
    data: np.ndarray, place: np.ndarray, size: np.ndarray, offset: np.ndarray, shard_name: Callable[[int], str]
) -> tuple[Columns, Keys, list[tuple[int, DataError]]]:
    """Sample i is `data[place[i] : place[i] + size[i]]`; places are multiples of 512, and `data` is as long as whole blocks. `offset` (of
    each in its shard) and `shard_name` (of sample i) are for messages. Returns the columns, the key of each sample as the tar has it, and
    the bad samples. Raises StaleIndexError where the bytes are not exactly one sample."""
    if gathering.is_there():
        fields, length = gathering.parse(data, place, size)
        keys = _cut_keys(data, place, length)
        odd = length < 0
    else:
        fields, keys, odd = _parse(data, place, size)
    num = len(place)
    errors: list[tuple[int, DataError]] = []
    present = np.ones(num, bool)
    if not odd.any():
        return Columns(data, fields, present), keys, errors
    texts = list(keys)
    for i in np.flatnonzero(odd).tolist():
        for _, known in fields.values():
            known[i] = -1
        try:
            texts[i], places = locate_fields(data[place[i] : place[i] + size[i]].data, int(offset[i]), shard_name(i))
        except DataError as error:
            texts[i], present[i] = error.key, False
            errors.append((i, error))
        else:
            for name, (start, num_bytes) in places.items():
                _put(fields, num, name, i, int(place[i]) + start, num_bytes)
    return Columns(data, fields, present), Keys.of(texts), errors


def _cut_keys(data: np.ndarray, place: np.ndarray, length: np.ndarray) -> Keys:
    """The keys that begin at these places; none where the length is -1."""
    length = np.maximum(length, 0)
    ends = np.cumsum(length)
    raw = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    gathering.gather(data, place, length, raw)
    return Keys(raw.tobytes(), ends)


def _parse(
    data: np.ndarray, place: np.ndarray, size: np.ndarray
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], Keys, np.ndarray]:
    """The fields, the keys, and which samples are odd: left to locate_fields."""
    num = len(place)
    fields: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    odd = np.zeros(num, bool)
    blocks = data.reshape(-1, BLOCK)
    row, stop = place // BLOCK, -(-(place + size) // BLOCK)
    alive = np.arange(num)
    keys = Keys(b"", np.zeros(num, np.int64))
    first_names = first_dots = np.empty(0)
    while alive.size:
        heads = blocks[row[alive]]
        ordinary, sizes = _check(heads)
        names, dots, named = _split(heads)
        if first_names.size == 0:
            first_names, first_dots = names, dots
            width = names.shape[1]
            raw = names.tobytes()
            keys = Keys(b"".join([raw[i * width : i * width + dot] for i, dot in enumerate(dots.tolist())]), np.cumsum(dots))
        else:
            named &= _same_key(names, first_names[alive], first_dots[alive]) & (dots == first_dots[alive])
        following = row[alive] + 1 + -(-sizes // BLOCK)
        good = ordinary & named & (following <= stop[alive]) & ((row[alive] + 1) * BLOCK + sizes <= place[alive] + size[alive])
        odd[alive[~good]] = True
        _note(fields, odd, alive[good], names[good], dots[good], (row[alive[good]] + 1) * BLOCK, sizes[good])
        row[alive] = following
        alive = alive[good & (following < stop[alive])]
        alive = alive[~odd[alive]]
    return fields, keys, odd


def _check(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of headers (n, 512): which are of ordinary files with a right checksum, and their sizes."""
    digits = heads[:, 124:135] - np.uint8(48)
    sums = heads[:, 148:154] - np.uint8(48)
    ordinary = (heads[:, 156] == 48) & (heads[:, 345] == 0) & (heads[:, 135] <= 32) & (digits <= 7).all(1)
    ordinary &= (sums <= 7).all(1) & ((heads[:, 154:156] & 0xDF) == 0).all(1)  # ended by zeros or blanks
    sizes = np.where(ordinary, digits @ _POWERS, 0).astype(np.int64)
    words = heads.view(np.uint64)  # four sums of 16 bits in each word: 128 bytes of 255 fit
    lanes = ((words & _PAIRS) + ((words >> np.uint64(8)) & _PAIRS)).sum(1)
    total = sum((lanes >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    total = total.astype(np.int64) + 256 - heads[:, 148:156].sum(1, dtype=np.int64)  # the checksum counts itself as blanks
    return ordinary & (total == sums @ _POWERS_OF_SUM), sizes


def _split(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Names (n, width) padded with zeros, the column of the first dot of the last path component, and for which that is the whole story."""
    names = heads[:, :_NAME]
    used = np.flatnonzero(names.any(0))
    width = int(used[-1]) + 1 if used.size else 1
    names = np.ascontiguousarray(names[:, :width])
    length = np.count_nonzero(names, axis=1)
    columns = np.arange(width)
    named = (length > 0) & ((names != 0) == (columns < length[:, None])).all(1)
    is_dot, start = names == 46, np.zeros(len(names), np.int64)
    slashes = names == 47
    if slashes.any():
        start = np.where(slashes.any(1), width - np.argmax(slashes[:, ::-1], axis=1), 0)
        is_dot &= columns >= start[:, None]
    dots = np.argmax(is_dot, axis=1)
    named &= is_dot.any(1) & (dots > start)  # a name that starts with a dot is a hidden file
    underscores = names == 95
    if width > 1 and (pairs := underscores[:, :-1] & underscores[:, 1:]).any():  # __MACOSX, __meta__
        named &= ~(pairs[:, 0] | (pairs.any(1) & (start > 0)))
    return names, dots, named


def _same_key(names: np.ndarray, first: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """Whether names agree up to and with the dot."""
    width = min(names.shape[1], first.shape[1])
    differs = (names[:, :width] != first[:, :width]) & (np.arange(width) <= dots[:, None])
    return ~differs.any(1) & (dots < width)


def _note(
    fields: dict[str, tuple[np.ndarray, np.ndarray]], odd: np.ndarray, slots: np.ndarray, names: np.ndarray, dots: np.ndarray,
    start: np.ndarray, size: np.ndarray,
) -> None:  # fmt: skip
    """Enter one member of each of these slots under its field. A field that a slot has already makes it odd."""
    if not slots.size:
        return
    width = names.shape[1]
    columns = dots[:, None] + np.arange(1, width)
    ends = np.where(columns < width, np.take_along_axis(names, np.minimum(columns, width - 1), axis=1), 0).astype(np.uint8)
    if (ends == ends[0]).all():
        groups = [(ends[0], np.arange(len(slots)))]
    else:
        kinds, which = np.unique(ends, axis=0, return_inverse=True)
        groups = [(kind, np.flatnonzero(which.reshape(-1) == i)) for i, kind in enumerate(kinds)]
    for kind, rows in groups:
        name = kind.tobytes().rstrip(b"\0").decode("utf-8", "surrogateescape").lower()
        if name not in fields:
            fields[name] = np.zeros(len(odd), np.int64), np.full(len(odd), -1, np.int64)
        starts, sizes = fields[name]
        here = slots[rows]
        odd[here[sizes[here] >= 0]] = True
        starts[here], sizes[here] = start[rows], size[rows]


def _put(fields: dict[str, tuple[np.ndarray, np.ndarray]], num: int, name: str, slot: int, start: int, size: int) -> None:
    if name not in fields:
        fields[name] = np.zeros(num, np.int64), np.full(num, -1, np.int64)
    fields[name][0][slot], fields[name][1][slot] = start, size
