"""How near a part of a picture is to PIL's: `python benchmarks/fidelity.py FOLDER`.

in: a folder of JPEGs  ->  out: a Markdown table: PSNR and mean absolute difference to PIL's decode, crop and antialiased resize
Invariant: everyone is given the same box of the same picture, drawn as in training; the size is 224.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import inputs  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from data import native, transforms  # noqa: E402
from data.restarts import add_restarts  # noqa: E402

SIDE = 224
Box = tuple[int, int, int, int]


def exact(data: bytes, box: Box) -> np.ndarray:
    """PIL: decode all, crop, resize."""
    from PIL import Image

    shown = Image.open(io.BytesIO(data)).convert("RGB").crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(shown).transpose(2, 0, 1)


def ours(decoder: str) -> Callable[[bytes, Box], np.ndarray]:
    def view(data: bytes, box: Box) -> np.ndarray:
        out = np.empty((3, SIDE, SIDE), np.uint8)
        transforms.write_part(transforms.open_encoded(data, decoder), box, (SIDE, SIDE), False, out, whole_pixels=True)
        return out

    return view


def torchvision(data: bytes, box: Box) -> np.ndarray:
    """As with litdata: torchvision's decoder and second transforms."""
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    left, top, right, bottom = box
    return functional.resized_crop(image, top, left, bottom - top, right - left, [SIDE, SIDE], antialias=True).numpy()


def dali() -> Callable[[bytes, Box], np.ndarray]:
    from nvidia.dali import fn, pipeline_def, types

    given: dict[str, Any] = {}

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)
    def views() -> Any:
        data = fn.external_source(lambda: [given["data"]], dtype=types.UINT8)
        corner = fn.external_source(lambda: [given["corner"]], dtype=types.INT64)
        shape = fn.external_source(lambda: [given["shape"]], dtype=types.INT64)
        image = fn.decoders.image_slice(data, corner, shape, axes=[0, 1], device="cpu")
        return fn.resize(image, size=[SIDE, SIDE], antialias=True, interp_type=types.INTERP_LINEAR)

    pipeline = views()
    pipeline.build()

    def view(data: bytes, box: Box) -> np.ndarray:
        left, top, right, bottom = box
        given.update(data=np.frombuffer(data, np.uint8), corner=np.array([top, left]), shape=np.array([bottom - top, right - left]))
        return pipeline.run()[0].as_array()[0].transpose(2, 0, 1)

    return view


def main() -> None:
    files = inputs.find_jpegs(Path(sys.argv[1]))
    ways = {"shardline, without the native part": ours("python"), "torchvision (litdata)": torchvision}
    if not native.why_absent():
        ways = {"shardline": ours("native"), "shardline, with restart markers": ours("native"), **ways}
    if find_spec("nvidia.dali"):
        ways["DALI"] = dali()
    told: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number, path in enumerate(files):
        data = path.read_bytes()
        size = transforms.open_picture(data).size
        box = transforms.random_box(size, np.random.default_rng((number, 5)).random(22).tolist(), transforms.DEFAULT_SCALE)
        whole: Box = tuple(int(edge) for edge in box)  # type: ignore[assignment]
        expected = exact(data, whole).astype(np.float64)
        for name, view in ways.items():
            off = view(add_restarts(data)[0] if "markers" in name else data, whole) - expected
            told[name].append((10 * math.log10(255**2 / max(1e-9, float((off**2).mean()))), float(np.abs(off).mean())))
    print(f"{len(files)} pictures\n\n| loader | PSNR: mean | least | mean absolute difference (of 255) |\n|---|---|---|---|")
    for name, found in told.items():
        ratios = [ratio for ratio, _ in found]
        shown = ["equal" if ratio > 120 else f"{ratio:.1f} dB" for ratio in (mean(ratios), min(ratios))]
        print(f"| {name} | {shown[0]} | {shown[1]} | {mean(off for _, off in found):.3f} |")


if __name__ == "__main__":
    main()
