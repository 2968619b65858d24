"""The C part of small samples: a batch of them read, their headers checked and their fields gathered, in one call each.

in: numpy arrays (int64, in one piece)  ->  out: the same numbers and bytes that store.py, columns.py and records.py find with numpy alone
Invariant: whatever is not an ordinary header is declined. Nothing here is needed: without samples.so (build.sh makes it) `is_there` is
False. ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from . import FOLDER, sources_hash

LIBRARY = FOLDER / "samples.so"
MOST_FIELDS, NAME = 16, 100  # as in samples.c
_STARTS = 65_536  # at most, before Python is asked whether to go on (Ctrl-C)
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


@lru_cache
def _load() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    library.shardline_samples_sources.restype = ctypes.c_char_p
    if library.shardline_samples_sources().decode() != sources_hash():
        return None  # of other C files
    for name, arguments in {
        "places": [_NUMBER, *[_POINTER] * 4, _NUMBER, *[_POINTER] * 3],
        "read": [_NUMBER, *[_POINTER] * 7, _NUMBER, _POINTER],
        "parse": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 7],
        "gather": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 3, _NUMBER],
        "digits": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 3],
        "walk": [_POINTER, _NUMBER, _NUMBER, ctypes.c_char_p, _NUMBER, _POINTER, _NUMBER, _POINTER],
        "same": [_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER],
    }.items():
        function = getattr(library, f"shardline_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int if name in ("parse", "digits", "same") else _NUMBER
    library.shardline_map.argtypes, library.shardline_map.restype = [ctypes.c_int32, _NUMBER], _POINTER
    library.shardline_unmap.argtypes, library.shardline_unmap.restype = [_POINTER, _NUMBER], None
    return library


def is_there() -> bool:
    """Whether the C part can be used."""
    return _load() is not None


def _library() -> ctypes.CDLL:
    library = _load()
    assert library is not None
    return library


def _at(array: np.ndarray) -> int:
    layout = array.__array_interface__
    assert layout["strides"] is None, "an array for C must be in one piece"
    return layout["data"][0]


def map_file(descriptor: int, length: int) -> int:
    """The address of a file's first bytes in memory, without another descriptor; 0 where it can't be mapped."""
    library = _load()
    return (library and library.shardline_map(descriptor, length)) or 0


def unmap(address: int, length: int) -> None:
    """Undoes `map_file`."""
    if address:
        _library().shardline_unmap(address, length)


def find_places(
    order: np.ndarray, shard: np.ndarray, index: np.ndarray, sources: np.ndarray, at: int, start: np.ndarray, size: np.ndarray,
    place: np.ndarray,
) -> int:  # fmt: skip
    """Fills in, for the samples `order` (numbers of rows), where each starts in its shard, its size, and its place in a buffer that is
    used up to `at`. sources: int64 (shards, 5), a row for each shard in this order: address and number of its offsets, descriptor, what
    `map_file` gave of how many bytes. Returns the length of the buffer, or -1 - i where sample i is not in its index."""
    return _library().shardline_places(
        len(order), _at(order), _at(shard), _at(index), _at(sources), at, _at(start), _at(size), _at(place)
    )  # fmt: skip


def read(
    order: np.ndarray, shard: np.ndarray, sources: np.ndarray, start: np.ndarray, size: np.ndarray, place: np.ndarray, buffer: np.ndarray
) -> tuple[int, int]:  # fmt: skip
    """Reads those samples into the buffer. (-1, 0), or the sample at which a file ends (0) or fails (errno)."""
    error = ctypes.c_int32()
    found = _library().shardline_read(
        len(order), _at(order), _at(shard), _at(sources), _at(start), _at(size), _at(place), _at(buffer), len(buffer), ctypes.byref(error)
    )  # fmt: skip
    return found, error.value


def parse(data: np.ndarray, place: np.ndarray, size: np.ndarray) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """({field: (start, size) of every sample, size -1 where it has none}, the length of each key, -1 for an odd sample)."""
    num = len(place)
    starts, sizes = np.empty((2, MOST_FIELDS, num), np.int64)
    names, lengths, key = np.empty((MOST_FIELDS, NAME), np.uint8), np.empty(MOST_FIELDS, np.int32), np.empty(num, np.int64)
    found = _library().shardline_parse(
        _at(data), len(data), num, _at(place), _at(size), _at(starts), _at(sizes), _at(names), _at(lengths), _at(key)
    )  # fmt: skip
    assert found >= 0, "a sample is not inside its buffer"
    return {names[f, : lengths[f]].tobytes().decode("ascii"): (starts[f], sizes[f]) for f in range(found)}, key


def walk(buf: Any, at: int, prefix: bytes) -> tuple[list[int], int, int, bytes]:
    """Passes over ordinary members of a tar from `at` on. prefix: what the names of the open sample's members start with, its key and a
    dot; anything else where there is none. (where samples start, members, where the next header is, the prefix now)."""
    data = np.frombuffer(buf, np.uint8)
    starts, walked = np.empty(_STARTS, np.int64), np.empty(4, np.int64)
    key = prefix.removesuffix(b".")
    found = _library().shardline_walk(_at(data), len(data), at, key, len(key), _at(starts), _STARTS, _at(walked))
    end, members, first, length = walked.tolist()
    return starts[:found].tolist(), members, end, prefix if first < 0 else buf[first : first + length] + b"."


def gather(data: np.ndarray, start: np.ndarray, size: np.ndarray, out: np.ndarray) -> None:
    """Copies the pieces of `data` one after the other to `out`, uint8 in one piece, which they fill."""
    copied = _library().shardline_gather(_at(data), len(data), len(start), _at(start), _at(size), _at(out), out.nbytes)
    assert copied == out.nbytes, "the pieces of a batch are not as long as it"


def read_digits(data: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """int64 (n,): the numbers that texts of one to nine digits are; -1 for any other."""
    value = np.empty(len(start), np.int64)
    outside = _library().shardline_digits(_at(data), len(data), len(start), _at(start), _at(size), _at(value))
    assert not outside, "a label is not inside its buffer"
    return value


def are_same(data: np.ndarray, start: np.ndarray, at: int, count: int) -> np.ndarray:
    """bool (n,): whether the `count` bytes at each start are those at `at`."""
    same = np.empty(len(start), bool)
    outside = _library().shardline_same(_at(data), len(data), len(start), _at(start), at, count, _at(same))
    assert not outside, "a field is not inside its buffer"
    return same
