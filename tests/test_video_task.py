"""The video task: the right class and clip in the right slot, through the loader, or a DataError that names the field."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_maker import write_shards
from tar_maker import END, join_samples
from video_maker import encode, number_of

from data import build_loader
from data.clips import ClipShape, eval_clip, train_clip, view_clips
from data.errors import DataError
from data.labels import LabelMap
from data.tasks import VideoClassification, create_task, default_img_size

LABELS = LabelMap("cls", 4)
CLIP = {"num_frames": 4, "sampling_rate": 2, "img_size": 32}
SHAPE = ClipShape(4, 2, 30.0, 32)
VIDEO = encode(20)


def make_task(**settings) -> VideoClassification:
    return create_task("video-classification", **{"training": True, "labels": LABELS, **CLIP, **settings})


def test_a_slot_holds_a_clip() -> None:
    task = pickle.loads(pickle.dumps(make_task()))
    batch = task.new_batch(3)
    assert batch["image"].shape == (3, 3, 4, 32, 32) and batch["image"].dtype == torch.uint8
    batch["image"].fill_(7)
    task.write(batch, 1, {"mp4": memoryview(VIDEO), "cls": b"2"}, np.random.default_rng(3))
    assert torch.equal(batch["image"][1], train_clip(VIDEO, np.random.default_rng(3), SHAPE))
    assert (batch["image"][[0, 2]] == 7).all() and batch["label"].tolist() == [0, 2, 0]
    still = make_task(augment=False)
    still.write(batch, 0, {"webm": VIDEO, "cls": b"1"}, np.random.default_rng(3))
    assert torch.equal(batch["image"][0], eval_clip(VIDEO, SHAPE))


def test_a_test_slot_holds_all_views() -> None:
    task = make_task(training=False, num_views=3, num_crops=2)
    batch = task.new_batch(2)
    assert batch["image"].shape == (2, 6, 3, 4, 32, 32)
    task.write(batch, 0, {"mkv": VIDEO, "cls": b"3"}, None)
    assert torch.equal(batch["image"][0], view_clips(VIDEO, SHAPE, 3, 2))
    assert make_task(num_views=1).new_batch(1)["image"].shape == (1, 1, 3, 4, 32, 32)


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"mp4": b"", "cls": b"1"}, "mp4", "the file is empty"),
        ({"avi": VIDEO[:300], "cls": b"1"}, "avi", "the video is cut: "),
        ({"jpg": b"x", "cls": b"1"}, "", "no video: the sample's fields are cls, jpg"),
        ({"mp4": VIDEO, "mkv": VIDEO, "cls": b"1"}, "mp4", "2 videos in one sample: mp4, mkv"),
        ({"mp4": VIDEO, "cls": b"4"}, "cls", "label 4 is outside the classes 0..3"),
        ({"mp4": VIDEO}, "cls", "no label: "),
    ],
)
def test_bad_samples_name_the_field(fields: dict[str, bytes], field: str, reason: str) -> None:
    task = make_task()
    with pytest.raises(DataError) as caught:
        task.write(task.new_batch(1), 0, fields, np.random.default_rng(0))
    assert caught.value.field == field and caught.value.reason.startswith(reason)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_frames": 0}, "num_frames 0 must be at least 1"),
        ({"sampling_rate": 0}, "sampling_rate 0 must be at least 1"),
        ({"num_views": -1}, "num_views -1 must be at least 1"),
        ({"target_fps": 0.0}, "target_fps 0.0 must be frames a second, more than 0"),
        ({"short_side": (30, 40)}, r"short_side \(30, 40\) must be two sizes in pixels, img_size \(32\) <= MIN <= MAX"),
        ({"hflip": 1.5}, "hflip 1.5 must be a probability in 0..1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_task(**settings)


def video_samples(*numbers: int) -> list[dict[str, bytes]]:
    """Samples in the layout of wds_example: <id>.mp4 and <id>.json."""
    words = ["clapping", "drumming", "singing"]
    return [
        {"mp4": encode(12 + n), "json": json.dumps({"annotations": {"label": words[n % 3]}, "url": f"https://x/{n}"}).encode()}
        for n in numbers
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    write_shards(folder, video_samples(0, 1, 2, 3), video_samples(4, 5, 6))
    return folder


def load(shards: Path, rank: int = 0, world_size: int = 1, **settings):
    keywords = {"batch_size": 4, "label": "json:annotations.label", "img_size": 32, "seed": 5, **settings}
    transform = {"num_frames": 4, "sampling_rate": 2}
    return build_loader(
        str(shards), task="video-classification", transform=transform, rank=rank, world_size=world_size, **keywords
    )


def test_wds_examples_shards_load(shards: Path) -> None:
    loader = load(shards, training=False)
    assert loader.task.labels.names == ("clapping", "drumming", "singing")
    batches = list(loader)
    assert [batch["image"].shape for batch in batches] == [(4, 3, 4, 32, 32)] * 2
    labels = torch.cat([batch["label"][batch["valid"]] for batch in batches])
    assert labels.tolist() == [n % 3 for n in range(7)]
    shape = ClipShape(4, 2, 30.0, 32)
    assert torch.equal(batches[1]["image"][0], eval_clip(encode(16), shape))


def test_clips_are_the_same_on_any_ranks_and_workers(shards: Path) -> None:
    def clips(world_size: int, num_workers: int) -> dict:
        found = {}
        for rank in range(world_size):
            for batch in load(shards, rank, world_size, epochs=2, num_workers=num_workers):
                for slot in batch["valid"].nonzero().flatten().tolist():
                    key = (int(batch["epoch"][slot]), batch["ids"][slot])
                    assert key not in found
                    found[key] = batch["image"][slot].numpy().tobytes()
        return found

    alone = clips(1, 0)
    assert len(alone) == 14 and len(set(alone.values())) == 14
    assert clips(2, 0) == alone and clips(3, 2) == alone


def test_a_bad_video_masks_its_slot(tmp_path: Path) -> None:
    good = video_samples(0, 1, 2)
    good[1] = {**good[1], "mp4": good[1]["mp4"][:-50]}
    write_shards(tmp_path, good)
    [batch] = load(tmp_path, training=False, batch_size=3)
    assert batch["valid"].tolist() == [True, False, True]
    assert [(e.shard, e.index, e.field, e.reason[:17]) for e in batch["errors"]] == [("0.tar", 1, "mp4", "the video is cut:")]
    assert torch.equal(batch["image"][1], batch["image"][0])


def test_the_picture_size_is_that_of_the_videos(shards: Path, tmp_path: Path) -> None:
    assert default_img_size(load(shards).shards, "video-classification") == 64  # 48 pixels, up to a multiple of 32
    with pytest.raises(ValueError, match=r"^no picture field in .*: the fields of its first samples are json, mp4; a picture is in "):
        default_img_size(load(shards).shards)
    found = write_shards(tmp_path, [{"mp4": b"junk", "cls": b"0"}])
    with pytest.raises(ValueError, match=r"^no video that can be read \(not a video: 4 bytes.*\) in .*; a video is in one of mp4, avi"):
        default_img_size(found, "video-classification")


def test_the_shard_of_video2dataset_reads(shared_data: Path) -> None:
    shard = shared_data / "foreign_shards" / "video2dataset_return_all_test.tar"
    loader = load(shard, training=False, batch_size=6, label="txt")
    [batch] = loader
    assert batch["valid"].all() and not batch["errors"]
    assert [key for _, _, key in batch["ids"]][:3] == ["000000014", "000000025", "000000356"]
    assert batch["image"].float().std((1, 2, 3, 4)).min() > 5


def test_frames_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(join_samples([("a", {"mp4": encode(20, size=(64, 64)), "cls": b"0"})]) + END)
    task = {"num_frames": 5, "sampling_rate": 4, "hflip": 0.0, "short_side": (64, 64)}
    loader = build_loader(str(tmp_path), task="video-classification", img_size=64, batch_size=1, transform=task, num_classes=1)
    [batch] = loader
    assert [number_of(batch["image"][0, :, t].permute(1, 2, 0).numpy()) for t in range(5)] == [0, 4, 9, 14, 19]
