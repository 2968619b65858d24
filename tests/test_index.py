"""data/index.py: what an index says, when it is believed, and what is lost of damaged shards."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tar_maker as tm

from data.errors import ShardError
from data.index import build_index, load_index, read_index, write_index
from data.native import gathering
from data.shards import load_shards
from data.store import ShardFiles
from data.tar import parse_sample


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True, params=["C", "Python"])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here is true of both."""
    if request.param == "Python":
        monkeypatch.setattr(gathering, "is_there", lambda: False)
    elif not gathering.is_there():
        pytest.skip("samples.so is not built")


def write_tar(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def offsets_of(path: str) -> list[int]:
    return [int(offset) for offset in build_index(path)[0]]


def test_layout(tmp_path: Path) -> None:
    """N+1 little-endian uint64; the last is where the last sample ends, not where the file does."""
    path = tm.write_shard(tmp_path / "x.tar", 3)
    info = load_index(str(path))
    assert (info.index_path, info.num_samples, info.damage, info.built) == (f"{path}.idx", 3, None, True)
    assert Path(info.index_path).read_bytes() == np.array([0, 2048, 4096, 6144], "<u8").tobytes()
    assert os.stat(info.index_path).st_mtime_ns == os.stat(path).st_mtime_ns
    assert read_index(info.index_path).tolist() == [0, 2048, 4096, 6144]
    assert sorted(os.listdir(tmp_path)) == ["x.tar", "x.tar.idx"]


def test_offsets_begin_at_extended_headers(tmp_path: Path) -> None:
    name = "x" * 150
    content = tm.pax({"mtime": "1.5"}) + tm.member("a.jpg", b"1") + tm.long_name(f"{name}.jpg") + tm.member(name[:100], b"2")
    path = write_tar(tmp_path / "x.tar", content + tm.member(name[:99], b"3") + tm.END)
    assert offsets_of(path) == [0, 2048, 4096]


def test_passed_over_members_neither_start_nor_end_a_sample(tmp_path: Path) -> None:
    other = tm.member("d/", b"", b"5") + tm.member("d/._a.jpg", b"mac") + tm.member("l", b"", b"2") + tm.member("README", b"x")
    content = other + tm.member("d/a.jpg", b"1") + other + tm.member("d/a.cls", b"2") + other + tm.member("d/b.jpg", b"3") + other
    path = write_tar(tmp_path / "x.tar", content + tm.END)
    size = len(other)
    assert offsets_of(path) == [size, 3 * size + 2048, 3 * size + 3072]


def test_joined_archives_are_one_shard_whose_samples_stay_apart(tmp_path: Path) -> None:
    """The last sample of one and the first of the next are two, also when their keys are the same."""
    one = tm.member("a.jpg", b"1") + tm.member("a.cls", b"1") + tm.END
    path = write_tar(tmp_path / "x.tar", one + one + tm.member("a.txt", b"1") + tm.END)
    assert offsets_of(path) == [0, len(one), 2 * len(one), 2 * len(one) + 1024]
    assert load_index(path).damage is None


def test_one_key_in_two_places_is_two_samples(tmp_path: Path) -> None:
    content = b"".join(tm.member(name, b"x") for name in ["a.j", "a.c", "b.j", "a.j", "a.c", "a.d"])
    assert len(offsets_of(write_tar(tmp_path / "x.tar", content))) - 1 == 3


@pytest.mark.parametrize("names", [["a.jpg", "ab.jpg", "a/b.jpg", "a.b/c.jpg", "a.jpg"], ["__a.jpg", "__a.b__", "__a.cls", "__b.jpg"]])
def test_keys_that_begin_alike(tmp_path: Path, names: list[str]) -> None:
    path = write_tar(tmp_path / "x.tar", b"".join(tm.member(name, b"x") for name in names))
    num_samples = len(offsets_of(path)) - 1
    assert num_samples == (5 if names[0] == "a.jpg" else 2)


@pytest.mark.parametrize("content", [bytes(512), tm.END, bytes(10240), tm.member("d/", b"", b"5") + tm.END, tm.member("README", b"x")])
def test_no_samples(tmp_path: Path, content: bytes) -> None:
    path = write_tar(tmp_path / "x.tar", content)
    assert load_index(path) == (path + ".idx", 0, None, True)
    assert load_index(path) == (path + ".idx", 0, None, False)


def test_missing_end_blocks(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", tm.join_samples(tm.make_samples(2)))
    assert offsets_of(path) == [0, 2048, 4096]
    assert load_index(path).damage is None


# What is lost


CUT = tm.join_samples(tm.make_samples(4))  # samples of 2048 bytes, members of 1024


@pytest.mark.parametrize(
    ("content", "num_samples", "damage"),
    [
        # in the data of sample 3's first member: sample 2 is whole, for the name of the cut one is known
        (CUT[: 6144 + 515], 3, "the data of '0003.jpg' is cut (3 of 9 bytes are there) at byte 6144: 515 bytes after its first 3 samples"),
        # in the data of its second: what there is of sample 3 is not used
        (CUT[: 6144 + 1536], 3, "the data of '0003.cls' is cut (0 of 1 bytes are there) at byte 7168: 1536 bytes after its first 3"),
        # in a header: sample 2 has all the fields that sample 1 has
        (CUT[: 6144 + 100], 3, "cut in a header at byte 6144: 100 bytes after its first 3 samples are not used"),
        (CUT[: 6144 + 1024 + 100], 3, "cut in a header at byte 7168: 1124 bytes after its first 3 samples are not used"),
        (CUT[:100], None, ""),
        (CUT[:300], 0, "cut in a header at byte 0: 300 bytes after its first 0 samples are not used"),
        (CUT[:514], 0, "the data of '0000.jpg' is cut (2 of 9 bytes are there) at byte 0: 514 bytes after its first 0"),
        (CUT[: 2048 + 100], 1, "cut in a header at byte 2048: 100 bytes after its first 1 sample are not used"),
        (CUT[:4096] + b"x" + CUT[4097:], 2, "broken header at byte 4096: 4096 bytes after its first 2 samples are not used"),
        (CUT[:5120] + b"x" + CUT[5121:], 2, "broken header at byte 5120: 4096 bytes after its first 2 samples are not used"),
        (b"x" + CUT[1:], 0, "broken header at byte 0: 8192 bytes after its first 0 samples are not used"),
        # in the padding: the data is all there
        (CUT[: 6144 + 515 + 50], 3, "cut in the padding of the last member at byte 6709: 565 bytes after its first 3 samples"),
        (CUT[:-50], 4, "cut in the padding of the last member at byte 8142: 0 bytes after its first 4 samples are not used"),
        # garbage after the end: the sample before it was ended by the end blocks
        (CUT[:5120] + tm.END + b"garbage" * 100, 3, "broken header at byte 6144: 1724 bytes after its first 3 samples are not used"),
    ],
)
def test_damage(tmp_path: Path, content: bytes, num_samples: int | None, damage: str) -> None:
    """The whole samples before it are used; the loss is named, also when the index is there already."""
    path = write_tar(tmp_path / "x.tar", content)
    if num_samples is None:
        with pytest.raises(ShardError, match="x.tar: not a tar"):
            load_index(path)
        return
    for built in (True, False):
        info = load_index(path)
        assert (info.num_samples, info.built) == (num_samples, built)
        assert info.damage is not None and info.damage.startswith(damage) and "\n" not in info.damage
    offsets = read_index(info.index_path)
    for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        parse_sample(content[a:b], a, "x.tar")


def test_cut_between_members_is_no_damage(tmp_path: Path) -> None:
    """It can't be told from a tar without end blocks; the sample that lacks a field is the task's to judge."""
    path = write_tar(tmp_path / "x.tar", CUT[: 6144 + 1024])
    assert load_index(path)[1:3] == (4, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.tar: empty (0 bytes): no tar in it; download or make it again"),
        (b"<!DOCTYPE html><html>" + b" " * 2000, "x.tar: a web page, not a tar: its download failed; download it again"),
        (b"\n <html>", "x.tar: a web page, not a tar: its download failed; download it again"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied', "x.tar: a web page, not a tar: its download failed; download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "x.tar: a Git LFS pointer, not a tar: fetch the file itself with git lfs pull"),
        (b"PK\x03\x04" + bytes(1000), "x.tar: a zip, not a tar: make shards of it with scripts/make_shards.py"),
        (
            b"\xff\xd8\xff\xe0" * 1000,
            r"x.tar: not a tar (it starts with b'\xff\xd8\xff\xe0\xff\xd8\xff\xe0\xff\xd8\xff\xe0\xff\xd8\xff\xe0')",
        ),
        (bytes(1024) + b"garbage" * 100, r"not a tar"),
    ],
)
def test_not_a_tar(tmp_path: Path, content: bytes, message: str) -> None:
    path = write_tar(tmp_path / "x.tar", content)
    with pytest.raises(ShardError) as caught:
        load_index(path)
    assert message in str(caught.value) and str(caught.value).startswith(path) and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["x.tar"]


def test_tars_spoilt_at_random_have_one_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walked in C, mostly, and in Python alone."""
    rng = np.random.default_rng(3)
    long = tm.pax({"path": "p/" + "n" * 120 + ".a"}) + tm.member("cut", b"x")
    odd = [long, tm.member("d/", kind=b"5"), bytes(1024), tm.member("._x.a", b"1")]
    for _ in range(150):
        pieces = []
        for i in range(int(rng.integers(1, 30))):
            pieces.append(tm.member(f"k{i // 3}.{'abc'[i % 3]}", rng.bytes(int(rng.integers(0, 1300)))))
            if rng.random() < 0.15:
                pieces.append(odd[rng.integers(len(odd))])
        content = bytearray(b"".join(pieces) + tm.END)
        for at in rng.integers(0, len(content), rng.integers(0, 2)).tolist():
            content[at] = rng.integers(256)
        path = write_tar(tmp_path / "x.tar", bytes(content[: rng.integers(1, len(content) + 1)] if rng.random() < 0.3 else content))
        found: list[object] = []
        for c in (True, False):
            monkeypatch.setattr(gathering, "is_there", lambda c=c: c)
            try:
                offsets, damage = build_index(path)
                found.append((offsets.tolist(), damage))
            except ShardError as error:
                found.append(str(error))
        assert found[0] == found[1]


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="x.tar: can't be read: No such file or directory"):
        load_index(str(tmp_path / "x.tar"))
    (tmp_path / "x.tar").mkdir()
    with pytest.raises(ShardError, match="x.tar: can't be read: Is a directory"):
        load_index(str(tmp_path / "x.tar"))


# When an index is believed


def age(path: str, seconds: int = 1000) -> None:
    stamp = os.stat(path).st_mtime_ns - seconds * 10**9
    os.utime(path, ns=(stamp, stamp))


def test_fresh_index_is_not_built_again(tmp_path: Path) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 3))
    assert load_index(path).built and not load_index(path).built
    assert load_index(path, rebuild=True).built


def test_foreign_index_is_checked_and_left_alone(tmp_path: Path) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 3))
    load_index(path)
    age(path + ".idx")
    before = os.stat(path + ".idx")
    assert load_index(path) == (path + ".idx", 3, None, False)
    assert (os.stat(path + ".idx").st_mtime_ns, os.stat(path + ".idx").st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 2048, 4096],  # of the same shard before it grew
        [0, 2048, 4096, 6144, 8192],  # beyond the end of the file
        [512, 2048, 6144],
        [0, 2048, 4608, 6144],
        [0, 4096, 2048, 6144],
        [0, 2048, 4096, 5120],
        [6144],
        [],
    ],
)
def test_index_that_does_not_fit_is_built_again(tmp_path: Path, offsets: list[int]) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 3))
    np.array(offsets, "<u8").tofile(path + ".idx")
    assert load_index(path) == (path + ".idx", 3, None, True)
    assert load_index(path) == (path + ".idx", 3, None, False)


def test_fresh_stamp_does_not_hide_another_shards_index(tmp_path: Path) -> None:
    """Snapshots with all their times equal, say."""
    path = str(tm.write_shard(tmp_path / "x.tar", 3))
    for offsets in ([0, 2048, 4096], [0], [512, 2048, 6144], [0, 9999]):
        write_index(path + ".idx", np.array(offsets), os.stat(path).st_mtime_ns)
        assert load_index(path) == (path + ".idx", 3, None, True)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 25, b"\xff" * 32])
def test_unreadable_index_counts_as_absent(tmp_path: Path, content: bytes) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 3))
    Path(path + ".idx").write_bytes(content)
    os.utime(path + ".idx", ns=(0, os.stat(path).st_mtime_ns))
    with pytest.raises(ValueError, match="x.tar.idx: not an index of a tar"):
        read_index(path + ".idx")
    assert load_index(path) == (path + ".idx", 3, None, True)


def test_shard_made_anew_gets_a_new_index(tmp_path: Path) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 3))
    load_index(path)
    tm.write_shard(tmp_path / "x.tar", 5)
    assert load_index(path)[1:] == (5, None, True)


def test_trailing_directories_are_no_part_of_the_last_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", CUT + tm.member("d/", b"", b"5") + tm.END)
    assert load_index(path)[1:] == (4, None, True)
    assert read_index(path + ".idx")[-1] == len(CUT)
    assert load_index(path)[1:] == (4, None, False)
    age(path + ".idx")  # its stamp does not vouch for what follows the last sample
    assert load_index(path)[1:] == (4, None, True)


def test_index_of_a_read_only_folder_goes_to_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "read only"
    folder.mkdir()
    path = str(tm.write_shard(folder / "x.tar", 3))
    folder.chmod(0o555)
    try:
        info = load_index(path)
        assert info[1:] == (3, None, True)
        assert Path(info.index_path).parent == cache / "shardline" / "index"
        assert load_index(path) == (info.index_path, 3, None, False)
        assert os.listdir(folder) == ["x.tar"]
    finally:
        folder.chmod(0o755)
    tm.write_shard(folder / "x.tar", 4)
    folder.chmod(0o555)
    try:
        assert load_index(path)[1:] == (4, None, True)
    finally:
        folder.chmod(0o755)


def test_no_place_for_an_index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 3))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ShardError, match="x.tar: no place for its index: .*: No space left on device; set XDG_CACHE_HOME to a folder"):
        load_index(path)
    assert os.listdir(tmp_path) == ["x.tar"]
    assert os.listdir(cache / "shardline" / "index") == []


def build_many(path: str) -> list[int]:
    return [load_index(path, rebuild=True).num_samples for _ in range(50)]


def test_several_jobs_may_build_at_once(tmp_path: Path) -> None:
    path = str(tm.write_shard(tmp_path / "x.tar", 200))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(build_many, [path] * 3) == [[200] * 50] * 3
    assert sorted(os.listdir(tmp_path)) == ["x.tar", "x.tar.idx"]
    assert load_index(path) == (path + ".idx", 200, None, False)


def test_foreign_shards(shared_data: Path, tmp_path: Path) -> None:
    """Shards that others made: counts, first keys and fields are those that they say."""
    answers = json.loads((shared_data / "foreign_shards" / "ANSWERS.json").read_text())
    for name in answers:
        shutil.copy(shared_data / "foreign_shards" / name, tmp_path)
    files = ShardFiles()
    shards = load_shards(str(tmp_path))
    assert [shard.name for shard in shards] == sorted(answers)
    for shard in shards:
        answer = answers[shard.name]
        samples = [parse_sample(*files.read(shard, i), shard.name) for i in range(shard.num_samples)]
        assert shard.damage is None
        assert shard.num_samples == answer["samples"]
        assert [key for key, _ in samples[:3]] == answer["first_keys"]
        wanted = {",".join(sorted(fields.lower().split(","))): count for fields, count in answer["field_sets"].items()}
        assert Counter(",".join(sorted(fields)) for _, fields in samples) == wanted
        if "cls_histogram" in answer:
            assert Counter(fields["cls"].decode() for _, fields in samples) == answer["cls_histogram"]
