"""Draw videos that only motion tells apart: `python scripts/make_motion_clips.py clips/`.

in: how many, a seed  ->  out: OUT/<direction>/<number>.mp4, class folders for scripts/make_shards.py
Invariant: patches of texture drift over noise in one of 8 directions; where they are, what they look like, how fast they go and the
noise are drawn alike for every class, and the drift wraps around, so that a single frame says nothing about the class.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/make_motion_clips.py` puts scripts/ there, not the root

from engine.flags import Parser, integer  # noqa: E402

DIRECTIONS = ("east", "southeast", "south", "southwest", "west", "northwest", "north", "northeast")  # rows count downwards
NUM_PATCHES = 4
SPEED = (1.5, 3.0)  # pixels a frame, of pictures of 64
NOISE = 12.0  # deviation of the noise of each frame, in 0..255
MOTION = 11  # purpose of the seed


def direction_step(direction: int) -> np.ndarray:
    """The unit step (down, right) of a direction."""
    angle = direction * np.pi / 4
    return np.array([np.sin(angle), np.cos(angle)])


def draw_texture(rng: np.random.Generator, side: int) -> np.ndarray:
    """A smooth random pattern, float (side, side, 3) in 0..255, that wraps around."""
    frequencies = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side)))
    band = np.exp(-(((frequencies - 0.09) / 0.04) ** 2))
    waves = np.fft.ifft2(np.fft.fft2(rng.normal(size=(3, side, side)), axes=(1, 2)) * band, axes=(1, 2)).real
    return 128 + 60 * (waves / waves.std()).transpose(1, 2, 0)


def draw_clip(rng: np.random.Generator, direction: int, side: int, num_frames: int) -> np.ndarray:
    """One video, uint8 (num_frames, side, side, 3)."""
    textures = [draw_texture(rng, side) for _ in range(NUM_PATCHES)]
    places = rng.uniform(0, side, (NUM_PATCHES, 2))
    radii = rng.uniform(0.16, 0.24, NUM_PATCHES) * side
    speed = rng.uniform(*SPEED) * side / 64
    rows, columns = np.mgrid[:side, :side]
    frames = np.empty((num_frames, side, side, 3), np.uint8)
    for number in range(num_frames):
        moved = direction_step(direction) * speed * number
        frame = np.full((side, side, 3), 128.0)
        for texture, place, radius in zip(textures, places, radii, strict=True):
            down, right = place + moved
            away = np.hypot((rows - down + side / 2) % side - side / 2, (columns - right + side / 2) % side - side / 2)
            weight = np.clip(radius - away + 0.5, 0, 1)[..., None]
            frame = weight * shifted(texture, place + moved) + (1 - weight) * frame
        frame += rng.normal(0, NOISE, frame.shape)
        frames[number] = frame.round().clip(0, 255)
    return frames


def shifted(texture: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The texture moved (down, right) by a number of pixels that need not be whole, around its edges."""
    whole = np.floor(by).astype(int)
    down, right = by - whole
    moved = np.roll(texture, tuple(whole), (0, 1))
    lower = (1 - down) * moved + down * np.roll(moved, 1, 0)
    return (1 - right) * lower + right * np.roll(lower, 1, 1)


def write_video(path: Path, frames: np.ndarray, fps: int) -> None:
    """H.264 in MP4, a key frame every 12."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 12
        stream.options = {"crf": "20", "preset": "veryfast", "threads": "1"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def make_clips(out: Path, per_class: int, side: int, num_frames: int, fps: int, seed: int) -> None:
    """The folders. Raises OSError."""
    from tqdm import tqdm

    with tqdm(total=per_class * len(DIRECTIONS), unit=" clips", disable=None) as progress:
        for direction, name in enumerate(DIRECTIONS):
            (out / name).mkdir(parents=True, exist_ok=True)
            for number in range(per_class):
                rng = np.random.default_rng((seed, direction, MOTION, number))
                write_video(out / name / f"{number:05d}.mp4", draw_clip(rng, direction, side, num_frames), fps)
                progress.update()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="make_motion_clips.py", description="Draw videos of 8 directions of motion, in class folders.")
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder for the class folders")
    add("--per-class", type=integer(1), default=120, metavar="N", help="videos of each class (default: %(default)s)")
    add("--size", type=integer(16), default=64, metavar="PIXELS", help="side of a frame, even (default: %(default)s)")
    add("--num-frames", type=integer(2), default=40, metavar="N", help="frames of a video (default: %(default)s)")
    add("--fps", type=integer(1), default=30, help="frames a second (default: %(default)s)")
    add("--seed", type=integer(0), default=0, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.size % 2:
        parser.error(f"--size {args.size}: H.264 wants an even one")
    try:
        make_clips(args.out, args.per_class, args.size, args.num_frames, args.fps, args.seed)
    except OSError as error:
        print(f"make_motion_clips.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{args.out}: {args.per_class * len(DIRECTIONS):,} videos of {len(DIRECTIONS)} classes\n\nMake shards of them:\n")
    print(f"    python scripts/make_shards.py {args.out} shards/motion --split train=0.8,val=0.2 --num-shards 8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
