"""Pictures, labels and other fields as people have them become the right value."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from picture_maker import NOISE, RNG, SMOOTH, encode, png
from PIL import Image

from data import decoders
from data.decoders import decode, decode_image, decode_integer, decode_json, decode_text, open_picture, parse_integer
from data.errors import DataError


def near(pixels: np.ndarray, expected: np.ndarray, tolerance: int = 9) -> bool:
    return pixels.shape == expected.shape and np.abs(pixels.astype(int) - expected.astype(int)).max() <= tolerance


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF"])
def test_lossless_formats_keep_every_pixel(kind: str) -> None:
    pixels = decode_image(encode(NOISE, kind))
    assert pixels.dtype == np.uint8 and (pixels == NOISE).all()


def test_lossless_webp_keeps_every_pixel() -> None:
    assert (decode_image(encode(NOISE, "WEBP", lossless=True)) == NOISE).all()


@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"subsampling": 0}, {"optimize": True}], ids=str)
def test_jpeg(settings: dict) -> None:
    assert near(decode_image(encode(SMOOTH, "JPEG", quality=95, **settings)), SMOOTH)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP", "PPM"])
def test_grayscale_has_three_equal_channels(kind: str) -> None:
    gray = SMOOTH[..., 0]
    settings = {"quality": 95} if kind == "JPEG" else {}
    pixels = decode_image(encode(gray, kind, **settings))
    assert near(pixels, np.repeat(gray[..., None], 3, 2), 9 if kind == "JPEG" else 0)


def test_cmyk_jpeg_has_its_colours_not_their_negatives() -> None:
    # Adobe stores CMYK inverted; PIL writes it so, with Adobe's marker.
    colours = np.zeros((16, 48, 3), np.uint8)
    colours[:, :16], colours[:, 16:32], colours[:, 32:] = (255, 0, 0), (255, 255, 255), (0, 0, 128)
    data = encode(Image.fromarray(colours).convert("CMYK"), "JPEG", quality=95, subsampling=0)
    assert b"Adobe" in data
    assert near(decode_image(data), colours, 12)


def test_cmyk_tiff() -> None:
    assert near(decode_image(encode(Image.fromarray(NOISE).convert("CMYK"), "TIFF")), NOISE, 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(kind: str, orientation: int) -> None:
    stored = {  # from the picture as shown: what a camera held that way writes
        1: SMOOTH,
        2: SMOOTH[:, ::-1],
        3: SMOOTH[::-1, ::-1],
        4: SMOOTH[::-1],
        5: SMOOTH.transpose(1, 0, 2),
        6: np.rot90(SMOOTH, 1),
        7: SMOOTH[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(SMOOTH, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    settings = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    data = encode(np.ascontiguousarray(stored), kind, exif=exif, **settings)
    assert near(decode_image(data), SMOOTH, 9 if kind == "JPEG" else 0)
    assert open_picture(data).size == (SMOOTH.shape[1], SMOOTH.shape[0])


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_absurd_orientation_is_no_orientation(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert near(decode_image(encode(SMOOTH, "JPEG", quality=95, exif=exif)), SMOOTH)


def test_damaged_exif_does_not_lose_the_picture() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a text long enough to lie outside its entry"
    data = encode(SMOOTH, "JPEG", quality=95, exif=exif)
    start = data.index(b"Exif\0\0") + 6
    for position in range(start, start + 40):
        damaged = data[:position] + b"\xff" + data[position + 1 :]
        assert sorted(decode_image(damaged).shape) == sorted(SMOOTH.shape)


def test_png_with_exif_behind_its_pixels() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    data = encode(NOISE, exif=exif)
    at = data.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(data[at : at + 4], "big")
    moved = data[:at] + data[end:-12] + data[at:end] + data[-12:]
    assert (decode_image(moved) == NOISE[::-1, ::-1]).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM"])
def test_junk_after_the_end_does_not_matter(kind: str) -> None:
    data = encode(SMOOTH, kind)
    assert (decode_image(data + b"\0junk\xff" * 100) == decode_image(data)).all()


def test_one_pixel_and_one_line() -> None:
    for kind in ("PNG", "JPEG", "BMP"):
        assert decode_image(encode(np.full((1, 1, 3), 200, np.uint8), kind)).tolist() == [[[200, 200, 200]]]
    line = RNG.integers(0, 256, (3000, 1, 3), dtype=np.uint8)
    assert (decode_image(encode(line)) == line).all()
    assert (decode_image(encode(line.transpose(1, 0, 2))) == line.transpose(1, 0, 2)).all()


def test_large_picture_in_few_bytes_is_read() -> None:
    rows = (b"\0" + b"\xff" * 1000) * 8000
    data = png(8000, 8000, 1, 0, rows)
    assert len(data) < 25_000
    picture = open_picture(data)
    assert picture.size == (8000, 8000)
    assert decoders.read_pixels(picture).getextrema() == (255, 255)


def test_the_bytes_decide_not_the_extension() -> None:
    assert (decode("jpg", encode(NOISE, "PNG")) == NOISE).all()
    assert near(decode("png", encode(SMOOTH, "JPEG", quality=95)), SMOOTH)
    assert (decode("seg.png", encode(NOISE, "BMP")) == NOISE).all()


def test_alpha_is_laid_over_white() -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0], rgba[0, 1], rgba[1, 0], rgba[1, 1] = (10, 20, 30, 255), (10, 20, 30, 0), (0, 0, 0, 128), (255, 0, 0, 51)
    expected = [[[10, 20, 30], [255, 255, 255]], [[127, 127, 127], [255, 204, 204]]]
    assert decode_image(encode(rgba)).tolist() == expected
    assert decode_image(encode(rgba, "WEBP", lossless=True, exact=True)).tolist() == expected
    assert decode_image(encode(rgba, "TIFF")).tolist() == expected


def test_gray_with_alpha() -> None:
    image = Image.merge("LA", (Image.new("L", (3, 1), 100), Image.frombytes("L", (3, 1), bytes([255, 0, 51]))))
    assert decode_image(encode(image)).tolist() == [[[100] * 3, [255] * 3, [224] * 3]]


def test_palette_with_and_without_transparency() -> None:
    image = Image.frombytes("P", (4, 1), bytes([0, 1, 2, 3]))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7])
    solid = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 8, 7]]
    assert decode_image(encode(image)).tolist() == [solid]
    assert decode_image(encode(image, transparency=1)).tolist() == [[solid[0], [255] * 3, *solid[2:]]]
    # one alpha for each entry
    assert decode_image(encode(image, transparency=bytes([0, 255, 128, 255]))).tolist() == [
        [[255] * 3, [0, 255, 0], [127, 127, 255], [9, 8, 7]]
    ]
    assert decode_image(encode(image, "GIF", transparency=2)).tolist() == [[*solid[:2], [255] * 3, solid[3]]]
    assert decode_image(encode(image, "BMP")).tolist() == [solid]


def test_one_transparent_colour() -> None:
    gray = png(3, 1, 8, 0, b"\0\x05\x06\x07", (b"tRNS", b"\0\x06"))
    assert decode_image(gray)[0, :, 0].tolist() == [5, 255, 7]
    rgb = png(2, 1, 8, 2, b"\0\x01\x02\x03\x04\x05\x06", (b"tRNS", b"\0\x04\0\x05\0\x06"))
    assert decode_image(rgb).tolist() == [[[1, 2, 3], [255, 255, 255]]]
    deep = png(3, 1, 16, 0, b"\0\x12\x34\x12\x35\xff\xff", (b"tRNS", b"\x12\x34"))
    assert decode_image(deep)[0, :, 0].tolist() == [255, 0x12, 255]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "PPM", "GIF"])
def test_one_bit(kind: str) -> None:
    bits = RNG.integers(0, 2, (9, 13)).astype(bool)
    assert (decode_image(encode(Image.fromarray(bits), kind)) == np.where(bits, 255, 0)[..., None]).all()


def test_two_and_four_bits_are_scaled() -> None:
    assert decode_image(png(4, 1, 2, 0, b"\0\x1b"))[0, :, 0].tolist() == [0, 85, 170, 255]
    assert decode_image(png(2, 1, 4, 0, b"\0\x0f"))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_keeps_its_brightness(kind: str) -> None:
    deep = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert decode_image(encode(Image.fromarray(deep), kind))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_16_bit_of_other_kinds() -> None:
    assert decode_image(png(1, 1, 16, 2, b"\0\x80\x01\xff\xff\x00\x10")).tolist() == [[[128, 255, 0]]]
    assert decode_image(png(1, 1, 16, 4, b"\0\x80\x01\xff\xff")).tolist() == [[[128, 128, 128]]]
    assert decode_image(png(1, 1, 16, 6, b"\0\x80\x01\x40\0\x20\0\0\0")).tolist() == [[[255, 255, 255]]]
    assert decode_image(b"P5 2 1 65535\n\x80\x01\xff\xff")[0, :, 0].tolist() == [128, 255]
    assert decode_image(b"P6 1 1 65535\n\x80\x01\xff\xff\x00\x10").tolist() == [[[128, 255, 0]]]


def test_interlaced_png() -> None:
    # Adam7 of a 2 x 2 picture: pass 1 the first pixel, pass 6 the second, pass 7 the second row
    rows = b"\0\x0a" + b"\0\x14" + b"\0\x1e\x28"
    assert decode_image(png(2, 2, 8, 0, rows, interlace=1))[..., 0].tolist() == [[10, 20], [30, 40]]


def test_animations_give_their_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    for kind, settings in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **settings)
        assert (decode_image(data) == (255, 0, 0)).all(), kind
    several = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])  # as phones write JPEG
    assert near(decode_image(several), np.full((8, 8, 3), (255, 0, 0)))


def test_decoding_needs_only_a_buffer() -> None:
    data = encode(NOISE)
    assert (decode_image(memoryview(data)) == NOISE).all()
    assert (decode_image(bytearray(data)) == NOISE).all()


@pytest.mark.parametrize(("data", "value"), [(b"3", 3), (b" 3 \r\n", 3), (b"03", 3), (b"\xef\xbb\xbf7\n", 7), (b"-1", -1), (b"+5", 5)])
def test_integers(data: bytes, value: int) -> None:
    assert decode_integer(data) == value and decode("cls", data) == value


@pytest.mark.parametrize("data", [b"", b"3.0", b"1e3", b"1_000", b"cat", b"3 4", b"0x1f", "\u0663".encode(), b"9" * 5000])
def test_what_is_no_integer(data: bytes) -> None:
    with pytest.raises(DataError, match="^cls: not an integer: '"):
        decode("cls", data)


def test_huge_integers_are_integers() -> None:
    assert parse_integer("9" * 30) == int("9" * 30)


def test_text() -> None:
    assert decode("txt", "\ufeffgr\u00fc\u00df\n".encode()) == "gr\u00fc\u00df\n"
    with pytest.raises(DataError, match=r"^txt: not UTF-8 text: b'\\xff\\xfeh\\x00'\.\.\. \(invalid start byte at byte 0\)"):
        decode("txt", b"\xff\xfeh\0")
    assert decode_text(memoryview(b"a")) == "a"


def test_json() -> None:
    value = {"a": {"b": [1, "x"]}}
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert decode("json", json.dumps(value).encode(encoding)) == value
    for bad in (b"", b"{", b"\xff\xff", b"[" * 100_000, b"1" * 10_000):
        with pytest.raises(DataError, match="^not JSON: "):
            decode_json(bad)


def test_npy() -> None:
    array = RNG.normal(size=(3, 4)).astype(np.float32)
    out = io.BytesIO()
    np.save(out, array)
    assert (decode("pose.npy", out.getvalue()) == array).all()
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    huge = out.getvalue().replace(b"(3, 4)", b"(3000000000000, 4)".ljust(6))
    for bad in (b"", b"x" * 100, out.getvalue()[:-1], out.getvalue()[:40], pickled.getvalue(), huge):
        with pytest.raises(DataError, match="^npy: not a .npy array that can be read: "):
            decode("npy", bad)


def test_other_fields_stay_bytes() -> None:
    assert decode("mp4", b"\0\1") == b"\0\1" and decode("pyd", memoryview(b"cos\n")) == b"cos\n"


def test_real_photographs(shared_data: Path) -> None:
    files = sorted((shared_data / "imagenet" / "images").iterdir())
    assert len(files) == 150
    for file in files[::10]:
        with Image.open(file) as image:
            assert (decode_image(file.read_bytes()) == np.asarray(image.convert("RGB"))).all()
