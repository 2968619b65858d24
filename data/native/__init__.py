"""The C part of the JPEG path: header, partial decode and resize in one call each, without PIL.

in: a JPEG's bytes; a box of it and where its pixels go  ->  out: the pixels, the same bytes that PIL's crop and resize give
Invariant: whatever is unusual or damaged is declined (None, False), and PIL decides. Nothing here is needed: `why_absent` says what
keeps it from being used. `make native` builds jpeg.so from the C files beside this one (build.sh); ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "jpeg.so"
_NO_MEMORY = 3
_DONE = 0


class Header(ctypes.Structure):
    """JpegHeader in native.h."""

    _fields_ = [
        ("width", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("orientation", ctypes.c_int32),
        ("components", ctypes.c_int32),
        ("sof", ctypes.c_int32),
        ("restart", ctypes.c_int32),
        ("h", ctypes.c_int32 * 4),
        ("v", ctypes.c_int32 * 4),
        ("pad", ctypes.c_int32),
        ("scan", ctypes.c_int64),
    ]


class _View(ctypes.Structure):
    """JpegView in native.h."""

    _fields_ = [
        ("box", ctypes.c_float * 4),
        ("width", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("plane", ctypes.c_int64),
        ("step_x", ctypes.c_int64),
        ("step_y", ctypes.c_int64),
    ]


def sources_hash() -> str:
    """What the library must have been built from: sha256 of the C files, in the order of their names."""
    files = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@lru_cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return "it is not built: `make native` builds it where a C compiler and libjpeg-turbo's jpeglib.h are"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"it can't be loaded: {' '.join(str(error).split())}"
    library.shardline_sources.restype = ctypes.c_char_p
    if library.shardline_sources().decode() != sources_hash():
        return "it was built from other C files than those beside it: run `make native`"
    library.shardline_header.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(Header)]
    library.shardline_restart.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t),
    ]  # fmt: skip
    library.shardline_free.argtypes = [ctypes.c_void_p]
    library.shardline_view.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(Header), ctypes.POINTER(_View)]
    return library


def why_absent() -> str:
    """Why the native part can't be used; empty where it can."""
    library = _load()
    return library if isinstance(library, str) else ""


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class Jpeg:
    """A JPEG whose header is read and whose pixels are not yet. `orientation`: EXIF's, 1..8, or 0 where PIL must say."""

    __slots__ = ("_bytes", "_header", "orientation")

    def __init__(self, data: np.ndarray, header: Header) -> None:
        self._bytes, self._header, self.orientation = data, header, header.orientation

    @property
    def data(self) -> memoryview:
        return self._bytes.data

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) as shown."""
        header = self._header
        return (header.height, header.width) if self.orientation >= 5 else (header.width, header.height)

    @property
    def progressive(self) -> bool:
        return self._header.sof == 0xC2

    @property
    def restart_interval(self) -> int:
        """MCUs from one restart marker to the next; 0 without."""
        return self._header.restart

    @property
    def num_mcus(self) -> int:
        """Minimum coded units, of one scan with all components."""
        header = self._header
        alone = header.components == 1
        width = 8 if alone else 8 * max(header.h)
        height = 8 if alone else 8 * max(header.v)
        return -(-header.width // width) * -(-header.height // height)

    def write(self, box: tuple[float, float, float, float], flip: bool, target: np.ndarray) -> bool:
        """Resizes the part `box` (left, top, right, bottom, as stored) and writes it, turned upright and then flipped, into
        uint8 (3, height, width). False leaves anything there: PIL must do it. Raises MemoryError."""
        library = _load()
        assert not isinstance(library, str)
        width, height = self._header.width, self._header.height
        inside = (max(0.0, box[0]), max(0.0, box[1]), min(box[2], width), min(box[3], height))
        stored = as_stored(target[:, :, ::-1] if flip else target, self.orientation)
        plane, step_y, step_x = stored.strides
        view = _View(inside, stored.shape[2], stored.shape[1], _address(stored), plane, step_x, step_y)
        code = library.shardline_view(_address(self._bytes), len(self._bytes), self._header, view)
        if code == _NO_MEMORY:
            raise MemoryError(f"no memory for a part of a JPEG of {width} x {height} pixels")
        return code == _DONE


def open_jpeg(data: bytes | bytearray | memoryview) -> Jpeg | None:
    """Reads the header; None for what PIL must look at."""
    library = _load()
    assert not isinstance(library, str)
    array = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    header = Header()
    return Jpeg(array, header) if library.shardline_header(_address(array), len(array), header) == _DONE else None


def rewrite_with_restarts(data: bytes, interval: int) -> bytes | None:
    """A JPEG of the same coefficients with a restart marker every `interval` MCUs and new Huffman tables, without the other segments
    of the old one; None for what libjpeg warns about, and what is not baseline with one scan."""
    library = _load()
    assert not isinstance(library, str)
    memory, size = ctypes.c_void_p(), ctypes.c_size_t()
    if library.shardline_restart(data, len(data), interval, memory, size) != _DONE:
        return None
    try:
        return ctypes.string_at(memory, size.value)
    finally:
        library.shardline_free(memory)


def as_stored(target: np.ndarray, orientation: int) -> np.ndarray:
    """A view of the memory of a picture as shown, (3, height, width), in which [:, y, x] is where pixel (x, y) as stored goes."""
    if orientation in (2, 3, 6, 7):
        target = target[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        target = target[:, ::-1]
    return target.transpose(0, 2, 1) if orientation >= 5 else target
