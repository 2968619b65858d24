"""The C part of the JPEG path: header, partial decode and resize in one call each, without PIL.

in: a JPEG's bytes; a box of it and where its pixels go  ->  out: the pixels, the same bytes that PIL's crop and resize give
Invariant: whatever is unusual or damaged is declined (None, False), and PIL decides. Nothing here is needed: `why_absent` says what
keeps it from being used. `make` builds jpeg.so from the C files beside this one (build.sh); ctypes lets other threads run meanwhile.
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
        return "it is not built: `make` builds it where a C compiler and libjpeg-turbo's jpeglib.h are"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"it can't be loaded: {' '.join(str(error).split())}"
    library.shardline_sources.restype = ctypes.c_char_p
    if library.shardline_sources().decode() != sources_hash():
        return "it was built from other C files than those beside it: run `make`"
    library.shardline_header.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(Header)]
    library.shardline_view.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(Header), ctypes.POINTER(_View), ctypes.c_int,
    ]  # fmt: skip
    return library


def why_absent() -> str:
    """Why the native part can't be used; empty where it can."""
    library = _load()
    return library if isinstance(library, str) else ""


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def read_header(data: np.ndarray) -> Header | None:
    """The header of a JPEG in uint8 (n,); None for what PIL must look at. `orientation` 0: PIL must say."""
    library = _load()
    assert not isinstance(library, str)
    header = Header()
    return header if library.shardline_header(_address(data), len(data), header) == _DONE else None


def write_view(
    data: np.ndarray, header: Header, box: tuple[float, float, float, float], target: np.ndarray, options: int = 0
) -> bool:
    """Resize the part `box` (left, top, right, bottom as stored) into uint8 (3, height, width), of any strides; False leaves
    anything there, and PIL must do it. Raises MemoryError."""
    library = _load()
    assert not isinstance(library, str)
    plane, step_y, step_x = target.strides
    view = _View(box, target.shape[2], target.shape[1], _address(target), plane, step_x, step_y)
    code = library.shardline_view(_address(data), len(data), header, view, options)
    if code == _NO_MEMORY:
        raise MemoryError(f"no memory for a part of a JPEG of {header.width} x {header.height} pixels")
    return code == _DONE
