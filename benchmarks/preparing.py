"""What comes before training: making shards, indexing them, the first batch: `python benchmarks/preparing.py WORK --pictures FOLDER`.

in: a work folder, a folder of JPEGs or none (then they are drawn)  ->  out: a line for each measurement, medians of three runs
Invariant: everything is measured in processes of its own, from their start to their end; files are in the page cache. `tar` is the
system's, with and without waiting until the disk has what it wrote, which make_shards always does.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import inputs

ROOT = Path(__file__).resolve().parents[1]
COPIES = 50  # of each picture, so that an interpreter's start is a small part
RESIZED = 10  # copies for --resize
TORCH = "import os, torch; os._exit(0)"  # nothing of the way out is timed
FIRST = """
import sys
sys.path.insert(0, sys.argv[1])
from data import build_loader
next(iter(build_loader(sys.argv[2], batch_size=64, task="bytes", num_classes=10, num_workers=int(sys.argv[3]))))
import os
os._exit(0)
"""


def seconds(act: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The median of three."""
    taken = []
    for _ in range(3):
        before()
        started = time.perf_counter()
        act()
        taken.append(time.perf_counter() - started)
    return median(taken)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def make_folders(work: Path, pictures: Path | None, copies: int) -> Path:
    """Ten class folders with these pictures."""
    folder = work / f"folders-{copies}"
    if not folder.exists():
        data = inputs.read_pictures(pictures)
        for number in range(copies * len(data)):
            place = folder / f"class{number % 10}" / f"{number:06d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data[number % len(data)])
    return folder


def measure_making(work: Path, folder: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    whole = b"".join(p.read_bytes() for p in files)
    print(f"{len(files):,} files, {len(whole) / 1e6:,.0f} MB")
    tar, out = work / "folders.tar", work / "made"
    both = f"{shlex.join(['tar', 'cf', str(tar), str(folder)])} && {shlex.join(['sync', str(tar)])}"

    def clear() -> None:  # to write over a file takes longer than to write a new one
        tar.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        os.sync()

    print(f"tar cf: {seconds(lambda: run('tar', 'cf', tar, folder), clear):.2f} s")
    print(f"tar cf, then sync: {seconds(lambda: run('sh', '-c', both), clear):.2f} s")
    print(f"sha256 of these bytes alone: {seconds(lambda: hashlib.sha256(whole)):.2f} s")

    for workers in (1, 2):
        taken = seconds(partial(run, sys.executable, ROOT / "scripts/make_shards.py", folder, out, "--workers", workers), clear)
        print(f"make_shards.py, {workers} worker{'s' * (workers > 1)}: {taken:.2f} s")
    clear()


def measure_resizing(work: Path, folder: Path) -> None:
    from PIL import Image

    files = sorted(p for p in folder.rglob("*") if p.is_file())

    def by_pil(resample: Image.Resampling) -> None:
        for file in files:
            image = Image.open(file).convert("RGB")
            scale = 256 / min(image.size)
            small = image.resize((round(image.width * scale), round(image.height * scale)), resample)
            small.save(io.BytesIO(), "JPEG", quality=90)

    out = work / "made"
    for resample in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR):
        rate = len(files) / seconds(partial(by_pil, resample))
        print(f"PIL open, resize to 256 ({resample.name.lower()}), save: {rate:,.0f} pictures/s")
    for workers in (1, 2):
        command = [sys.executable, ROOT / "scripts/make_shards.py", folder, out, "--resize", 256, "--shard-size", 150, "--workers", workers]
        taken = seconds(partial(run, *command), lambda: shutil.rmtree(out, ignore_errors=True))
        print(f"make_shards.py --resize 256, {workers} worker{'s' * (workers > 1)}: {len(files) / taken:,.0f} pictures/s")


def measure_indexing(work: Path) -> None:
    from data.index import build_index
    from data.native import gathering

    paths = inputs.small_shards(work)[:5]
    for path in paths:
        Path(path).read_bytes()
    for how in ("C", "Python"):
        if how == "Python":
            gathering.is_there = lambda: False  # type: ignore[assignment]
        num_members = 2 * sum(len(build_index(path)[0]) - 1 for path in paths)
        rate = num_members / seconds(lambda: [build_index(path) for path in paths])
        print(f"index, {how}: {rate:,.0f} members/s")


def measure_start(work: Path) -> None:
    folder = work / "thousand"
    for number in range(0 if folder.exists() else 1000):
        folder.mkdir(exist_ok=True)
        with inputs.ShardWriter(folder / f"{number:04d}.tar") as writer:
            for i in range(8):
                writer.add(f"{number * 8 + i:06d}", {"bin": b"x" * 1000, "cls": b"%d" % i})
    print(f"python and import torch: {seconds(lambda: run(sys.executable, '-c', TORCH)):.2f} s")
    for workers in (0, 1):
        taken = seconds(partial(run, sys.executable, "-c", FIRST, ROOT, folder, workers))
        print(f"python to the first batch of 1,000 indexed shards, {workers} workers: {taken:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("work", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="JPEGs (default: drawn ones)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    measure_making(args.work, make_folders(args.work, args.pictures, COPIES))
    measure_resizing(args.work, make_folders(args.work, args.pictures, RESIZED))
    measure_indexing(args.work)
    measure_start(args.work)


if __name__ == "__main__":
    main()
