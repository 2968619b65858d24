"""The test of a model: a video's clips answer together, exactly, on any number of ranks; what was said of each is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo_pool import GlooPool
from launching import base, launch, read_lines
from shard_maker import write_shards
from test_video_training import command, events, videos

from data import build_loader
from engine.forward import normalize
from engine.scores import average_precision
from engine.views import answer_views, combine
from models import create_model

VIEWS = ["--num-ensemble-views", 3, "--num-spatial-crops", 2]


def test_probabilities_are_averaged_or_the_highest_taken() -> None:
    logits = torch.randn(4, 5, 7)
    scores = logits.softmax(-1)
    assert torch.allclose(combine(logits, "sum").softmax(-1), scores.mean(1), atol=1e-6)
    highest = scores.amax(1)
    assert torch.allclose(combine(logits, "max").exp(), highest, atol=1e-6)
    assert torch.allclose(combine(logits[:, :1], "sum").softmax(-1), scores[:, 0], atol=1e-6)
    several = combine(logits, "sum", several=True)
    assert torch.allclose(several.sigmoid(), logits.sigmoid().mean(1), atol=1e-6)
    assert torch.allclose(combine(logits, "max", several=True).sigmoid(), logits.sigmoid().amax(1), atol=1e-6)
    far = torch.tensor([[[800.0, -800.0]]])
    assert torch.isfinite(combine(far, "sum")).all() and torch.isfinite(combine(far, "sum", several=True)).all()


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_the_model_never_gets_more_clips_than_told(at_once: int) -> None:
    sizes = []

    def predict(clips: torch.Tensor) -> torch.Tensor:
        sizes.append(len(clips))
        return clips.float().mean((1, 2, 3, 4))[:, None] * torch.tensor([0.01, -0.01])

    images = torch.randint(0, 256, (2, 5, 3, 2, 4, 4), dtype=torch.uint8)
    answer = answer_views(predict, images, "sum", at_once)
    assert max(sizes) <= at_once and sum(sizes) == 10
    expected = combine(torch.stack([predict(images[n]) for n in range(2)]), "sum")
    assert torch.allclose(answer, expected)


@pytest.fixture
def tested(gloo_pool: GlooPool, tmp_path: Path) -> tuple[Path, list[str]]:
    """A trained run's folder, and shards of 7 videos with one bad one among them."""
    train = [shard.path for shard in write_shards(tmp_path / "train", videos(9))]
    samples = videos(8, 20)
    samples[5]["mp4"] = samples[5]["mp4"][:-40]
    test = [shard.path for shard in write_shards(tmp_path / "test", samples[:3], samples[3:])]
    launch(gloo_pool, command(train, tmp_path, "trained", 1))
    return tmp_path / "runs" / "trained", test


def evaluate(pool: GlooPool, tested: tuple[Path, list[str]], name: str, world_size: int, *more) -> tuple[dict, dict[str, np.ndarray]]:
    trained, test = tested
    launch(pool, ["--evaluate", "--resume", trained, "--test-data", *test, "--device", "cpu", "--nproc-per-node", world_size, "-j", 0,
                  "--output", trained.parent, "--name", name, *VIEWS, *more])  # fmt: skip
    [line] = events(trained.parent / name, "test")
    assert events(trained.parent / name, "eval") == []
    with np.load(trained.parent / name / "predictions.npz") as file:
        return line, dict(file)


def test_the_test_is_exact_on_any_world_size(gloo_pool: GlooPool, tested: tuple[Path, list[str]]) -> None:
    lines, predictions = zip(*[evaluate(gloo_pool, tested, f"w{w}", w) for w in (1, 2, 3, 4)], strict=True)
    assert {(line["num_samples"], line["bad_samples"], line["correct"]) for line in lines} == {(7, 1, lines[0]["correct"])}
    assert [line["loss"] for line in lines] == pytest.approx([lines[0]["loss"]] * 4, abs=1e-6)
    first = predictions[0]
    assert first["key"].tolist() == [f"s{n:04d}" for n in (0, 1, 2, 3, 4, 6, 7)] and first["index"].tolist() == [0, 1, 2, 0, 1, 3, 4]
    assert first["shard"].tolist() == ["0.tar"] * 3 + ["1.tar"] * 4
    for other in predictions[1:]:
        assert all(np.array_equal(other[name], first[name]) for name in ("shard", "key", "index", "labels"))
        assert np.allclose(other["scores"], first["scores"], atol=1e-5)
    assert (first["scores"].argmax(1) == first["labels"]).sum() == lines[0]["correct"]
    [bad] = read_lines(tested[0].parent / "w2" / "bad_samples.jsonl")
    assert (bad["shard"], bad["index"], bad["field"]) == ("1.tar", 2, "mp4")


def test_a_videos_score_is_the_mean_over_its_clips(gloo_pool: GlooPool, tested: tuple[Path, list[str]]) -> None:
    """Computed here by hand from the loader's clips and the checkpoint's weights."""
    trained, test = tested
    _, predictions = evaluate(gloo_pool, tested, "sum", 2)
    model = create_model("tiny", 3)
    model.load_state_dict(torch.load(trained / "checkpoints" / "last.pt", weights_only=True)["model"])
    transform = {"num_frames": 8, "sampling_rate": 1, "num_views": 3, "num_crops": 2}
    loader = build_loader(test, batch_size=8, task="video-classification", label="json:annotations.label", img_size=32, training=False,
                          classes=["class 0", "class 1", "class 2"], transform=transform)  # fmt: skip
    [batch] = loader
    with torch.inference_mode():
        clips = normalize(batch["image"].flatten(0, 1))
        scores = model.eval()(clips).softmax(1).unflatten(0, (8, 6)).mean(1)[batch["valid"]]
    assert np.allclose(torch.from_numpy(predictions["scores"]).softmax(1), scores, atol=1e-5)


