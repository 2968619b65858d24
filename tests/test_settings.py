"""What a flag says reaches the task and the model, or is refused in one line."""

from __future__ import annotations

import pytest
from shard_maker import write_shards
from test_run import samples

import run
from engine import flags
from engine.settings import model_options, num_frames, task_settings


def parse(*words):
    return flags.parse_args([str(word) for word in words])


def test_each_kind_of_task_gets_its_settings():
    drawn = {"auto_augment": None, "color_jitter": 0.0, "reprob": 0.0}
    pictures = {"scale": (0.5, 1.0), "decoder": "auto", "hflip": 0.5, "augment": False, **drawn}
    assert task_settings(parse("--scale", 0.5, 1, "--no-aug")) == pictures
    assert num_frames(parse()) is None
    clips = parse("--task", "video-classification", "--num-frames", 8, "--short-side", 64, 80, "--hflip", 0)
    expected = {"num_frames": 8, "sampling_rate": 2, "target_fps": 30.0, "short_side": (64, 80), "hflip": 0.0, "augment": True}
    assert task_settings(clips) == expected
    assert num_frames(clips) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sampling-rate", 4], "--sampling-rate is for clips, and --task image-classification has pictures: leave it out"),
        (["--short-side", 40, 50], "--short-side is for clips, and --task image-classification has pictures: leave it out"),
        (["--task", "video-classification", "--scale", 0.1, 1], "--scale is for pictures, and --task video-classification has clips"),
    ],
)
def test_flags_of_another_task_are_refused(words, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        task_settings(parse(*words))


def test_keywords_of_the_model_are_yaml():
    words = ["width_per_group=8", "dropout=0.25", "zero_init_final_bn=false", "blocks=[1, 1, 1, 1]", "nonlocal_blocks={4: [0]}"]
    assert model_options(words) == {
        "width_per_group": 8, "dropout": 0.25, "zero_init_final_bn": False, "blocks": [1, 1, 1, 1], "nonlocal_blocks": {4: [0]},
    }  # fmt: skip
    assert model_options(None) == {}


@pytest.mark.parametrize("word", ["depth", "=3", "a b=1", "num_classes=3"])
def test_what_is_no_keyword_is_refused(word):
    with pytest.raises(ValueError, match=r"^--model-kwargs '.*': it takes NAME=VALUE, a keyword of the model's constructor"):
        model_options([word])
    with pytest.raises(ValueError, match=r"^--model-kwargs 'a=\[1': the value can't be read: "):
        model_options(["a=[1"])


def test_the_model_gets_its_keywords(tmp_path):
    write_shards(tmp_path / "train", samples(6))
    args = parse("--data", tmp_path / "train", "--model", "resnet50", "--model-kwargs", "width_per_group=32", "--device", "cpu", "-b", 2)
    run.prepare(args)
    assert args.model_options == {"width_per_group": 32}
    assert args.kept["flags"]["model_kwargs"] == ["width_per_group=32"]
    wrong = parse("--data", tmp_path / "train", "--model", "tiny", "--model-kwargs", "width=32", "--device", "cpu")
    with pytest.raises(ValueError, match=r"^--model-kwargs width: tiny refuses them: .*unexpected keyword argument 'width'$"):
        run.prepare(wrong)
    assert flags.parse_args(["--model-kwargs", "a=1", "b=[1, 2]"]).model_kwargs == ["a=1", "b=[1, 2]"]
