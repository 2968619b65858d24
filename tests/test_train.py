"""Training over real gloo ranks: resume is bit-exact, batches don't depend on the world size, bad data is spent from one budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_pool import RankFailed
from launching import base, global_batches, launch, read_lines, spoil

from engine import checkpoint

SIZES = (7, 5, 3, 1, 0, 41)


def tensors_of(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{number}")


def same_checkpoint(a, b):
    for name in ("model", "optimizer"):
        left, right = dict(tensors_of(a[name])), dict(tensors_of(b[name]))
        assert left.keys() == right.keys() and len(left) > 5
        for key, value in left.items():
            assert torch.equal(value, right[key]), key
    average, other = dict(tensors_of(a["ema"])), dict(tensors_of(b["ema"]))
    assert average.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in average.items())
    assert a["scaler"] == b["scaler"]
    assert a["stream"] == b["stream"]
    assert (a["progress"]["step"], a["progress"]["best"]) == (b["progress"]["step"], b["progress"]["best"])


def last(folder):
    return checkpoint.load(folder)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resumed_run_ends_with_the_same_bits(gloo_pool, picture_shards, tmp_path, world_size):
    # momentum, batch norm, dropout (tiny has both), augmentation, two workers
    paths, val = picture_shards(SIZES), picture_shards([9, 7, 5], name="val")
    for key in (b"s00004.png", b"s00050.png", b"s00055.png"):  # each masked once an epoch, and named, however often it is read
        spoil(next(path for path in paths if key in Path(path).read_bytes()), key)
    more = ["--val-data", *val, "-j", 2, "--checkpoint-interval", 4]
    launch(gloo_pool, base(paths, tmp_path, "whole", world_size, *more))
    launch(gloo_pool, base(paths, tmp_path, "broken", world_size, *more), crash_at=7)  # step 7 of 15, in the middle of epoch 2
    broken = tmp_path / "runs" / "broken"
    assert last(broken)["progress"]["step"] == 5  # the end of epoch 1: a step later than the interval's
    assert len(read_lines(broken / "audit" / "rank0.jsonl")) > 5
    launch(gloo_pool, [*base(paths, tmp_path, "broken", world_size, *more), "--resume", "auto"])
    whole = tmp_path / "runs" / "whole"
    same_checkpoint(last(whole), last(broken))
    assert global_batches(whole) == global_batches(broken)
    assert global_batches(whole, "val") == global_batches(broken, "val")
    bad = [sorted(map(str, read_lines(folder / "bad_samples.jsonl"))) for folder in (whole, broken)]
    assert bad[0] == bad[1] and len(bad[0]) == 9
    assert [last(folder)["progress"]["bad"] for folder in (whole, broken)] == [9, 9]

    def told(folder):  # every number but the times
        untimed = ("seconds", "samples_per_second", "data_wait", "data_time", "step_time", "limits")
        events = [line for line in read_lines(folder / "metrics.jsonl") if line["event"] in ("epoch", "eval", "end")]
        return [{key: value for key, value in line.items() if key not in untimed} for line in events]

    assert told(whole) == told(broken)


def test_a_resumed_run_ends_with_the_same_bits_with_everything_on(gloo_pool, picture_shards, tmp_path):
    paths, val = picture_shards(SIZES), picture_shards([9, 7, 5], name="val")
    more = ["--val-data", *val, "-j", 2, "--checkpoint-interval", 4, "--ema", 0.9, "--amp", "fp16", "--mixup", 0.4, "--cutmix", 1,
            "--grad-accum", 2, "--clip-grad", 1, "--auto-augment", "randaugment", "--reprob", 0.5, "--smoothing", 0.1, "--precise-bn", 2,
            "--opt", "adamw", "--layer-decay", 0.8, "--channels-last", "--checkpoint-hist", 2, "--warmup-steps", 3]  # fmt: skip
    launch(gloo_pool, base(paths, tmp_path, "whole", 2, *more))
    launch(gloo_pool, base(paths, tmp_path, "broken", 2, *more), crash_at=7)
    launch(gloo_pool, [*base(paths, tmp_path, "broken", 2, *more), "--resume", "auto"])
    whole, broken = last(tmp_path / "runs" / "whole"), last(tmp_path / "runs" / "broken")
    same_checkpoint(whole, broken)
    assert whole["ema"] is not None and whole["scaler"]["scale"] > 1


def test_global_batches_are_one_sequence_for_every_world_size(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards(SIZES)
    expected = None
    for world_size in (1, 2, 3, 4):
        for num_workers in (0, 1, 3):
            name = f"{world_size}-{num_workers}"
            launch(gloo_pool, [*base(paths, tmp_path, name, world_size), "-j", num_workers])
            batches = global_batches(tmp_path / "runs" / name)
            steps = [len(read_lines(path)) for path in (tmp_path / "runs" / name / "audit").glob("*")]
            assert steps == [15] * world_size
            expected = expected or batches
            assert batches == expected
    assert expected is not None
    rows = [row for batch in expected.values() for row in batch]
    assert len(rows) == len({(epoch, shard, index) for epoch, shard, index, _ in rows}) == 3 * sum(SIZES)


def test_a_batch_of_10_on_3_processes_and_another_world_size_at_a_resume(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards(SIZES)
    ten = ["-b", 10, "--checkpoint-interval", 3]
    launch(gloo_pool, base(paths, tmp_path, "one", 1, *ten))
    launch(gloo_pool, base(paths, tmp_path, "three", 3, *ten), crash_at=8)
    launch(gloo_pool, [*base(paths, tmp_path, "three", 2, *ten), "--resume", "auto"])
    assert global_batches(tmp_path / "runs" / "one") == global_batches(tmp_path / "runs" / "three")


def linear(name, num_classes, img_size):
    """A model without batch norm or dropout: what it learns must not depend on how a batch is cut."""
    return torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(3 * (img_size // 8) ** 2, num_classes))


def test_world_sizes_learn_the_same(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards(SIZES)
    spoil(paths[5], b"s00050.png")  # a masked slot must weigh nothing on any cut
    weights = []
    for world_size in (1, 3, 4):
        launch(gloo_pool, base(paths, tmp_path, f"w{world_size}", world_size, "-b", 10), None, None, linear)
        weights.append(last(tmp_path / "runs" / f"w{world_size}")["model"])
    assert weights[0]["2.weight"].abs().max() > 0.1
    for other in weights[1:]:
        for key, value in weights[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6)


def test_evaluation_is_exact_on_any_world_size(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards([20, 16])
    for name, sizes in (("val", [9, 7, 5]), ("one", [30])):
        val = picture_shards(sizes, name=name)
        found = []
        launch(gloo_pool, base(paths, tmp_path, f"train-{name}", 1, "--epochs", 1))
        for world_size in (1, 2, 3, 4):
            argv = ["--evaluate", "--val-data", *val, "--resume", tmp_path / "runs" / f"train-{name}", "--device", "cpu", "-b", 8,
                    "--nproc-per-node", world_size, "-j", 0, "--output", tmp_path / "runs", "--name", f"{name}-{world_size}"]  # fmt: skip
            launch(gloo_pool, argv)
            (line,) = (x for x in read_lines(tmp_path / "runs" / f"{name}-{world_size}" / "metrics.jsonl") if x["event"] == "eval")
            found.append(line)
            seen = [row for batch in global_batches(tmp_path / "runs" / f"{name}-{world_size}", "val").values() for row in batch]
            assert len(seen) == len(set(seen)) == sum(sizes)
        assert {(line["num_samples"], line["correct"]) for line in found} == {(sum(sizes), found[0]["correct"])}
        assert [line["loss"] for line in found] == pytest.approx([found[0]["loss"]] * 4, abs=1e-6)


def test_sigterm_on_one_rank_stops_all_at_one_step_and_resume_is_exact(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards(SIZES)
    launch(gloo_pool, base(paths, tmp_path, "whole", 2))
    codes = launch(gloo_pool, base(paths, tmp_path, "stopped", 2), sigterm_at=6)
    assert codes == [143, 143]
    stopped = tmp_path / "runs" / "stopped"
    assert last(stopped)["progress"]["step"] == 7  # the next step's counts carry the flag
    assert read_lines(stopped / "metrics.jsonl")[-1]["status"] == "stopped"
    launch(gloo_pool, [*base(paths, tmp_path, "stopped", 2), "--resume", "auto"])
    same_checkpoint(last(tmp_path / "runs" / "whole"), last(stopped))


def test_bad_samples_are_counted_over_all_ranks(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards([20, 16])
    spoil(paths[0], b"s00003.png")
    launch(gloo_pool, base(paths, tmp_path, "bad", 2))
    folder = tmp_path / "runs" / "bad"
    epochs = [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == "epoch"]
    assert [(line["samples"], line["bad_samples"]) for line in epochs] == [(35, 1)] * 3
    assert [[line[name] for name in ("seen", "distinct", "repeated", "missed")] for line in epochs] == [[36, 36, 0, 0]] * 3
    bad = read_lines(folder / "bad_samples.jsonl")
    assert [(line["shard"], line["index"], line["key"], line["field"]) for line in bad] == [("000.tar", 3, "s00003", "png")] * 3
    assert last(folder)["progress"]["bad"] == 3


def test_too_many_bad_samples_stop_every_rank_with_one_message(gloo_pool, picture_shards, tmp_path):
    paths = picture_shards([20, 16])
    for number in range(6):
        spoil(paths[0], f"s{number:05d}.png".encode())
    with pytest.raises(RankFailed) as raised:
        launch(gloo_pool, base(paths, tmp_path, "bad", 2))
    text = str(raised.value)
    assert text.count("TooManyBadSamples: 11 of") == 2 or text.count("TooManyBadSamples: 12 of") == 2
    assert "more than --max-bad 0.01 accepts: the first is 000.tar sample" in text
    launch(gloo_pool, base(paths, tmp_path, "more", 2, "--max-bad", 0.5))
