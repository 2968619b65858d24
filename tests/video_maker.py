"""Videos made by PyAV whose frames say which one they are.

in: how many frames, when, how encoded  ->  out: the bytes of a file; and from a frame its number
Invariant: a frame's number is written as 8 black or white columns in its upper half, which survives any codec; the lower half is red.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

BITS = 8


def numbered(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray:
    """Frame `number` (0..255) of size (width, height), uint8 (height, width, 3)."""
    width, height = size
    frame = np.zeros((height, width, 3), np.uint8)
    frame[:] = (220, 30, 30)
    for bit in range(BITS):
        column = slice(bit * width // BITS, (bit + 1) * width // BITS)
        frame[: height // 2, column] = 235 if number >> bit & 1 else 20
    return frame


def number_of(frame: np.ndarray) -> int:
    """The number that a frame (height, width, 3) shows."""
    height, width = frame.shape[:2]
    top = frame[height // 8 : height * 3 // 8].mean((0, 2))
    return sum((top[(2 * bit + 1) * width // (2 * BITS)] > 128) << bit for bit in range(BITS))


def is_upright(frame: np.ndarray) -> bool:
    """Whether the red half is below."""
    lower = frame[frame.shape[0] * 5 // 8 : frame.shape[0] * 7 // 8].reshape(-1, 3).mean(0)
    return bool(lower[0] > 150 and lower[1] < 90 and lower[2] < 90)


def encode(
    num_frames: int = 30,
    *,
    format: str = "mp4",
    codec: str = "libx264",
    size: tuple[int, int] = (64, 48),
    fps: int = 30,
    ticks: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    pixels: str = "yuv420p",
    rotation: int = 0,
    gop: int = 12,
    audio: bool = False,
    pictures: Sequence[np.ndarray] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A file of num_frames numbered frames. ticks: when each is shown, in units of time_base (default: every 1/fps s)."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.codec_context.gop_size = gop
        defaults = {"preset": "ultrafast", "crf": "18", "bf": "2"} if codec == "libx264" else {}
        stream.options = {**defaults, **(options or {})}
        if time_base is not None:
            stream.codec_context.time_base = time_base
        if rotation:
            stream.set_display_rotation(rotation)
        sound: Any = container.add_stream("aac" if format != "avi" else "mp3", rate=16000, layout="mono") if audio else None
        for number in range(num_frames):
            pixels_of = numbered(number, size) if pictures is None else pictures[number]
            frame = av.VideoFrame.from_ndarray(pixels_of, format="rgb24")
            frame.time_base = time_base or Fraction(1, fps)
            frame.pts = number if ticks is None else ticks[number]
            container.mux(stream.encode(frame.reformat(format=pixels)))
        container.mux(stream.encode())
        if sound is not None:
            write_sound(container, sound)
    return file.getvalue()


def write_sound(container: Any, stream: Any, seconds: float = 0.5) -> None:
    import av

    silence = av.AudioFrame.from_ndarray(np.zeros((1, int(16000 * seconds)), np.float32), format="fltp", layout="mono")
    silence.sample_rate, silence.pts = 16000, 0
    container.mux(stream.encode(silence))
    container.mux(stream.encode())


def encode_sound(format: str = "mp4") -> bytes:
    """A file with sound only."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        write_sound(container, container.add_stream("aac", rate=16000, layout="mono"))
    return file.getvalue()
