"""The task of telling what happens in a video.

in: {field: bytes} of one sample, an rng  ->  out: one slot of the batch's tensors, written in place
Invariant: as for every task (tasks.py): a frozen value that pickles; what is wrong with a sample is a `DataError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .clips import ClipShape, eval_clip, train_clip, view_clips
from .errors import DataError
from .labels import LabelMap, OneLabel, SeveralLabels, find_field
from .video import VIDEO_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoClassification(OneLabel):
    """A video in any of VIDEO_FIELDS and its class: "image" uint8 (n, 3, num_frames, img_size, img_size), "label" int64 (n,).

    With num_views or num_crops a slot holds all clips of its video: "image" (n, num_views * num_crops, 3, ...).
    """

    training: bool
    labels: LabelMap
    img_size: int
    num_frames: int = 32
    sampling_rate: int = 2
    target_fps: float = 30.0
    short_side: tuple[int, int] | None = None
    hflip: float = 0.5
    augment: bool = True
    num_views: int | None = None
    num_crops: int | None = None

    def __post_init__(self) -> None:
        least = {"img_size": self.img_size, "num_frames": self.num_frames, "sampling_rate": self.sampling_rate}
        least |= {"num_views": self.num_views or 1, "num_crops": self.num_crops or 1}
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        if not 0 < self.target_fps < 1e6:
            raise ValueError(f"target_fps {self.target_fps} must be frames a second, more than 0")
        if self.short_side is not None and not self.img_size <= self.short_side[0] <= self.short_side[1]:
            raise ValueError(f"short_side {self.short_side} must be two sizes in pixels, img_size ({self.img_size}) <= MIN <= MAX")
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"hflip {self.hflip} must be a probability in 0..1")

    @property
    def num_clips(self) -> int | None:
        """Clips a slot; None where a slot is one clip."""
        return None if self.num_views is None and self.num_crops is None else (self.num_views or 1) * (self.num_crops or 1)

    def new_batch(self, num_slots: int) -> dict[str, torch.Tensor]:
        """The memory of a batch, all zeros."""
        clips = () if self.num_clips is None else (self.num_clips,)
        return {
            "image": torch.zeros((num_slots, *clips, 3, self.num_frames, self.img_size, self.img_size), dtype=torch.uint8),
            "label": self.new_labels(num_slots),
        }

    def write(self, batch: dict[str, torch.Tensor], slot: int, fields: Mapping[str, Any], rng: np.random.Generator | None) -> None:
        """Fills a slot; `rng` is needed only where `training`. Raises DataError, and then the slot holds anything."""
        label = self.read_label(fields)
        name = find_field(fields, VIDEO_FIELDS, "video")
        shape = ClipShape(self.num_frames, self.sampling_rate, self.target_fps, self.img_size)
        out = batch["image"][slot]
        try:
            if self.num_clips is not None:
                view_clips(fields[name], shape, self.num_views or 1, self.num_crops or 1, out)
            elif self.training and self.augment:
                assert rng is not None
                train_clip(fields[name], rng, shape, self.short_side, self.hflip, out)
            else:
                eval_clip(fields[name], shape, out)
        except DataError as error:
            raise DataError(error.reason, field=name) from None
        batch["label"][slot] = label


class MultiLabelVideoClassification(SeveralLabels, VideoClassification):
    """A video and any number of classes: "image" as above, "label" uint8 (n, classes), 1 for each class that the video has."""

    __slots__ = ()
