"""The demo's videos: reproducible, and told apart by motion only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.video import Video
from scripts.make_motion_clips import DIRECTIONS, direction_step, draw_clip, main


def drift(frames: np.ndarray) -> np.ndarray:
    """(down, right) in pixels a frame by which the moving part of frames moves: the best of all shifts of their differences."""
    gray = frames.astype(float).mean(3)
    moving = gray - gray.mean(0)
    best, where = -np.inf, (0, 0)
    for down in range(-4, 5):
        for right in range(-4, 5):
            score = sum((np.roll(a, (down, right), (0, 1)) * b).mean() for a, b in zip(moving[:-1], moving[1:], strict=True))
            if (down or right) and score > best:
                best, where = score, (down, right)
    return np.array(where)


@pytest.mark.parametrize("direction", range(8))
def test_the_patches_move_where_the_class_says(direction: int) -> None:
    found = drift(draw_clip(np.random.default_rng(direction), direction, 48, 12))
    assert found @ direction_step(direction) > 0.9 * np.hypot(*found)


def test_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "a"), "--per-class", "1", "--size", "32", "--num-frames", "6", "--fps", "10"]) == 0
    assert "8 videos of 8 classes" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(DIRECTIONS)
    for name in DIRECTIONS:
        data = (tmp_path / "a" / name / "00000.mp4").read_bytes()
        with Video(data) as video:
            assert (video.size, video.num_frames, round(video.fps)) == ((32, 32), 6, 10)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "--size", "33"])
    assert stopped.value.code == 2 and "--size 33: H.264 wants an even one" in capsys.readouterr().err
