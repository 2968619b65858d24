"""What the benchmarks read: shards of pictures, and shards of small samples.

in: a folder of JPEGs or none, a work folder  ->  out: `<work>/pictures/000.tar` ... (jpg, cls) or `<work>/small/000.tar` ... (bin, cls)
Invariant: made once per work folder from fixed seeds; without a folder of JPEGs the pictures are drawn: smooth shapes, edges, texture and
noise, in ImageNet's sizes, which compress to about ImageNet's bytes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.writer import ShardWriter, shard_names  # noqa: E402

SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 500), (400, 300), (640, 480), (1024, 768))  # width, height


def shards_of(kind: str, work: Path, folder: Path | None) -> list[str]:
    """The shards that loaders of this kind read; `folder`: of JPEGs, or None."""
    if kind == "small":
        return small_shards(work)
    return token_shards(work) if kind == "tokens" else picture_shards(work, folder)


def picture_shards(work: Path, folder: Path | None, num: int = 3000, per_shard: int = 250) -> list[str]:
    """Shards of `num` JPEGs: those of `folder` again and again, or 150 drawn ones."""

    target = work / "pictures"
    if found := _written(target, num, per_shard):
        return found
    return _write(target, num, per_shard, "jpg", [(data, i) for i, data in enumerate(read_pictures(folder))])


def find_jpegs(folder: Path) -> list[Path]:
    """The JPEGs of a folder; ends the program where there is none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{folder}: no .jpg or .jpeg in it: name a folder that has some")
    return files


def read_pictures(folder: Path | None) -> list[bytes]:
    """The JPEGs of a folder, or 150 drawn ones."""
    return [path.read_bytes() for path in find_jpegs(folder)] if folder else [draw_picture(i) for i in range(150)]


def samples(shards: list[str], field: str) -> Iterator[tuple[bytes, int]]:
    """(data, label) of every sample, for loaders that want a format of their own."""
    from data.tar import walk

    for shard in shards:
        content = Path(shard).read_bytes()
        members = iter(walk(content))
        for data, label in zip(members, members, strict=True):
            assert data.name.endswith(field)
            yield content[data.data_offset : data.data_offset + data.size], int(content[label.data_offset : label.data_offset + label.size])


def made_shards(work: Path, shards: list[str], name: str, *options: str) -> list[str]:
    """Shards that scripts/make_shards.py made with these options of the pictures in `shards`, in `<work>/<name>/`."""
    target, source = work / name, work / "source"
    num = len(shards)
    if found := _written(target, num, 1):
        return found
    if not source.exists():
        folders = [source / "even", source / "odd"]
        for folder in folders:
            folder.mkdir(parents=True)
        for number, (data, _) in enumerate(samples(shards, "jpg")):
            (folders[number % 2] / f"{number:07d}.jpg").write_bytes(data)
    command = [sys.executable, str(ROOT / "scripts" / "make_shards.py"), str(source), str(target), "--num-shards", str(num), *options]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return _written(target, num, 1)


def small_shards(work: Path, num: int = 200_000, per_shard: int = 10_000) -> list[str]:
    """Shards of `num` samples of 512 to 1,536 random bytes and a class."""
    target = work / "small"
    if found := _written(target, num, per_shard):
        return found
    rng = np.random.default_rng(0)
    samples = [(rng.bytes(int(size)), i % 10) for i, size in enumerate(rng.integers(512, 1537, 5000))]
    return _write(target, num, per_shard, "bin", samples)


def token_shards(work: Path, num: int = 40_000, per_shard: int = 10_000, length: int = 2048) -> list[str]:
    """Shards of `num` samples of `length` uint16 tokens."""
    target = work / "tokens"
    rng = np.random.default_rng(0)
    samples = [(rng.integers(0, 50_000, length, np.uint16).tobytes(), 0) for _ in range(1000)]
    return _written(target, num, per_shard) or _write(target, num, per_shard, "bin", samples)


def draw_picture(number: int) -> bytes:
    """A JPEG (quality 92) with a photograph's mixture: gradients, some hundred shapes with edges, fine texture, sensor noise."""
    from PIL import Image, ImageDraw, ImageFilter

    rng = np.random.default_rng((number, 7))
    width, height = SIZES[number % len(SIZES)]
    coarse = rng.integers(30, 226, (4, 5, 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(120):
        x, y = rng.integers(0, (width, height))
        w, h = rng.integers(4, max(width, height) // 5, 2)
        fill = tuple(int(v) for v in rng.integers(0, 256, 3))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)((x, y, x + w, y + h), fill=fill)
    image = image.filter(ImageFilter.GaussianBlur(1))
    texture = rng.normal(0, 11, (height, width, 1)) + rng.normal(0, 4, (height, width, 3))
    pixels = np.clip(np.asarray(image) + texture, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=92)
    return out.getvalue()


def _written(target: Path, num: int, per_shard: int) -> list[str]:
    paths = [target / name for name in shard_names(-(-num // per_shard))]
    return [str(path) for path in paths] if all(path.exists() for path in paths) else []


def _write(target: Path, num: int, per_shard: int, field: str, samples: list[tuple[bytes, int]]) -> list[str]:
    target.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(shard_names(-(-num // per_shard))):
        with ShardWriter(target / name) as writer:
            for i in range(number * per_shard, min(num, (number + 1) * per_shard)):
                data, label = samples[i % len(samples)]
                writer.add(f"{i:07d}", {field: data, "cls": b"%d" % label})
    return _written(target, num, per_shard)
