"""What a page may show of a field.

in: a field's name and bytes  ->  out: Shown: its kind, a text; pictures drawn anew; the type under which a clip or sound is sent
Invariant: bytes of a tar reach the browser only as text to be escaped, inside a picture that was decoded and encoded here, or under one of
the types of PLAYED, which no browser takes for a page.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.decoders import IMAGE_FIELDS, decode_json, decode_npy
from data.errors import DataError
from data.viewing import FieldView

if TYPE_CHECKING:
    from PIL.Image import Image

PLAYED = {
    "mp4": "video/mp4", "m4v": "video/mp4", "mov": "video/mp4", "webm": "video/webm", "mkv": "video/webm", "ogv": "video/ogg",
    "avi": "video/x-msvideo", "wav": "audio/wav", "flac": "audio/flac", "mp3": "audio/mpeg", "ogg": "audio/ogg", "opus": "audio/ogg",
    "m4a": "audio/mp4",
}  # fmt: skip
TEXT_FIELDS = ("txt", "cls", "text", "caption", "csv", "tsv", "md", "html", "htm", "xml", "svg", "yaml", "yml", "srt", "id", "index")
MAX_TEXT = 64 << 10  # bytes
MAX_ARRAY = 64 << 20


@dataclass(frozen=True, slots=True)
class Shown:
    """A field on a page. kind: picture, video, audio, text or bytes. text: what to print; cut: there is more. error: why it can't be
    read."""

    kind: str
    text: str = ""
    cut: bool = False
    error: str = ""


def kind_of(field: FieldView) -> str:
    """What a field is, by its name."""
    if field.kind in IMAGE_FIELDS:
        return "picture"
    if field.kind in PLAYED:
        return PLAYED[field.kind].partition("/")[0]
    return "text" if field.kind in (*TEXT_FIELDS, "json", "npy") else "bytes"


def show(field: FieldView, data: bytes) -> Shown:
    """A field, read."""
    kind = kind_of(field)
    try:
        if field.kind == "json":
            text = json.dumps(decode_json(data), indent=2, ensure_ascii=False)
            return Shown("text", text[:MAX_TEXT], len(text) > MAX_TEXT)
        if field.kind == "npy":
            return Shown("text", _describe_array(data) if len(data) <= MAX_ARRAY else f"{len(data):,} bytes: too large to be shown")
    except DataError as error:
        return Shown("text", _as_text(data[:MAX_TEXT]) if field.kind == "json" else "", len(data) > MAX_TEXT, error.reason)
    if kind == "text":
        return Shown("text", _as_text(data[:MAX_TEXT]), len(data) > MAX_TEXT)
    if kind == "bytes":
        return Shown("bytes", _hex_dump(data[:128]), len(data) > 128)
    return Shown(kind)


def encode_picture(image: Image, lossless: bool) -> tuple[bytes, str]:
    """(bytes, type) of a picture that was decoded here."""
    out = io.BytesIO()
    if lossless:
        image.save(out, "PNG")
        return out.getvalue(), "image/png"
    image.save(out, "JPEG", quality=85)
    return out.getvalue(), "image/jpeg"


def _as_text(data: bytes) -> str:
    return data.decode("utf-8-sig", "backslashreplace").replace("\0", "\\0")


def _describe_array(data: bytes) -> str:
    array = decode_npy(data)
    text = f"{array.dtype} {' x '.join(map(str, array.shape)) or 'scalar'}"
    if array.size and array.dtype.kind in "iufb":
        text += f"\nfrom {array.min()} to {array.max()}, mean {array.mean():.4g}"
    return f"{text}\n{str(array)[:4000]}"


def _hex_dump(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:04x}  {row.hex(' '):<47}  {shown}")
    return "\n".join(lines)


