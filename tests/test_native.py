"""The C decoder gives the bytes that PIL's crop and resize give, for every kind of JPEG, and leaves to PIL what it declines."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_maker import encode, noise
from PIL import Image

from data import native
from data.decoders import open_picture, read_pixels, turned
from data.errors import DataError
from data.transforms import eval_transform, random_box, stored_box, train_transform

pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=f"no native part here: {native.why_absent()}")

KINDS: dict[str, dict[str, Any]] = {
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "420": {"subsampling": 2},
    "411": {"subsampling": "4:1:1"},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True, "quality": 97},
    "coarse": {"quality": 5},
    "restarts": {"restart_marker_blocks": 3},
    "restart rows": {"restart_marker_rows": 1, "subsampling": 0},
}


def photo(width: int, height: int) -> Image.Image:
    """Shapes, a gradient and some noise: all frequencies, as in a photograph."""
    small = Image.fromarray(noise(max(1, width // 9), max(1, height // 9))).resize((width, height), Image.Resampling.BICUBIC)
    return Image.blend(small, Image.fromarray(noise(width, height)), 0.15)


def by_pil(data: bytes, box: tuple[float, float, float, float], size: tuple[int, int], flip: bool = False) -> torch.Tensor:
    """The exact part by PIL alone; `box` and `size` of the picture as shown."""
    picture = open_picture(data)
    box = stored_box(box, picture.orientation, picture.size)
    size = size[::-1] if picture.orientation >= 5 else size
    image = turned(read_pixels(picture).resize(size, Image.Resampling.BILINEAR, box=box), picture.orientation).convert("RGB")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return pixels.flip(2) if flip else pixels


def by_c(data: bytes, box: tuple[float, float, float, float], size: tuple[int, int], flip: bool = False) -> torch.Tensor:
    jpeg = native.open_jpeg(data)
    assert jpeg is not None
    jpeg.orientation = jpeg.orientation or open_picture(data).orientation
    out = np.full((3, size[1], size[0]), 99, np.uint8)
    assert jpeg.write(stored_box(box, jpeg.orientation, jpeg.size), flip, out)
    return torch.from_numpy(out)


def some_boxes(width: int, height: int, num: int) -> list[tuple[float, float, float, float]]:
    rng = np.random.default_rng((width, height))
    return [(0, 0, width, height), *(random_box((width, height), rng.random(22).tolist(), (0.01, 1.0)) for _ in range(num))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(150, 110), (97, 203), (64, 64), (33, 47)])
def test_every_part_is_pil_s_to_the_byte(kind: str, shape: tuple[int, int]) -> None:
    for image in (photo(*shape), photo(*shape).convert("L")):
        data = encode(image, "JPEG", **KINDS[kind])
        for box in some_boxes(*shape, 12):
            for size in ((40, 40), (100, 30)):
                assert torch.equal(by_c(data, box, size), by_pil(data, box, size)), (box, size)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 3), (15, 17), (1000, 9), (9, 1000)])
def test_odd_sizes(shape: tuple[int, int]) -> None:
    for kind in ("420", "444", "progressive"):
        data = encode(photo(*shape), "JPEG", **KINDS[kind])
        for box in some_boxes(*shape, 6):
            assert torch.equal(by_c(data, box, (24, 24)), by_pil(data, box, (24, 24))), box


def test_boxes_between_pixels() -> None:
    data = encode(photo(200, 140), "JPEG")
    for box in ((0.3, 0.7, 199.1, 139.9), (10.5, 3.25, 12.25, 130), (100.1, 50, 163.9, 114)):
        assert torch.equal(by_c(data, box, (64, 64)), by_pil(data, box, (64, 64)))


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_and_flips(orientation: int, order: str) -> None:
    exif = Image.Exif()
    exif.endian = "<" if order == "little" else ">"
    exif[0x010E], exif[0x0112] = "a text", orientation
    data = encode(photo(90, 60), "JPEG", exif=exif)
    header = native.open_jpeg(data)
    assert header is not None and header.orientation == orientation == open_picture(data).orientation
    assert header.size == open_picture(data).size
    for box in some_boxes(*header.size, 4):
        for flip in (False, True):
            assert torch.equal(by_c(data, box, (30, 20), flip), by_pil(data, box, (30, 20), flip))


def test_where_orientation_is_unusual_pil_says() -> None:
    base = encode(photo(40, 30), "JPEG")
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    exif = Image.Exif()
    exif[0x0112] = 3
    body = exif.tobytes()
    long = body.replace(b"\x12\x01\x03\x00", b"\x12\x01\x04\x00")  # a LONG, which PIL takes too
    assert long != body or body.replace(b"\x01\x12\x00\x03", b"\x01\x12\x00\x04") != body
    for segment in (xmp, b"Exif\0\0" + body[:20], body + body, b"Exif\0\0junk", long):
        data = base[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + base[2:]
        wanted = eval_transform(data, 65)
        assert torch.equal(eval_transform(data, 65, decoder="native"), by_transform(data, wanted))


def by_transform(data: bytes, python: torch.Tensor) -> torch.Tensor:
    """What PIL alone gives for the evaluation's view at 65 pixels; near to what the Python path gives."""
    width, height = open_picture(data).size
    short = round(65 * 256 / 224)
    resized = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    left, top = round((resized[0] - 65) / 2), round((resized[1] - 65) / 2)
    x, y = width / resized[0], height / resized[1]
    exact = by_pil(data, (left * x, top * y, (left + 65) * x, (top + 65) * y), (65, 65))
    assert (exact.int() - python.int()).abs().max() <= 2
    return exact


