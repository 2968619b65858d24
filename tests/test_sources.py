"""Sources: names, classes and splits from folders, archives and tables."""

from __future__ import annotations

import io
import json
import os
import tarfile
import unicodedata
from pathlib import Path

import pytest
from photos import all_samples, content, make_folder, paths, picture, refused, run, some_classes, summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", some_classes())


# --- names and keys


def test_odd_names(tmp_path: Path) -> None:
    files: dict[str, bytes | int] = {
        "a/v1.0.jpg": 0,
        "a/v1.0.JPG": 1,
        "a/v1_0.jpg": 2,
        "a/deeper/v1.0.jpg": 3,
        "b/v1.0.jpg": 4,
        "b/100% sure.jpg": 5,
        "b/ü ñ.jpg": 6,
        "café 1/x.jpg": 7,
        "b/" + "long" * 50 + ".jpg": 8,
        "b/" + "long" * 50 + "er.jpg": 9,
    }
    litter: dict[str, bytes | int] = {
        ".DS_Store": b"x",
        "a/._v1.0.jpg": b"x",
        "__MACOSX/a/x.jpg": 0,
        "a/Thumbs.db": b"x",
        ".ipynb_checkpoints/x.jpg": 0,
        "a/readme.txt": b"x",
    }
    make_folder(tmp_path / "photos", {**files, **litter})
    assert run(tmp_path / "photos", tmp_path / "out", "--no-shuffle") == 0
    found = all_samples(tmp_path / "out")
    by_path = {json.loads(fields["json"])["path"]: key for key, fields in found.items()}
    assert by_path.keys() == files.keys()
    assert by_path["a/v1.0.JPG"] == "a_v1_0-2"
    assert {by_path[n] for n in ("a/deeper/v1.0.jpg", "a/v1.0.jpg", "a/v1_0.jpg")} == {"a_v1_0", "a_v1_0-3", "a_v1_0-4"}
    assert by_path["b/v1.0.jpg"] == "b_v1_0"
    assert by_path["b/100% sure.jpg"] == "b_100_sure"
    assert by_path["b/ü ñ.jpg"] == "b_ü_ñ"
    assert by_path["café 1/x.jpg"] == "café_1_x"
    assert max(len(key.encode()) for key in found) < 90
    assert all(fields["jpg"] == picture(files[path]) for path, fields in zip(by_path, found.values(), strict=True))  # type: ignore[arg-type]
    assert summary(tmp_path / "out")["classes"] == ["a", "b", "café 1"]


def test_unicode_is_the_same_from_every_system(tmp_path: Path) -> None:
    for form in ("NFC", "NFD"):
        name = unicodedata.normalize(form, "é/ü.jpg")
        make_folder(tmp_path / form / "photos", {name: 1, "b/x.jpg": 2})
        run(tmp_path / form / "photos", tmp_path / f"out{form}")
    assert content(tmp_path / "outNFC") == content(tmp_path / "outNFD")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "photos/a").mkdir(parents=True)
    name = os.fsencode(tmp_path / "photos/a") + b"/\xff\xfe.jpg"
    with open(name, "wb") as file:
        file.write(picture())
    make_folder(tmp_path / "photos", {"b/x.jpg": 0})
    assert run(tmp_path / "photos", tmp_path / "out") == 0
    assert sorted(all_samples(tmp_path / "out")) == ["a__", "b_x"]


# --- sources


def test_splits_by_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {f"data/{split}/{name}": seed for split in ("train", "valid") for name, seed in some_classes(4).items()}
    make_folder(tmp_path / "photos", {**files, "data/train/cow/1.jpg": 1, "data/valid/dog/1.jpg": 1})
    out = tmp_path / "out"
    assert run(tmp_path / "photos", out, "--shard-size", "5") == 0
    assert {p.name for p in out.iterdir()} == {"dataset.json", "train", "val"}
    described = summary(out)
    assert described["classes"] == ["ant", "bee", "cow", "dog"]
    assert {split: value["samples"] for split, value in described["splits"].items()} == {"train": 9, "val": 9}
    assert all(path.startswith("train/") for path in paths(out / "train"))
    output, notes = capsys.readouterr()
    assert f"--data '{out}/train/{{000..001}}.tar' --val-data '{out}/val/{{000..001}}.tar'" in output
    assert f"note: {tmp_path}/photos: val has classes that train has not: dog" in notes
    assert run(tmp_path / "photos", tmp_path / "o", "--split", "a=.5,b=.5") == 2
    assert "its folders are splits already: leave --split out" in capsys.readouterr().err


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", some_classes(1, ("train", "ship")))
    run(tmp_path / "photos", tmp_path / "out")
    assert summary(tmp_path / "out")["classes"] == ["ship", "train"]


