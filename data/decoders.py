"""Bytes of one field -> its value.

in: field name, bytes  ->  out: picture (H, W, 3) uint8, int, str, JSON value, array, or the bytes themselves
Invariant: pure, and the bytes decide, not the extension. Bytes that are bad raise `DataError`; anything else that is raised is a
fault of the code. Nothing is unpickled, nothing is printed, and no picture above `MAX_PIXELS` is ever decoded.
"""

from __future__ import annotations

import io
import json
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Buffer = bytes | bytearray | memoryview

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "tif", "tiff")

# PIL's own limit against decompression bombs: a quarter of a GiB at three bytes a pixel.
MAX_PIXELS = 178_956_970

# What a file starts with -> PIL's name of the format. Only these are ever opened: PIL also knows formats that run programs (EPS).
_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_PPM = re.compile(rb"P[1-6][\s#]")

# What PIL raises on bytes it can't read. Caught only around PIL's own calls, where none of our code runs.
_PIL_ERRORS = (OSError, SyntaxError, ValueError, struct.error, EOFError)


@dataclass(slots=True)
class Picture:
    """A picture whose header is read and whose pixels are not. `width` and `height` are those of the picture as shown; `image` is
    as stored, and `orientation` (EXIF, 1..8) says how one becomes the other."""

    image: Image.Image
    orientation: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) as shown."""
        width, height = self.image.size
        return (height, width) if self.orientation >= 5 else (width, height)


def picture_format(data: Buffer) -> str:
    """PIL's name of the format that the first bytes show, "" for none of ours."""
    head = bytes(data[:16])
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    return "PPM" if _PPM.match(head) else ""


def open_picture(data: Buffer) -> Picture:
    """Reads the header. Raises DataError: no picture, a broken header, more than MAX_PIXELS."""
    from PIL import Image

    kind = picture_format(data)
    if not kind:
        head = bytes(data[:8])
        raise DataError(f"not a picture: {len(data)} bytes that start with {head!r}" if head else "the file is empty")
    if kind == "PNG":
        _check_png(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=(kind,))
            orientation = _orientation(image)
    except Image.UnidentifiedImageError:  # its text holds an address, and hides the cause
        raise DataError(f"broken {kind} header ({len(data)} bytes)") from None
    except Image.DecompressionBombError:
        raise DataError(f"{kind} of more than the limit of {MAX_PIXELS:,} pixels") from None
    except _PIL_ERRORS as error:
        raise DataError(_reason(kind, error)) from None
    if image.width * image.height > MAX_PIXELS:
        raise DataError(f"{image.width} x {image.height} pixels, the limit is {MAX_PIXELS:,} in all")
    return Picture(image, orientation)


def read_pixels(picture: Picture) -> Image.Image:
    """The whole picture as stored (not yet turned), in mode "RGB", or "L" where all three would be equal. Raises DataError."""
    image = picture.image
    kind = image.format or "picture"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
    except _PIL_ERRORS as error:
        raise DataError(_reason(kind, error)) from None
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    return _to_rgb(image)


def decode_image(data: Buffer) -> np.ndarray:
    """Any picture -> uint8 (H, W, 3) as it should be seen: turned by its EXIF orientation, alpha laid over white, 16 bits to 8."""
    picture = open_picture(data)
    image = turned(read_pixels(picture), picture.orientation)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """The stored picture as shown, by its EXIF orientation."""
    if orientation == 1:
        return image
    from PIL.Image import Transpose

    methods = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    return image.transpose(methods[orientation - 2])


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8; damaged EXIF counts as 1, since the pixels are all right."""
    info = image.info
    if image.format not in ("TIFF", "PNG") and "exif" not in info and "xmp" not in info:
        return 1
    try:
        value = image.getexif().get(0x0112, 1)
    except (*_PIL_ERRORS, TypeError, KeyError, IndexError):
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _check_png(data: Buffer) -> None:
    """Checks the checksum of every chunk: PIL skips that of the pixels, and its text for the others says nothing."""
    view = memoryview(data)
    position = 8
    while position + 12 <= len(view):
        length = int.from_bytes(view[position : position + 4], "big")
        name = bytes(view[position + 4 : position + 8])
        end = position + 8 + length
        if end + 4 > len(view):
            break
        if zlib.crc32(view[position + 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise DataError(f"PNG chunk {name!r} at byte {position} fails its checksum")
        if name == b"IEND":
            return
        position = end + 4
    raise DataError(f"PNG is cut: no end mark in its {len(view)} bytes")


def _to_rgb(image: Image.Image) -> Image.Image:
    """The modes that PIL's own conversion would get wrong, or that need a choice."""
    from PIL import Image

    mode, info = image.mode, image.info
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bits(image)
    if mode in ("LA", "PA", "La", "RGBA", "RGBa") or (mode in ("1", "L", "P", "RGB") and "transparency" in info):
        if mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[mode])
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    if mode == "1":
        return image.convert("L")
    if mode in ("P", "CMYK", "YCbCr", "RGBX"):
        return image.convert("RGB")
    raise DataError(f"{image.format} of pixel type {mode}, which has no one way to become RGB; re-encode it with 8 bits")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """16-bit gray -> L by the high byte; PIL's convert would clip everything above 255 to white."""
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    bits = 16
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        bits = tags.get(258, (16,))[0]  # BitsPerSample: PIL reads 12 bits unscaled
        if tags.get(262) == 0:  # white is zero
            values = (1 << bits) - 1 - values
    gray = (values >> (bits - 8)).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        gray[values == clear] = 255
    return Image.fromarray(gray)


def _reason(kind: str, error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{kind} can't be decoded: {text[:200]}"


def decode_text(data: Buffer) -> str:
    """UTF-8, with or without a byte order mark."""
    try:
        return bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {bytes(data[:12])!r}... ({error.reason} at byte {error.start})") from None


_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def parse_integer(text: str) -> int | None:
    """The integer that a stripped text is, None for any other text (`3.0`, `1_000`, words, more than 18 digits)."""
    return int(text) if _INTEGER.fullmatch(text) else None


def decode_integer(data: Buffer) -> int:
    """A text integer such as b" 3\\n"."""
    text = decode_text(data).strip()
    value = parse_integer(text)
    if value is None:
        raise DataError(f"not an integer: {text[:40]!r}")
    return value


def decode_json(data: Buffer) -> Any:
    """JSON in UTF-8, -16 or -32, as Python values."""
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {' '.join(str(error).split())[:120]}") from None


def decode_npy(data: Buffer) -> np.ndarray:
    """A .npy array; arrays of Python objects are refused, since reading them runs code."""
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise DataError(f"not a .npy array that can be read: {' '.join(str(error).split())[:120]}") from None


DECODERS: dict[str, Callable[[Buffer], Any]] = {
    **dict.fromkeys(IMAGE_FIELDS, decode_image),
    "cls": decode_integer,
    "txt": decode_text,
    "json": decode_json,
    "npy": decode_npy,
}


def decode(field: str, data: Buffer) -> Any:
    """The value of a field by its last extension (`seg.png` is a picture); the bytes where DECODERS has none. Raises DataError."""
    decoder = DECODERS.get(field.rpartition(".")[2], bytes)
    try:
        return decoder(data)
    except DataError as error:
        raise DataError(error.reason, field=field) from None
