"""Training on videos keeps the promises of the picture task: exact resume, batches, evaluation and bad data, over real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_pool import GlooPool
from launching import global_batches, launch, read_lines
from shard_maker import write_shards
from test_train import last, same_checkpoint
from video_maker import encode

COUNTS = (7, 5, 3)
SLOWFAST = ["--model", "slowfast_8x8_r50", "--model-kwargs", "width_per_group=8", "blocks=[1,1,1,1]"]


def videos(count: int, first: int = 0) -> list[dict[str, bytes]]:
    """Videos of different length whose label is written in the json, as wds_example's."""
    return [
        {"mp4": encode(9 + n % 5, pictures=None, size=(48, 40)), "json": b'{"annotations": {"label": "class %d"}}' % (n % 3)}
        for n in range(first, first + count)
    ]


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Shards of videos for training."""
    starts = [sum(COUNTS[:number]) for number in range(len(COUNTS))]
    return [shard.path for shard in write_shards(tmp_path / "train", *map(videos, COUNTS, starts))]


def command(shards: list[str], tmp_path: Path, name: str, world_size: int, *more) -> list:
    return ["--data", *shards, "--task", "video-classification", "--label", "json:annotations.label", "--model", "tiny", "--img-size", 32,
            "--num-frames", 8, "--sampling-rate", 1, "--device", "cpu", "--nproc-per-node", world_size, "--output", tmp_path / "runs",
            "--name", name, "--epochs", 2, "-b", 6, "-j", 0, "--lr", 0.05, "--audit", *more]  # fmt: skip


def events(folder: Path, name: str) -> list[dict]:
    return [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == name]


def test_a_resumed_run_ends_with_the_same_bits(gloo_pool: GlooPool, shards: list[str], tmp_path: Path) -> None:
    val = [shard.path for shard in write_shards(tmp_path / "val", videos(5))]
    more = ["--val-data", *val, "-j", 1, "--checkpoint-interval", 2, *SLOWFAST]
    launch(gloo_pool, command(shards, tmp_path, "whole", 2, *more))
    launch(gloo_pool, command(shards, tmp_path, "broken", 2, *more), crash_at=4)
    whole, broken = tmp_path / "runs" / "whole", tmp_path / "runs" / "broken"
    assert last(broken)["progress"]["step"] == 3  # of 5: the end of epoch 1 is in step 3
    launch(gloo_pool, ["--resume", broken, "--device", "cpu", "--nproc-per-node", 2, "-j", 1, "--output", tmp_path / "runs"])
    same_checkpoint(last(whole), last(broken))
    assert global_batches(whole) == global_batches(broken)
    assert [(line["loss"], line["correct"]) for line in events(whole, "eval")] == [
        (line["loss"], line["correct"]) for line in events(broken, "eval")
    ]


def test_batches_and_evaluation_are_exact_on_any_world_size(gloo_pool: GlooPool, shards: list[str], tmp_path: Path) -> None:
    val = [shard.path for shard in write_shards(tmp_path / "val", videos(5), videos(2, 5))]
    found, batches = [], []
    for world_size in (1, 3):
        launch(gloo_pool, command(shards, tmp_path, f"w{world_size}", world_size))
        batches.append(global_batches(tmp_path / "runs" / f"w{world_size}"))
    assert batches[0] == batches[1] and sum(map(len, batches[0].values())) == 2 * sum(COUNTS)
    for world_size in (1, 2, 4):
        argv = ["--evaluate", "--val-data", *val, "--resume", tmp_path / "runs" / "w1", "--device", "cpu", "--nproc-per-node", world_size,
                "-b", 5, "-j", 0, "--output", tmp_path / "runs", "--name", f"e{world_size}", "--audit"]  # fmt: skip
        launch(gloo_pool, argv)
        [line] = events(tmp_path / "runs" / f"e{world_size}", "eval")
        found.append((line["num_samples"], line["correct"], round(line["loss"], 5)))
        seen = [row for batch in global_batches(tmp_path / "runs" / f"e{world_size}", "val").values() for row in batch]
        assert len(seen) == len(set(seen)) == 7
    assert found == [(7, *found[0][1:])] * 3


def test_bad_videos_are_masked_and_counted(gloo_pool: GlooPool, tmp_path: Path) -> None:
    samples = videos(12)
    samples[3]["mp4"] = samples[3]["mp4"][:-30]
    samples[8]["mp4"] = b""
    write_shards(tmp_path / "train", samples)
    launch(gloo_pool, command([str(tmp_path / "train")], tmp_path, "bad", 2))
    folder = tmp_path / "runs" / "bad"
    assert [(line["samples"], line["bad_samples"], line["seen"]) for line in events(folder, "epoch")] == [(10, 2, 12)] * 2
    bad = {(line["index"], line["field"], line["reason"].split(":")[0]) for line in read_lines(folder / "bad_samples.jsonl")}
    assert bad == {(3, "mp4", "the video is cut"), (8, "mp4", "the file is empty")}
    assert last(folder)["progress"]["bad"] == 4


def test_the_flags_of_clips_reach_the_task(gloo_pool: GlooPool, shards: list[str], tmp_path: Path) -> None:
    def weights(name: str, *more) -> torch.Tensor:
        launch(gloo_pool, command(shards[2:], tmp_path, name, 1, "--epochs", 1, *more))
        return torch.cat([value.flatten().double() for value in last(tmp_path / "runs" / name)["model"].values()])

    plain = weights("plain")
    for name, *words in (
        ("frames", "--num-frames", 4), ("rate", "--sampling-rate", 3), ("fps", "--target-fps", 7.5), ("side", "--short-side", 60, 64),
    ):  # fmt: skip
        assert not torch.equal(weights(name, *words), plain), name
    assert torch.equal(weights("same", "--target-fps", 30, "--short-side", 37, 46), plain)
    [start] = events(tmp_path / "runs" / "frames", "start")
    assert (start["num_frames"], start["img_size"], start["num_classes"]) == (4, 32, 3)
    assert "clips of 4 frames of 32x32" in (tmp_path / "runs" / "frames" / "log.txt").read_text()


def test_a_checkpoint_decides_what_a_clip_is(gloo_pool: GlooPool, shards: list[str], tmp_path: Path) -> None:
    launch(gloo_pool, command(shards[2:], tmp_path, "run", 1, "--epochs", 1))
    with pytest.raises(ValueError, match=r"^--num-frames 16 contradicts the checkpoint's 8: leave it out, or start without --resume$"):
        launch(gloo_pool, ["--resume", tmp_path / "runs" / "run", "--epochs", 2, "--num-frames", 16, "--device", "cpu"])