def test_splits_beside_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "photos", {"train/a/1.jpg": 1, "val/a/1.jpg": 1, "extra/a/1.jpg": 1})
    assert "folders named like splits lie beside extra" in refused(capsys, tmp_path / "photos", tmp_path / "out")


def test_class_is_the_first_folder_that_differs(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", {"x/y/a-b/1.jpg": 1, "x/y/a/deep/er/1.jpg": 2, "x/y/a/2.jpg": 3})
    run(tmp_path / "photos", tmp_path / "out", "--no-shuffle")
    assert summary(tmp_path / "out")["classes"] == ["a", "a-b"]
    assert paths(tmp_path / "out") == ["a-b/1.jpg", "a/2.jpg", "a/deep/er/1.jpg"]


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", some_classes(1, ("10", "9", "100", "2")))
    run(tmp_path / "photos", tmp_path / "out")
    assert summary(tmp_path / "out")["classes"] == ["2", "9", "10", "100"]
    assert {json.loads(f["json"])["class"]: f["cls"] for f in all_samples(tmp_path / "out").values()}["10"] == b"2"


def test_gzipped_tar(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "photos.tgz", "w:gz") as tar:
        tar.add(folder, "photos")
    assert run(tmp_path / "photos.tgz", tmp_path / "out") == 0
    assert len(all_samples(tmp_path / "out")) == 10


def test_archive_that_holds_a_name_twice(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for name, seed in (("a/x.jpg", 1), ("b/x.jpg", 2), ("./a/x.jpg", 3), ("../../etc/c/x.jpg", 4)):
            info = tarfile.TarInfo(name)
            info.size = len(picture(seed))
            tar.addfile(info, io.BytesIO(picture(seed)))
    run(tmp_path / "photos.tar", tmp_path / "out")
    found = all_samples(tmp_path / "out")
    assert found["a_x"]["jpg"] == picture(3)
    assert len(found) == 3


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    make_folder(tmp_path / "set", {"p/1.jpg": 1, "p/2, b.jpg": 2, "q/3.jpg": 3})
    rows = [("p/1.jpg", "cat"), ("p/2, b.jpg", "dog"), ("q/3.jpg", "cat")]
    table = tmp_path / "set" / f"labels.{suffix}"
    if suffix == "jsonl":
        table.write_text("\n".join(json.dumps({"id": 7, "file": p, "name": n}) for p, n in rows))
    else:
        mark = "," if suffix == "csv" else "\t"
        quoted = [(f'"{p}"' if mark in p else p, n) for p, n in rows]
        table.write_text(
            "\ufeffid,file,name\n".replace(",", mark) + "".join(f"7{mark}{p}{mark}{n}\r\n" for p, n in quoted)
        )
    assert run(table, tmp_path / "out", "--columns", "file,name", "--no-shuffle") == 0
    assert [(json.loads(f["json"])["path"], f["cls"]) for f in all_samples(tmp_path / "out").values()] == [
        (path, b"1" if name == "dog" else b"0") for path, name in rows
    ]


def test_paths_of_a_table_may_lie_anywhere(tmp_path: Path) -> None:
    make_folder(tmp_path, {"far/a/1.jpg": 1, "near/2.jpg": 2})
    (tmp_path / "near/t.csv").write_text(f"path,label\n{tmp_path}/far/a/1.jpg,x\n2.jpg,y\n../far/a/1.jpg,y\n")
    assert run(tmp_path / "near/t.csv", tmp_path / "out", "--no-shuffle") == 0
    assert paths(tmp_path / "out") == ["far/a/1.jpg", "far/a/1.jpg", "near/2.jpg"]


def test_labels_that_json_holds_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, {"1.jpg": 1, "2.jpg": 2})
    (tmp_path / "t.jsonl").write_text('{"path": "1.jpg", "label": 1}\n\n{"path": "2.jpg", "label": 2.0}\n')
    run(tmp_path / "t.jsonl", tmp_path / "out", "--no-shuffle")
    assert [fields["cls"] for fields in all_samples(tmp_path / "out").values()] == [b"1", b"2"]
    (tmp_path / "t.jsonl").write_text('{"path": "1.jpg", "label": 1\n')
    capsys.readouterr()
    assert "t.jsonl line 1: not JSON (" in refused(capsys, tmp_path / "t.jsonl", tmp_path / "o")


def test_folder_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "set", {"images/1.jpg": 1, "images/2.jpg": 2})
    table = tmp_path / "set/labels.csv"
    table.write_text("file,wnid,name\n1.jpg,n1,cat\n2.jpg,n2,dog\n")
    assert refused(capsys, tmp_path / "set", tmp_path / "out") == (
        f"{table} line 2: no column 'path' among file, wnid, name: "
        "name those that hold path and label, like --columns file,name"
    )
    assert run(tmp_path / "set", tmp_path / "out", "--columns", "file,name") == 0
    assert summary(tmp_path / "out")["classes"] == ["cat", "dog"]
    (tmp_path / "set/more.csv").write_text("a")
    capsys.readouterr()
    assert "2 tables (labels.csv, more.csv): give one" in refused(capsys, tmp_path / "set", tmp_path / "o")


