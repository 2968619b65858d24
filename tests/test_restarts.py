"""Restart markers: the same pixels and segments, little larger, left out where they can't be; through make_shards too."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from photos import all_samples, make_folder, refused, run
from picture_maker import encode, noise
from PIL import Image

from data import native, restarts
from data.decoders import decode_image
from data.restarts import add_restarts, describe_unmarked

pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=f"no native part here: {native.why_absent()}")


def photo(width: int = 320, height: int = 240) -> Image.Image:
    return Image.fromarray(noise(width // 9, height // 9)).resize((width, height), Image.Resampling.BICUBIC)


def coefficients_differ(a: bytes, b: bytes) -> bool:
    return not (decode_image(a) == decode_image(b)).all()


@pytest.mark.parametrize("settings", [{}, {"subsampling": 0}, {"subsampling": "4:1:1"}, {"optimize": True}, {"quality": 97}], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_picture_stays_and_gets_markers(mode: str, settings: dict) -> None:
    data = encode(photo().convert(mode), "JPEG", **settings)
    new, reason = add_restarts(data)
    assert reason == "" and not coefficients_differ(data, new)
    jpeg = native.open_jpeg(new)
    assert jpeg is not None and jpeg.restart_interval > 0
    assert len(new) < 1.03 * len(data)
    assert add_restarts(new) == (new, restarts.MARKED)


def test_all_other_segments_stay_as_they_are() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a text"
    data = encode(photo(), "JPEG", exif=exif, icc_profile=bytes(range(200)) * 500, comment=b"a comment", dpi=(300, 300), xmp=b"<x/>")
    data = data[:2] + b"\xff\xed\x00\x06abcd" + data[2:]  # before JFIF's, and unknown
    new, reason = add_restarts(data)
    assert reason == "" and not coefficients_differ(data, new)
    with Image.open(io.BytesIO(data)) as old, Image.open(io.BytesIO(new)) as image:
        assert {k: v for k, v in old.info.items()} == {k: v for k, v in image.info.items()}
        assert old.applist == image.applist  # type: ignore[attr-defined]
        assert image.getexif()[0x0112] == 6


def test_what_is_left_as_it_is() -> None:
    image = photo()
    plain = encode(image, "JPEG")
    frame = plain.index(b"\xff\xc0")
    cases = {
        restarts.NO_JPEG: [encode(image), b"", b"\xff\xd8"],
        restarts.PROGRESSIVE: [encode(image, "JPEG", progressive=True)],
        restarts.OTHER_CODING: [plain[:frame] + b"\xff\xc9" + plain[frame + 2 :], plain[:frame] + b"\xff\xc3" + plain[frame + 2 :]],
        restarts.MARKED: [encode(image, "JPEG", restart_marker_rows=1)],
        restarts.SMALL: [encode(photo(16, 16), "JPEG")],
        restarts.UNUSUAL: [plain[:-2], plain + b"junk", plain[: len(plain) // 2] + plain[-2:]],
    }
    for reason, pictures in cases.items():
        for data in pictures:
            assert add_restarts(data) == (data, reason)


def test_a_crop_of_a_marked_picture_is_the_same() -> None:
    data = encode(photo(400, 300), "JPEG", quality=92)
    new, _ = add_restarts(data)
    for box in ((0, 0, 400, 300), (120, 90, 300, 200), (390, 290, 400, 300), (0, 250, 30, 300)):
        views = []
        for encoded in (data, new):
            jpeg = native.open_jpeg(encoded)
            assert jpeg is not None
            views.append(np.zeros((3, 64, 64), np.uint8))
            assert jpeg.write(box, False, views[-1])
        assert (views[0] == views[1]).all()


def test_make_shards_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes | int] = {f"a/{i}.jpg": encode(photo(200 + i, 150), "JPEG") for i in range(4)}
    files |= {"b/p.jpg": encode(photo(), "JPEG", progressive=True), "b/q.png": encode(photo()), "b/r.jpg": encode(photo(), "JPEG")}
    folder = make_folder(tmp_path / "in", files)
    assert run(folder, tmp_path / "out", "--restart-markers", "--no-shuffle") == 0
    line = "restart markers: 5 of 7 pictures have new ones; left as they are: 1 no JPEG, 1 progressive"
    assert line in capsys.readouterr().err
    made = {next(field for field in fields if field in ("jpg", "png")): fields for fields in all_samples(tmp_path / "out").values()}
    assert made["png"]["png"] == files["b/q.png"]
    pictures = [fields["jpg"] for fields in all_samples(tmp_path / "out").values() if "jpg" in fields]
    originals = [data for name, data in files.items() if name.endswith(".jpg") and isinstance(data, bytes)]
    assert len(pictures) == len(originals) == 6
    for new in pictures:
        assert sum(not coefficients_differ(new, old) for old in originals if decode_image(old).shape == decode_image(new).shape) == 1
    assert run(folder, tmp_path / "out", "--restart-markers", "--no-shuffle") == 0  # all there
    assert "digest" in (tmp_path / "out" / "dataset.json").read_text()


def test_without_the_native_part_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "in", {"a/0.jpg": 1, "b/1.jpg": 2})
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    native._load.cache_clear()
    try:
        line = refused(capsys, folder, tmp_path / "out", "--restart-markers")
        assert line.startswith("--restart-markers needs the native part: it is not built: `make native` builds it")
    finally:
        native._load.cache_clear()


def test_counts_are_added_up() -> None:
    assert describe_unmarked([{}, {}], 1200) == "restart markers: 1,200 of 1,200 pictures have new ones"
    line = describe_unmarked([{"a": 1}, {"b": 2, "a": 1}], 9)
    assert line == "restart markers: 5 of 9 pictures have new ones; left as they are: 2 a, 2 b"


def test_real_photographs_grow_by_less_than_two_percent(shared_data: Path) -> None:
    before = after = 0
    for file in sorted((shared_data / "imagenet" / "images").iterdir())[::3]:
        data = file.read_bytes()
        new, reason = add_restarts(data)
        assert reason == "" and not coefficients_differ(data, new)
        before, after = before + len(data), after + len(new)
    assert after < 1.02 * before
