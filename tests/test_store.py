"""data/store.py and data/cache.py: gzip shards, samples by number, few open files."""

from __future__ import annotations

import gzip
import os
import pickle
import resource
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tar_maker as tm

from data import store
from data.cache import cache_dir, cached_path
from data.errors import ShardError, StaleIndexError
from data.shards import Shard, load_shards
from data.store import ShardFiles, cut_reason, local_tar
from data.tar import parse_sample

CONTENT = tm.join_samples(tm.make_samples(20)) + tm.END


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def read_all(shard: Shard) -> list[tuple[str, dict[str, bytes]]]:
    files = ShardFiles()
    return [parse_sample(*files.read(shard, i), shard.name) for i in range(shard.num_samples)]


def test_plain_tars_are_read_in_place(tmp_path: Path, cache: Path) -> None:
    for name in ("x.tar", "plain.tar.gz"):
        path = str(tm.write_shard(tmp_path / name, 2))
        assert local_tar(path) == path and not cut_reason(path)
    assert os.listdir(cache) == []


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar"])
def test_gzip_is_decompressed_once(tmp_path: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(gzip.compress(CONTENT))
    (shard,) = load_shards(str(tmp_path / name))
    assert (shard.path, shard.name, shard.num_samples, shard.damage) == (str(tmp_path / name), name, 20, None)
    assert Path(shard.tar_path).read_bytes() == CONTENT and Path(shard.tar_path).is_relative_to(cache / "shardline")
    assert shard.num_bytes == len(gzip.compress(CONTENT))
    assert read_all(shard) == tm.make_samples(20)
    monkeypatch.setattr(store, "_decompress", None)
    assert load_shards(str(tmp_path / name)) == [shard]
    assert os.listdir(tmp_path) == [name]


def test_changed_gzip_is_decompressed_again(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    for num in (3, 5):
        path.write_bytes(gzip.compress(tm.join_samples(tm.make_samples(num))))
        assert load_shards(str(path))[0].num_samples == num


@pytest.mark.parametrize("between", [b"", bytes(512), bytes(3_000_000)])
def test_several_gzip_members(tmp_path: Path, between: bytes) -> None:
    """pigz, bgzip and `cat a.gz b.gz` make them; zeros may pad the space between."""
    parts = [CONTENT[:700], CONTENT[700:5000], CONTENT[5000:]]
    path = tmp_path / "x.tar.gz"
    path.write_bytes(between.join(gzip.compress(part) for part in parts) + between)
    (shard,) = load_shards(str(path))
    assert shard.damage is None and read_all(shard) == tm.make_samples(20)


def test_cut_gzip_keeps_what_decompresses(tmp_path: Path) -> None:
    content = tm.join_samples([(f"{i:04d}", {"jpg": os.urandom(1500), "cls": b"1"}) for i in range(100)]) + tm.END
    whole = gzip.compress(content)
    path = tmp_path / "x.tar.gz"
    path.write_bytes(whole[: len(whole) // 2])
    first, again = load_shards(str(path)), load_shards(str(path))
    assert first == again
    assert 40 <= first[0].num_samples <= 60
    assert first[0].damage and "is cut" in first[0].damage
    assert [key for key, _ in read_all(first[0])] == [f"{i:04d}" for i in range(first[0].num_samples)]


@pytest.mark.parametrize(
    ("broken", "num_samples"),
    [
        (gzip.compress(CONTENT)[:-8], 20),  # only its checksum is missing: after the end blocks, nothing is lost
        (gzip.compress(CONTENT)[:-8] + b"checksum", 20),
        (gzip.compress(CONTENT) + b"garbage", 20),
        (gzip.compress(CONTENT[:6144]) + gzip.compress(CONTENT[6144:])[:10], 3),
        (gzip.compress(CONTENT[:7168]) + b"garbage", 3),  # a member's end, but not a sample's
        (gzip.compress(CONTENT[:7168])[:-8] + b"checksum", 3),
    ],
)
def test_broken_gzip_is_named(tmp_path: Path, broken: bytes, num_samples: int) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(broken)
    for _ in range(2):
        (shard,) = load_shards(str(path))
        assert shard.num_samples == num_samples and shard.damage is not None
        assert shard.damage.startswith("the gzip stream is cut or broken at byte ") and "are not used" in shard.damage
        assert read_all(shard) == tm.make_samples(num_samples)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"text" * 200), r"x.tar.gz: not a tar \(it starts with b'texttexttexttext'\)"),
        (gzip.compress(b""), r"x.tar.gz: empty \(0 bytes\): no tar in it"),
        (gzip.compress(CONTENT)[:12], "x.tar.gz: the gzip stream is cut or broken: no tar in it; download or make it again"),
        (b"\x28\xb5\x2f\xfd" + b"x" * 600, r"x.tar.gz: compressed with zstd, which .*: decompress it first \(zstd -d\)"),
        (b"BZh9" + b"x" * 600, r"x.tar.gz: compressed with bzip2, .*: decompress it first \(bunzip2\)"),
        (b"\xfd7zXZ\0" + b"x" * 600, r"x.tar.gz: compressed with xz, .*: decompress it first \(unxz\)"),
    ],
)
def test_what_else_may_be_in_a_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(ShardError, match=message) as caught:
        load_shards(str(tmp_path / "x.tar.gz"))
    assert str(caught.value).startswith(str(tmp_path))