def test_class_numbers_of_a_table_are_kept(tmp_path: Path) -> None:
    make_folder(tmp_path / "set", {"1.jpg": 1, "2.jpg": 2})
    (tmp_path / "set/t.csv").write_text("path,label\n1.jpg,3\n2.jpg,1\n")
    run(tmp_path / "set/t.csv", tmp_path / "out", "--no-shuffle")
    assert [fields["cls"] for fields in all_samples(tmp_path / "out").values()] == [b"3", b"1"]
    assert summary(tmp_path / "out")["classes"] == ["0", "1", "2", "3"]
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne\n")
    run(tmp_path / "set/t.csv", tmp_path / "named", "--no-shuffle", "--classes", tmp_path / "names.txt")
    assert [fields["cls"] for fields in all_samples(tmp_path / "named").values()] == [b"3", b"1"]
    assert summary(tmp_path / "named")["classes"] == list("abcde")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n1.jpg,\n", "t.csv line 2: the column 'label' is empty"),
        ("path,label\n", "t.csv: the table has no rows"),
        ("path,label\nnone.jpg,a\n", "t.csv: 'none.jpg' of its first row is neither in"),
        ("path,label\n1.jpg,99999999\n", "label 99999999 is too large for a class number"),
        ("path;label\n1.jpg;a\n", "t.csv line 2: no column 'path' among path;label"),
        ("path,label\n1.jpg,\xff\n", "t.csv: not UTF-8 text"),
    ],
)
def test_bad_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    make_folder(tmp_path, {"1.jpg": 1, "t.csv": text.encode("latin-1")})
    assert message in refused(capsys, tmp_path / "t.csv", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(
        tmp_path, {"flat/1.jpg": 1, "flat/2.jpg": 2, "none/a.txt": b"x", "cut.zip": b"PK\3\4xx", "x.rar": b"Rar!" * 300}
    )
    out = tmp_path / "out"
    assert refused(capsys, tmp_path / "no", out) == f"{tmp_path}/no: no such file or folder"
    assert "flat: no class folders: all 2 pictures lie in one folder (such as 1.jpg)" in refused(
        capsys, tmp_path / "flat", out
    )
    assert "none: no picture found" in refused(capsys, tmp_path / "none", out)
    assert "cut.zip: not a whole zip archive" in refused(capsys, tmp_path / "cut.zip", out)
    assert "x.rar: not a folder, zip, tar, or table" in refused(capsys, tmp_path / "x.rar", out)
    assert "--columns names columns of a CSV" in refused(capsys, tmp_path / "x.rar", out, "--columns", "a,b")
    run(make_folder(tmp_path / "ok", some_classes()), out)
    capsys.readouterr()
    assert "000.tar: holds .cls files beside its pictures, so it is a shard already" in refused(
        capsys, out / "000.tar", "o"
    )
    assert not Path("o").exists()
