"""scripts/index_shards.py, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tar_maker as tm

from scripts import index_shards

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a b"
    folder.mkdir()
    for i in range(4):
        tm.write_shard(folder / f"{i:03d}.tar", 3)
    return folder


def test_writes_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index_shards.main([str(folder / "{000..001}.tar")]) == 0
    assert capsys.readouterr() == ("2 indexes written\n2 of 2 shards can be used: 6 samples\n", "")
    assert sorted(os.listdir(folder)) == ["000.tar", "000.tar.idx", "001.tar", "001.tar.idx", "002.tar", "003.tar"]
    assert index_shards.main([str(folder / f"{i:03d}.tar") for i in range(3)]) == 0
    assert capsys.readouterr().out == "2 indexes up to date already\n1 index written\n3 of 3 shards can be used: 9 samples\n"
    assert index_shards.main([str(folder), "--rebuild", "-j", "2"]) == 0
    assert capsys.readouterr().out == "4 indexes written\n4 of 4 shards can be used: 12 samples\n"


def test_names_damaged_and_bad_shards_and_indexes_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "000.tar").write_bytes(b"<html>" * 200)
    os.truncate(folder / "001.tar", 2048 + 100)
    (folder / "002.tar").write_bytes(tm.END)
    assert index_shards.main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "3 indexes written\n3 of 4 shards can be used: 4 samples\n"
    assert err.splitlines() == [
        f"error: {folder}/000.tar: a web page, not a tar: its download failed; download it again",
        f"damaged: {folder}/001.tar: cut in a header at byte 2048: 100 bytes after its first 1 sample are not used",
        f"note: {folder}/002.tar: no samples in it",
    ]


def test_says_where_indexes_of_read_only_folders_are(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.chmod(0o555)
    try:
        assert index_shards.main([str(folder)]) == 0
    finally:
        folder.chmod(0o755)
    assert capsys.readouterr().out.splitlines()[0] == f"4 indexes written in {cache}/shardline/index"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index_shards.main([str(tmp_path / "no" / "{0..3}.tar")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("index_shards.py: ") and err.count("\n") == 1 and "there is no folder" in err
    for argv, message in ([], "PATTERN"), (["x", "-j", "0"], "0 is less than 1"), (["x", "-j", "two"], "two"):
        with pytest.raises(SystemExit, match="2"):
            index_shards.main(argv)
        assert message in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        index_shards.main(["--help"])
    shown = capsys.readouterr().out
    assert "examples:" in shown and "python scripts/index_shards.py 'shards/{000..099}.tar'" in shown


def test_runs_from_anywhere(folder: Path, tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "index_shards.py")
    done = subprocess.run([sys.executable, script, "a b/<000..003>.tar"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "4 indexes written\n4 of 4 shards can be used: 12 samples\n", done.stderr
