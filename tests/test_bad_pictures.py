"""Pictures that are cut, damaged, absurd or none: a DataError that says why, never wrong pixels."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pytest
from picture_maker import NOISE, RNG, encode, png
from PIL import Image

from data import decoders
from data.decoders import MAX_PIXELS, decode_image
from data.errors import DataError


def reason(data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        decode_image(data)
    assert "\n" not in caught.value.reason
    return caught.value.reason


def test_cut_jpeg_is_bad_wherever_it_is_cut() -> None:
    for settings in ({}, {"progressive": True}):
        data = encode(NOISE, "JPEG", **settings)
        for length in range(1, len(data)):
            assert reason(data[:length])
    half = len(data) // 2
    assert reason(data[:half]) == f"JPEG is cut: no end mark in its {half} bytes"


def test_jpeg_header_without_pixels() -> None:
    data = encode(NOISE, "JPEG")
    header = data[: data.index(b"\xff\xda")]
    assert reason(header) == f"JPEG is cut: no end mark in its {len(header)} bytes"
    assert "JPEG is cut" in reason(header + b"\xff\xd9")
    assert reason(data[:20]) == "JPEG can't be decoded: the header is cut or broken"


def test_the_end_mark_of_a_thumbnail_is_not_that_of_the_picture() -> None:
    data = encode(NOISE, "JPEG")
    comment = b"a thumbnail ends with \xff\xd9"
    data = data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]
    assert decode_image(data).shape == NOISE.shape
    assert reason(data[:-200] + bytes(200)) == f"JPEG is cut: no end mark in its {len(data)} bytes"


def test_jpeg_filled_up_with_zeros_is_bad() -> None:
    # what a broken download into a preallocated file leaves; PIL would read the rest as gray
    data = encode(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG")
    assert reason(data[: len(data) // 2] + bytes(len(data))).startswith("JPEG is cut: no end mark")


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_cut_file(kind: str) -> None:
    data = encode(NOISE, kind)
    for share in (0.3, 0.6, 0.9):
        assert reason(data[: int(len(data) * share)])


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (2**31 - 1, 1), (13_378, 13_378), (2**31 - 1, 2**31 - 1)])
def test_absurd_size_is_refused_before_decoding(width: int, height: int) -> None:
    assert reason(png(width, height, 8, 2, b"\0")) == f"{width} x {height} pixels: more than the limit of {MAX_PIXELS:,}"


def test_absurd_size_in_a_jpeg_header() -> None:
    data = bytearray(encode(NOISE, "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert reason(bytes(data)).startswith("65535 x 65535 pixels")


def test_absurd_size_in_a_webp_header() -> None:
    data = bytearray(encode(NOISE, "WEBP"))
    at = data.index(b"\x9d\x01\x2a") + 3
    data[at : at + 4] = b"\xff\x3f\xff\x3f"
    assert "16383 x 16383" in reason(bytes(data)) or "exceeds limit" in reason(bytes(data))


def test_pixels_without_one_meaning_are_refused() -> None:
    text = "TIFF with pixels of type {}, which have no one way to become RGB; store 8 bits"
    assert reason(encode(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")) == text.format("F")
    assert reason(encode(Image.fromarray(np.zeros((2, 2), np.int32)), "TIFF")) == text.format("I")


def test_png_checksums() -> None:
    data = encode(NOISE)
    at = data.index(b"IDAT")
    damaged = data[: at + 40] + bytes([data[at + 40] ^ 1]) + data[at + 41 :]
    assert reason(damaged) == f"PNG chunk b'IDAT' at byte {at - 4} fails its checksum"
    assert reason(data[:18] + b"\1" + data[19:]) == "PNG chunk b'IHDR' at byte 8 fails its checksum"
    assert reason(data[:-12]) == f"PNG is cut: no end mark in its {len(data) - 12} bytes"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html>", "not a picture: 15 bytes that start with b'<!DOCTYP'"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture: 47 bytes that start with b'%!PS-Ado'"),
        (b"version https://git-lfs", "not a picture: 23 bytes that start with b'version '"),
        (b"\0" * 4096, r"not a picture: 4096 bytes that start with b'\x00\x00\x00\x00\x00\x00\x00\x00'"),
        (b"P9 1 1 255\n", "not a picture: 11 bytes that start with b'P9 1 1 2'"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WEBP can't be decoded: could not create decoder object"),
    ],
)
def test_what_is_no_picture(data: bytes, expected: str) -> None:
    assert reason(data) == expected


def test_warnings_stay_inside() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * 50
    data = encode(NOISE, "JPEG", exif=exif)
    cut_exif = data.replace(struct.pack(">I", 51), struct.pack(">I", 5000))
    tiff = encode(NOISE, "TIFF", description="x" * 50).replace(struct.pack("<I", 51), struct.pack("<I", 99999))
    large = png(13_370, 13_370, 1, 0, b"\0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in (cut_exif, tiff, large, b"\x89PNG\r\n\x1a\n"):
            try:
                decode_image(bad)
            except DataError:
                pass
        assert warnings.filters[0][0] == "error"


def test_a_fault_of_the_code_is_not_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(image: Image.Image) -> Image.Image:
        raise TypeError("a fault of the code")

    monkeypatch.setattr(decoders, "_to_rgb", broken)
    with pytest.raises(TypeError, match="a fault of the code"):
        decode_image(encode(Image.new("RGBA", (2, 2))))
