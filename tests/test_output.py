"""The output folder: what is never mixed with what, and never removed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from photos import content, make_folder, refused, run, some_classes


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
