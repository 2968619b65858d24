"""How fast shards come from a server: `python benchmarks/remote.py WORK [--pictures FOLDER]`, with nginx on loopback.

in: a work folder, perhaps a folder of JPEGs  ->  out: samples a second from local files, a warm cache, a cold one, range requests; and what
first batches of 1,000 shards cost
Invariant: all ways read the same samples in the same order with the same transform, in turn, and the median of the rounds is told.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from inputs import picture_shards  # noqa: E402
from servers import Served, serve  # noqa: E402

from data import build_loader, load_shards  # noqa: E402
from data.prefetch import block_shards  # noqa: E402


def read_rate(shards: Any, workers: int, **kwargs: Any) -> float:
    """Samples a second of one epoch of picture training, from the first batch asked for to the last."""
    loader = build_loader(shards, batch_size=64, img_size=224, training=True, num_workers=workers, num_classes=1000, **kwargs)
    started = time.perf_counter()
    for _ in loader:
        pass
    return loader.num_samples / (time.perf_counter() - started)


def rates(paths: list[str], served: Served, work: Path, workers: int, rounds: int) -> dict[str, float]:
    """Median samples a second of each way."""
    url = f"{served.url}/{{000..{len(paths) - 1:03d}}}.tar"
    cold, warm = work / "cold", work / "warm"

    def read_cold() -> float:
        shutil.rmtree(cold, ignore_errors=True)
        return read_rate(load_shards(url, cache_dir=str(cold)), workers)

    ways: dict[str, Callable[[], float]] = {
        "local": lambda: read_rate(paths, workers),
        "warm cache": lambda: read_rate(url, workers, cache_dir=str(warm)),
        "cold cache": read_cold,
        "range requests": lambda: read_rate(url, workers, cache_dir="none"),
    }
    ways["warm cache"]()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return {name: statistics.median(values) for name, values in found.items()}


def first_batches(path: str, served: Served, work: Path) -> list[dict[str, float]]:
    """A thousand shards, each a link to one: for some --shuffle-block the seconds to the first batch of 256, bytes sent by then, those of
    the shards that a run names before it (the block's, and the first of the list), and of how many shards the batch is."""
    count = load_shards(path)[0].num_samples
    folder = served.root / "thousand"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(1000):
        os.link(path, folder / f"{number:03d}.tar")
    (folder / "sizes.json").write_text(json.dumps({f"{number:03d}.tar": count for number in range(1000)}))
    size = os.path.getsize(path)
    found = []
    for block in (1024, 4096, 16384):
        served.requests()
        started = time.perf_counter()
        loader = build_loader(
            f"{served.url}/thousand/{{000..999}}.tar", batch_size=256, img_size=224, num_classes=1000, num_workers=2, shuffle_block=block,
            cache_dir=str(work / "thousand"), cache_size=100 * size,
        )  # fmt: skip
        planned = time.perf_counter() - started
        batches = iter(loader)
        batch = next(batches)
        seconds = time.perf_counter() - started
        sent = sum(sent for _, _, sent in served.requests())
        batches.close()  # type: ignore[attr-defined]
        shutil.rmtree(work / "thousand")
        named = size * len({0, *block_shards(loader.plan, 0, 0).tolist()})
        mixed = len({shard for shard, _, _ in batch["ids"]})
        found.append({"block": block, "shard_mb": size / 1e6, "seconds_to_plan": planned, "seconds": seconds, "sent_mb": sent / 1e6,
                      "named_mb": named / 1e6, "shards_in_batch": mixed})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast shards come from a server on loopback.")
    parser.add_argument("work", type=Path, help="where shards and caches are made (about 1 GB)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="JPEGs to read (default: drawn ones)")
    parser.add_argument("--num", type=int, default=1500, help="pictures (default: %(default)s)")
    parser.add_argument("--large", type=int, default=900, help="pictures in each of the thousand shards (default: %(default)s, 100 MB)")
    parser.add_argument("--workers", type=int, default=2, help="loader workers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    paths = picture_shards(args.work, args.pictures, args.num)
    load_shards(paths)
    with serve(args.work / "pictures", args.work / "nginx") as served:
        found = rates(paths, served, args.work, args.workers, args.rounds)
        for name, rate in found.items():
            print(f"{name:15} {rate:8.1f} samples/s  {rate / found['local']:.2f} of local")
        (large,) = picture_shards(args.work / "large", args.pictures, args.large, args.large)
        print(json.dumps({"rates": found, "first_batches": first_batches(large, served, args.work)}))


if __name__ == "__main__":
    main()
