"""Run folders as run.py would leave them, made from the plan in milliseconds: for tests of what reads run folders.

in: samples per shard, the starts of a run  ->  out: shards.tsv, val_shards.tsv, args.yaml, metrics.jsonl, audit/
Invariant: what it writes is exact; a test spoils it by itself. (That real runs are so is for tests that train.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.plan import Plan

Start = tuple[int, int, int | None]  # global batch, world size, steps until the next start (None: to the end)


def write_run(
    folder: Path,
    shards: Sequence[tuple[str, int]],
    starts: Sequence[Start] = ((10, 2, None),),
    *,
    epochs: int = 3,
    val: Sequence[tuple[str, int]] = (),
    status: str | None = "finished",
    with_step: bool = True,
    **stream: Any,
) -> Path:
    """shards: (path, samples). status None: the run was killed. with_step: whether start lines say their step."""
    flags: dict[str, Any] = {"seed": 0, "no_shuffle": False, "shuffle_block": 16, "lanes": 1, "epochs": epochs, **stream}
    (folder / "audit").mkdir(parents=True)
    (folder / "args.yaml").write_text(yaml.safe_dump(flags))
    for name, listed in ("shards.tsv", shards), ("val_shards.tsv", val):
        (folder / name).write_text("path\tsamples\tbytes\n" + "".join(map(row, listed)))
    counts = np.array([size for _, size in shards])
    plan = Plan(counts, epochs, flags["seed"], not flags["no_shuffle"], flags["shuffle_block"], flags["lanes"])
    metrics: list[dict[str, Any]] = []
    step = position = 0
    for batch_size, world_size, num_steps in starts:
        left = plan.num_steps(position, batch_size)
        start = {"samples_seen": position, "batch_size": batch_size, "world_size": world_size}
        totals = {"num_samples": plan.num_samples, "total_steps": step + left}
        metrics.append({"event": "start", **start, **totals, **({"step": step} if with_step else {})})
        for _ in range(left if num_steps is None else num_steps):
            step += 1
            write_batch(folder, plan, shards, step, position, batch_size, world_size)
            done = plan.epochs_completed(position, batch_size)
            position = min(position + batch_size, plan.num_positions)
            if done:
                metrics.append({"event": "epoch", "epoch": (position - 1) // plan.num_samples, "step": step})
            if done and val:
                metrics.append(write_evaluation(folder, val, step, batch_size, world_size))
    if status:
        metrics.append({"event": "end", "status": status, "steps": step, "samples_seen": position})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


def row(shard: tuple[str, int]) -> str:
    """A shard's line of shards.tsv; an audit needs no files, so there may be none."""
    path, size = shard
    return f"{path}\t{size}\t{os.path.getsize(path) if os.path.exists(path) else 0}\n"


def write_evaluation(folder: Path, val: Sequence[tuple[str, int]], step: int, batch_size: int, world_size: int) -> dict[str, Any]:
    """The audit of an evaluation after a step -> its line in metrics.jsonl."""
    plan = Plan(np.array([size for _, size in val]), shuffle=False)
    for position in range(0, plan.num_samples, batch_size):
        write_batch(folder, plan, val, step, position, batch_size, world_size, "val")
    return {"event": "eval", "epoch": 0, "step": step, "num_samples": plan.num_samples}


def write_batch(
    folder: Path,
    plan: Plan,
    shards: Sequence[tuple[str, int]],
    step: int,
    position: int,
    batch_size: int,
    world_size: int,
    split: str = "train",
) -> None:
    """A line for each rank."""
    for rank in range(world_size):
        slots = plan.batch(position, batch_size, rank, world_size)
        names = [Path(shards[number][0]).name for number in slots.shard.tolist()]
        ids = [[name, index, f"k{sample}"] for name, index, sample in zip(names, slots.index.tolist(), slots.sample.tolist(), strict=True)]
        line = {"step": step, "epoch": slots.epoch.tolist(), "ids": ids, "valid": slots.valid.tolist(), "split": split}
        with open(folder / "audit" / f"rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def change_lines(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Apply `change` to the list of a file's objects, in place."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
