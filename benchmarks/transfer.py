"""What it costs to bring a batch from a worker to its rank, and workers that are threads: `python benchmarks/transfer.py WORK`.

in: the work folder of loaders.py  ->  out: milliseconds a batch for three ways of sending; pictures/s of processes and threads
Invariant: what is sent is the same each time: 64 pictures of 224 x 224 in uint8, labels, mask, epochs, sample numbers.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from data import Plan, build_loader, load_shards
from data.block import new_tensors, pack, unpack
from data.stages import AssembleBatch, BatchPlan, ReadSamples
from data.store import ShardFiles

LAYOUT: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "image": (torch.uint8, (64, 3, 224, 224)),
    "label": (torch.int64, (64,)),
    "valid": (torch.bool, (64,)),
    "epoch": (torch.int64, (64,)),
    "sample": (torch.int64, (64,)),
}
BATCHES = 200


def separate() -> dict[str, Any]:
    """Tensors of their own in private memory: torch's queue copies each into shared memory."""
    batch = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in LAYOUT.items()}
    batch["image"].fill_(1)
    return batch


def block() -> dict[str, Any]:
    """One block, shared from the start."""
    batch = new_tensors(LAYOUT, True)
    batch["image"].fill_(1)
    return pack(batch)


class Filled(IterableDataset):
    """Batches that cost nothing but their memory."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.make() for _ in range(BATCHES))


def send(make: Callable[[], dict[str, Any]]) -> tuple[float, float]:
    """(ms a batch from one worker to here, ms of this process's CPU time); every page of it is looked at."""
    loader = DataLoader(Filled(make), batch_size=None, collate_fn=lambda batch: batch, num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    started, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        unpack(batch)["image"].view(-1)[::4096].sum()
    num = BATCHES - 10
    return (time.perf_counter() - started) / num * 1e3, (time.process_time() - cpu) / num * 1e3


def thread_rate(paths: list[str], num_threads: int, decoder: str, num_batches: int) -> float:
    """Pictures/s of threads in place of workers: each makes whole batches with its own open files."""
    shards = load_shards(paths)
    task = build_loader(shards, batch_size=64, img_size=224, num_classes=1000, transform={"decoder": decoder}).task
    plan = Plan(np.array([shard.num_samples for shard in shards]), epochs=1000)
    own = threading.local()

    def make(n: int) -> dict[str, Any]:
        if not hasattr(own, "files"):
            own.files = ShardFiles()
        plans = [BatchPlan(n, 0, plan.batch(64 * n, 64, 0, 1))]
        return next(iter(AssembleBatch(plan, task, True, False)(ReadSamples(shards, own.files)(plans))))

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(make, range(2)))
        started = time.perf_counter()
        list(pool.map(make, range(2, 2 + num_batches)))
        return num_batches * 64 / (time.perf_counter() - started)


def process_rate(paths: list[str], num_workers: int, decoder: str, num_batches: int) -> float:
    """Pictures/s of the loader."""
    batches = iter(
        build_loader(
            paths, batch_size=64, img_size=224, num_classes=1000, num_workers=num_workers, epochs=1000, transform={"decoder": decoder}
        )
    )
    for _ in range(4 * num_workers):  # what was read ahead
        next(batches)
    started = time.perf_counter()
    for _ in islice(batches, num_batches):
        pass
    return num_batches * 64 / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("work", type=Path)
    parser.add_argument("--batches", type=int, default=20, help="batches of pictures for each rate (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in (("tensors of their own", separate), ("one shared block", block)):
        wall, cpu = send(make)
        print(f"{name:<24} {wall:6.2f} ms a batch, of which {cpu:.2f} ms of the rank's CPU time")
    paths = inputs.picture_shards(args.work, None)
    for decoder in ("native", "python"):
        for workers in (1, 2):
            rates = [run(paths, workers, decoder, args.batches) for run in (process_rate, thread_rate)]
            print(f"{decoder} decoder, {workers} workers: {rates[0]:,.0f} pictures/s as processes, {rates[1]:,.0f} as threads")


if __name__ == "__main__":
    main()
