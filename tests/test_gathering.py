"""native/gathering.py: what is done in C is what numpy does, and numbers that can't be are refused."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import shard_maker

from data import StaleIndexError, build_loader
from data.native import gathering
from data.store import ShardFiles

pytestmark = pytest.mark.skipif(not gathering.is_there(), reason="samples.so is not built")


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    samples = [{"bin": rng.bytes(int(rng.integers(0, 1500))), "cls": [b"%d" % i, b"%d\n" % i, b"", b"x"][i % 4]} for i in range(120)]
    return shard_maker.write_shards(tmp_path / "s", *[samples[i : i + 12] for i in range(0, 120, 12)])


def without_c(monkeypatch):
    monkeypatch.setattr(gathering, "is_there", lambda: False)


@pytest.mark.parametrize("order", ["random", "as it lies", "one again and again"])
def test_samples_are_read_alike(shards, monkeypatch, order):
    orders = {"random": np.random.default_rng(1).permutation(120), "as it lies": np.arange(120), "one again and again": np.full(120, 77)}
    number = orders[order]
    shard, index = number // 12, number % 12
    found = []
    for _ in range(2):
        files = ShardFiles(max_open=3)
        for _ in range(2):  # the second time into memory that is there
            data, place, size, offset = files.read_many(shards, shard, index)
        found.append([(data[a : a + n].tobytes(), a, o) for a, n, o in zip(place.tolist(), size.tolist(), offset.tolist(), strict=True)])
        assert len(files._open) <= 3
        without_c(monkeypatch)
    assert found[0] == found[1]
    one_by_one = [ShardFiles().read(shards[s], i) for s, i in zip(shard.tolist(), index.tolist(), strict=True)]
    assert [(data, offset) for data, _, offset in found[0]] == one_by_one


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_the_same(shards, monkeypatch, num_workers):
    def batches():
        return list(build_loader(shards, batch_size=32, task="bytes", epochs=2, num_classes=100, num_workers=num_workers))

    fast = batches()
    without_c(monkeypatch)
    for a, b in zip(fast, batches(), strict=True):
        for name in ("bytes", "offsets", "label", "valid", "sample"):
            assert a[name].equal(b[name]), name
        assert list(a["ids"]) == list(b["ids"]) and a["errors"] == b["errors"] and a["errors"]


@pytest.mark.parametrize("c", [True, False])
def test_what_is_wrong_with_a_shard_is_named_alike(shards, monkeypatch, c):
    if not c:
        without_c(monkeypatch)
    shard, index = np.array([1, 0, 2]), np.array([11, 3, 12])
    with pytest.raises(StaleIndexError, match=r"2.tar: its index changed under the run \(12 samples, sample 12 asked for\)"):
        ShardFiles().read_many(shards, shard, index)
    with open(shards[1].tar_path, "r+b") as file:
        file.truncate(3000)
    with pytest.raises(StaleIndexError, match=r"1.tar: its index does not fit it: the file ends at byte 3000, before sample 11 does"):
        ShardFiles().read_many(shards, shard, index - 1 + (index < 12))
    np.array([512, 0], "<u8").tofile(shards[0].index_path)
    with pytest.raises(StaleIndexError, match=r"0.tar.idx: not an index of a tar"):
        ShardFiles().read_many(shards, shard, index)


def test_a_disk_that_fails_is_named(shards, monkeypatch):
    import os

    os.unlink(shards[0].path)
    os.mkdir(shards[0].path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0.tar: can't be read at byte \d+: Is a directory"):
            ShardFiles().read_many(shards, np.zeros(2, np.int64), np.array([4, 2]))
        without_c(monkeypatch)


def test_a_file_cut_while_it_is_mapped_is_named(shards):
    """Reading past its end in memory would end the process."""
    files = ShardFiles()
    files.read_many(shards, np.zeros(2, np.int64), np.array([4, 2]))
    with open(shards[0].tar_path, "r+b") as file:
        file.truncate(5000)
    handler = signal.getsignal(signal.SIGBUS)
    for _ in range(2):
        with pytest.raises(StaleIndexError, match="0.tar: its index does not fit it: the file ends at byte 5000, before sample 2 does"):
            files.read_many(shards, np.zeros(2, np.int64), np.array([4, 2]))
    assert signal.getsignal(signal.SIGBUS) == handler
    assert len(files.read_many(shards, np.zeros(1, np.int64), np.array([0]))[0])


def test_places_outside_are_refused():
    data, one = np.zeros(1024, np.uint8), np.ones(1, np.int64)
    for place, size in [(1024, 1), (0, 1025), (-512, 512), (512, 2**62), (2**62, 512), (0, -1)]:
        with pytest.raises(AssertionError, match="a sample is not inside its buffer"):
            gathering.parse(data, one * place, one * size)
        with pytest.raises(AssertionError, match="the pieces of a batch are not as long as it"):
            gathering.gather(data, one * place, one * size, np.zeros(max(0, min(size, 4096)), np.uint8))
    with pytest.raises(AssertionError, match="the pieces of a batch are not as long as it"):
        gathering.gather(data, one * 0, one * 9, np.zeros(8, np.uint8))
    for start in (1020, -1, 2**62):
        with pytest.raises(AssertionError, match="a label is not inside its buffer"):
            gathering.read_digits(data, one * start, one * 9)
        with pytest.raises(AssertionError, match="a field is not inside its buffer"):
            gathering.are_same(data, one * start, 0, 9)
    with pytest.raises(AssertionError, match="an array for C must be in one piece"):
        gathering.read_digits(data[::2], one, one)


def test_tokens_are_the_same(tmp_path, monkeypatch):
    import io

    rng = np.random.default_rng(0)
    samples = []
    for i in range(40):
        out = io.BytesIO()
        np.save(out, rng.integers(0, 9, 7 if i == 20 else 8, np.int64 if i == 30 else np.int32))
        samples.append({"npy": out.getvalue()})
    shards = shard_maker.write_shards(tmp_path / "t", samples)
    settings = {"field": "npy", "length": 8, "dtype": "int32"}
    made = [list(build_loader(shards, batch_size=8, task="tokens", training=False, transform=settings))]
    without_c(monkeypatch)
    made.append(list(build_loader(shards, batch_size=8, task="tokens", training=False, transform=settings)))
    for a, b in zip(*made, strict=True):
        assert a["tokens"].equal(b["tokens"]) and a["valid"].equal(b["valid"]) and a["errors"] == b["errors"]
    assert any(batch["errors"] for batch in made[0]) and any(not batch["errors"] for batch in made[0])
