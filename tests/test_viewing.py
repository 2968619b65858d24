"""data/viewing.py: any sample at the same cost, pictures upright, what the model is shown; and scripts/contact_sheet.py."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tar_maker as tm
from PIL import Image
from remote_shards import nginx, published, site  # noqa: F401

from data.errors import DataError, ShardError
from data.pipeline import build_loader
from data.plan import Plan
from data.shards import load_shards
from data.tasks import create_task, resolve_labels
from data.viewing import enlarged, model_views, poster, read_field, read_fields, thumbnail, video_poster, view_samples
from scripts import contact_sheet

ROOT = Path(__file__).resolve().parents[1]


def test_samples_and_their_fields(tmp_path: Path) -> None:
    tm.write_shard(tmp_path / "0.tar", 20)
    (shard,) = load_shards(str(tmp_path))
    views = view_samples(shard, 17, 10)
    assert [(view.index, view.key, view.offset, view.size) for view in views] == [(i, f"{i:04d}", 2048 * i, 2048) for i in (17, 18, 19)]
    jpg, cls = views[0].fields
    assert (jpg.name, jpg.offset, jpg.size, cls.name) == ("jpg", 2048 * 17 + 512, 10, "cls")
    assert read_field(views[0], jpg) == b"picture 17"
    assert read_fields(views[1]) == {"jpg": b"picture 18", "cls": b"8"}
    assert view_samples(shard, 20, 1) == view_samples(shard, -1, 1) == []
    assert views[0].first(("png", "cls")) == cls and views[0].find("x") is None


def test_shards_that_changed_meanwhile(tmp_path: Path) -> None:
    path = tm.write_shard(tmp_path / "0.tar", 20)
    (shard,) = load_shards(str(tmp_path))
    view = view_samples(shard, 19, 1)[0]
    os.truncate(path, 2048 * 19 + 520)
    with pytest.raises(ShardError, match="its index does not fit it"):
        view_samples(shard, 19, 1)
    with pytest.raises(ShardError, match="it ends inside sample 19"):
        read_field(view, view.fields[0])
    os.truncate(shard.index_path, 8)
    with pytest.raises(ShardError, match="it changed: 1 entries where 2 are expected"):
        view_samples(shard, 0, 1)
    path.unlink()
    with pytest.raises(ShardError, match="can't be read"):
        read_field(view, view.fields[0])


def jpeg(image: Image.Image, **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95, **more)  # type: ignore[arg-type]
    return out.getvalue()


def test_thumbnails_are_upright_and_small() -> None:
    image = Image.new("RGB", (800, 400), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 400, 400))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown, it is turned right: the left half comes to the top
    small = thumbnail(jpeg(image, exif=exif), 100)
    assert small.size == (50, 100) and small.mode == "RGB"
    top = small.getpixel((25, 10))
    assert isinstance(top, tuple) and top[0] > 200 and top[2] < 60
    with pytest.raises(DataError, match="not a picture"):
        thumbnail(b"hello", 100)
    assert enlarged(Image.new("RGB", (8, 6)), 128).size == (128, 96)
    assert enlarged(Image.new("RGB", (80, 60)), 128).size == (80, 60)


def test_posters_of_what_has_none(tmp_path: Path) -> None:
    samples = [("a", {"txt": b"x"}), ("b", {"seg.png": b"no"})]
    (tmp_path / "0.tar").write_bytes(tm.join_samples(samples) + tm.END)
    text, wrong = view_samples(load_shards(str(tmp_path))[0], 0, 2)
    assert poster(text, 50) is None
    with pytest.raises(DataError, match="not a picture"):
        poster(wrong, 50)


def test_a_clip_is_shown_by_its_first_frame(shared_data: Path) -> None:
    clip = min(path for path in (shared_data / "video" / "named_actions").rglob("*") if path.is_file())
    image = video_poster(clip.read_bytes(), 100)
    assert max(image.size) == 100
    with pytest.raises(DataError):
        video_poster(b"hello" * 100, 100)


def test_model_views_are_the_batches_of_a_run(picture_shards: Callable[..., list[str]]) -> None:
    shards = load_shards(picture_shards([12, 9], side=40))
    labels = resolve_labels(shards, "cls")
    loader = build_loader(shards, batch_size=21, img_size=32, epochs=3, seed=7)
    seen = {}
    for batch in loader:
        for epoch, sample, image in zip(batch["epoch"].tolist(), batch["sample"].tolist(), batch["image"], strict=True):
            seen[epoch, sample] = image.numpy()
    task = create_task("image-classification", training=True, labels=labels, img_size=32)
    for sample, (shard, index) in {3: (0, 3), 14: (1, 2)}.items():
        fields = read_fields(view_samples(shards[shard], index, 1)[0])
        views = model_views(task, loader.plan, sample, fields, range(3))
        for epoch, image in enumerate(views):
            assert np.array_equal(np.asarray(image).transpose(2, 0, 1), seen[epoch, sample])


def test_clips_are_strips_of_frames(shared_data: Path, tmp_path: Path) -> None:
    path = min(path for path in (shared_data / "video" / "named_actions").rglob("*") if path.is_file())
    (tmp_path / "0.tar").write_bytes(tm.join_samples([("a", {path.suffix[1:]: path.read_bytes(), "cls": b"0"})]) + tm.END)
    shards = load_shards(str(tmp_path))
    task = create_task("video-classification", training=True, labels=resolve_labels(shards, "cls"), img_size=32, num_frames=16)
    views = model_views(task, Plan(np.array([1])), 0, read_fields(view_samples(shards[0], 0, 1)[0]), range(2))
    assert [view.size for view in views] == [(8 * 32, 32)] * 2 and views[0].tobytes() != views[1].tobytes()


def test_remote_shards_are_looked_at_like_local_ones(site, published, tmp_path, capsys) -> None:
    paths = published([10, 10])
    local, there = load_shards(paths), load_shards(site.shards(2) + "?sig=secret")
    assert [view_samples(shard, 3, 2)[1].key for shard in there] == [view_samples(shard, 3, 2)[1].key for shard in local]
    assert read_fields(view_samples(there[1], 9, 1)[0]) == read_fields(view_samples(local[1], 9, 1)[0])
    sheets = [tmp_path / "local.png", tmp_path / "remote.png"]
    for pattern, out in zip([f"{os.path.dirname(paths[0])}/{{000..001}}.tar", site.shards(2) + "?sig=secret"], sheets, strict=True):
        assert contact_sheet.main([pattern, str(out), "--num", "6", "--columns", "3", "--side", "64"]) == 0
    assert sheets[0].read_bytes() == sheets[1].read_bytes() and "secret" not in "".join(capsys.readouterr())


def test_contact_sheets(picture_shards: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(Path(picture_shards([12, 9])[0]).parent)
    out = tmp_path / "sheet.png"

    def sheet(*words: str) -> bytes:
        assert contact_sheet.main([folder, str(out), "--num", "6", "--columns", "3", "--side", "64", *words]) == 0
        return out.read_bytes()

    first = sheet()
    assert capsys.readouterr() == (f"{out}: 6 of 21 samples, 216 x 202 pixels\n", "")
    assert Image.open(out).size == (216, 202) and sheet() == first
    assert sheet("--seed", "3") != first
    assert (augmented := sheet("--augmented")) != first and sheet("--augmented") == augmented
    assert sheet("--augmented", "--epoch", "1") != augmented
    assert contact_sheet.choose(10, 4, None) == [1, 3, 6, 8] and contact_sheet.choose(3, 9, None) == [0, 1, 2]


def test_a_sheet_of_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [("a", {"png": b"no picture at all", "cls": b"x\x1b"}), ("b" * 90, {"txt": b"x", "cls": b"\xff"})]
    (tmp_path / "0.tar").write_bytes(tm.join_samples(samples) + tm.END)
    assert contact_sheet.main([str(tmp_path), str(tmp_path / "x.png")]) == 0
    assert "2 of 2 samples" in capsys.readouterr().out

    assert contact_sheet.main([str(tmp_path / "none"), str(tmp_path / "x.png")]) == 2
    assert contact_sheet.main([str(tmp_path), str(tmp_path / "no" / "x.png")]) == 2
    assert contact_sheet.main([str(tmp_path), str(tmp_path / "x.png"), "--augmented", "--task", "none"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 3 and err.count("contact_sheet.py: error: ") == 3
    assert "task 'none' is unknown" in err or "no picture" in err
    done = subprocess.run([sys.executable, str(ROOT / "scripts/contact_sheet.py"), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert "examples:\n  python scripts/contact_sheet.py" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--side", "1000000000"), "argument --side: '1000000000' is not a whole number from 32 to 1024"),
        (("--num", "1000000"), "argument --num: '1000000' is not a whole number from 1 to 10000"),
        (("--num", "200", "--side", "1024"), "200 tiles of 1024 pixels make over 100,000,000 pixels: give a smaller --num or --side"),
        (("--label", "json:"), "label source 'json:': say where in the JSON the label is, as in json:annotation.label"),
        (("--sides", "64"), "unrecognized arguments: --sides 64; the nearest flag is --side"),
        (("--augmentd",), "unrecognized arguments: --augmentd; the nearest flag is --augmented"),
    ],
)
def test_a_sheet_that_can_not_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str) -> None:
    samples = [(f"s{i}", {"txt": b"x"}) for i in range(200)]
    (tmp_path / "0.tar").write_bytes(tm.join_samples(samples) + tm.END)
    try:
        code = contact_sheet.main([str(tmp_path), str(tmp_path / "x.png"), *words])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    assert (code, capsys.readouterr().err) == (2, f"contact_sheet.py: error: {reason}\n")
