"""An encoded video -> the clips that a model is shown.

in: bytes, `ClipShape`, numpy Generator  ->  out: uint8 (3, T, size, size), or (views * crops, 3, T, size, size) for a test
Invariant: pure: the same bytes and rng state give the same clip. A frame is decoded once however many views show it, and brought
to its size as it becomes RGB. Sampling is that of SlowFast (Feichtenhofer et al., 2019), in time where it counts frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from .decoders import Buffer
from .stills import Still, open_frames
from .timing import DECODE, TRANSFORM, lap
from .video import Video

EVAL_SCALE = 256 / 224  # short side of an evaluation's frames, to their crop's side
JITTER = (256 / 224, 320 / 224)  # the same in training: drawn between these

Place = tuple[int, int, int]  # left and top of a crop, and the clip that it goes to


@dataclass(frozen=True, slots=True)
class ClipShape:
    """num_frames frames that span num_frames * sampling_rate / target_fps seconds, in squares of `size` pixels."""

    num_frames: int
    sampling_rate: int
    target_fps: float
    size: int


def frame_indexes(video: Video | Still, shape: ClipShape, share: float) -> np.ndarray:
    """Which frames make a clip, int64 (num_frames,); share 0..1 says where it starts, between as early and as late as can be.

    A video shorter than the clip shows its last frame until the end.
    """
    length = shape.num_frames * shape.sampling_rate / shape.target_fps * video.fps  # of the clip, in frames
    start = share * max(video.num_frames - length, 0)
    places = np.linspace(start, start + length - 1, shape.num_frames).clip(0, video.num_frames - 1)
    tolerance = min(video.tick, 0.25 / video.fps)  # times are rounded to ticks
    return (np.searchsorted(video.times, places / video.fps + tolerance, side="right") - 1).clip(0)


def train_clip(
    encoded: Buffer,
    rng: np.random.Generator,
    shape: ClipShape,
    short_side: tuple[int, int] | None = None,
    hflip: float = 0.5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A random view, uint8 (3, T, size, size), written into `out` where given: any start, a short side drawn from short_side (default:
    256-320 for crops of 224), any place, flipped with probability `hflip`. Raises DataError.
    """
    low, high = short_side or (round(JITTER[0] * shape.size), round(JITTER[1] * shape.size))
    share = rng.random()
    short = max(shape.size, round(rng.uniform(low, high)))
    across, down = rng.random(2)
    flip = bool(rng.random() < hflip)
    with open_frames(encoded) as video:
        width, height = scaled_size(video.size, short)
        place = (int(across * (width - shape.size + 1)), int(down * (height - shape.size + 1)), 0)
        clips = _new(1, shape) if out is None else out[None]
        _write(video, [frame_indexes(video, shape, share)], (width, height), [place], clips, flip)
    return clips[0]


def eval_clip(encoded: Buffer, shape: ClipShape, out: torch.Tensor | None = None) -> torch.Tensor:
    """The middle of the middle, uint8 (3, T, size, size). Raises DataError."""
    return view_clips(encoded, shape, 1, 1, None if out is None else out[None])[0]


def view_clips(encoded: Buffer, shape: ClipShape, num_views: int, num_crops: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """num_views clips spread evenly from the video's start to its end, each in num_crops crops spread along the long side, uint8
    (num_views * num_crops, 3, T, size, size), the crops of a view together. One view is the middle one. One crop is the middle of
    frames an eighth larger; several have the frames' whole short side. Raises DataError.
    """
    short = shape.size if num_crops > 1 else round(EVAL_SCALE * shape.size)
    with open_frames(encoded) as video:
        width, height = scaled_size(video.size, short)
        views = [frame_indexes(video, shape, share) for share in spread(num_views)]
        places = [
            (math.ceil((width - shape.size) * across), math.ceil((height - shape.size) * down), number)
            for number, share in enumerate(spread(num_crops))
            for across, down in [(share, 0.5) if width > height else (0.5, share)]
        ]
        clips = _new(num_views * num_crops, shape) if out is None else out
        _write(video, views, (width, height), places, clips, False)
    return clips


def spread(count: int) -> list[float]:
    """`count` shares from 0 to 1; the middle for one."""
    return [0.5] if count == 1 else [number / (count - 1) for number in range(count)]


def scaled_size(size: tuple[int, int], short: int) -> tuple[int, int]:
    """(width, height) with the short side brought to `short`."""
    width, height = size
    scale = short / min(width, height)
    return max(short, int(width * scale)), max(short, int(height * scale))


def _new(num_clips: int, shape: ClipShape) -> torch.Tensor:
    return torch.empty((num_clips, 3, shape.num_frames, shape.size, shape.size), dtype=torch.uint8)


def _write(
    video: Video | Still, views: list[np.ndarray], size: tuple[int, int], places: Iterable[Place], clips: torch.Tensor, flip: bool
) -> None:
    """Decodes each frame that any view shows, once, and writes its crops wherever they belong."""
    places = list(places)
    side, target = clips.shape[-1], clips.numpy()
    for index, picture in video.read(np.concatenate(views), size):
        lap(DECODE)
        for left, top, number in places:
            crop = picture[top : top + side, left : left + side]
            pixels = (crop[:, ::-1] if flip else crop).transpose(2, 0, 1)
            for view, indexes in enumerate(views):
                for place in np.flatnonzero(indexes == index):
                    target[view * len(places) + number, :, place] = pixels
        lap(TRANSFORM)
