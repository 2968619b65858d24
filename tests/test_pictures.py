"""What counts as a picture, and pictures made smaller."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from photos import all_samples, make_folder, picture, refused, run, some_classes, summary
from PIL import Image

from data import native
from data.errors import DataError
from data.pictures import raw_picture, resize_picture
from data.transforms import eval_transform, train_transform


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", some_classes())


def test_unreadable_pictures_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jpeg, png = picture(1, (64, 64), quality=95), picture(1, (64, 64), "PNG")
    bad = {
        "a/cut.jpg": jpeg[: len(jpeg) // 2],
        "a/cut.png": png[:-20],
        "a/empty.jpg": b"",
        "a/page.jpg": b"<html>not found</html>",
        "a/thumbnail.jpg": picture(1, exif=b"Exif\0\0" + jpeg)[:-200],
    }
    make_folder(tmp_path / "photos", {**some_classes(), **bad})
    (tmp_path / "photos/a/gone.jpg").symlink_to("nowhere")
    assert run(tmp_path / "photos", tmp_path / "out") == 0
    error = capsys.readouterr().err
    for name in (*bad, "a/gone.jpg"):
        assert f"left out: {name}: " in error
    assert "left out: 6 of 16 pictures; dataset.json has the list" in error
    assert len(summary(tmp_path / "out")["left_out"]) == 6
    assert "a/gone.jpg: No such file" in error
    assert len(all_samples(tmp_path / "out")) == 10
    for workers in ("1", "2"):
        line = refused(
            capsys, tmp_path / "photos", tmp_path / "strict", "--strict", "--shard-size", "8", "--workers", workers
        )
        assert "(without --strict it would be left out)" in line
    assert not list((tmp_path / "strict").glob(".*"))
    assert run(tmp_path / "photos", tmp_path / "out", "--strict") == 2  # it is complete, but not for --strict
    assert "(left out by an earlier run without --strict)" in capsys.readouterr().err


def test_names_that_would_break_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "photos", {**some_classes(), "a/1\n\x1b[2J.jpg": b"x"})
    assert run(tmp_path / "photos", tmp_path / "out") == 0
    assert capsys.readouterr().err.startswith("left out: a/1\\n\\x1b[2J.jpg: ")


def test_nothing_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "photos", {"a/1.jpg": b"x", "b/2.jpg": b"y"})
    assert run(tmp_path / "photos", tmp_path / "out") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "make_shards.py: none of the 2 pictures can be read"


def test_damaged_archives(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(some_classes()):
            archive.write(folder / name, name)
    data = bytearray((tmp_path / "photos.zip").read_bytes())
    where = data.find((folder / "ant/3.jpg").read_bytes())
    data[where + 300] ^= 255
    (tmp_path / "photos.zip").write_bytes(data)
    assert run(tmp_path / "photos.zip", tmp_path / "zip") == 0
    assert "left out: ant/3.jpg: damaged in the zip: wrong checksum" in capsys.readouterr().err
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(folder, "photos")
    size = (tmp_path / "photos.tar").stat().st_size
    os.truncate(tmp_path / "photos.tar", size // 2)
    assert run(tmp_path / "photos.tar", tmp_path / "tar") == 0
    assert "photos.tar: damaged at byte" in capsys.readouterr().err
    assert 0 < len(all_samples(tmp_path / "tar")) < 10
    assert "damaged at byte" in refused(capsys, tmp_path / "photos.tar", tmp_path / "o", "--strict")


def test_bytes_decide_the_format(tmp_path: Path) -> None:
    formats = {"PNG": "png", "WEBP": "webp", "BMP": "bmp", "GIF": "gif", "PPM": "ppm", "TIFF": "tif", "JPEG": "jpg"}
    files = {f"{kind}/x.jpeg": picture(1, kind=kind) for kind in formats}
    make_folder(tmp_path / "photos", dict(files))
    run(tmp_path / "photos", tmp_path / "out")
    found = {next(iter(fields)): fields for fields in all_samples(tmp_path / "out").values()}
    assert found.keys() == set(formats.values())
    assert all(found[field][field] == files[f"{kind}/x.jpeg"] for kind, field in formats.items())


def test_what_decodes_is_kept_though_it_looks_damaged(tmp_path: Path) -> None:
    trailing = picture(1) + b"\0" * 3000 + b"appended by a camera"
    make_folder(tmp_path / "photos", {"a/1.jpg": trailing, "b/1.jpg": 1})
    run(tmp_path / "photos", tmp_path / "out")
    assert all_samples(tmp_path / "out")["a_1"]["jpg"] == trailing


def test_resize(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    big = Image.radial_gradient("L").resize((400, 200)).convert("RGB")
    out = io.BytesIO()
    big.save(out, "JPEG", exif=turned)
    files: dict[str, bytes | int] = {
        "a/turned.jpg": out.getvalue(),
        "a/small.jpg": picture(1, (30, 100)),
        "b/gray.png": _png(big.convert("L")),
        "b/palette.png": _png(big.convert("P")),
        "b/x.webp": picture(3, (90, 50), "WEBP"),
        "b/thin.jpg": picture(3, (1000, 40)),
    }
    make_folder(tmp_path / "photos", files)
    assert run(tmp_path / "photos", tmp_path / "out", "--resize", "40") == 0
    found = {}
    for fields in all_samples(tmp_path / "out").values():
        name, field = json.loads(fields["json"])["path"], next(iter(fields))
        found[name] = Image.open(io.BytesIO(fields[field]))
        assert found[name].getexif().get(0x0112, 1) == 1
        if name in ("a/small.jpg", "b/thin.jpg"):
            assert fields[field] == (tmp_path / "photos" / name).read_bytes()
    assert {name: image.size for name, image in found.items()} == {
        "a/turned.jpg": (40, 80),
        "a/small.jpg": (30, 100),
        "b/gray.png": (80, 40),
        "b/palette.png": (80, 40),
        "b/x.webp": (72, 40),
        "b/thin.jpg": (1000, 40),
    }
    assert {found[n].format for n in found if n.startswith("a/")} == {"JPEG"}
    small, whole = found["a/turned.jpg"].convert("L").tobytes(), big.convert("L").tobytes()
    assert abs(small[40 * 40 + 20] - whole[100 * 400 + 200]) < 8  # the middle of both


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.skipif(bool(native.why_absent()), reason="the native part is not built")
def test_resized_bytes_do_not_depend_on_the_native_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    made = []
    for width, height in ((300, 200), (200, 301), (1200, 900)):
        image = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)).resize((width, height))
        for orientation in (1, 6):
            exif = Image.Exif()
            exif[0x0112] = orientation
            out = io.BytesIO()
            image.save(out, "JPEG", exif=exif)
            made.append(out.getvalue())
    with_it = [(resize_picture(data, 128), raw_picture(data, 128)) for data in made]
    monkeypatch.setattr("data.native.why_absent", lambda: "as if")
    assert [(resize_picture(data, 128), raw_picture(data, 128)) for data in made] == with_it
    assert [min(Image.open(io.BytesIO(data)).size) for (_, data), _ in with_it] == [128] * 6


def test_raw_pictures_are_read_as_their_pixels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for shape in ((90, 120, 3), (120, 91)):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 5, *shape[2:]), np.uint8))
        pixels = np.asarray(coarse.resize(shape[1::-1], Image.Resampling.BICUBIC))
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        field, data = raw_picture(out.getvalue(), None)
        assert field == "ppm" and (np.asarray(Image.open(io.BytesIO(data))) == pixels).all()
        for seed in range(5):
            views = [train_transform(encoded, np.random.default_rng(seed), 80).int() for encoded in (data, out.getvalue())]
            assert (views[0] - views[1]).abs().max() <= 6  # at the edges; 1 or 2 inside
        assert torch.equal(eval_transform(data, 80), eval_transform(out.getvalue(), 80))
        with pytest.raises(DataError, match="PPM can't be decoded"):
            train_transform(data[:-1], np.random.default_rng(0), 80)


def test_encode_raw(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.radial_gradient("L").resize((400, 200)).convert("RGB").save(tmp_path / "photos" / name / "x.jpg")
    assert run(tmp_path / "photos", tmp_path / "out", "--resize", "40", "--encode", "raw", "--no-shuffle") == 0
    with tarfile.open(tmp_path / "out/000.tar") as archive:
        assert archive.getnames()[:3] == ["a_x.ppm", "a_x.cls", "a_x.json"]
        file = archive.extractfile("a_x.ppm")
        assert file is not None and file.read()[:13] == b"P6\n80 40\n255\n"
