"""TASKS: what a sample's fields become in a batch.

in: {field: bytes} of one sample, an rng  ->  out: one slot of the batch's tensors, written in place
Invariant: a task is a frozen value that pickles; what is wrong with a sample is a `DataError` that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .classes import read_classes, resolve_labels
from .decoders import IMAGE_FIELDS
from .errors import DataError
from .labels import LabelMap, list_fields
from .scan import default_img_size
from .transforms import choose_decoder, eval_transform, train_transform

__all__ = ["TASKS", "ImageClassification", "LabelMap", "create_task", "default_img_size", "read_classes", "resolve_labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassification:
    """A picture in any of IMAGE_FIELDS and its class: "image" uint8 (n, 3, img_size, img_size), "label" int64 (n,)."""

    training: bool
    labels: LabelMap
    img_size: int
    scale: tuple[float, float] | None = None
    hflip: float = 0.5
    augment: bool = True
    decoder: str = "auto"  # who decodes JPEGs; a made task holds what was chosen

    def __post_init__(self) -> None:
        if self.img_size < 1:
            raise ValueError(f"img_size {self.img_size} must be at least 1 pixel")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {self.scale} must be two shares of the area, 0 < MIN <= MAX <= 1")
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"hflip {self.hflip} must be a probability in 0..1")
        object.__setattr__(self, "decoder", choose_decoder(self.decoder))

    def new_batch(self, num_slots: int) -> dict[str, torch.Tensor]:
        """The memory of a batch, all zeros."""
        return {
            "image": torch.zeros((num_slots, 3, self.img_size, self.img_size), dtype=torch.uint8),
            "label": torch.zeros(num_slots, dtype=torch.int64),
        }

    def write(self, batch: dict[str, torch.Tensor], slot: int, fields: Mapping[str, Any], rng: np.random.Generator | None) -> None:
        """Fills a slot; `rng` is needed only where `training`. Raises DataError, and then the slot holds anything."""
        label = self.labels.parse(fields)
        name = find_picture(fields)
        image = batch["image"][slot]
        try:
            if self.training and self.augment:
                assert rng is not None
                train_transform(fields[name], rng, self.img_size, self.scale, self.hflip, out=image, decoder=self.decoder)
            else:
                eval_transform(fields[name], self.img_size, out=image, decoder=self.decoder)
        except DataError as error:
            raise DataError(error.reason, field=name) from None
        batch["label"][slot] = label


def find_picture(fields: Mapping[str, Any]) -> str:
    """The name of the one picture field. Raises DataError for none, and for two: which one is meant can't be known."""
    found = [name for name in IMAGE_FIELDS if name in fields]
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"no picture: the sample's fields are {list_fields(fields)}")
    raise DataError(f"{len(found)} pictures in one sample: {', '.join(found)}", field=found[0])


TASKS = {
    "image-classification": ImageClassification,
}


def create_task(name: str, **settings: Any) -> ImageClassification:
    """The task of this name with its settings: training, labels, img_size, scale, hflip, augment, decoder. Raises ValueError."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; there are {', '.join(TASKS)}")
    return TASKS[name](**settings)
