"""records.py through build_loader: bytes and tokens of many small samples, whole batches at a time."""

from __future__ import annotations

import io

import numpy as np
import pytest
import shard_maker
import torch

from data import ShardError, build_loader
from data.labels import LabelMap


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def rows(batch):
    """[(key, bytes, label or None)] of the valid slots."""
    cuts = batch["offsets"].tolist()
    label = batch.get("label")
    return [
        (batch["ids"][i][2], batch["bytes"][cuts[i] : cuts[i + 1]].numpy().tobytes(), None if label is None else int(label[i]))
        for i in np.flatnonzero(batch["valid"].numpy()).tolist()
    ]


@pytest.fixture
def small(tmp_path):
    """Two shards of 30 and 13 samples of different sizes."""
    rng = np.random.default_rng(0)
    samples = [{"bin": rng.bytes(int(rng.integers(0, 1500))), "cls": b"%d\n" % (i % 12) if i % 5 else b"%d" % (i % 12)} for i in range(43)]
    return shard_maker.write_shards(tmp_path / "small", samples[:30], samples[30:]), samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bytes_come_as_they_are(small, num_workers):
    shards, samples = small
    batches = list(build_loader(shards, batch_size=8, task="bytes", epochs=2, num_workers=num_workers))
    seen = [row for batch in batches for row in rows(batch)]
    expected = [(f"s{i:04d}", s["bin"], int(s["cls"])) for i, s in enumerate(samples)]
    assert sorted(seen) == sorted(expected * 2)
    assert {tuple(batch["label"].shape) for batch in batches} == {(8,)}
    assert not any(batch["errors"] for batch in batches)


def test_a_user_stage_sees_sample_dicts_and_changes_nothing(small):
    shards, _ = small
    plain = list(build_loader(shards, batch_size=8, task="bytes"))
    staged = list(build_loader(shards, batch_size=8, task="bytes", stages=[iter]))
    for a, b in zip(plain, staged, strict=True):
        assert rows(a) == rows(b) and a["ids"] == b["ids"]


def test_bytes_without_labels(tmp_path):
    shards = shard_maker.write_shards(tmp_path / "x", [{"txt": b"one"}, {"txt": b"three"}])
    (batch,) = build_loader(shards, batch_size=2, task="bytes", label=None, training=False)
    assert rows(batch) == [("s0000", b"one", None), ("s0001", b"three", None)]


def test_labels_by_name_and_in_another_order(tmp_path):
    samples = [{"bin": b"x", "cls": label} for label in (b"cat", b"dog", b"1", b"00", b"7", b"-1", b"")]
    shards = shard_maker.write_shards(tmp_path / "x", samples)
    labels = LabelMap("cls", 2, ("cat", "dog"), remap=(1, 0))
    (batch,) = build_loader(shards, batch_size=7, task="bytes", labels=labels, training=False)
    one_by_one: list[int | None] = []
    for sample in samples:
        try:
            one_by_one.append(labels.parse(sample))
        except ValueError:
            one_by_one.append(None)
    assert [label if ok else None for label, ok in zip(batch["label"].tolist(), batch["valid"].tolist(), strict=True)] == one_by_one
    assert [(e.index, e.field) for e in batch["errors"]] == [(4, "cls"), (5, "cls"), (6, "cls")]


def test_what_is_missing_or_doubled_is_named(tmp_path):
    import tar_maker as tm

    content = tm.join_samples([("a", {"bin": b"1", "cls": b"0"}), ("b", {"cls": b"1"}), ("c", {"bin": b"2"})])
    content += tm.member("d.bin", b"3") + tm.member("d.bin", b"4") + tm.END
    (tmp_path / "0.tar").write_bytes(content)
    (batch,) = build_loader(str(tmp_path / "0.tar"), batch_size=4, task="bytes", training=False, transform={"field": "bin"})
    assert batch["valid"].tolist() == [True, False, False, False]
    assert batch["offsets"].tolist() == [0, 1, 1, 1, 1]
    assert [(e.index, e.key, e.field, e.reason) for e in batch["errors"]] == [
        (1, "b", "bin", "no bin: the sample's fields are cls"),
        (2, "c", "cls", "no label: the sample's fields are bin"),
        (3, "d", "bin", "the sample has this field twice"),
    ]
    assert [key for _, _, key in batch["ids"]] == ["a", "b", "c", "d"]


