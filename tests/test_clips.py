"""Which frames make a clip, and which part of them is shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from video_maker import encode, number_of, numbered

from data import clips
from data.clips import ClipShape, eval_clip, frame_indexes, scaled_size, spread, train_clip
from data.video import Video


def numbers(clip: torch.Tensor) -> list[int]:
    """The numbers that the frames of a clip (3, T, size, size) show."""
    return [number_of(clip[:, t].permute(1, 2, 0).numpy()) for t in range(clip.shape[1])]


def indexes(data: bytes, share: float, num_frames: int = 8, rate: int = 2, fps: float = 30.0) -> list[int]:
    with Video(data) as video:
        return frame_indexes(video, ClipShape(num_frames, rate, fps, 32), share).tolist()


@pytest.mark.parametrize("format", ["mp4", "matroska"])  # Matroska's times are rounded to milliseconds
@pytest.mark.parametrize("share", [0.0, 0.31, 0.5, 1.0])
@pytest.mark.parametrize(("num_frames", "rate", "fps"), [(8, 2, 30.0), (8, 1, 30.0), (16, 2, 15.0), (8, 2, 60.0), (32, 2, 30.0)])
def test_frames_are_slowfasts(format: str, share: float, num_frames: int, rate: int, fps: float) -> None:
    """At a constant rate: linspace over the clip's length from its start, rounded down, in frames."""
    data = encode(60, format=format)
    length = num_frames * rate / fps * 30
    start = share * max(60 - length, 0)
    expected = np.linspace(start, start + length - 1, num_frames).clip(0, 59)
    found = indexes(data, share, num_frames, rate, fps)
    near = np.abs(expected - np.round(expected)) < 0.05  # so close to the next frame that rounding of times decides
    assert np.array_equal(np.array(found)[~near], np.floor(expected[~near]))
    assert np.array_equal(np.array(found)[near], np.round(expected[near]))


def test_frames_follow_the_clock_where_the_rate_varies() -> None:
    """Ten frames in the first second, then fifty in the next: a clip over both sees as much time of each."""
    from fractions import Fraction

    ticks = [*range(0, 1000, 100), *range(1000, 2000, 20)]
    data = encode(60, ticks=ticks, time_base=Fraction(1, 1000), format="matroska")
    found = np.array(ticks)[indexes(data, 0.0, num_frames=20, rate=3, fps=30.0)]
    assert np.abs(found - np.linspace(0, 1950, 20)).max() <= 110
    assert (found < 1000).sum() in (10, 11)


@pytest.mark.parametrize(("num_frames", "expected"), [(1, [0] * 8), (2, [0, 1] + [1] * 6), (5, [0, 2, 4] + [4] * 5)])
def test_short_videos_show_their_last_frame_until_the_end(num_frames: int, expected: list[int]) -> None:
    data = encode(num_frames, format="mp4")
    assert indexes(data, 0.7) == expected
    assert indexes(data, 0.0) == expected


def test_a_training_clip_is_a_function_of_the_rng() -> None:
    data = encode(60, size=(96, 64))
    shape = ClipShape(8, 2, 30.0, 32)
    drawn = [train_clip(data, np.random.default_rng(seed), shape) for seed in (1, 1, 2, 3, 4, 5)]
    assert drawn[0].shape == (3, 8, 32, 32) and drawn[0].dtype == torch.uint8
    assert torch.equal(drawn[0], drawn[1])
    assert len({clip.numpy().tobytes() for clip in drawn}) == 5
    out = torch.zeros(3, 8, 32, 32, dtype=torch.uint8)
    assert train_clip(data, np.random.default_rng(1), shape, out=out).data_ptr() == out.data_ptr() and torch.equal(out, drawn[0])


def test_training_clips_start_anywhere_and_are_flipped_half_the_time() -> None:
    data = encode(60, size=(64, 64))
    shape = ClipShape(4, 2, 30.0, 64)
    starts, flips = set(), 0
    for seed in range(40):
        clip = train_clip(data, np.random.default_rng(seed), shape, short_side=(64, 64))
        shown = numbers(clip)
        mirrored = numbers(clip.flip(3))
        forward = [np.all((np.diff(n) >= 2) & (np.diff(n) <= 3)) for n in (shown, mirrored)]
        assert any(forward)
        flipped = not forward[0]
        flips += flipped
        starts.add((mirrored if flipped else shown)[0])
    assert 10 <= flips <= 30
    assert min(starts) < 8 and max(starts) > 40 and len(starts) > 20
    assert all(numbers(train_clip(data, np.random.default_rng(s), shape, (64, 64), hflip=0.0))[0] in range(53) for s in range(5))


