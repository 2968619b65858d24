"""The output folder: what is never mixed with what, and never removed."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from photos import content, make_folder, refused, run, some_classes, summary

from data.output import OutputFolder
from data.tables import SourceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", some_classes())


def test_other_shards_are_neither_mixed_nor_lost(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = make_folder(
        tmp_path / "out", {"000007.tar": b"x", "000007.tar.idx": b"x", "notes.txt": b"x", "sub/a.tar": b"x"}
    )
    assert refused(capsys, folder, out) == (
        f"{out}: holds other shards (000007.tar, 000007.tar.idx): choose another folder, or give --overwrite to replace them"
    )
    (out / "backup.tar").write_bytes(b"mine")
    before = content(out)
    error = refused(capsys, folder, out, "--overwrite")
    assert error == f"{out}: backup.tar is not named like a shard of make_shards: move it away first"
    assert content(out) == before
    (out / "backup.tar").unlink()
    assert run(folder, out, "--overwrite") == 0
    assert set(content(out)) == {"000.tar", "000.tar.idx", "dataset.json", "notes.txt", "sub/a.tar"}


def test_splits_are_overwritten_whole(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(folder, out, "--split", "train=0.5,val=0.5")
    (out / "val/notes.txt").write_text("mine")
    assert run(folder, out, "--overwrite") == 0
    assert set(content(out)) == {"000.tar", "000.tar.idx", "dataset.json", "val/notes.txt"}
    assert not (out / "train").exists()


def test_source_is_never_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "photos", some_classes())
    with tarfile.open(tmp_path / "000.tar", "w") as tar:
        tar.add(tmp_path / "photos", "photos")
    error = refused(capsys, tmp_path / "000.tar", tmp_path, "--overwrite")
    assert error.endswith(f"--overwrite would remove the source {tmp_path / '000.tar'}: choose another folder")
    assert (tmp_path / "000.tar").exists()


def test_dataset_json_of_someone_else(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = make_folder(tmp_path / "out", {"dataset.json": b'{"mine": 1}'})
    for more in ((), ("--overwrite",)):
        assert "dataset.json: not written by make_shards, so it is left alone" in refused(capsys, folder, out, *more)
    assert content(out) == {"dataset.json": b'{"mine": 1}'}


def test_out_that_is_no_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert refused(capsys, folder, tmp_path / "file") == f"{tmp_path}/file: is a file: give a folder for the shards"


def test_ordinary_names_of_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "100% my shards"
    assert run(folder, out, "--shard-size", "5") == 0
    assert f"--data '{out}/{{000..001}}.tar'" in capsys.readouterr().out
    out = tmp_path / "a{1..2}[x]"  # a pattern in itself: the folder is named
    assert run(folder, out, "--shard-size", "5") == 0
    assert f"--data '{out}'" in capsys.readouterr().out


def test_data_set_in_a_split_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dataset.json would be found before the one above it, and has other classes."""
    make_folder(tmp_path / "other", some_classes(3, ("x", "y", "z")))
    out, split = tmp_path / "out", ("--split", "train=0.5,val=0.5")
    run(tmp_path / "other", out / "train", "--num-shards", "2")
    capsys.readouterr()
    assert "holds other shards (train/000.tar, train/000.tar.idx, train/001.tar and 2 more)" in refused(
        capsys, folder, out, *split
    )
    assert run(folder, out, *split, "--overwrite") == 0
    run(folder, tmp_path / "fresh", *split)
    assert content(out) == content(tmp_path / "fresh")
    (out / "val/dataset.json").write_text("{}")
    assert "val/dataset.json: not written by make_shards" in refused(capsys, folder, out, *split, "--overwrite")


def test_two_at_once_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.output._PATIENCE", 0.1)
    first, second = (OutputFolder(str(tmp_path / "out"), "digest", {}) for _ in range(2))
    first.prepare(["000.tar"])
    for overwrite in (False, True):
        with pytest.raises(SourceError, match="another make_shards is writing there: wait for it"):
            second.prepare(["000.tar"], overwrite)
    first.close()
    assert second.prepare(["000.tar"]) == {}
    second.close()


def test_kill_while_a_finished_set_is_mended(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(folder, out, "--shard-size", "3")
    before = content(out)
    (out / "001.tar").unlink()
    (out / "002.tar").unlink()
    described = summary(out)
    header = {"digest": described["digest"], "arguments": described["arguments"]}
    (out / "dataset.json.part").write_text(json.dumps(header) + "\n")  # as if killed before its first shard
    stamp = (out / "000.tar").stat().st_mtime_ns
    assert run(folder, out, "--shard-size", "3") == 0
    assert content(out) == before
    assert (out / "000.tar").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("start", ["", '{"digest": "a', "\n"])
def test_kill_before_the_first_line(folder: Path, tmp_path: Path, start: str) -> None:
    make_folder(tmp_path / "out", {"dataset.json.part": start.encode()})
    assert run(folder, tmp_path / "out", "--shard-size", "3") == 0
    run(folder, tmp_path / "fresh", "--shard-size", "3")
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