def test_which_field_is_meant_must_be_known(tmp_path):
    shards = shard_maker.write_shards(tmp_path / "x", [{"bin": b"1", "txt": b"2", "cls": b"0"}])
    (batch,) = build_loader(shards, batch_size=1, task="bytes", training=False)
    assert batch["errors"][0].reason == "which field is meant? there are bin, txt: name it (field)"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("pack", [npy, np.ndarray.tobytes], ids=["npy", "raw"])
def test_tokens(tmp_path, pack, num_workers):
    tokens = np.random.default_rng(0).integers(0, 60_000, (20, 33), np.uint16)
    field = "npy" if pack is npy else "bin"
    shards = shard_maker.write_shards(tmp_path / "x", [{field: pack(row)} for row in tokens])
    batches = list(build_loader(shards, batch_size=8, task="tokens", training=False, num_workers=num_workers))
    assert batches[0]["tokens"].dtype == torch.uint16 and tuple(batches[0]["tokens"].shape) == (8, 33)
    read = np.concatenate([batch["tokens"].numpy()[batch["valid"].numpy()] for batch in batches])
    assert (read == tokens).all()
    assert batches[0]["tokens"].long()[3].tolist() == tokens[3].tolist()
    assert batches[2]["tokens"].numpy()[7].any()  # a masked slot holds ordinary data


def test_tokens_that_are_not_like_the_others(tmp_path):
    good = np.arange(5, dtype=np.int32)
    old = io.BytesIO()
    np.lib.format.write_array(old, good, version=(2, 0))
    samples = [npy(good), old.getvalue(), npy(good[:4]), npy(good.astype(np.int64)), good.tobytes(), b"", npy(good)[:-1], npy(good)]
    shards = shard_maker.write_shards(tmp_path / "x", [{"ids.npy": data} for data in samples])
    (batch,) = build_loader(shards, batch_size=8, task="tokens", training=False)
    assert batch["valid"].tolist() == [True, True, False, False, True, False, False, True]
    assert (batch["tokens"].numpy() == good).all()  # the bad ones hold a copy of a good one
    assert [error.reason for error in batch["errors"][:3]] == [
        "an array (4,) of int32, not (5,) of int32",
        "an array (5,) of int64, not (5,) of int32",
        "0 bytes, not the 20 of 5 tokens of type int32",
    ]


def test_no_tokens_is_said_at_the_start(tmp_path):
    shards = shard_maker.write_shards(tmp_path / "x", [{"txt": b"words"}])
    with pytest.raises(ShardError, match=r"no field npy or bin in .*0.tar: name the tokens' field, as in transform={'field': 'ids.npy'}"):
        build_loader(shards, batch_size=1, task="tokens")


def test_a_keyword_that_a_task_does_not_take(small):
    with pytest.raises(ValueError, match="task 'bytes' takes no hflip; it takes training, labels, field"):
        build_loader(small[0], batch_size=1, task="bytes", transform={"hflip": 0.5})


def test_a_shard_that_shrank_or_changed_under_its_index_stops_the_run(small):
    from data import StaleIndexError

    shards, _ = small
    loader = build_loader(shards, batch_size=43, task="bytes", training=False)
    with open(shards[0].tar_path, "r+b") as file:
        file.truncate(20_000)
    with pytest.raises(StaleIndexError, match=r"0.tar: its index does not fit it: the file ends at byte 20000, before sample \d+ does"):
        list(loader)
    with open(shards[0].tar_path, "r+b") as file:
        file.truncate(100_000)  # zeros where samples were
    with pytest.raises(StaleIndexError, match=r"0.tar: its index does not fit it: sample at byte \d+: "):
        list(loader)


def test_few_files_are_open_however_many_shards(tmp_path):
    import os

    shards = shard_maker.write_shards(tmp_path / "many", *[[{"bin": b"x", "cls": b"0"}] for _ in range(150)])
    before = len(os.listdir("/proc/self/fd"))
    loader = iter(build_loader(shards, batch_size=50, task="bytes", epochs=2))
    for _ in range(5):
        assert next(loader)["valid"].all()
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 64 + 2
