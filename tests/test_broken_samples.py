"""Every odd or bad picture and label that is known, one row each, between two good samples: what comes out of build_loader.

A row says what the sample holds and what it becomes: its pixels or its class, or the reason for which it is masked and named; and
which test looks at the same input closer. Odd and broken tars: test_broken_inputs.py.
"""
# ruff: noqa: E501  (tables: one input, one line)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_maker import encode, png
from PIL import Image
from shard_maker import write_listing
from tar_maker import END, join_samples

from data import build_loader

SIDE = 8
GOOD = encode(np.full((SIDE, SIDE, 3), 9, np.uint8))


def plain(*colour: int, width: int = SIDE, height: int = SIDE) -> np.ndarray:
    """One colour, uint8 (height, width, 3)."""
    return np.full((height, width, 3), colour, np.uint8)


def image(mode: str, colour: Any, side: int = SIDE) -> Image.Image:
    return Image.new(mode, (side, side), colour)


def orange(kind: str, width: int = SIDE, height: int = SIDE, **settings: Any) -> bytes:
    return encode(plain(250, 120, 10, width=width, height=height), kind, **settings)


def turned() -> bytes:
    """Red on the left and blue on the right, and EXIF that says: turn it clockwise."""
    pixels = plain(255, 0, 0)
    pixels[:, SIDE // 2 :] = 0, 0, 255
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(pixels, "JPEG", exif=exif, quality=95, subsampling=0)


ORANGE, GRAY, WHITE = plain(250, 120, 10), plain(100, 100, 100), plain(255, 255, 255)
RED_OVER_BLUE = np.concatenate([plain(255, 0, 0, height=SIDE // 2), plain(0, 0, 255, height=SIDE // 2)])
NOISE = np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
PNG, JPEG = encode(NOISE), encode(NOISE, "JPEG")
ADAM7 = b"".join(
    b"\0" + b"\xfa\x78\x0a" * width for width, rows in ((1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)) for _ in range(rows)
)
PALETTE = image("P", 1)
PALETTE.putpalette([255, 0, 0, 250, 120, 10])
DEEP = Image.fromarray(np.full((SIDE, SIDE), 100 * 256 + 7, np.uint16))
FLAT = {"quality": 95, "subsampling": 0}

PICTURES: list[tuple[str, str, bytes, np.ndarray | str, str]] = [
    ("grayscale PNG", "png", encode(image("L", 100)), GRAY, "test_decoders.py::test_grayscale_has_three_equal_channels"),
    ("grayscale JPEG", "jpg", encode(image("L", 100), "JPEG"), GRAY, "test_decoders.py::test_grayscale_has_three_equal_channels"),
    ("CMYK JPEG of Adobe", "jpg", encode(image("RGB", (250, 120, 10)).convert("CMYK"), "JPEG", **FLAT), ORANGE, "test_decoders.py::test_cmyk_jpeg_has_its_colours_not_their_negatives"),
    ("progressive JPEG", "jpg", orange("JPEG", progressive=True, **FLAT), ORANGE, "test_decoders.py::test_jpeg"),
    ("turned by EXIF", "jpg", turned(), RED_OVER_BLUE, "test_decoders.py::test_exif_orientation"),
    ("cut JPEG", "jpg", JPEG[:-9], f"JPEG is cut: no end mark in its {len(JPEG) - 9} bytes", "test_bad_pictures.py::test_cut_jpeg_is_bad_wherever_it_is_cut"),
    ("cut PNG", "png", PNG[:-20], f"PNG is cut: no end mark in its {len(PNG) - 20} bytes", "test_bad_pictures.py::test_cut_file"),
    ("JPEG header only", "jpg", JPEG[: JPEG.index(b"\xff\xda")], f"JPEG is cut: no end mark in its {JPEG.index(bytes([255, 218]))} bytes", "test_bad_pictures.py::test_jpeg_header_without_pixels"),
    ("junk after a JPEG", "jpg", orange("JPEG", **FLAT) + b"junk" * 99, ORANGE, "test_decoders.py::test_junk_after_the_end_does_not_matter"),
    ("junk after a PNG", "png", PNG + b"junk" * 99, NOISE, "test_decoders.py::test_junk_after_the_end_does_not_matter"),
    ("1 x 1", "png", orange("PNG", 1, 1), ORANGE, "test_decoders.py::test_one_pixel_and_one_line"),
    ("1 x 3000", "png", orange("PNG", 1, 3000), ORANGE, "test_transforms.py::test_odd_shapes"),
    ("3000 x 1", "png", orange("PNG", 3000, 1), ORANGE, "test_transforms.py::test_odd_shapes"),
    ("8000 x 8000 in few bytes", "png", png(8000, 8000, 1, 0, (b"\0" + b"\xff" * 1000) * 8000), WHITE, "test_decoders.py::test_large_picture_in_few_bytes_is_read"),
    ("100000 x 100000", "png", png(100_000, 100_000, 8, 2, b"\0"), "100000 x 100000 pixels: more than the limit of 178,956,970", "test_bad_pictures.py::test_absurd_size_is_refused_before_decoding"),
    ("0 x 0", "png", png(0, 0, 8, 2, b""), "PNG can't be decoded: ", ""),
    ("PNG bytes in .jpg", "jpg", PNG, NOISE, "test_decoders.py::test_the_bytes_decide_not_the_extension"),
    ("JPEG bytes in .png", "png", orange("JPEG", **FLAT), ORANGE, "test_decoders.py::test_the_bytes_decide_not_the_extension"),
    ("RGBA", "png", encode(image("RGBA", (245, 0, 0, 51))), plain(253, 204, 204), "test_decoders.py::test_alpha_is_laid_over_white"),
    ("palette", "png", encode(PALETTE), ORANGE, "test_decoders.py::test_palette_with_and_without_transparency"),
    ("palette with a transparent colour", "png", encode(PALETTE, transparency=1), WHITE, "test_decoders.py::test_palette_with_and_without_transparency"),
    ("1 bit", "png", encode(image("1", 1)), WHITE, "test_decoders.py::test_one_bit"),
    ("gray and alpha", "png", encode(image("LA", (0, 51))), plain(204, 204, 204), "test_decoders.py::test_gray_with_alpha"),
    ("16-bit gray", "png", encode(DEEP), GRAY, "test_decoders.py::test_16_bit_gray_keeps_its_brightness"),
    ("16-bit RGB", "png", png(SIDE, SIDE, 16, 2, (b"\0" + b"\xfa\x01\x78\xff\x0a\x80" * SIDE) * SIDE), ORANGE, "test_decoders.py::test_16_bit_of_other_kinds"),
    ("interlaced", "png", png(SIDE, SIDE, 8, 2, ADAM7, interlace=1), ORANGE, "test_decoders.py::test_interlaced_png"),
    ("bad CRC", "png", PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:], "PNG chunk b'IDAT' at byte 33 fails its checksum", "test_bad_pictures.py::test_png_checksums"),
    ("WebP", "webp", orange("WEBP", lossless=True), ORANGE, "test_decoders.py::test_lossless_webp_keeps_every_pixel"),
    ("animated GIF", "gif", encode(PALETTE, "GIF", save_all=True, append_images=[image("RGB", (0, 0, 255))]), ORANGE, "test_decoders.py::test_animations_give_their_first_frame"),
    ("BMP", "bmp", orange("BMP"), ORANGE, "test_decoders.py::test_lossless_formats_keep_every_pixel"),
    ("empty", "png", b"", "the file is empty", "test_bad_pictures.py::test_what_is_no_picture"),
    ("HTML page", "jpg", b"<!DOCTYPE html>", "not a picture: 15 bytes that start with b'<!DOCTYP'", "test_bad_pictures.py::test_what_is_no_picture"),
    ("zeros", "jpg", bytes(999), "not a picture: 999 bytes that start with b'", "test_bad_pictures.py::test_what_is_no_picture"),
    ("random bytes", "jpg", b"\xff\xd8\xff" + NOISE.tobytes(), "JPEG ", "test_bad_pictures.py::test_jpeg_filled_up_with_zeros_is_bad"),
]  # fmt: skip

NAMES = ["cat", "dog", "emu"]
HUGE = b"1" + b"0" * 30

LABELS: list[tuple[str, str, bytes, int | str, str]] = [
    ("spaces", "cls", b" 2 ", 2, "test_labels.py::test_integer_labels"),
    ("line end", "cls", b"2\r\n", 2, "test_labels.py::test_integer_labels"),
    ("leading zero", "cls", b"02", 2, "test_labels.py::test_integer_labels"),
    ("BOM", "cls", b"\xef\xbb\xbf2", 2, "test_labels.py::test_integer_labels"),
    ("3.0", "cls", b"3.0", "label '3.0' is not an integer, and no class names are known", "test_labels.py::test_bad_integer_labels"),
    ("-1", "cls", b"-1", "label -1 is outside the classes 0..2", "test_labels.py::test_bad_integer_labels"),
    ("too large", "cls", b"3", "label 3 is outside the classes 0..2", "test_labels.py::test_bad_integer_labels"),
    ("huge", "cls", HUGE, f"label {HUGE.decode()} is outside the classes 0..2", "test_labels.py::test_bad_integer_labels"),
    ("5,000 digits", "cls", b"9" * 5000, f"label '{'9' * 40}' is not an integer, and no class names are known", "test_labels.py::test_bad_integer_labels"),
    ("a word", "cls", b"dog", "label 'dog' is not an integer, and no class names are known", "test_labels.py::test_bad_integer_labels"),
    ("a known word", "cls named", b"dog\n", 1, "test_labels.py::test_class_names_in_cls"),
    ("an unknown word", "cls named", b"gnu", "label 'gnu' is not one of the 3 class names", "test_labels.py::test_class_names_in_cls"),
    ("empty", "cls", b"", "the label is empty", "test_labels.py::test_bad_integer_labels"),
    ("binary", "cls", b"\xff\xd8\xff\xe0", "not UTF-8 text: b'\\xff\\xd8\\xff\\xe0'... (invalid start byte at byte 0)", "test_labels.py::test_bad_integer_labels"),
    ("JSON integer", "json:a.b", b'{"a": {"b": 2}}', 2, "test_labels.py::test_json_labels"),
    ("JSON integer as a string", "json:a.b", b'{"a": {"b": "2"}}', 2, "test_labels.py::test_json_labels"),
    ("JSON class name", "json:a.b named", b'{"a": {"b": "emu"}}', 2, "test_labels.py::test_json_labels"),
    ("JSON unknown name", "json:a.b named", b'{"a": {"b": "gnu"}}', "label 'gnu' is not one of the 3 class names", "test_labels.py::test_json_labels"),
    ("JSON float", "json:a.b", b'{"a": {"b": 2.0}}', "label '2.0' at 'a.b' is neither an integer nor a class name", "test_labels.py::test_json_labels"),
    ("JSON path missing", "json:a.b", b'{"a": {"c": 2}}', "no 'a.b' in the JSON: looked for 'b' and found keys c", "test_labels.py::test_json_labels"),
    ("JSON too large", "json:a.b", b'{"a": {"b": 3}}', "label 3 is outside the classes 0..2", "test_labels.py::test_json_labels"),
    ("JSON with 5,000 digits", "json:a.b", b'{"a": {"b": %s}}' % (b"9" * 5000), "not JSON: Exceeds the limit", ""),
    ("JSON nested 100,000 times", "json:a.b", b"[" * 100_000, "not JSON: maximum recursion depth exceeded", ""),
    ("broken JSON", "json:a.b", b'{"a"', "not JSON: ", "test_labels.py::test_json_labels"),
    ("text", "txt", b" 2\n", 2, "test_labels.py::test_integer_labels"),
]  # fmt: skip


def middle(path: Path, field: str, fields: dict[str, bytes], good: dict[str, bytes], **loading: Any) -> tuple[np.ndarray, int] | str:
    """(pixels, class) of a sample between two good ones, or why it is masked."""
    path.write_bytes(join_samples([("0", good), ("1", fields), ("2", good)]) + END)
    loader = build_loader(str(path), batch_size=3, training=False, img_size=SIDE, **loading)
    (batch,) = loader
    valid = batch["valid"].tolist()
    assert loader.num_samples == 3 and valid[::2] == [True, True] and [key for _, _, key in batch["ids"]] == ["0", "1", "2"]
    if valid[1]:
        assert not batch["errors"]
        return batch["image"][1].permute(1, 2, 0).numpy(), int(batch["label"][1])
    (error,) = batch["errors"]
    assert (error.shard, error.index, error.key, error.field) == (path.name, 1, "1", field) and str(error).isprintable()
    assert (batch["image"][1] == batch["image"][0]).all() and batch["label"][1] == batch["label"][0]  # ordinary data for batch norm
    return error.reason


@pytest.mark.parametrize(("field", "data", "expected"), [row[1:4] for row in PICTURES], ids=[row[0] for row in PICTURES])
def test_a_picture_becomes(tmp_path: Path, field: str, data: bytes, expected: np.ndarray | str) -> None:
    found = middle(tmp_path / "x.tar", field, {field: data, "cls": b"1"}, {"png": GOOD, "cls": b"0"}, num_classes=3)
    if isinstance(found, str):
        assert isinstance(expected, str) and found.startswith(expected)
    else:
        assert isinstance(expected, np.ndarray) and found[1] == 1
        lossy = data[:2] == b"\xff\xd8"
        assert np.abs(found[0].astype(int) - expected).max() <= (12 if lossy else 0)


@pytest.mark.parametrize(("source", "data", "expected"), [row[1:4] for row in LABELS], ids=[row[0] for row in LABELS])
def test_a_label_becomes(tmp_path: Path, source: str, data: bytes, expected: int | str) -> None:
    source, _, named = source.partition(" ")
    field = source.partition(":")[0]
    good = json.dumps({"a": {"b": NAMES[0] if named else 0}}).encode() if field == "json" else b"0"
    if named:
        write_listing(tmp_path, NAMES)
    found = middle(
        tmp_path / "x.tar", field, {"png": GOOD, field: data}, {"png": GOOD, field: good}, label=source, num_classes=None if named else 3
    )
    if isinstance(found, str):
        assert isinstance(expected, str) and found.startswith(expected)
    else:
        assert found[1] == expected


def test_the_tests_that_the_tables_refer_to_exist() -> None:
    here = Path(__file__).parent
    for reference in [row[4] for row in PICTURES] + [row[4] for row in LABELS]:
        file, _, test = reference.partition("::")
        assert not file or f"\ndef {test}(" in (here / file).read_text(), reference
