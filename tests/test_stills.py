"""A picture in a video's place is one frame."""

from __future__ import annotations

import numpy as np
import pytest
from picture_maker import encode, noise

from data.clips import ClipShape, eval_clip
from data.errors import DataError
from data.stills import Still, open_frames, short_side


def test_a_picture_is_shown_for_the_whole_clip() -> None:
    pixels = noise(64, 40)
    data = encode(pixels, "PNG")
    with open_frames(data) as frames:
        assert isinstance(frames, Still) and frames.size == (64, 40) and short_side(data) == 40
        [(index, picture)] = frames.read([0, 0], (64, 40))
    assert index == 0 and np.array_equal(picture, pixels)
    clip = eval_clip(data, ClipShape(4, 2, 30.0, 32))
    assert (clip == clip[:, :1]).all() and clip.float().std() > 5


def test_a_cut_picture_is_an_error() -> None:
    with pytest.raises(DataError, match="^PNG is cut"):
        open_frames(encode(noise(64, 40), "PNG")[:200])
