"""Shards as bytes on a disk: what is in them, when they appear, what a crash leaves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from data.index import build_index, read_index
from data.tar import walk
from data.writer import ShardRecord, ShardWriter, shard_names, tar_header, write_dataset_json

SAMPLES = [("a", {"jpg": b"x" * 700, "cls": b"0"}), ("b", {"jpg": b"", "cls": b"1"}), ("c", {"jpg": b"z" * 512})]


def write(path: Path, samples: list[tuple[str, dict[str, bytes]]] = SAMPLES) -> ShardRecord:
    with ShardWriter(path) as writer:
        for key, fields in samples:
            writer.add(key, fields)
    assert writer.record is not None
    return writer.record


def test_shard_holds_the_samples(tmp_path: Path) -> None:
    record = write(tmp_path / "000.tar")
    with tarfile.open(tmp_path / "000.tar") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        infos = archive.getmembers()
    assert members == {f"{key}.{field}": data for key, fields in SAMPLES for field, data in fields.items()}
    assert {(i.mtime, i.uid, i.gid, i.uname, i.gname, i.mode) for i in infos} == {(0, 0, 0, "", "", 0o644)}
    content = (tmp_path / "000.tar").read_bytes()
    assert record == ShardRecord("000.tar", 3, len(content), hashlib.sha256(content).hexdigest(), ("cls", "jpg"))


def test_bytes_are_pinned(tmp_path: Path) -> None:
    """The same samples give the same shard on every machine and in every later version."""
    record = write(tmp_path / "000.tar")
    assert (record.bytes, record.sha256[:16]) == (6144, "4d70e3e6b02757f9")


def test_headers_are_those_of_tarfile() -> None:
    info = tarfile.TarInfo("key.jpg")
    info.size = 12345
    assert tar_header("key.jpg", 12345) == info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("name", ["k" * 96 + ".jpg", "k" * 97 + ".jpg", "k" * 300 + ".jpg", "ä" * 60 + ".jpg", "a/b.c.d"])
def test_names_of_any_length(name: str) -> None:
    content = tar_header(name, 1) + b"x".ljust(512, b"\0") + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == [name]
    assert [member.name for member in walk(content)] == [name]


def test_index_is_that_of_a_walk(tmp_path: Path) -> None:
    write(tmp_path / "000.tar", [*SAMPLES, ("k" * 200, {"jpg": b"long name"}), ("last", {"cls": b"1"})])
    offsets, damage = build_index(str(tmp_path / "000.tar"))
    assert damage is None
    assert read_index(str(tmp_path / "000.tar.idx")).tolist() == offsets.tolist()
    assert os.stat(tmp_path / "000.tar.idx").st_mtime_ns == os.stat(tmp_path / "000.tar").st_mtime_ns


def test_empty_shard(tmp_path: Path) -> None:
    record = write(tmp_path / "000.tar", [])
    assert (record.samples, record.bytes) == (0, 1024)
    assert read_index(str(tmp_path / "000.tar.idx")).tolist() == [0]


def test_shard_larger_than_the_buffer(tmp_path: Path) -> None:
    samples = [(f"{i:02d}", {"bin": bytes([i]) * 1_000_000}) for i in range(13)]
    record = write(tmp_path / "000.tar", samples)
    content = (tmp_path / "000.tar").read_bytes()
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    found = [content[m.data_offset : m.data_offset + m.size] for m in walk(content)]
    assert found == [fields["bin"] for _, fields in samples]


def test_shard_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "000.tar")
    writer.add("a", {"cls": b"1"})
    writer.finish()
    assert not (tmp_path / "000.tar").exists()
    writer.publish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000.tar", "000.tar.idx"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "000.tar") as writer:
        writer.add("a", {"cls": b"1"})
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "v1.0", "folder/v1.0", "before"])
def test_keys_that_would_be_read_otherwise_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="give each sample its own"), ShardWriter(tmp_path / "000.tar") as writer:
        writer.add("before", {"cls": b"1"})
        writer.add(key, {"cls": b"1"})


def test_names_grow_with_the_count() -> None:
    assert shard_names(2) == ["000.tar", "001.tar"]
    assert shard_names(1000)[-1] == "999.tar"
    assert (shard_names(1001)[0], shard_names(1001)[-1]) == ("0000.tar", "1000.tar")


def test_dataset_json(tmp_path: Path) -> None:
    train = [ShardRecord("000.tar", 3, 4096, "aa", ("cls", "jpg")), ShardRecord("001.tar", 1, 2048, "bb", ("cls", "png"))]
    write_dataset_json(tmp_path / "dataset.json", {"train": train}, ["cat", "dög"], {"seed": 0}, digest="d")
    content = json.loads((tmp_path / "dataset.json").read_text())
    assert content == {
        "version": 1,
        "splits": {
            "train": {
                "shards": [
                    {"name": "000.tar", "samples": 3, "bytes": 4096, "sha256": "aa"},
                    {"name": "001.tar", "samples": 1, "bytes": 2048, "sha256": "bb"},
                ],
                "samples": 4,
                "bytes": 6144,
            }
        },
        "classes": ["cat", "dög"],
        "fields": ["cls", "jpg", "png"],
        "arguments": {"seed": 0},
        "digest": "d",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["dataset.json"]
