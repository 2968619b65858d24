"""Bytes of one field -> its value.

in: field name, bytes  ->  out: picture (H, W, 3) uint8, int, str, JSON value, array, or the bytes themselves
Invariant: pure, and the bytes decide, not the extension. Bad bytes raise `DataError`; anything else that is raised is a fault
of the code. Nothing is unpickled, PIL's warnings stay inside, and no picture above `MAX_PIXELS` is decoded.
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
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Buffer = bytes | bytearray | memoryview

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "tif", "tiff")

# PIL's own limit against decompression bombs: half a GiB at three bytes a pixel.
MAX_PIXELS = 178_956_970

# What a file starts with; the groups are PIL's names of the readers. No other reader is ever used: some run programs (EPS).
_MAGIC = re.compile(
    rb"(?P<Jpeg>\xff\xd8\xff)|(?P<Png>\x89PNG\r\n\x1a\n)|(?P<WebP>RIFF.{4}WEBP)|(?P<Gif>GIF8[79]a)|(?P<Bmp>BM)"
    rb"|(?P<Tiff>II[*+]\0|MM\0[*+])|(?P<Ppm>P[1-6][\s#])",
    re.DOTALL,
)

# Where PIL keeps EXIF and XMP.
_EXIF = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")

# PIL's names of what brings a picture of EXIF orientation 2, 3, ... 8 upright.
_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split()

# PIL's words for what has a plainer name.
_PLAINER = {
    "not identified by this driver": "the header is cut or broken",
    "cannot load this image": "a header and no pixels",
}


@dataclass(slots=True)
class Picture:
    """A picture whose header is read and whose pixels are not yet: `image` as it is stored, and its EXIF `orientation`, 1..8,
    that says how to turn it. `data`: its bytes."""

    image: Image.Image
    orientation: int
    data: bytes

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) as shown."""
        width, height = self.image.size
        return (height, width) if self.orientation >= 5 else (width, height)


def is_picture(data: Buffer) -> bool:
    """Whether the first bytes are those of a picture that is read here."""
    return _MAGIC.match(bytes(data[:16])) is not None


def open_picture(data: Buffer) -> Picture:
    """Reads the header. Raises DataError: no picture, a broken header, more than MAX_PIXELS."""
    data = bytes(data)
    kind = _kind(data)
    late_exif = kind == "Png" and _check_png(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = io.BytesIO(data)
            image = _reader(kind)(file)
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{image.width} x {image.height} pixels: more than the limit of {MAX_PIXELS:,}")
            # PIL reads what stands in place of lost pixels, such as zeros, as gray ones
            if kind == "Jpeg" and data.rfind(b"\xff\xd9", file.tell()) < 0:
                raise DataError(f"JPEG is cut: no end mark in its {len(data)} bytes")
            if late_exif:
                image.load()
            return Picture(image, _orientation(image), data)
    except DataError:
        raise
    except _pil_errors() as error:
        raise DataError(_reason(kind, error)) from None


def read_pixels(picture: Picture) -> Image.Image:
    """The whole picture as it is stored (not yet turned), in mode "RGB", or "L" where the three would be equal. Raises
    DataError."""
    image = picture.image
    try:
        if image.format == "TIFF":  # the only one that warns here
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                image.load()
        else:
            image.load()
    except _pil_errors() as error:
        raise DataError(_reason(image.format or "picture", error)) from None
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    return _to_rgb(image)


def decode_image(data: Buffer) -> np.ndarray:
    """Any picture -> uint8 (H, W, 3) as it should be seen: turned by its EXIF orientation, alpha laid over white, 16 bits
    brought to 8."""
    picture = open_picture(data)
    image = turned(read_pixels(picture), picture.orientation)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """A picture as it is stored -> as it is shown."""
    if orientation == 1:
        return image
    from PIL.Image import Transpose

    return image.transpose(Transpose[_TURNS[orientation - 2]])


def _kind(data: bytes) -> str:
    """The format that the first bytes show, as PIL names its reader."""
    match = _MAGIC.match(data)
    if match is None:
        raise DataError(f"not a picture: {len(data)} bytes that start with {data[:8]!r}" if data else "the file is empty")
    assert match.lastgroup is not None
    return match.lastgroup


@lru_cache
def _pil_errors() -> tuple[type[Exception], ...]:
    """What PIL raises on bytes that it can't read; caught only around PIL's own calls, where none of our code runs."""
    from PIL.Image import DecompressionBombError

    return OSError, SyntaxError, ValueError, EOFError, struct.error, DecompressionBombError


@lru_cache
def _reader(kind: str) -> Callable[[io.BytesIO], Image.Image]:
    """PIL's class for a format. `Image.open` would do the same, more slowly, and hide why a header is refused."""
    return getattr(import_module(f"PIL.{kind}ImagePlugin"), f"{kind}ImageFile")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; 1 where it is damaged, since the pixels are all right."""
    # PIL turns TIFF itself, while it reads the pixels
    if image.format == "TIFF" or not any(name in image.info for name in _EXIF):
        return 1
    try:
        value = image.getexif().get(0x0112, 1)
    except (TypeError, KeyError, IndexError):
        return 1
    except _pil_errors():
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _check_png(data: bytes) -> bool:
    """Checks the checksum of every chunk, which PIL skips for the pixels; says whether EXIF stands after the pixels."""
    view = memoryview(data)
    position, in_pixels, late_exif = 8, False, False
    while position + 12 <= len(view):
        length = int.from_bytes(view[position : position + 4], "big")
        name = bytes(view[position + 4 : position + 8])
        end = position + 8 + length
        if end + 4 > len(view):
            break
        if zlib.crc32(view[position + 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise DataError(f"PNG chunk {name!r} at byte {position} fails its checksum")
        in_pixels = in_pixels or name == b"IDAT"
        late_exif = late_exif or (in_pixels and name == b"eXIf")
        if name == b"IEND":
            return late_exif
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
    raise DataError(f"{image.format} with pixels of type {mode}, which have no one way to become RGB; store 8 bits")


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
    text = " ".join(str(error).split())[:200]
    text = _PLAINER.get(text, text)
    if error.__cause__ is not None:  # PIL's text is then that of an IndexError or KeyError inside its reader
        text = f"broken header ({type(error.__cause__).__name__}: {text})"
    return f"{kind.upper()} can't be decoded: {text or type(error).__name__}"


def decode_text(data: Buffer) -> str:
    """UTF-8, with or without a byte order mark."""
    try:
        return bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {bytes(data[:12])!r}... ({error.reason} at byte {error.start})") from None


_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")


def parse_integer(text: str) -> int | None:
    """The integer that a stripped text is, None for any other text (`3.0`, `1_000`, words, hundreds of digits)."""
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
    """The value of a field by its last extension (`seg.png` is a picture); the bytes where DECODERS has none. Raises
    DataError."""
    decoder = DECODERS.get(field.rpartition(".")[2], bytes)
    try:
        return decoder(data)
    except DataError as error:
        raise DataError(error.reason, field=field) from None