def test_the_short_side_and_the_place_of_a_crop_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(4, size=(96, 64))
    shape = ClipShape(2, 1, 30.0, 28)
    sizes, places = [], []
    write = clips._write

    def watched(video, views, size, where, out, flip):  # type: ignore[no-untyped-def]
        sizes.append(size)
        places.append(where[0])
        write(video, views, size, where, out, flip)

    monkeypatch.setattr(clips, "_write", watched)
    for seed in range(60):
        train_clip(data, np.random.default_rng(seed), shape)
    shorts = [min(size) for size in sizes]
    assert (min(shorts), max(shorts)) == (32, 40)  # 256 and 320 of 224
    assert all(width == int(height * 1.5) for width, height in sizes)
    assert {left for left, _, _ in places} >= {0, 10, 20} and max(top for _, top, _ in places) >= 9
    assert all(left + 28 <= width and top + 28 <= height for (left, top, _), (width, height) in zip(places, sizes, strict=True))
    for seed in range(20):
        train_clip(data, np.random.default_rng(seed), shape, short_side=(50, 52))
    assert {min(size) for size in sizes[60:]} == {50, 51, 52}


def test_evaluation_is_the_middle() -> None:
    clip = eval_clip(encode(60, size=(64, 64)), ClipShape(4, 2, 30.0, 56))
    assert clip.shape == (3, 4, 56, 56)
    whole = eval_clip(encode(60, size=(224, 64)), ClipShape(8, 2, 30.0, 56))
    red = whole[0].float().mean((0, 1))
    assert red.shape == (56,)
    with Video(encode(60, size=(64, 64))) as video:
        assert frame_indexes(video, ClipShape(4, 2, 30.0, 56), 0.5).tolist() == [26, 28, 30, 33]


def test_views_are_spread_from_start_to_end_and_crops_along_the_long_side() -> None:
    data = encode(60, size=(128, 64))
    shape = ClipShape(4, 2, 30.0, 64)
    views = clips.view_clips(data, shape, 3, 3)
    assert views.shape == (9, 3, 4, 64, 64)
    with Video(data) as video:
        frames = {index: torch.from_numpy(picture.copy()) for index, picture in video.read(range(60), (128, 64))}
        expected = [frame_indexes(video, shape, share).tolist() for share in (0.0, 0.5, 1.0)]
    assert expected[0][0] == 0 and expected[2][-1] == 59
    for view, chosen in enumerate(expected):
        for crop, left in enumerate((0, 32, 64)):
            for place, index in enumerate(chosen):
                assert torch.equal(views[3 * view + crop, :, place], frames[index][:, left : left + 64].permute(2, 0, 1))
    assert torch.equal(clips.view_clips(data, shape, 1, 1)[0], eval_clip(data, shape))


def test_crops_of_upright_videos_lie_above_each_other() -> None:
    tall = encode(8, size=(64, 128), pictures=[np.ascontiguousarray(np.rot90(numbered(i, (128, 64)))) for i in range(8)])
    views = clips.view_clips(tall, ClipShape(2, 1, 30.0, 64), 1, 3)
    with Video(tall) as video:
        [(_, picture)] = video.read([3], (64, 128))
        assert frame_indexes(video, ClipShape(2, 1, 30.0, 64), 0.5)[0] == 3
    for crop, top in enumerate((0, 32, 64)):
        assert np.array_equal(views[crop, :, 0].permute(1, 2, 0).numpy(), picture[top : top + 64])


def test_sizes() -> None:
    assert scaled_size((320, 240), 256) == (341, 256)
    assert scaled_size((240, 320), 256) == (256, 341)
    assert scaled_size((50, 50), 64) == (64, 64)
    assert spread(1) == [0.5] and spread(3) == [0.0, 0.5, 1.0]
