"""Is this file a picture, of which format, and smaller if wished.

in: the bytes of one file  ->  out: the field name (`jpg`, `png`, ...) and the bytes to store
Invariant: bytes are stored untouched unless they are made smaller; the bytes decide the format, not the file's name.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

import numpy as np

from . import native
from .decoders import MAX_PIXELS, Picture, open_picture, read_pixels, turned

if TYPE_CHECKING:
    from PIL import Image

# File names that are looked at in a folder or an archive; what such a file really holds is decided by its bytes.
PICTURE_SUFFIXES = frozenset("jpg jpeg jpe jfif png webp bmp gif ppm pgm pbm pnm tif tiff".split())
QUALITY = 90  # of a JPEG or WebP that is made smaller
_FIELDS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "GIF": "gif", "PPM": "ppm", "TIFF": "tif"}
_STANDALONE = frozenset([0x01, *range(0xD0, 0xD9)])  # JPEG markers without a length: TEM, RST0-7, SOI
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0-15: where a JPEG's size stands


def check_picture(data: bytes) -> str:
    """The field name for these bytes; raises DataError where they are no whole picture.

    Cheap: a JPEG's markers up to its scan and its end marker, a PNG's size and last chunk. What fails that, and the rarer
    formats, are decoded, which has the last word: so what training can read is never left out. Damage inside the compressed
    data is not seen here and becomes a bad sample in training.
    """
    if data.startswith(b"\xff\xd8\xff") and _is_whole_jpeg(data):
        return "jpg"
    if data.startswith(b"\x89PNG\r\n\x1a\n") and _is_whole_png(data):
        return "png"
    picture = open_picture(data)
    read_pixels(picture)
    return _FIELDS[picture.image.format or ""]


def resize_picture(data: bytes, short_side: int) -> tuple[str, bytes]:
    """Field name and bytes with the short side at most `short_side`, in the same format, upright, RGB or grayscale.

    A picture that is small enough keeps its bytes; none is made larger. Raises DataError.
    """
    picture = open_picture(data)
    kind = picture.image.format or ""
    if min(picture.size) <= short_side:
        return check_picture(data), data
    small = _smaller(picture, short_side)
    small.info = {}  # neither the old orientation nor a colour profile, which training does not use
    out = io.BytesIO()
    small.save(out, kind, quality=QUALITY)
    return _FIELDS[kind], out.getvalue()


def raw_picture(data: bytes, short_side: int | None) -> tuple[str, bytes]:
    """Field name and bytes of the picture uncompressed: PPM (PGM where it is gray), upright, the short side at most `short_side`.

    Any tool reads it, and a crop of it is a copy of its rows. Raises DataError.
    """
    picture = open_picture(data)
    if short_side is not None and min(picture.size) > short_side:
        image = _smaller(picture, short_side)
    else:
        image = turned(read_pixels(picture), picture.orientation)
    kind = b"P5" if image.mode == "L" else b"P6"
    return "ppm", kind + b"\n%d %d\n255\n" % image.size + image.tobytes()


def _smaller(picture: Picture, short_side: int) -> Image.Image:
    """The picture upright with its short side brought to `short_side`; the same pixels with and without the native part."""
    from PIL import Image

    width, height = picture.image.size
    scale = short_side / min(width, height)
    size = (max(short_side, round(width * scale)), max(short_side, round(height * scale)))
    # A JPEG can be decoded at 1/2, 1/4, 1/8 for a fraction of the time: the smallest that leaves twice the pixels wanted.
    picture.image.draft(None, (2 * size[0], 2 * size[1]))
    whole = picture.image.size == (width, height)
    if whole and picture.image.mode == "RGB" and not native.why_absent() and (jpeg := native.open_jpeg(picture.data)):
        jpeg.orientation = picture.orientation
        shown = size[::-1] if picture.orientation >= 5 else size
        pixels = np.empty((shown[1], shown[0], 3), np.uint8)
        if jpeg.write((0.0, 0.0, float(width), float(height)), False, pixels.transpose(2, 0, 1)):
            return Image.fromarray(pixels)
    # twice as fast as Lanczos, and what the native part can do
    return turned(read_pixels(picture).resize(size, Image.Resampling.BILINEAR), picture.orientation)


def _is_whole_jpeg(data: bytes) -> bool:
    """A frame of sane size, a scan, and an end marker after it (thumbnails lie in segments before the scan)."""
    position, sized = 2, False
    while position + 9 < len(data):
        if data[position] != 0xFF:
            return False
        marker = data[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
        elif marker in _STANDALONE:
            position += 2
        elif marker == 0xDA:
            return sized and data.rfind(b"\xff\xd9", position) > 0
        else:
            if marker in _FRAMES:
                height, width = struct.unpack_from(">HH", data, position + 5)
                sized = 0 < height * width <= MAX_PIXELS
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


def _is_whole_png(data: bytes) -> bool:
    if data[12:16] != b"IHDR" or len(data) < 45:
        return False
    width, height = struct.unpack_from(">II", data, 16)
    return 0 < width * height <= MAX_PIXELS and data.rfind(b"IEND", 33) > data.find(b"IDAT", 33) > 0
