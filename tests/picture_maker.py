"""Encoded pictures for tests: by PIL, or by hand what PIL can't write."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (12, 20, 3), dtype=np.uint8)
# Smooth, so that JPEG keeps it to within a few units.
SMOOTH = np.zeros((32, 48, 3), np.uint8)
SMOOTH[..., 0], SMOOTH[..., 1], SMOOTH[..., 2] = np.arange(0, 240, 5), np.arange(0, 160, 5)[:, None], 90


def noise(width: int, height: int) -> np.ndarray:
    """Random pixels, uint8 (height, width, 3)."""
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(image: Image.Image | np.ndarray, kind: str = "PNG", **settings) -> bytes:
    """The picture in PIL's format `kind`."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def png(width: int, height: int, depth: int, color: int, rows: bytes, *extra: tuple[bytes, bytes], interlace: int = 0) -> bytes:
    """A PNG of any header, true or not; `rows`: filter bytes and pixels; `extra`: chunks (name, body) before them."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    middle = b"".join(chunk(name, body) for name, body in extra)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + middle + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
