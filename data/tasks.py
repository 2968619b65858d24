"""TASKS: what a sample's fields become in a batch.

in: {field: bytes} of one sample, an rng  ->  out: one slot of the batch's tensors, written in place
Invariant: a task is a frozen value that pickles; what is wrong with a sample is a `DataError` that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .augment import augment, check_augmentation
from .classes import read_classes, resolve_labels
from .decoders import IMAGE_FIELDS, open_picture
from .errors import DataError
from .labels import LabelMap, OneLabel, SeveralLabels, find_field
from .records import Bytes, Tokens
from .scan import median_side
from .shards import Shard
from .stills import short_side
from .transforms import choose_decoder, eval_transform, train_transform
from .video import VIDEO_FIELDS
from .video_task import MultiLabelVideoClassification, VideoClassification

__all__ = [
    "TASKS", "ImageClassification", "LabelMap", "VideoClassification", "create_task", "default_img_size", "find_picture",
    "read_classes", "resolve_labels",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassification(OneLabel):
    """A picture in any of IMAGE_FIELDS and its class: "image" uint8 (n, 3, img_size, img_size), "label" int64 (n,)."""

    training: bool
    labels: LabelMap
    img_size: int
    scale: tuple[float, float] | None = None
    hflip: float = 0.5
    augment: bool = True
    decoder: str = "auto"  # who decodes JPEGs; a made task holds what was chosen
    auto_augment: str | None = None
    color_jitter: float = 0.0
    reprob: float = 0.0

    def __post_init__(self) -> None:
        if self.img_size < 1:
            raise ValueError(f"img_size {self.img_size} must be at least 1 pixel")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {self.scale} must be two shares of the area, 0 < MIN <= MAX <= 1")
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"hflip {self.hflip} must be a probability in 0..1")
        object.__setattr__(self, "decoder", choose_decoder(self.decoder))
        check_augmentation(self.auto_augment, self.color_jitter, self.reprob)

    def new_batch(self, num_slots: int) -> dict[str, torch.Tensor]:
        """The memory of a batch, all zeros."""
        return {
            "image": torch.zeros((num_slots, 3, self.img_size, self.img_size), dtype=torch.uint8),
            "label": self.new_labels(num_slots),
        }

    def write(self, batch: dict[str, torch.Tensor], slot: int, fields: Mapping[str, Any], rng: np.random.Generator | None) -> None:
        """Fills a slot; `rng` is needed only where `training`. Raises DataError, and then the slot holds anything."""
        label = self.read_label(fields)
        name = find_picture(fields)
        image = batch["image"][slot]
        try:
            if self.training and self.augment:
                assert rng is not None
                train_transform(fields[name], rng, self.img_size, self.scale, self.hflip, out=image, decoder=self.decoder)
                augment(image, rng, policy=self.auto_augment, jitter=self.color_jitter, reprob=self.reprob)
            else:
                eval_transform(fields[name], self.img_size, out=image, decoder=self.decoder)
        except DataError as error:
            raise DataError(error.reason, field=name) from None
        batch["label"][slot] = label


class MultiLabelClassification(SeveralLabels, ImageClassification):
    """A picture and any number of classes: "image" as above, "label" uint8 (n, classes), 1 for each class that the picture has."""

    __slots__ = ()


def find_picture(fields: Mapping[str, Any]) -> str:
    """The name of the one picture field. Raises DataError."""
    return find_field(fields, IMAGE_FIELDS, "picture")


TASKS: dict[str, type] = {
    "image-classification": ImageClassification,
    "multi-label-classification": MultiLabelClassification,
    "video-classification": VideoClassification,
    "multi-label-video-classification": MultiLabelVideoClassification,
    "bytes": Bytes,
    "tokens": Tokens,
}


def settings_of(name: str) -> tuple[str, ...]:
    """The keywords that the task of this name takes. Raises ValueError for a task that is none of ours."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; there are {', '.join(TASKS)}")
    return tuple(field.name for field in fields(TASKS[name]))


def create_task(name: str, **settings: Any) -> Any:
    """The task of this name with its settings: training, labels, img_size, and those of its own. Raises ValueError."""
    known = settings_of(name)
    if unknown := settings.keys() - set(known):
        raise ValueError(f"task {name!r} takes no {', '.join(sorted(unknown))}; it takes {', '.join(known)}")
    return TASKS[name](**settings)


def default_img_size(shards: Sequence[Shard], task: str = "image-classification") -> int:
    """The median short side of the first pictures (or videos), up to a multiple of 32, within 32..224. Raises ShardError where there is
    none."""
    settings_of(task)
    if has_clips(task):
        return median_side(shards, VIDEO_FIELDS, short_side, 16, "video")
    return median_side(shards, IMAGE_FIELDS, lambda data: min(open_picture(data).size), 256, "picture")


def has_several_labels(name: str) -> bool:
    """Whether a sample of this task has any number of labels."""
    return name in TASKS and bool(getattr(TASKS[name], "several_labels", False))


def has_clips(name: str) -> bool:
    """Whether a sample of this task is a clip."""
    return name in TASKS and issubclass(TASKS[name], VideoClassification)
