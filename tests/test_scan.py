"""What a walk over shards finds: labels, the size of the pictures, and what there is instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from picture_maker import encode, noise
from shard_maker import labelled, write_shards

from data import scan
from data.classes import resolve_labels
from data.errors import ShardError
from data.labels import LabelMap
from data.scan import count_labels
from data.shards import load_shards
from data.tasks import default_img_size


def test_processes_count_what_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_shards(tmp_path, *(labelled("cls", b"%d" % i, b"%d" % (i % 3)) for i in range(7)))
    alone = count_labels(shards, "cls", 1)
    monkeypatch.setattr(scan, "_PARALLEL_FROM", 0)
    assert count_labels(shards, "cls", 2) == alone


@pytest.mark.parametrize(
    ("sides", "size"), [([8], 32), ([32], 32), ([33], 64), ([100, 128, 500], 128), ([129], 160), ([224], 224), ([500], 224)]
)
def test_default_img_size(tmp_path: Path, sides: list[int], size: int) -> None:
    shards = write_shards(tmp_path, [{"png": encode(noise(side, side + 7))} for side in sides])
    assert default_img_size(shards) == size


def test_default_img_size_looks_past_bad_pictures(tmp_path: Path) -> None:
    assert default_img_size(write_shards(tmp_path, [{"jpg": b"junk"}, {"jpg": encode(noise(64, 90))}])) == 64


def test_default_img_size_without_pictures(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", [{"cls": b"1", "mp4": b"x"}])
    with pytest.raises(
        ShardError, match="^no picture field in .*/0.tar: the fields of its first samples are cls, mp4; a picture is in one of jpg, "
    ):
        default_img_size(shards)
    shards = write_shards(tmp_path / "b", [{"jpg": b"junk"}])
    with pytest.raises(ShardError, match=r"^no picture that can be read \(not a picture: 4 bytes that start with b'junk'\) in "):
        default_img_size(shards)


def test_foreign_shards(shared_data: Path, tmp_path: Path) -> None:
    for name in ("foreign_shards/jl_sample", "foreign_shards/clipretrieval_image1", "cifar10/cifar10_test_3000"):
        shutil.copy(shared_data / f"{name}.tar", tmp_path)
    answers = json.loads((shared_data / "foreign_shards" / "ANSWERS.json").read_text())
    shards = load_shards(str(tmp_path / "jl_sample.tar"))
    counts = count_labels(shards, "cls")
    assert {str(label): n for label, n in counts.items()} == answers["jl_sample.tar"]["cls_histogram"]
    assert resolve_labels(shards, "cls") == LabelMap("cls", 10)
    assert default_img_size(shards) == 32
    with pytest.raises(ShardError, match="no label field 'cls' in .*: the fields of its first samples are jpg; say where"):
        resolve_labels(load_shards(str(tmp_path / "clipretrieval_image1.tar")), "cls")
    with pytest.raises(ShardError, match="this looks like class folders: run python scripts/make_shards.py "):
        resolve_labels(load_shards(str(tmp_path / "cifar10_test_3000.tar")), "cls")