def test_a_tar_whose_first_name_looks_like_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    for name in (b"BZh9.jpg", b"\x1f\x8b\x08.jpg"):
        path.write_bytes(tm.member(name, b"x") + tm.END)
        assert local_tar(str(path)) == str(path)


def test_no_room_to_decompress(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(CONTENT))

    def fail(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_decompress", fail)
    message = "x.tar.gz: can't be decompressed into .*: No space left on device; set XDG_CACHE_HOME to a folder with room"
    with pytest.raises(ShardError, match=message):
        load_shards(str(tmp_path / "x.tar.gz"))
    assert os.listdir(cache / "shardline" / "tar") == []


# The cache folder


def test_cache_dir(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == str(cache / "shardline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == str(tmp_path / ".cache" / "shardline")


def test_cache_dir_where_there_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/not/allowed")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_dir()
    assert folder == str(tmp_path / f"shardline-{os.getuid()}")
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    os.rename(folder, tmp_path / "shardline-54321")
    with pytest.raises(ShardError, match="shardline-54321 belongs to another user; set XDG_CACHE_HOME to a folder that can be written"):
        cache_dir()


def test_cache_entries_of_one_path_differ_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(b"1")
    first = cached_path("tar", str(path), os.stat(path))
    assert first == cached_path("tar", str(path), os.stat(path))
    os.utime(path, (1, 1))
    assert first != cached_path("tar", str(path), os.stat(path))


# ShardFiles


def test_read_gives_any_sample(tmp_path: Path) -> None:
    shards = [load_shards(str(tm.write_shard(tmp_path / f"{i}.tar", 3, 10 * i)))[0] for i in range(5)]
    files = ShardFiles(max_open=2)
    for i, k in [(0, 2), (4, 0), (2, 1), (0, 0), (3, 2), (3, 1), (0, 2)]:
        data, offset = files.read(shards[i], k)
        assert offset == 2048 * k and len(data) == 2048
        assert parse_sample(data, offset, "x") == tm.make_samples(1, 10 * i + k)[0]
    files.close()
    assert files.read(shards[1], 1)[1] == 2048


def test_at_most_max_open_files(tmp_path: Path) -> None:
    shards = [load_shards(str(tm.write_shard(tmp_path / f"{i}.tar", 1)))[0] for i in range(12)]
    before = len(os.listdir("/proc/self/fd"))
    files = ShardFiles(max_open=4)
    for shard in shards * 2:
        files.read(shard, 0)
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    copy = pickle.loads(pickle.dumps(files))
    assert len(os.listdir("/proc/self/fd")) == before + 4
    copy.read(shards[0], 0)
    assert copy._max_open == 4
    del files, copy
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_thousand_shards_with_256_descriptors(tmp_path: Path) -> None:
    tm.write_shard(tmp_path / "0000.tar", 2)
    for i in range(1, 2000):
        os.link(tmp_path / "0000.tar", tmp_path / f"{i:04d}.tar")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        shards = load_shards(str(tmp_path / "{0000..1999}.tar"))
        files = ShardFiles()
        assert sum(len(files.read(shard, 1)[0]) for shard in shards) == 2000 * 2048
        files.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_index_or_shard_that_changed_under_the_run(tmp_path: Path) -> None:
    path = tm.write_shard(tmp_path / "x.tar", 3)
    (shard,) = load_shards(str(path))
    with pytest.raises(StaleIndexError, match=r"x.tar: its index changed under the run \(3 samples, sample 3 asked for\)"):
        ShardFiles().read(shard, 3)
    os.truncate(path, 5000)
    with pytest.raises(StaleIndexError, match="x.tar: its index does not fit it: the file ends at byte 5000, before sample 2 does; delete"):
        ShardFiles().read(shard, 2)
    np.array([5, 1], "<u8").tofile(shard.index_path)
    with pytest.raises(StaleIndexError, match="x.tar.idx: not an index of a tar; delete it or run scripts/index_shards.py"):
        ShardFiles().read(shard, 0)
    os.unlink(shard.index_path)
    with pytest.raises(ShardError, match="x.tar.idx: can't be read any more: No such file or directory"):
        ShardFiles().read(shard, 0)


def test_reads_of_more_than_the_system_gives_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = load_shards(str(tm.write_shard(tmp_path / "x.tar", 3)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 700), offset))
    assert parse_sample(*ShardFiles().read(shard, 1), "x.tar") == tm.make_samples(2)[1]


def test_a_shard_whose_disk_fails_is_named(tmp_path: Path) -> None:
    (shard,) = load_shards(str(tm.write_shard(tmp_path / "x.tar", 3)))
    os.unlink(shard.path)
    os.mkdir(shard.path)  # it opens, and then reading fails, as on a disk with bad blocks
    with pytest.raises(ShardError) as stopped:
        ShardFiles().read(shard, 1)
    assert str(stopped.value) == f"{tmp_path}/x.tar: can't be read at byte 2048: Is a directory"
