"""A picture in the place of a video: one frame. (video2dataset stores pictures and videos in one field.)

in: the bytes of a video field  ->  out: `Video`, or `Still` with the same members
Invariant: the bytes decide, not the name. Bad bytes raise `DataError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .decoders import Buffer, is_picture, open_picture, read_pixels, turned
from .video import Video


class Still:
    """A picture as a video of one frame; see Video."""

    num_frames, fps, tick = 1, 25.0, 1e-3
    times = np.zeros(1)

    def __init__(self, data: Buffer) -> None:
        self._picture = open_picture(data)
        self.size = self._picture.size

    def __enter__(self) -> Still:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, indexes: Sequence[int] | np.ndarray, size: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
        """(0, picture uint8 (height, width, 3) brought to size = (width, height)), once. Raises DataError."""
        from PIL import Image

        image = turned(read_pixels(self._picture), self._picture.orientation).convert("RGB")
        yield 0, np.array(image.resize(size, Image.Resampling.BILINEAR))


def open_frames(data: Buffer) -> Video | Still:
    """A context manager that gives frames, of a video or of a picture. Raises DataError."""
    return Still(data) if is_picture(data) else Video(data)


def short_side(data: Buffer) -> int:
    """The short side of the frames, in pixels. Raises DataError."""
    with open_frames(data) as video:
        return min(video.size)
