"""engine/limits.py: what limits a run, from the totals alone; and in real runs over gloo ranks, where a slow disk, a slow stage and a slow
rank are each named right; the profile of all ranks."""

from __future__ import annotations

import json
import time
from dataclasses import replace
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
from engine.limits import Setting, judge, smaller_shards
from engine.waits import DATA, FORWARD, Totals, Waits
from models import create_model

import run  # isort: skip

def totals(
    data: float = 0.0, forward: float = 3.0, backward: float = 6.0, count: float = 0.0, spread: float = 0.2, **loader: float
) -> Totals:  # fmt: skip
    """100 steps; spread: how much the own time of a step varies, as a share of it."""
    trainer = {"data": data, "transfer": 0.1, "forward": forward, "count": count, "backward": backward, "update": 0.5}
    own = (data + 0.1 + forward) / 100
    return Totals(trainer, loader, steps=100, own_squares=100 * own**2 * (1 + spread**2))


SETTING = Setting(4, 16, smaller="--resize 256")


def said(*ranks: Totals, **more: Any) -> str:
    return judge(ranks, replace(SETTING, **more)).sentence


def test_data_that_is_late() -> None:
    late = totals(data=3.0, decode=40.0, transform=6.0, read=2.0, wait=20.0)
    verdict = judge([late, late], replace(SETTING, cores=8, device="cuda"))
    assert (verdict.limit, verdict.what) == ("data", "decode") and verdict.share == pytest.approx(3 / 12.6)
    assert verdict.sentence == (
        "GPUs wait 24 % of the time for data: decoding takes 83 % of worker time; "
        "raise -j from 4 to 5, or if pictures are larger than that, make smaller ones (make_shards.py --resize 256)"
    )
    assert said(late, cores=4) == (
        "the trainer waits 24 % of the time for data: decoding takes 83 % of worker time; "
        "all cores have a worker: if pictures are larger than that, make smaller ones (make_shards.py --resize 256)"
    )
    assert said(late, device="cuda").startswith("the GPU waits 24 %")
    much = totals(data=30.0, decode=40.0)
    assert "raise -j from 4 to 16" in said(much) and "raise -j from 2 to 8" in said(much, num_workers=2)
    assert "raise -j from 0 to 1" in said(much, num_workers=0)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("read", "reading takes 90 % of worker time; the disk is slow: copy the shards to a faster one"),
        ("stages", "your own stages take 90 % of worker time; raise -j from 4 to 5, or make them faster"),
        ("transform", "cropping and resizing takes 90 % of worker time; raise -j from 4 to 5, or if pictures are larger than that"),
        ("collate", "putting batches together takes 90 % of worker time; raise -j from 4 to 5, or use a smaller --img-size"),
        ("hand_over", "handing batches over takes 90 % of worker time"),
    ],
)
def test_each_stage_has_its_advice(stage: str, words: str) -> None:
    other = "decode" if stage != "decode" else "read"
    assert words in said(totals(data=2.0, **{stage: 9.0, other: 1.0}))


def test_the_size_that_is_advised() -> None:
    advised = [smaller_shards(side, clips=False) for side in (8, 32, 64, 160, 224, 288)]
    assert advised == [f"--resize {side}" for side in (8, 32, 64, 184, 256, 336)]
    assert smaller_shards(224, clips=True) == "--resize-video 256"


def test_one_rank_whose_data_is_late() -> None:
    good, late = totals(count=4.0, decode=5.0), totals(data=4.0, read=9.0, decode=1.0)
    verdict = judge([good, good, late, good], SETTING)
    assert (verdict.limit, verdict.rank, verdict.what) == ("data", 2, "read")
    begin = "rank 2 waits 29 % of the time for data: reading takes 90 % of worker time; that machine's disk is slow"
    assert verdict.sentence.startswith(begin)
    few = judge([totals(decode=5.0), totals(data=0.8, read=9.0)], SETTING)  # too little to be waited for
    assert (few.limit, few.rank) == ("data", 1) and few.sentence.startswith("rank 1 waits 7.7 % of the time for data")