def test_the_transforms_use_it() -> None:
    data = encode(photo(300, 200), "JPEG")
    for seed in range(6):
        draws = np.random.default_rng(seed).random(23).tolist()
        box = random_box((300, 200), draws[1:], (0.08, 1.0))
        view = train_transform(data, np.random.default_rng(seed), 96, decoder="native")
        assert torch.equal(view, by_pil(data, box, (96, 96), draws[0] < 0.5))
        small = train_transform(data, np.random.default_rng(seed), 32, decoder="native")
        assert (small.int() - train_transform(data, np.random.default_rng(seed), 32).int()).abs().max() <= 2
    assert torch.equal(eval_transform(data, 65, decoder="native"), by_transform(data, eval_transform(data, 65)))
    plain = encode(photo(256, 300), "JPEG")  # not resampled: the very pixels
    assert torch.equal(eval_transform(plain, 224, decoder="native"), eval_transform(plain, 224))


def frame(data: bytes) -> int:
    return next(data.index(mark) for mark in (b"\xff\xc0", b"\xff\xc2") if mark in data)


def test_what_it_declines_is_as_the_python_path_has_it() -> None:
    image = photo(80, 60)
    data = encode(image, "JPEG")
    at = frame(data)
    odd = {
        "cmyk": encode(image.convert("CMYK"), "JPEG"),
        "png": encode(image),
        "12 bits": data[: at + 4] + b"\x0c" + data[at + 5 :],
        "arithmetic": data[:at] + b"\xff\xc9" + data[at + 2 :],
        "lossless": data[:at] + b"\xff\xc3" + data[at + 2 :],
        "too large": data[: at + 5] + b"\xff\xff\xff\xff" + data[at + 9 :],
        "no end": data[:-2],
        "cut": data[: len(data) // 2],
        "empty": b"",
        "no frame": data[:at] + data[at + 19 :],
        "sampling 0": data[: at + 11] + b"\0" + data[at + 12 :],
    }
    for name, encoded in odd.items():
        assert native.open_jpeg(encoded) is None, name
        assert outcome(encoded, "native") == outcome(encoded, "python"), name


def outcome(data: bytes, decoder: str) -> str | bytes:
    try:
        return eval_transform(data, 16, decoder=decoder).numpy().tobytes()
    except DataError as error:
        return error.reason


@pytest.mark.parametrize("kind", ["420", "progressive", "restarts"])
def test_damaged_bytes_end_as_in_pil(kind: str) -> None:
    data = encode(photo(24, 17), "JPEG", **KINDS[kind])
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(data)
        for at in rng.integers(2, len(data), rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        box, size = (0, 0, 1, 1), (7, 7)
        jpeg = native.open_jpeg(bytes(damaged))
        if jpeg is None:
            continue
        jpeg.orientation = jpeg.orientation or 1
        out = np.zeros((3, *size), np.uint8)
        box = (0, 0, *jpeg.size)
        if max(jpeg.size) > 2000 or not jpeg.write(stored_box(box, jpeg.orientation, jpeg.size), False, out):
            refused += 1
            continue
        assert torch.equal(torch.from_numpy(out), by_pil(bytes(damaged), box, size))
    assert refused > 50


def test_restart_markers_out_of_order_are_pil_s() -> None:
    data = encode(photo(200, 160), "JPEG", restart_marker_blocks=4)
    marks = [at for at in range(len(data) - 1) if data[at] == 0xFF and 0xD0 <= data[at + 1] <= 0xD7]
    assert len(marks) > 20
    box = (90, 100, 150, 150)
    assert torch.equal(by_c(data, box, (32, 32)), by_pil(data, box, (32, 32)))
    for at in marks[3:20]:
        for byte in (b"\xd0\xd3"[at % 2], 0):  # another number, none
            damaged = data[: at + 1] + bytes([byte]) + data[at + 2 :]
            if damaged == data:
                continue
            jpeg = native.open_jpeg(damaged)
            assert jpeg is not None
            assert not jpeg.write(box, False, np.zeros((3, 32, 32), np.uint8))
            assert outcome(damaged, "native") == outcome(damaged, "python")


def test_a_single_component_may_have_any_sampling() -> None:
    for kind in ("420", "restarts"):
        data = bytearray(encode(photo(120, 75).convert("L"), "JPEG", **KINDS[kind]))
        for sampling in (0x11, 0x22, 0x21, 0x41):
            data[frame(bytes(data)) + 11] = sampling
            for box in some_boxes(120, 75, 10):
                assert torch.equal(by_c(bytes(data), box, (30, 30)), by_pil(bytes(data), box, (30, 30))), (sampling, box)


def test_threads_and_forks_do_not_disturb_each_other() -> None:
    pictures = [encode(photo(130 + i, 100), "JPEG") for i in range(6)]
    expected = [by_c(data, (5, 5, 90, 90), (50, 50)) for data in pictures]
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for _ in range(30) for i in range(6) if not torch.equal(by_c(pictures[i], (5, 5, 90, 90), (50, 50)), expected[i]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:
        os._exit(int(not torch.equal(by_c(pictures[0], (5, 5, 90, 90), (50, 50)), expected[0])))
    for thread in threads:
        thread.join()
    assert not wrong and os.waitpid(child, 0)[1] == 0


def test_any_buffer_and_any_memory_will_do() -> None:
    data = encode(photo(70, 50), "JPEG")
    batch = torch.zeros(3, 3, 48, 48, dtype=torch.uint8)
    for buffer in (data, bytearray(data), memoryview(b"xx" + data)[2:]):
        train_transform(buffer, np.random.default_rng(0), 48, scale=(0.2, 1), out=batch[1], decoder="native")
        assert torch.equal(batch[1], train_transform(data, np.random.default_rng(0), 48, scale=(0.2, 1), decoder="native"))
    assert not batch[0].any() and not batch[2].any()


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in native.FOLDER.iterdir():
        if file.suffix in (".c", ".h", ".sh"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    script = ["sh", str(tmp_path / "build.sh")]
    assert subprocess.run(script, env={**os.environ, "CC": "no-such-compiler"}, capture_output=True).stdout == b""
    assert not (tmp_path / "jpeg.so").exists()
    built = "built data/native/samples.so\nbuilt data/native/jpeg.so\n"
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout == built
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout == ""  # nothing to do
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "jpeg.so")
    native._load.cache_clear()
    try:
        assert native.why_absent() == ""
        (tmp_path / "view.c").write_text("/* changed */")
        native._load.cache_clear()
        assert native.why_absent() == "it was built from other C files than those beside it: run `make native`"
        (tmp_path / "none.so").write_bytes(b"no library")
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
        native._load.cache_clear()
        assert native.why_absent().startswith("it can't be loaded: ")
    finally:
        native._load.cache_clear()


def test_real_photographs(shared_data: Path) -> None:
    rng = np.random.default_rng(0)
    for file in sorted((shared_data / "imagenet" / "images").iterdir()):
        data = file.read_bytes()
        box = random_box(open_picture(data).size, rng.random(22).tolist(), (0.08, 1.0))
        assert torch.equal(by_c(data, box, (224, 224)), by_pil(data, box, (224, 224))), file.name
