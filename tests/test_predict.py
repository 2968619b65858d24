"""scripts/predict.py: the names of pictures and of shards, from a checkpoint that a run wrote."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys

import pytest
from launching import base, launch, spoil
from PIL import Image
from remote_shards import nginx, site  # noqa: F401
from shard_maker import write_shards
from test_video_training import command, videos
from video_maker import encode

from scripts import predict


@pytest.fixture
def trained(gloo_pool, picture_shards, tmp_path):
    classes = tmp_path / "classes.txt"
    classes.write_text("red\ngreen\nblue\n")
    paths, val = picture_shards([60, 30]), picture_shards([7, 4], name="val")
    launch(gloo_pool, base(paths, tmp_path, "run", 1, "--epochs", 6, "-b", 10, "--classes", classes, "--val-data", *val, "--no-aug"))
    return tmp_path / "runs" / "run"


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, words)])
    code = predict.main()
    return code, *capsys.readouterr()


def test_pictures_get_their_names(trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, name in enumerate(("red", "green", "blue")):
        pixels = [40, 40, 40]
        pixels[number] = 160
        Image.new("RGB", (50, 40), tuple(pixels)).save(folder / f"{name}.png")
    code, out, err = run(monkeypatch, capsys, trained, folder, "--top", 2)
    lines = out.splitlines()
    assert code == 0 and err == "" and len(lines) == 9
    for picture, best in zip(lines[::3], lines[1::3], strict=True):
        assert best.split()[-1] == picture.rpartition("/")[2].removesuffix(".png")
        assert float(best.split()[0]) > 34
    end, pipe = os.pipe()
    os.close(end)
    monkeypatch.setattr(sys, "stdout", os.fdopen(pipe, "w"))  # as of `predict.py ... | head` when head has seen enough
    code, _, err = run(monkeypatch, capsys, trained, folder)
    assert (code, err) == (141, "")
    monkeypatch.undo()
    (folder / "broken.jpg").write_bytes(b"\xff\xd8nothing")
    code, out, err = run(monkeypatch, capsys, trained, folder)
    assert code == 1 and len(out.splitlines()) == 3 * 4
    assert err.startswith(f"left out: {folder}/broken.jpg: ")


def test_shards_go_to_a_csv(trained, site, tmp_path, monkeypatch, capsys):
    spoil(tmp_path / "val" / "000.tar", b"s00002.png")
    out_file = tmp_path / "out.csv"
    code, _, err = run(monkeypatch, capsys, trained / "checkpoints" / "last.pt", tmp_path / "val", "--csv", out_file, "-b", 4)
    assert code == 1 and err.splitlines()[-1] == f"10 pictures, 1 left out: {out_file}"
    rows = list(csv.reader(io.StringIO(out_file.read_text())))
    assert rows[0] == ["picture", "class1", "probability1", "class2", "probability2", "class3", "probability3"]
    assert [row[0] for row in rows[1:]] == [f"000.tar/s{n:05d}" for n in (0, 1, 3, 4, 5, 6)] + [f"001.tar/s{n:05d}" for n in (7, 8, 9, 10)]
    assert [row[1] for row in rows[1:]] == [("red", "green", "blue")[n % 3] for n in (0, 1, 3, 4, 5, 6, 7, 8, 9, 10)]
    assert all(abs(sum(map(float, row[2::2])) - 1) < 1e-5 for row in rows[1:])
    for path in (tmp_path / "val").glob("*.tar"):
        shutil.copy(path, site.folder)
    again = tmp_path / "again.csv"
    code, _, err = run(monkeypatch, capsys, trained / "checkpoints" / "last.pt", site.shards(2) + "?secret", "--csv", again, "-b", 4)
    assert (code, again.read_text()) == (1, out_file.read_text()) and "secret" not in err


def test_videos_get_their_names(gloo_pool, tmp_path, monkeypatch, capsys):
    train = write_shards(tmp_path / "train", videos(6))[0].path
    launch(gloo_pool, command([train], tmp_path, "clips", 1, "--epochs", 1))
    (tmp_path / "a.mp4").write_bytes(encode(12))
    (tmp_path / "b.mkv").write_bytes(b"")
    code, out, err = run(monkeypatch, capsys, tmp_path / "runs" / "clips", tmp_path / "a.mp4", tmp_path / "b.mkv", train, "--top", 1)
    assert code == 1 and err == f"left out: {tmp_path}/b.mkv: the file is empty\n"
    lines = out.splitlines()
    assert lines[::2] == [f"{tmp_path}/a.mp4", *(f"0.tar/s{n:04d}" for n in range(6))] and all("%  class" in line for line in lines[1::2])


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, tmp_path / "nothing.pt", "x.jpg")
    assert (code, err) == (2, f"predict.py: error: {tmp_path}/nothing.pt: there is no such checkpoint; give a .pt file or a run folder\n")