def test_one_rank_that_is_slow() -> None:
    fast, slow = totals(forward=2.0, backward=12.0), totals(forward=8.0, backward=6.0)
    verdict = judge([fast, slow, fast], SETTING)
    assert (verdict.limit, verdict.rank) == ("rank", 1) and verdict.share == pytest.approx(6 / 14.6)
    begin = "the other ranks wait 41 % of the time for rank 1: until its backward it takes 81 ms a step, and others 21 ms;"
    assert verdict.sentence.startswith(begin)
    assert said(slow, fast).startswith("rank 1 waits 41 % of the time for rank 0")
    assert said(fast, slow, fast, device="cuda").startswith("the other GPUs wait 41 %")


def test_no_rank_is_accused_by_chance() -> None:
    fast, slow = totals(forward=2.0, backward=8.0), totals(forward=4.0, backward=6.0)
    assert judge([fast, slow], SETTING).limit == "rank"
    wild = totals(forward=4.0, backward=6.0, spread=4.0)  # 100 steps: the mean is known to 40 %
    assert judge([totals(forward=2.0, backward=8.0, spread=4.0), wild], SETTING).limit == "model"
    a_little = totals(forward=2.5, backward=6.0)  # 24 % longer, but it costs the other 5 % of its time
    assert judge([totals(forward=2.0, backward=6.5), a_little], SETTING).limit == "model"
    waits_for_nobody = totals(forward=2.0, backward=6.0)  # what one takes longer is made up elsewhere
    assert judge([waits_for_nobody, slow], SETTING).limit == "model"


def test_short_steps_are_nobodys_fault() -> None:
    """Steps of 26 ms, of which the ranks spend 20 in meeting: one that is 2 ms slower does not cost the others 76 %."""
    fast, slow = totals(forward=0.5, backward=0.3, count=2.0), totals(forward=0.7, backward=0.3, count=1.8)
    verdict = judge([fast, slow], SETTING)
    assert (verdict.limit, verdict.what) == ("meeting", "count")
    assert verdict.sentence == (
        "the ranks meet in every step, which takes 56 % of the time, and no one is late each time: a step takes 34 ms; "
        "a larger -b has them meet less often"
    )


def test_a_model_that_limits() -> None:
    verdict = judge([totals(data=0.1), totals(data=0.05)], replace(SETTING, device="cuda"))
    assert (verdict.limit, verdict.what) == ("model", "backward")
    begin = "the model limits: forward, backward and update take 98 % of the time, data is waited for 1.0 %; --amp bf16"
    assert verdict.sentence.startswith(begin)


def test_too_few_steps_to_tell() -> None:
    assert said(Totals()) == "what limits is not told: no steps after the start-up"
    assert said(Totals({"data": 5.0}, steps=1), Totals({"data": 1.0}, steps=1)) == "what limits is not told: 1 step after the start-up"
    assert judge([Totals({"data": 5.0, "forward": 1.0}, steps=4)], SETTING).limit == "data"



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
    sentences = limits(tmp_path / "runs" / "slow")
    assert len(sentences) == 4
    for sentence in sentences:
        assert sentence.startswith("the other ranks wait ") and "% of the time for rank 1: until its backward it takes " in sentence
    log = (tmp_path / "runs" / "slow" / "log.txt").read_text()
    assert sentences[0] in log and f"over the whole run, {sentences[-1]}" in log


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
    for sentence in limits(tmp_path / "runs" / "disk"):
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
    measured = waits.close_all()
    counted = 12 - max(1, num_workers)
    assert workers == set(range(max(1, num_workers))) and measured.steps == counted
    assert measured.loader["stages"] > 10 * counted * 0.005
    assert measured.loader.keys() >= {"read", "stages", "decode", "transform", "collate", "hand_over"}
    verdict = judge([measured], Setting(num_workers, 2))
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


def test_a_profile_ends(picture_shards) -> None:
    """A worker keeps no spans of the steps after those wanted."""
    loader = build_loader(picture_shards([60]), batch_size=10, img_size=32, profile=2)
    assert ["spans" in batch["times"] for batch in loader] == [True, True, False, False, False, False]
