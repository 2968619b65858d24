"""What limits a run on these shards and this machine: `python scripts/benchmark.py --data 'shards/{000..099}.tar' --model resnet50`.

in: shards, a model  ->  out: samples/s of reading, of reading and decoding, of the whole loader, of the model alone; one sentence
Invariant: the loader is the one that run.py would build with these flags, and every rate is over whole batches after a warm-up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/benchmark.py` puts scripts/ there, not the root

import numpy as np  # noqa: E402

from data.errors import LoaderError, ShardError  # noqa: E402
from data.plan import Plan  # noqa: E402
from data.shards import Shard, load_shards, num_cores  # noqa: E402
from engine.flags import Parser  # noqa: E402

WARM_UP = 3  # batches: the first ones start workers and fill caches
MARGIN = 1.15  # rates closer than this are called equal
ENDLESS = 100_000  # epochs


@dataclass(frozen=True, slots=True)
class Rates:
    """Samples/s: of reading bytes alone and of reading and decoding, in one process each; of the loader with its workers; of the model
    alone. `megabytes`: MB/s of reading."""

    read: float
    megabytes: float
    decode: float
    loader: float
    model: float


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        print(report(**vars(args)))
    except (ShardError, LoaderError, ValueError) as error:
        print(f"benchmark.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def report(
    data: list[str], task: str, model: str, img_size: int | None, batch_size: int, workers: int, device: str | None, seconds: float
) -> str:
    """The whole story, as it is printed."""
    import torch

    from data.native import why_absent
    from data.tasks import default_img_size

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shards = load_shards(data)
    size = default_img_size(shards, task) if img_size is None else img_size
    read, megabytes = measure_reading(shards, batch_size, seconds)
    loading = {"batch_size": batch_size, "task": task, "img_size": size, "epochs": ENDLESS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    decode = measure_loader(shards, seconds, num_workers=0, **loading)
    torch.set_num_threads(threads)
    loader = measure_loader(shards, seconds, num_workers=workers, **loading) if workers else decode
    rates = Rates(read, megabytes, decode, loader, measure_model(model, size, batch_size, device, seconds))
    rows = [
        ("reading, one process", f"{rates.read:,.0f} samples/s, {rates.megabytes:,.0f} MB/s"),
        ("reading and decoding, one process", f"{rates.decode:,.0f} samples/s"),
        (f"the loader, {workers} workers", f"{rates.loader:,.0f} samples/s"),
        (f"{model} alone on {device}, {size} x {size}", f"{rates.model:,.0f} samples/s"),
    ]
    absent = why_absent()
    lines = [f"{name:<40} {value}" for name, value in rows]
    return "\n".join([*lines, "", verdict(rates, workers, num_cores(), absent)])


def verdict(rates: Rates, workers: int, cores: int, native_absent: str) -> str:
    """One sentence: what limits a run, and what to change."""
    if rates.loader > rates.model * MARGIN:
        headroom = rates.loader / rates.model
        spare = f"; -j {max(1, round(workers / headroom))} would do" if workers > 1 and headroom > 2 else ""
        return f"The model limits this run: the loader gives {headroom:.1f} times what it takes{spare}."
    behind = f"the model takes {rates.model:,.0f} samples/s and gets {rates.loader:,.0f}"
    if rates.read < rates.decode * 2 and rates.read < rates.model * MARGIN:
        return f"The disk limits this run ({behind}): put the shards on a faster one, or make them smaller (make_shards.py --resize 256)."
    if workers < cores and rates.loader < rates.decode * max(1, workers) * MARGIN:
        return f"Decoding limits this run ({behind}): more workers (-j {min(cores, 2 * max(1, workers))})."
    if native_absent:
        return f"Decoding limits this run ({behind}): use the native decoder ({native_absent})."
    smaller = "make_shards.py --resize 256, --restart-markers or --encode raw"
    if rates.loader * MARGIN >= rates.model:
        return f"Loader and model are as fast as each other ({behind}): to go beyond, make both faster ({smaller} for the loader)."
    return f"Decoding limits this run ({behind}) and all {cores} cores are used: make decoding cheaper ({smaller})."


def measure_reading(shards: Sequence[Shard], batch_size: int, seconds: float) -> tuple[float, float]:
    """(samples/s, MB/s) of one process that reads and groups samples in training's order."""
    from data.stages import BatchPlan, ReadSamples
    from data.store import ShardFiles

    plan = Plan(np.array([shard.num_samples for shard in shards], np.int64), epochs=ENDLESS)
    plans = (BatchPlan(n, 0, plan.batch(n * batch_size, batch_size, 0, 1)) for n in count())
    num_bytes = 0

    def batches() -> Iterator[None]:
        nonlocal num_bytes
        for raw in ReadSamples(shards, ShardFiles())(plans):
            num_bytes += sum(len(value) for sample in raw.samples for value in sample.values() if isinstance(value, bytes))
            yield

    def start_again() -> None:
        nonlocal num_bytes
        num_bytes = 0

    rate, took = _rate(batches(), batch_size, seconds, start_again)
    return rate, num_bytes / 1e6 / took


def measure_loader(shards: Sequence[Shard], seconds: float, **loading: Any) -> float:
    """Samples/s of the loader that run.py would build."""
    from data.pipeline import build_loader

    return _rate(iter(build_loader(shards, **loading)), loading["batch_size"], seconds)[0]


def measure_model(name: str, img_size: int, batch_size: int, device: str, seconds: float) -> float:
    """Samples/s of training steps (forward, backward, SGD) on one batch that is on the device already."""
    import torch
    from torch.nn.functional import cross_entropy

    from engine.forward import normalize
    from models import create_model

    model = create_model(name, 1000, img_size).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randint(0, 256, (batch_size, 3, img_size, img_size), dtype=torch.uint8, device=device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def steps() -> Iterator[None]:
        while True:
            cross_entropy(model(normalize(images)), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.synchronize()
            yield

    return _rate(steps(), batch_size, seconds)[0]


def _rate(batches: Iterator[Any], batch_size: int, seconds: float, on_start: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """(samples/s, seconds) over at least `seconds` and two batches, after a warm-up."""
    for _ in range(WARM_UP):
        next(batches)
    on_start()
    started = time.perf_counter()
    for n in count(1):
        next(batches)
        took = time.perf_counter() - started
        if n >= 2 and took >= seconds:
            return n * batch_size / took, took
    raise AssertionError("the batches have no end")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="benchmark.py", description="What limits a run on these shards and this machine.")
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="PATTERN", help="shards, as run.py takes them")
    add("--task", default="image-classification", metavar="NAME", help="what a sample is (default: %(default)s)")
    add("--model", default="resnet18", metavar="NAME", help="as run.py takes it (default: %(default)s)")
    add("--img-size", type=int, metavar="N", help="side of the model's pictures (default: as run.py chooses it)")
    add("-b", "--batch-size", type=int, default=64, metavar="N", help="samples a step of one process (default: %(default)s)")
    add("-j", "--workers", type=int, default=min(8, num_cores()), metavar="N", help="loader workers (default: %(default)s)")
    add("--device", choices=["cuda", "cpu"], help="where to train (default: cuda if there is a GPU)")
    add("--seconds", type=float, default=5.0, help="for each of the four rates (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
