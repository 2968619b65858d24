"""Classes, splits, and the sizes of shards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from photos import all_samples, content, make_folder, paths, refused, run, some_classes, summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", some_classes())


def test_given_classes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "training", some_classes(2, ("zebra", "bee", "ant")))
    run(tmp_path / "training", tmp_path / "train")
    assert run(folder, tmp_path / "val", "--classes", tmp_path / "train/dataset.json") == 0
    assert summary(tmp_path / "val")["classes"] == ["ant", "bee", "zebra"]
    (tmp_path / "list.json").write_text('["bee", "ant"]')
    assert run(folder, tmp_path / "listed", "--classes", tmp_path / "list.json") == 0
    assert {key[:3]: fields["cls"] for key, fields in all_samples(tmp_path / "listed").items()} == {
        "bee": b"0",
        "ant": b"1",
    }
    capsys.readouterr()
    error = refused(capsys, tmp_path / "training", tmp_path / "out", "--classes", tmp_path / "list.json")
    assert error == "class 'zebra' is not among the 2 of --classes: add it there or leave it out"


def test_split_has_its_share_of_every_class(tmp_path: Path) -> None:
    sizes = {"a": 100, "b": 37, "c": 10, "d": 1}
    files = {f"{name}/{i}.jpg": i for name, size in sizes.items() for i in range(size)}
    make_folder(tmp_path / "photos", files)  # type: ignore[arg-type]
    split = "train=0.8,val=0.1,test=0.1"
    assert run(tmp_path / "photos", tmp_path / "out", "--split", split) == 0
    parts = {name: paths(tmp_path / "out" / name) for name in ("train", "val", "test")}
    assert sorted(sum(parts.values(), [])) == sorted(files)
    for name, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        assert abs(len(parts[name]) - share * 148) < 2
        counts = Counter(path[0] for path in parts[name])
        assert all(abs(counts[label] - share * size) <= 2 for label, size in sizes.items())
    assert {path[0] for path in parts["train"]} == set(sizes)  # no class that training never sees
    run(tmp_path / "photos", tmp_path / "again", "--split", split, "--workers", "2")
    assert content(tmp_path / "again") == content(tmp_path / "out")


def test_a_split_that_gets_no_picture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "photos", some_classes(1))
    assert run(tmp_path / "photos", tmp_path / "out", "--split", "train=0.8,val=0.1,test=0.1") == 0
    note = "no picture is left for val, test: the first of each class goes to the largest split"
    assert capsys.readouterr().err == f"note: {tmp_path}/photos: {note}\n"
    assert list(summary(tmp_path / "out")["splits"]) == ["train"]


def test_number_and_size_of_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def counts(name: str, *options: str) -> list[int]:
        assert run(folder, tmp_path / name, *options) == 0
        return [s["samples"] for split in summary(tmp_path / name)["splits"].values() for s in split["shards"]]

    assert counts("default") == [10]
    assert counts("num", "--num-shards", "4") == [2, 3, 2, 3]
    assert counts("size", "--shard-size", "4") == [4, 4, 2]
    assert counts("split", "--split", "train=0.8,val=0.2", "--num-shards", "4") == [2, 2, 2, 2, 2]
    sizes = counts("bytes", "--max-bytes", "12K", "--shard-size", "4")
    assert sum(sizes) == 10 and max(sizes) <= 4 and len(sizes) > 3
    assert all(path.stat().st_size <= 12_000 for path in (tmp_path / "bytes").glob("*.tar"))
    assert counts("tiny", "--max-bytes", "1") == [1] * 10
    capsys.readouterr()
    error = refused(capsys, folder, tmp_path / "many", "--num-shards", "11")
    assert error == "--num-shards 11 is more than the 10 pictures: give 10 or fewer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-shards 2 --shard-size 3", "--num-shards goes with neither --shard-size nor --max-bytes: give one"),
        ("--split train=0.9", "the shares in 'train=0.9' make 0.9, not 1"),
        ("--split train:0.9", "'train:0.9' is not a list of splits and shares, like train=0.9,val=0.1"),
        ("--split all=0.5,val=0.5", "is not a list of splits and shares"),
        ("--shard-size 0", "'0' is not a whole number of at least 1"),
        ("--max-bytes much", "'much' is not a size in bytes, like 500M"),
        ("--columns file", "'file' does not name two columns, like file,label"),
        ("--what", "unrecognized arguments: --what"),
        ("--classes none.json", "classes file none.json can't be read"),
    ],
)
def test_bad_options(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert message in refused(capsys, folder, tmp_path / "out", *options.split())
    assert not (tmp_path / "out").exists()
