"""pipeline.py with torch's real DataLoader: the plan's order survives workers, start methods, resumes and user stages."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import LoaderError, Plan, StaleIndexError, build_loader, load_shards
from data.stages import ReadSamples
from data.workers import received

SIZES = (7, 5, 3, 1, 0, 41)


def read(shards, **kwargs):
    kwargs = {"batch_size": 12, "img_size": 32, "epochs": 3, "seed": 0, **kwargs}
    return list(build_loader(shards, **kwargs))


def valid_ids(batch):
    return [(e, *i) for e, i, v in zip(batch["epoch"].tolist(), batch["ids"], batch["valid"].tolist(), strict=True) if v]


def global_batches(ranks):
    return [sorted(sum((valid_ids(batch) for batch in step), [])) for step in zip(*ranks, strict=True)]


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key
        elif key != "times":
            assert value == b[key], key


def test_global_batches_are_the_same_for_any_ranks_and_workers(picture_shards):
    paths = picture_shards(SIZES)
    shards = load_shards(paths)
    expected = global_batches([read(shards)])
    for epoch in range(3):
        assert len({i for batch in expected for i in batch if i[0] == epoch}) == sum(SIZES)
    for world_size in (2, 3, 4, 5):
        for num_workers in (0, 1, 3):
            ranks = [read(shards, rank=r, world_size=world_size, num_workers=num_workers) for r in range(world_size)]
            assert {len(batches) for batches in ranks} == {len(expected)}
            assert {len(batch["valid"]) for batches in ranks for batch in batches} == {-(-12 // world_size)}
            assert global_batches(ranks) == expected


@pytest.mark.parametrize("method, num_workers, prefetch_factor", [("fork", 3, 1), ("fork", 2, 4), ("spawn", 2, 2), ("forkserver", 1, 3)])
def test_workers_change_nothing(picture_shards, method, num_workers, prefetch_factor):
    paths = picture_shards(SIZES)
    alone = read(paths)
    made = read(paths, num_workers=num_workers, prefetch_factor=prefetch_factor, multiprocessing_context=method)
    assert len(made) == len(alone)
    for a, b in zip(alone, made, strict=True):
        same(a, b)  # pixels too: augmentation does not know the worker


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_goes_on_at_the_next_sample(picture_shards, num_workers):
    paths = picture_shards(SIZES)
    whole = read(paths)
    for stop in (0, 1, 7, len(whole) - 1, len(whole)):
        loader = build_loader(paths, batch_size=12, img_size=32, epochs=3, num_workers=num_workers)
        stream: Any = iter(loader)
        for _ in range(stop):
            next(stream)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert len(pickle.dumps(state)) < 1024
        assert state["samples_seen"] == min(12 * stop, 171)  # consumed, not prefetched
        stream.close()
        again = build_loader(paths, batch_size=12, img_size=32, epochs=3)
        again.load_state_dict(state)
        assert len(again) == len(whole) - stop
        if stop < len(whole):
            for a, b in zip(whole[stop:], again, strict=True):
                same(a, b)


def test_a_state_fits_another_world_size_and_batch_size(picture_shards):
    paths = picture_shards(SIZES)
    order = [i for batch in read(paths) for i in valid_ids(batch)]
    loader = build_loader(paths, batch_size=12, img_size=32, epochs=3)
    stream = iter(loader)
    for _ in range(4):
        next(stream)
    ranks = []
    for rank in range(3):
        part = build_loader(paths, batch_size=10, img_size=32, epochs=3, rank=rank, world_size=3, num_workers=1)
        part.load_state_dict(loader.state_dict(), step=4)
        ranks.append(list(part))
    assert [batch["step"] for batch in ranks[0]] == list(range(4, 4 + len(ranks[0])))
    rest = order[48:]
    assert global_batches(ranks) == [sorted(rest[n : n + 10]) for n in range(0, len(rest), 10)]


def test_breaking_off_and_iterating_again_goes_on(picture_shards):
    loader = build_loader(picture_shards(SIZES), batch_size=12, img_size=32, epochs=1)
    first = next(iter(loader))
    second = next(iter(loader))
    assert (first["step"], second["step"]) == (0, 1)
    list(loader)
    with pytest.warns(UserWarning, match="all 1 epochs of this loader are consumed: build it with more epochs"):
        assert list(loader) == []


def test_epoch_end_counts_the_epochs_that_a_step_completes(picture_shards):
    paths = picture_shards(SIZES)  # 57 samples
    assert [b["epoch_end"] for b in read(paths, batch_size=12)] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert [b["epoch_end"] for b in read(paths, batch_size=100)] == [1, 2]


def test_evaluation_is_one_pass_in_index_order_and_starts_anew(picture_shards):
    shards = load_shards(picture_shards(SIZES))
    loaders = [build_loader(shards, batch_size=16, img_size=32, training=False, rank=r, world_size=2) for r in range(2)]
    for _ in range(2):
        ranks = [list(loader) for loader in loaders]
        keys = [i[3] for batch in global_batches(ranks) for i in batch]
        assert keys == [f"s{n:05d}" for n in range(57)]
    assert all(not batch["errors"] for batch in ranks[0])


def test_two_ranks_pass_different_samples_one_epoch_each_once(picture_shards):
    shards = load_shards(picture_shards(SIZES))
    kwargs: dict[str, Any] = {"batch_size": 12, "img_size": 32, "world_size": 2, "num_workers": 2}
    ranks = [list(build_loader(shards, rank=r, **kwargs)) for r in range(2)]
    seen = [i for rank in ranks for batch in rank for i in valid_ids(batch)]
    assert len(seen) == len(set(seen)) == 57


def spoil(path, changes):
    """Rewrite a shard; changes: member name -> new bytes, or None to leave the member out."""
    members = []
    with tarfile.open(path) as tar:
        for info in tar:
            file = tar.extractfile(info)
            assert file is not None
            members.append((info, file.read()))
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            content = changes.get(info.name, content)
            if content is not None:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def test_bad_samples_are_masked_and_named(picture_shards):
    paths = picture_shards([8], classes=2)
    spoil(paths[0], {"s00002.png": b"no picture", "s00005.cls": b"x", "s00006.png": None})
    batches = read(paths, batch_size=8, epochs=1, shuffle=False)
    assert batches[0]["valid"].tolist() == [True, True, False, True, True, False, False, True]
    errors = batches[0]["errors"]
    assert batches[0]["error_slots"] == [2, 5, 6]
    assert [(e.shard, e.index, e.key, e.field) for e in errors] == [
        ("000.tar", 2, "s00002", "png"),
        ("000.tar", 5, "s00005", "cls"),
        ("000.tar", 6, "s00006", ""),
    ]
    for slot in (2, 5, 6):  # ordinary data for batch norm
        assert torch.equal(batches[0]["image"][slot], batches[0]["image"][0])
        assert batches[0]["label"][slot] == batches[0]["label"][0]
    ranks = [read(paths, batch_size=5, epochs=1, shuffle=False, rank=r, world_size=3) for r in range(3)]
    named = [e for rank in ranks for batch in rank for e in batch["errors"]]
    assert sorted(e.index for e in named) == [2, 5, 6]  # padding repeats samples, never their errors


def test_a_batch_without_one_good_sample_is_zeros(picture_shards):
    paths = picture_shards([2])
    spoil(paths[0], {"s00000.png": b"", "s00001.png": b""})
    (batch,) = read(paths, batch_size=2, epochs=1)
    assert not batch["valid"].any()
    assert batch["image"].sum() == 0 and batch["label"].tolist() == [0, 0]


def test_a_shard_that_changed_under_its_index_stops_the_run(picture_shards):
    paths = picture_shards([8])
    loader = build_loader(paths, batch_size=12, img_size=32)
    with open(paths[0], "r+b") as file:
        file.seek(1024)
        file.write(b"\xff" * 8192)
    with pytest.raises(StaleIndexError, match="000.tar"):
        list(loader)


def lose_step_3(plans):
    yield from (plan for plan in plans if plan.step != 3)


class Lossy(ReadSamples):
    """Stands for a worker whose batch never reaches its rank."""

    def __call__(self, plans):
        return super().__call__(lose_step_3(plans))


def test_a_batch_that_is_lost_on_the_way_stops_the_run(picture_shards, monkeypatch):
    paths = picture_shards(SIZES)
    monkeypatch.setattr("data.pipeline.ReadSamples", Lossy)
    with pytest.raises(LoaderError, match="step 3 never came from its worker, step 4 did"):
        read(paths)
    with pytest.raises(LoaderError, match="the workers ended 1 steps early"):
        read(paths, batch_size=45)  # 4 steps: the last is lost


def test_a_worker_that_is_killed_in_the_middle_of_a_transfer_is_named():
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()

    def batches():
        yield {"step": 0}
        assert worker.pid
        os.kill(worker.pid, signal.SIGKILL)
        raise ConnectionResetError(104, "Connection reset by peer")  # what the end of its socket gives

    taken = received(batches(), [worker])
    assert next(taken) == {"step": 0}
    with pytest.raises(LoaderError) as stopped:
        next(taken)
    assert str(stopped.value) == (
        f"DataLoader worker (pid {worker.pid}) was killed while it handed over a batch: "
        "it may have run out of memory (see dmesg); fewer --workers need less"
    )


def test_full_shared_memory_is_one_line(picture_shards, monkeypatch):
    def full(size):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    loader = build_loader(picture_shards(SIZES), batch_size=12, img_size=224, num_workers=1)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)  # forked into the worker
    with pytest.raises(LoaderError, match=r"no shared memory left for a batch of 1.7 MiB .*: enlarge /dev/shm"):
        list(loader)


def rename_field(samples):
    for sample in samples:
        yield {("jpg" if key == "png" else key): value for key, value in sample.items()}


def drop_every_third(samples):
    for n, sample in enumerate(samples):
        if n % 3:
            yield sample


def lose_slot(samples):
    for sample in samples:
        yield {key: value for key, value in sample.items() if key != "__slot__"}


def repeat(samples):
    for sample in samples:
        yield sample
        yield sample


def test_stages_run_batch_by_batch(picture_shards):
    import webdataset as wds

    paths = picture_shards(SIZES)
    renamed = read(paths, stages=[rename_field, wds.map(dict)], num_workers=2)
    for a, b in zip(read(paths), renamed, strict=True):
        same(a, b)
    dropped = read(paths, batch_size=6, stages=[drop_every_third])
    assert dropped[0]["valid"].tolist() == [False, True, True, False, True, True]
    assert not dropped[0]["errors"]


@pytest.mark.parametrize("stage, slot", [(lose_slot, "None"), (repeat, "0")])
def test_a_stage_must_keep_its_slots(picture_shards, stage, slot):
    with pytest.raises(ValueError, match=f"a stage returned a sample with __slot__ {slot}, which is unknown or came twice"):
        read(picture_shards([4]), stages=[stage], shuffle=False, batch_size=4)


def test_the_state_wins_over_defaults_and_contradictions_are_refused(picture_shards):
    paths = picture_shards(SIZES)
    state = build_loader(paths, batch_size=12, img_size=32, seed=9, lanes=2, shuffle_block=8).state_dict()
    loader = build_loader(paths, batch_size=12, img_size=32)
    loader.load_state_dict(state)
    assert (loader.plan.seed, loader.plan.lanes, loader.plan.shuffle_block) == (9, 2, 8)
    with pytest.raises(ValueError, match="seed=0 contradicts the saved state's 9: leave it out, or start afresh"):
        build_loader(paths, batch_size=12, img_size=32, seed=0).load_state_dict(state)


def test_a_state_of_other_shards_is_refused(picture_shards):
    paths = picture_shards(SIZES)
    state = build_loader(paths, batch_size=4, img_size=32).state_dict()
    with pytest.raises(ValueError, match="the saved state is of other data: 6 shards then, 2 now; give the same shards"):
        build_loader(paths[:2], batch_size=4, img_size=32).load_state_dict(state)
    with pytest.raises(ValueError, match="equal totals, but shards were renamed, reordered or changed in size"):
        build_loader([*paths[1:], paths[0]], batch_size=4, img_size=32).load_state_dict(state)


def test_shards_may_move_as_a_whole(picture_shards, tmp_path):
    paths = picture_shards(SIZES)
    state = build_loader(paths, batch_size=4, img_size=32).state_dict()
    moved = (tmp_path / "train").rename(tmp_path / "elsewhere")
    build_loader(str(moved), batch_size=4, img_size=32).load_state_dict(state)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is not in 0..1 (world_size 2)"),
        ({"batch_size": 2, "world_size": 3}, "batch_size 2 is smaller than world_size 3: every rank needs a sample a step"),
        ({"task": "tea"}, "task 'tea' is unknown"),
    ],
)
def test_values_that_cannot_work(picture_shards, kwargs, message):
    with pytest.raises(ValueError) as raised:
        read(picture_shards([4]), **kwargs)
    assert message in str(raised.value)


def test_importing_data_is_quick():
    code = "import sys, data; print(sorted({'torchvision', 'PIL', 'webdataset'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_data_can_be_copied_out_alone(tmp_path, picture_shards):
    import shutil

    root = Path(__file__).resolve().parents[1]
    shutil.copytree(root / "data", tmp_path / "elsewhere" / "data", ignore=shutil.ignore_patterns("__pycache__"))
    pattern = str(Path(picture_shards([4])[0]).parent / "*.tar")
    code = f"from data import build_loader; print(sum(int(b['valid'].sum()) for b in build_loader({pattern!r}, batch_size=3)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=True).stdout
    assert out.strip() == "4"


def test_the_plan_that_a_loader_follows_is_the_public_one(picture_shards):
    shards = load_shards(picture_shards(SIZES))
    plan = Plan(np.array(SIZES), epochs=3, seed=0)
    slots = plan.batch(24, 12, 1, 2)
    batch = read(shards, rank=1, world_size=2)[2]
    assert [(name, index) for name, index, _ in batch["ids"]] == [
        (f"{s:03d}.tar", i) for s, i in zip(slots.shard.tolist(), slots.index.tolist(), strict=True)
    ]