def test_each_flag_of_the_test_changes_it(gloo_pool: GlooPool, tested: tuple[Path, list[str]]) -> None:
    losses = {}
    for name, *words in (
        ("plain",), ("max", "--ensemble", "max"), ("views", "--num-ensemble-views", 1), ("crops", "--num-spatial-crops", 1),
        ("size", "--test-size", 40),
    ):  # fmt: skip
        losses[name] = evaluate(gloo_pool, tested, name, 1, *words)[0]["loss"]
    assert len(set(losses.values())) == 5, losses


def test_a_run_trains_and_then_tests(gloo_pool: GlooPool, tmp_path: Path) -> None:
    train, test = (write_shards(tmp_path / name, videos(count, first))[0].path for name, count, first in (("train", 7, 0), ("test", 5, 9)))
    launch(gloo_pool, command([train], tmp_path, "both", 2, "--test-data", test, "--val-data", test, *VIEWS))
    folder = tmp_path / "runs" / "both"
    [line] = events(folder, "test")
    assert (line["num_samples"], line["step"]) == (5, 3) and len(events(folder, "eval")) == 2
    assert "test: top-1 " in (folder / "log.txt").read_text()
    assert len(np.load(folder / "predictions.npz")["scores"]) == 5
    again = ["--evaluate", "--resume", folder, "--device", "cpu", "-j", 0, "--output", tmp_path / "runs", "--name", "again"]
    launch(gloo_pool, again)  # both, as the run had them
    assert events(tmp_path / "runs" / "again", "test")[0]["correct"] == line["correct"]
    assert len(events(tmp_path / "runs" / "again", "eval")) == 1


def test_videos_with_several_labels_are_judged_by_mean_average_precision(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The scores of a video are the means of its clips' probabilities of each class alone."""
    samples = videos(7)
    for number, sample in enumerate(samples):
        sample["json"] = json.dumps({"tags": [f"class {n}" for n in range(3) if number >> n & 1]}).encode()
    test = write_shards(tmp_path / "test", samples[:4], samples[4:])
    paths = [shard.path for shard in test]
    words = ["--task", "multi-label-video-classification", "--label", "json:tags"]
    launch(gloo_pool, command(paths, tmp_path, "several", 2, "--test-data", *paths, *VIEWS, *words))
    [line] = events(tmp_path / "runs" / "several", "test")
    with np.load(tmp_path / "runs" / "several" / "predictions.npz") as file:
        told = dict(file)
    assert told["labels"].tolist() == [[number >> n & 1 for n in range(3)] for number in range(7)] and line["num_samples"] == 7
    assert line["map"] == pytest.approx(float(np.nanmean(average_precision(told["scores"], told["labels"]))))
    model = create_model("tiny", 3)
    model.load_state_dict(torch.load(tmp_path / "runs" / "several" / "checkpoints" / "last.pt", weights_only=True)["model"])
    loader = build_loader(test, batch_size=7, task=words[1], label=words[3], img_size=32, training=False,
                          transform={"num_frames": 8, "sampling_rate": 1, "num_views": 3, "num_crops": 2})  # fmt: skip
    [batch] = loader
    with torch.inference_mode():
        scores = model.eval()(normalize(batch["image"].flatten(0, 1))).sigmoid().unflatten(0, (7, 6)).mean(1)
    assert np.allclose(torch.from_numpy(told["scores"]).sigmoid(), scores, atol=1e-5)
    assert "mAP " in (tmp_path / "runs" / "several" / "log.txt").read_text()


def test_pictures_are_tested_as_they_are_evaluated(gloo_pool: GlooPool, picture_shards, tmp_path: Path) -> None:
    train, test = picture_shards([12]), picture_shards([7], name="test")
    launch(gloo_pool, [*base(train, tmp_path, "run", 2), "--epochs", 1, "--val-data", *test, "--test-data", *test])
    [tested], [evaluated] = events(tmp_path / "runs" / "run", "test"), events(tmp_path / "runs" / "run", "eval")
    assert {name: tested[name] for name in ("num_samples", "correct", "loss")} == {
        name: evaluated[name] for name in ("num_samples", "correct", "loss")
    }
    with pytest.raises(ValueError, match=r"^--num-ensemble-views is for clips, and --task image-classification has pictures"):
        launch(gloo_pool, [*base(train, tmp_path, "no", 1), "--test-data", *test, "--num-ensemble-views", 2])


def test_a_test_size_that_the_model_can_not_take_is_refused_before_training(picture_shards, gloo_pool: GlooPool, tmp_path: Path) -> None:
    paths = picture_shards([4])
    words = ["--data", *paths, "--test-data", *paths, "--model", "vit_b_32", "--img-size", 32, "--test-size", 64, "--device", "cpu"]
    words += ["-b", 2]
    with pytest.raises(ValueError, match=r"^--test-size 64: --model vit_b_32 of --img-size 32 can't take it: Wrong image height"):
        launch(gloo_pool, words)
