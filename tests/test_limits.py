"""Who waits, in real runs over gloo ranks: a slow disk, a slow stage and a slow rank are each named right; the profile of all ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import base, launch, read_lines, run_main
from torch import nn

from data import build_loader
from data.store import ShardFiles
from engine import distributed, flags
from engine.waits import DATA, FORWARD, Waits
from models import create_model

import run  # isort: skip


class Slow(nn.Module):
    """A model that one rank takes long for."""

    def __init__(self, inner: nn.Module, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = inner, rank

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.rank:
            time.sleep(0.1)
        output: torch.Tensor = self.inner(images)
        return output


def slow_model(*args: Any, **more: Any) -> nn.Module:
    return Slow(create_model(*args, **more), rank=1)


def limits(folder: Path) -> list[str]:
    """What the epochs' lines say, and the last line."""
    lines = read_lines(folder / "metrics.jsonl")
    return [line["limits"] for line in lines if line["event"] in ("epoch", "end")]


def test_a_slow_rank_is_named(gloo_pool, picture_shards, tmp_path) -> None:
    launch(gloo_pool, base(picture_shards([60]), tmp_path, "slow", 3), model=slow_model)
    said = limits(tmp_path / "runs" / "slow")
    assert len(said) == 4
    for sentence in said[1:]:  # in the first epoch everything is loaded
        assert sentence.startswith("the other ranks wait ") and "% of the time for rank 1: until its backward it takes " in sentence
    log = (tmp_path / "runs" / "slow" / "log.txt").read_text()
    assert said[0] in log and f"over the whole run, {said[-1]}" in log


def run_with_slow_disk(rank: int, args: Any) -> Any:
    """One rank of a run; rank 1's reads take 30 ms."""
    whole = ShardFiles.read

    def read(self: ShardFiles, *where: Any) -> tuple[bytes, int]:
        if rank == 1:
            time.sleep(0.03)
        return whole(self, *where)

    ShardFiles.read = read  # type: ignore[method-assign, assignment]
    try:
        return run_main(rank, args)
    finally:
        ShardFiles.read = whole  # type: ignore[method-assign]


def test_a_slow_disk_is_named(gloo_pool, picture_shards, tmp_path) -> None:
    args = flags.parse_args([str(word) for word in base(picture_shards([60]), tmp_path, "disk", 2)])
    run.prepare(args)
    store, args.store_port = distributed.host_store()
    gloo_pool.run(2, run_with_slow_disk, args)
    del store
    for sentence in limits(tmp_path / "runs" / "disk")[1:]:
        assert sentence.startswith("rank 1 waits ") and "of the time for data: reading takes " in sentence
        assert "that machine's disk is slow: copy the shards to a faster one" in sentence


def slow_stage(samples: Any) -> Any:
    for sample in samples:
        time.sleep(0.005)
        yield sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_stage_is_named(picture_shards, num_workers: int) -> None:
    shards = picture_shards([60])
    next(iter(build_loader(shards, batch_size=10, img_size=32)))  # what decodes is loaded now
    waits = Waits(torch.device("cpu"), num_workers=num_workers)
    loader = build_loader(shards, batch_size=10, img_size=32, epochs=2, num_workers=num_workers, stages=[slow_stage])
    workers = set()
    waits.begin()
    for batch in loader:
        waits.lap(DATA)
        waits.batch(batch["times"])
        workers.add(batch["times"]["worker"])
        waits.lap(FORWARD)
    totals = waits.close_all()
    assert workers == set(range(max(1, num_workers))) and totals.steps == 12
    assert totals.loader["stages"] > 120 * 0.005
    assert totals.loader.keys() >= {"read", "stages", "decode", "transform", "collate", "hand_over"}
    verdict = waits.judge([totals])
    assert (verdict.limit, verdict.what) == ("data", "stages")
    assert "of the time for data: your own stages take " in verdict.sentence


def test_a_profile_of_all_ranks(gloo_pool, picture_shards, tmp_path) -> None:
    begin = time.perf_counter()
    launch(gloo_pool, [*base(picture_shards([60]), tmp_path, "traced", 2), "--profile", "4", "-j", "2"])
    end = time.perf_counter()
    events = json.loads((tmp_path / "runs" / "traced" / "trace.json").read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(rank, row): name for rank in (0, 1) for row, name in enumerate(("trainer", "worker 0", "worker 1"))}
    spans = [event for event in events if event["ph"] == "X"]
    for place in names:
        mine = sorted((span for span in spans if (span["pid"], span["tid"]) == place), key=lambda span: span["ts"])
        assert mine and all(1e6 * begin < span["ts"] and span["ts"] + span["dur"] < 1e6 * end for span in mine)  # one clock
        for one, after in zip(mine[:-1], mine[1:], strict=True):
            assert one["ts"] + one["dur"] <= after["ts"] + 1  # a row does one thing at a time; microseconds
    steps = [span for span in spans if span["tid"] == 0 and span["name"] == "backward"]
    assert len(steps) == 2 * 4
    assert {span["name"] for span in spans if span["tid"] == 0} == {"data", "transfer", "forward", "count", "backward", "update"}
    assert {span["name"] for span in spans if span["tid"]} >= {"wait", "read", "decode", "transform", "collate", "hand_over"}
