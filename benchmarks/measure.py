"""One loader, measured in a process of its own: `loaders.py` starts it.

in: the loader's name, what it reads, workers, seconds  ->  out: a line of JSON: samples/s, samples per CPU second, seconds to the first
batch, memory
Invariant: imports and the making of a loader's own format are not timed; the first batches, which a queue may hold ready, are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import inputs
import peers
import peers_small

# name -> (what must be importable, {kind: builder})
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "webdataset": ("webdataset", {"pictures": peers.webdataset, "evaluation": peers.webdataset_evaluation,
                                  "small": peers_small.webdataset_small}),
    "shardline": ("torch", {"pictures": peers.shardline, "evaluation": peers.shardline_evaluation,
                            "small": peers_small.shardline_small, "tokens": peers_small.shardline_tokens}),
    "shardline-python": ("torch", {"pictures": peers.shardline_python, "evaluation": peers.shardline_python_evaluation}),
    "shardline-marked": ("torch", {"pictures": peers.shardline_marked}),
    "shardline-marked-python": ("torch", {"pictures": peers.shardline_marked_python}),
    "memory": ("torch", {"tokens": peers_small.memory_tokens}),
    "shardline-raw": ("torch", {"pictures": peers.shardline_raw}),
    "timm": ("timm", {"pictures": peers.timm}),
    "huggingface": ("datasets", {"pictures": peers.huggingface, "small": peers_small.huggingface_small}),
    "mosaic": ("streaming", {"pictures": peers.mosaic, "small": peers_small.mosaic_small}),
    "litdata": ("litdata", {"pictures": peers.litdata, "small": peers_small.litdata_small}),
    "dali": ("nvidia.dali", {"pictures": peers.dali, "small": peers_small.dali_small}),
    "spdl": ("spdl.io", {"pictures": peers.spdl, "small": peers_small.spdl_small}),
}
OWN_FORMAT = ("mosaic", "litdata", "dali", "shardline-marked", "shardline-marked-python", "shardline-raw")  # made before the clock starts
SIZES = {"pictures": peers.PICTURES, "evaluation": peers.PICTURES, "small": peers.SMALL, "tokens": peers.SMALL}


def measure(name: str, kind: str, work: Path, workers: int, seconds: float) -> dict[str, Any]:
    """Run a loader: warm up for a quarter of the time, then count what comes in `seconds`."""
    import torch  # noqa: F401  (all have it loaded: it is not a loader's cost)

    shards = inputs.shards_of(kind, work, None)  # made by loaders.py
    build = LOADERS[name][1][kind]
    if name in OWN_FORMAT and not (work / f"{name}-{kind}.made").exists():
        next(iter(build(shards, work, 0)))
        (work / f"{name}-{kind}.made").touch()
    started = time.perf_counter()
    batches = iter(build(shards, work, workers))
    first = next(batches)
    to_first = time.perf_counter() - started
    check(first, kind)
    memory = pss(os.getpid())
    end = time.perf_counter() + seconds / 4
    while time.perf_counter() < end:
        next(batches)
    started = now = time.perf_counter()
    cpu = cpu_seconds(os.getpid())
    count = 0
    while now < started + seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    rate, per_cpu = (count * SIZES[kind] / seconds for seconds in (now - started, cpu_seconds(os.getpid()) - cpu))
    memory = max(memory, pss(os.getpid()))
    return {"name": name, "kind": kind, "workers": workers, "rate": rate, "per_cpu": per_cpu, "first": to_first, "memory": memory}


def check(batch: Any, kind: str) -> None:
    """What is compared must be the same work."""
    if kind in ("pictures", "evaluation"):
        image = batch["image"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
        assert tuple(image.shape) == (peers.PICTURES, 3, peers.SIDE, peers.SIDE), image.shape
        assert str(image.dtype).endswith("uint8"), image.dtype


def pss(root: int) -> int:
    """Proportional set size of a process and all below it, in bytes: shared pages are counted once."""
    total = 0
    for process in tree(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def cpu_seconds(root: int) -> float:
    """What a process and all below it have used, which says more than the clock where others use the machine too."""
    ticks = 0
    for process in tree(root):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # its own, and those of the children that have ended
    return max(1, ticks) / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """The ids of a process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # gone meanwhile
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


if __name__ == "__main__":
    name, kind, work, workers, seconds = sys.argv[1:]
    found = measure(name, kind, Path(work), int(workers), float(seconds))
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)  # some loaders' threads never end
