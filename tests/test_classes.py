"""Which classes there are, for a training and for a validation set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from picture_maker import NOISE, encode
from shard_maker import labelled, write_listing, write_shards

from data import scan
from data.classes import read_classes, resolve_labels
from data.errors import ShardError
from data.labels import LabelMap
from data.scan import count_labels
from data.shards import load_shards

NAMES = LabelMap("cls", 3, ("cat", "dog", "emu"))


def test_integers_are_counted(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0", b"4"), [], labelled("cls", b" 2 ", b"-1", b"junk", b"\xff", b""))
    assert resolve_labels(shards, "cls") == LabelMap("cls", 5)
    assert count_labels(shards, "cls") == {0: 1, 4: 1, 2: 1, -1: 1, "junk": 1}


def test_a_damaged_integer_does_not_make_a_million_classes(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0", b"1", b"1000000", b"99999999999"))
    assert resolve_labels(shards, "cls").num_classes == 2
    shards = write_shards(tmp_path / "all", labelled("cls", b"1000000", b"-3"))
    with pytest.raises(ShardError, match="^no label in cls is an integer in 0..999999; found '1000000', '-3'$"):
        resolve_labels(shards, "cls")


@pytest.mark.parametrize("source", ["txt", "cls"])
def test_words_become_sorted_names(tmp_path: Path, source: str) -> None:
    shards = write_shards(tmp_path, labelled(source, b"dog", b"cat\n"), labelled(source, b"dog", b"ant", b"\xff"))
    labels = resolve_labels(shards, source)
    assert labels == LabelMap(source, 3, ("ant", "cat", "dog"))
    assert labels.parse({source: b"cat"}) == 1


def test_json_labels_are_counted(tmp_path: Path) -> None:
    words = labelled("json", *(json.dumps({"a": {"b": word}}).encode() for word in ("x", "y", "x")), b"{")
    assert resolve_labels(write_shards(tmp_path / "w", words), "json:a.b") == LabelMap("json:a.b", 2, ("x", "y"))
    numbers = labelled("json", b'{"a": 3}', b'{"a": "5"}')
    assert resolve_labels(write_shards(tmp_path / "n", numbers), "json:a") == LabelMap("json:a", 6)


def test_upper_case_extensions_are_counted(tmp_path: Path) -> None:
    assert resolve_labels(write_shards(tmp_path, labelled("CLS", b"0", b"7")), "cls").num_classes == 8


def test_labels_of_a_cut_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, labelled("cls", *(b"%d" % i for i in range(10))))
    data = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(data[: 5 * 2048 + 100])
    assert resolve_labels(load_shards(str(tmp_path / "0.tar")), "cls").num_classes == 5


def test_captions_are_not_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_shards(tmp_path, labelled("txt", *(b"a caption %d" % i for i in range(9))))
    monkeypatch.setattr(scan, "MAX_CLASSES", 5)
    text = r"^more than 5 different labels in 'txt', such as 'a caption 0': that is a caption or an id; say where the label is"
    with pytest.raises(ShardError, match=text):
        resolve_labels(shards, "txt")


def test_names_of_dataset_json(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0", b"1"))
    write_listing(tmp_path, ["cat", "dog", "emu"])  # no scan would find the third
    assert resolve_labels(shards, "cls") == NAMES


def test_given_classes_that_dataset_json_agrees_with(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0"))
    write_listing(tmp_path, ["cat", "dog", "emu"])
    assert resolve_labels(shards, "cls", classes=["cat", "dog", "emu"]) == NAMES


def test_another_order_of_classes_is_matched_by_name(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0", b"1"))
    write_listing(tmp_path, ["emu", "cat"])
    labels = resolve_labels(shards, "cls", classes=["cat", "dog", "emu"])
    assert labels == LabelMap("cls", 3, ("cat", "dog", "emu"), (2, 0))
    assert [labels.parse({"cls": data}) for data in (b"0", b"1", b"emu")] == [2, 0, 2]


def test_a_class_that_training_lacks_stops(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0"))
    write_listing(tmp_path, ["yak", "cat"])
    with pytest.raises(ShardError) as caught:
        resolve_labels(shards, "cls", classes=["cat", "dog", "emu"])
    assert str(caught.value) == (
        f"1 of the 2 classes in the dataset.json of {shards[0].path} are not among the 3 given classes: 'yak'; "
        "leave those samples out, or train with all of the classes"
    )


def test_a_word_that_the_given_classes_lack_stops(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, labelled("txt", b"cat", b"yak", b"yak", b"asp"))
    with pytest.raises(ShardError) as caught:
        resolve_labels(shards, "txt", classes=["cat", "dog"])
    assert str(caught.value) == (
        "labels of 3 samples are not among the 2 given classes: 'asp', 'yak'; leave those samples out, or add the names to the classes"
    )
    assert resolve_labels(shards, "txt", classes=["yak", "cat", "asp"]).names == ("yak", "cat", "asp")


def test_num_classes(tmp_path: Path) -> None:
    integers = write_shards(tmp_path / "i", labelled("cls", b"0", b"1"))
    assert resolve_labels(integers, "cls", num_classes=7) == LabelMap("cls", 7)
    words = write_shards(tmp_path / "w", labelled("cls", b"a", b"b"))
    assert resolve_labels(words, "cls", num_classes=5) == LabelMap("cls", 5, ("a", "b"))
    with pytest.raises(ShardError, match=r"^num_classes is 1, but there are 2 class names \('a', 'b'\): raise it, or leave it out$"):
        resolve_labels(words, "cls", num_classes=1)


def test_given_num_classes_need_no_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_shards(tmp_path, labelled("cls", b"0", b"1"))
    monkeypatch.setattr("data.classes.count_labels", None)
    assert resolve_labels(shards, "cls", num_classes=2).num_classes == 2
    assert resolve_labels(shards, "cls", classes=["a", "b"]).num_classes == 2


def test_a_label_field_that_no_sample_has(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [{"jpg": b"x", "txt": b"a"}, {"jpg": b"x", "json": b"{}"}])
    with pytest.raises(ShardError) as caught:
        resolve_labels(shards, "cls")
    assert str(caught.value) == (
        f"no label field 'cls' in {shards[0].path}: the fields of its first samples are jpg, json, txt; "
        "say where the label is with --label (cls, txt, json:a.b)"
    )
    with pytest.raises(
        ShardError, match=r"no label that can be read as 'json:a' \(no 'a' in the JSON: looked for 'a' and found keys none\) in "
    ):
        resolve_labels(shards, "json:a")


def test_a_label_field_that_only_later_shards_have(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [], [{"jpg": b"x"}] * 300, labelled("cls", b"1"))
    assert resolve_labels(shards, "cls").num_classes == 2


def test_a_tar_of_class_folders(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [{"png": encode(NOISE)}] * 3, keys="train/cat/{:04d}")
    with pytest.raises(ShardError) as caught:
        resolve_labels(shards, "cls")
    path = shards[0].path
    assert str(caught.value) == (
        f"no label field 'cls' in {path}: the fields of its first samples are png; "
        f"this looks like class folders: run python scripts/make_shards.py {path} OUT"
    )


def test_shards_without_samples(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [], [])
    with pytest.raises(ShardError, match="^no label field 'cls': the shards hold no samples; give shards that do$"):
        resolve_labels(shards, "cls")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dataset.json", '{"version": 1, "classes": ["cat", "dog"]}'),
        ("names.json", '["cat", "dog"]'),
        ("names", '["cat", "dog"]'),
        ("names.txt", "cat\r\ndog\r\n\r\n"),
        ("names.txt", "\ufeffcat\n dog"),
    ],
)
def test_read_classes(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_classes(str(tmp_path / name)) == ["cat", "dog"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the classes in {} are none: list at least one name"),
        ("cat\n\ndog\n", "the classes in {} must be a list of names, none of them empty; got ['cat', '', 'dog']"),
        ("cat\ndog\ncat\n", "the classes in {} name 'cat' more than once: a name stands for one class"),
        ('{"version": 1}', "the classes in {} must be a list of names, none of them empty; got None"),
        ("[1, 2]", "the classes in {} must be a list of names, none of them empty; got [1, 2]"),
        ("[", "classes file {} is not JSON (Expecting value: line 1 column 2 (char 1)): mend it, or give one name a line"),
    ],
)
def test_bad_classes_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "names"
    path.write_text(text)
    with pytest.raises(ShardError) as caught:
        read_classes(str(path))
    assert str(caught.value) == message.format(path)


def test_classes_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="^classes file .*/none can't be read .*No such file.*: give a dataset.json, a JSON list"):
        read_classes(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ShardError, match="^classes file .*/binary can't be read"):
        read_classes(str(tmp_path / "binary"))
