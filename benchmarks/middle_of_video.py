"""What a clip from the middle of a long video costs, beside decoding the whole file: `python benchmarks/middle_of_video.py`.

in: minutes of video to draw  ->  out: CPU seconds and memory of both, printed
Invariant: both start from the file's bytes, in one process after the other, with one thread.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.clips import ClipShape, eval_clip, train_clip  # noqa: E402

SHAPE = ClipShape(num_frames=32, sampling_rate=2, target_fps=30.0, size=224)
SIZE, FPS = (320, 240), 30


def draw_video(path: Path, minutes: float) -> None:
    """H.264 with a key frame every 250 frames, as x264 has it: squares that wander over a gradient, and some noise."""
    import av

    rng = np.random.default_rng(0)
    ground = np.add.outer(np.linspace(0, 120, SIZE[1]), np.linspace(0, 120, SIZE[0]))[..., None].repeat(3, 2).astype(np.uint8)
    noise = rng.integers(0, 12, (8, *ground.shape), np.uint8)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height = SIZE
        stream.pix_fmt, stream.options = "yuv420p", {"preset": "ultrafast", "crf": "28", "g": "250"}
        for number in range(round(minutes * 60 * FPS)):
            frame = ground + noise[number % 8]
            for square in range(4):
                x, y = (number * (square + 1) + 70 * square) % (SIZE[0] - 40), (number * 2 + 50 * square) % (SIZE[1] - 40)
                frame[y : y + 40, x : x + 40] = (250, 60 * square, 100)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def decode_whole(data: bytes) -> int:
    """Every frame as RGB, one after the other; to keep them, as wds_example does, would need gigabytes."""
    import av

    count = 0
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            count += len(frame.to_ndarray(format="rgb24")) > 0
    return count


def cpu_seconds(work: Any, times: int) -> float:
    """The median over runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return float(np.median(found))


def measure_memory(path: str, num_clips: int, result: Any) -> None:
    """In a process of its own: MiB at the start with the file's bytes, after the first clip, and at most after all."""
    data = Path(path).read_bytes()
    train_clip(data, np.random.default_rng(0), SHAPE)
    first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for number in range(num_clips):
        train_clip(data, np.random.default_rng(number), SHAPE)
    result.put((first, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, len(data) / 2**20))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the long video (default: %(default)s)")
    parser.add_argument("--clips", type=int, default=30, help="clips of the memory measurement (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for minutes in (args.minutes / 10, args.minutes):
            path = Path(folder) / "video.mp4"
            draw_video(path, minutes)
            data = path.read_bytes()
            clip = cpu_seconds(lambda data=data: eval_clip(data, SHAPE), 5)
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=measure_memory, args=(str(path), args.clips, queue))
            process.start()
            first, most, size = queue.get()
            process.join()
            print(f"{minutes:g} minutes, {size:.1f} MiB: the middle clip of 32 frames takes {1000 * clip:.0f} ms of CPU time; "
                  f"memory {first:.0f} MiB after one clip, at most {most:.0f} MiB after {args.clips + 1}", flush=True)  # fmt: skip
        start = time.process_time()
        frames = decode_whole(data)
        whole = time.process_time() - start
        print(f"decoding all {frames:,} frames takes {1000 * whole:.0f} ms: {whole / clip:.0f} times as long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
