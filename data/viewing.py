"""One sample, for people: where its fields are, how it looks, how a model would be shown it.

in: a Shard, the number of a sample  ->  out: SampleView; pictures (PIL, RGB)
Invariant: any sample costs the same, wherever it stands: 16 bytes of the index and its own headers are read; a remote shard is fetched into
the cache first. Nothing else is written, and no name from a tar is used as a path. No state, so several threads may ask at once.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .checking import list_fields_at
from .decoders import IMAGE_FIELDS, open_picture, read_pixels, turned
from .errors import DataError, ShardError, StaleIndexError
from .fetching import bring
from .index import map_tar
from .shards import Shard
from .stills import open_frames
from .video import VIDEO_FIELDS

if TYPE_CHECKING:
    from PIL.Image import Image

    from .plan import Plan


class FieldView(NamedTuple):
    """A field: its name, where its bytes are in the tar, how many."""

    name: str
    offset: int
    size: int

    @property
    def kind(self) -> str:
        """Its last extension, which says what it is (`seg.png` is a picture)."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class SampleView:
    """A sample: `offset` of its first header and `size` up to the next sample; `doubled`: a field that is there twice."""

    shard: Shard
    index: int
    key: str
    offset: int
    size: int
    fields: tuple[FieldView, ...]
    doubled: str

    def find(self, name: str) -> FieldView | None:
        """The field of this name."""
        return next((one for one in self.fields if one.name == name), None)

    def first(self, kinds: tuple[str, ...]) -> FieldView | None:
        """The first field of one of these kinds."""
        return next((one for one in self.fields if one.kind in kinds), None)


def view_samples(shard: Shard, first: int, count: int) -> list[SampleView]:
    """The samples first, first + 1, ... of a shard, as many as there are. Raises ShardError."""
    count = min(count, shard.num_samples - first)
    if first < 0 or count < 1:
        return []
    bring(shard)
    offsets = _read_offsets(shard, first, count + 1)
    views = []
    with map_tar(shard.tar_path, name=shard.path)[0] as tar:
        for i, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            if end > len(tar):
                raise StaleIndexError(f"{shard.path}: its index does not fit it: run scripts/index_shards.py --rebuild on it")
            key, fields, doubled = list_fields_at(tar, start, end)
            views.append(SampleView(shard, first + i, key, start, end - start, tuple(FieldView(*one) for one in fields), doubled))
    return views


def read_field(view: SampleView, field: FieldView) -> bytes:
    """The bytes of a field. Raises ShardError."""
    bring(view.shard)
    try:
        with open(view.shard.tar_path, "rb") as file:
            file.seek(field.offset)
            data = file.read(field.size)
    except OSError as error:
        raise ShardError(f"{view.shard.path}: can't be read: {error.strerror}") from None
    if len(data) < field.size:
        raise StaleIndexError(f"{view.shard.path}: it ends inside sample {view.index}: it was changed")
    return data


def read_fields(view: SampleView) -> dict[str, bytes]:
    """The bytes of every field."""
    return {field.name: read_field(view, field) for field in view.fields}


def thumbnail(data: bytes, side: int) -> Image:
    """A picture, upright, at most side x side. Raises DataError."""
    picture = open_picture(data)
    if picture.image.format == "JPEG":
        picture.image.draft(None, (2 * side, 2 * side))  # decoded at an eighth of its size, where that is enough
    image = turned(read_pixels(picture), picture.orientation).convert("RGB")
    image.thumbnail((side, side))
    return image


def enlarged(image: Image, side: int) -> Image:
    """Small pictures a whole number of times larger, with their pixels to be seen, but at most side x side."""
    times = side // max(image.size)
    if times < 2:
        return image
    from PIL.Image import Resampling

    return image.resize((image.width * times, image.height * times), Resampling.NEAREST)


def poster(view: SampleView, side: int) -> Image | None:
    """The picture that stands for a sample: its first picture, or its video's first frame; None where it has neither.

    Raises DataError, ShardError.
    """
    field = view.first(IMAGE_FIELDS)
    if field is not None:
        return thumbnail(read_field(view, field), side)
    field = view.first(VIDEO_FIELDS)
    return None if field is None else video_poster(read_field(view, field), side)


def video_poster(data: bytes, side: int) -> Image:
    """The first frame of a clip, upright, at most side x side. Raises DataError."""
    from PIL.Image import fromarray

    with open_frames(data) as video:
        scale = min(1.0, side / max(video.size))
        size = max(1, round(video.size[0] * scale)), max(1, round(video.size[1] * scale))
        return fromarray(next(video.read([0], size))[1])


def model_views(task: Any, plan: Plan, sample: int, fields: dict[str, bytes], epochs: range) -> list[Image]:
    """What the model is shown of sample number `sample` in each epoch: the task's own transform with the run's own random numbers.

    Clips are strips of up to eight frames. Raises DataError.
    """
    from PIL.Image import fromarray

    views = []
    for epoch in epochs:
        batch = task.new_batch(1)
        task.write(batch, 0, fields, plan.sample_rng(epoch, sample) if task.training else None)
        pixels = next((tensor[0].numpy() for tensor in batch.values() if tensor.ndim >= 4 and tensor.element_size() == 1), None)
        if pixels is None:
            raise DataError("this task has no pictures to show")
        while pixels.ndim > 3:  # a clip, (3, T, H, W) or (T, 3, H, W)
            frames = pixels.swapaxes(0, 1) if pixels.shape[0] == 3 else pixels
            import numpy as np

            pixels = np.concatenate(list(frames[:: max(1, len(frames) // 8)][:8]), axis=2)
        views.append(fromarray(pixels.transpose(1, 2, 0).copy()))
    return views


def _read_offsets(shard: Shard, first: int, count: int) -> list[int]:
    """Entries of a shard's index. Raises ShardError."""
    try:
        with open(shard.index_path, "rb") as file:
            data = os.pread(file.fileno(), 8 * count, 8 * first)
    except OSError as error:
        raise ShardError(f"{shard.index_path}: can't be read any more: {error.strerror}") from None
    if len(data) < 8 * count:
        raise StaleIndexError(f"{shard.index_path}: it changed: {len(data) // 8} entries where {count} are expected")
    return list(struct.unpack(f"<{count}Q", data))
