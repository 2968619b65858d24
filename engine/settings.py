"""What the flags say to the task and to the model, which have settings of their own.

in: the flags  ->  out: keywords of the task's transform, of the model's constructor
Invariant: a flag that the task or the model has no use for is an error, never passed over.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from data import tasks

# flag -> what it is for, where only one kind of task has it
PICTURE_FLAGS = ("scale", "decoder", "auto_augment", "color_jitter", "reprob")
CLIP_FLAGS = ("num_frames", "sampling_rate", "target_fps", "short_side")
VIEW_FLAGS = ("num_ensemble_views", "num_spatial_crops", "ensemble")
VIEWS, CROPS = 10, 3  # SlowFast's test


def has_clips(args: argparse.Namespace) -> bool:
    """Whether a sample is a clip, not a picture."""
    return tasks.has_clips(args.task)


def task_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of the task beside training, labels and img_size. Raises ValueError for a flag of another kind of task."""
    clips = has_clips(args)
    for name in PICTURE_FLAGS if clips else CLIP_FLAGS + VIEW_FLAGS:
        if name in args.explicit and getattr(args, name) is not None:
            other, this = ("pictures", "clips") if clips else ("clips", "pictures")
            raise ValueError(f"--{name.replace('_', '-')} is for {other}, and --task {args.task} has {this}: leave it out")
    settings: dict[str, Any] = {"hflip": args.hflip, "augment": not args.no_aug}
    for name in CLIP_FLAGS if clips else PICTURE_FLAGS:
        value = getattr(args, name)
        settings[name] = tuple(value) if isinstance(value, list) else value
    return settings


def view_settings(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What build_loader is told otherwise for the test: a slot holds all clips of a video, so a batch has as many videos fewer. And
    how its clips answer together, as answer_views takes it; None for pictures."""
    size = args.test_size or args.img_size
    if not has_clips(args):
        return {"img_size": size}, None
    views, crops = args.num_ensemble_views or VIEWS, args.num_spatial_crops or CROPS
    several = tasks.has_several_labels(args.task)
    return {
        "img_size": size,
        "batch_size": max(args.world_size, args.batch_size // (views * crops)),
        "transform": {**args.transform, "short_side": None, "num_views": views, "num_crops": crops},
    }, {"how": args.ensemble, "at_once": args.batch_size // args.world_size, "several": several}


def num_frames(args: argparse.Namespace) -> int | None:
    """Frames of the model's input; None for pictures."""
    return args.num_frames if has_clips(args) else None


def model_options(words: Iterable[str] | None) -> dict[str, Any]:
    """`width_per_group=8` and the like -> {"width_per_group": 8}; values are read as YAML. Raises ValueError."""
    import yaml

    options = {}
    for word in words or ():
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier() or name in ("num_classes", "img_size", "name"):
            raise ValueError(f"--model-kwargs {word!r}: it takes NAME=VALUE, a keyword of the model's constructor, as in dropout=0.5")
        try:
            options[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--model-kwargs {word!r}: the value can't be read: {' '.join(str(error).split())}") from None
    return options
