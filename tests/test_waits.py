"""engine/waits.py: what limits a run, from the totals alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data import timing
from engine.waits import Totals, Waits, judge


def totals(data: float = 0.0, forward: float = 3.0, backward: float = 6.0, count: float = 0.0, **loader: float) -> Totals:
    trainer = {"data": data, "transfer": 0.1, "forward": forward, "count": count, "backward": backward, "update": 0.5}
    return Totals(trainer, loader, steps=100)


def said(*ranks: Totals, **more: Any) -> str:
    return judge(ranks, **{"num_workers": 4, "cores": 16, **more}).sentence


def test_data_that_is_late() -> None:
    late = totals(data=3.0, decode=40.0, transform=6.0, read=2.0, wait=20.0)
    verdict = judge([late, late], 4, processes=2, cores=16, device="cuda")
    assert (verdict.limit, verdict.what) == ("data", "decode") and verdict.share == pytest.approx(3 / 12.6)
    assert verdict.sentence == (
        "GPUs wait 24 % of the time for data: decoding takes 83 % of worker time; "
        "raise -j from 4 to 5, or make shards of smaller pictures (make_shards.py --resize 256)"
    )
    assert said(late, cores=4) == (
        "the trainer waits 24 % of the time for data: decoding takes 83 % of worker time; "
        "all cores are used: make shards of smaller pictures (make_shards.py --resize 256)"
    )
    much = totals(data=30.0, decode=40.0)
    assert "raise -j from 4 to 16" in said(much) and "raise -j from 2 to 8" in said(much, num_workers=2)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("read", "reading takes 90 % of worker time; the disk is slow: copy the shards to a faster one"),
        ("stages", "your own stages take 90 % of worker time; make them faster, or raise -j from 4 to 5"),
        ("transform", "cropping and resizing takes 90 % of worker time; raise -j from 4 to 5, or make shards of smaller pictures"),
        ("collate", "putting batches together takes 90 % of worker time; raise -j from 4 to 5, or use a smaller --img-size"),
        ("hand_over", "handing batches over takes 90 % of worker time"),
    ],
)
def test_each_stage_has_its_advice(stage: str, words: str) -> None:
    other = "decode" if stage != "decode" else "read"
    assert words in said(totals(data=2.0, **{stage: 9.0, other: 1.0}))


def test_one_rank_whose_data_is_late() -> None:
    good, late = totals(count=4.0, decode=5.0), totals(data=4.0, read=9.0, decode=1.0)
    verdict = judge([good, good, late, good], 4, 4, 64)
    assert (verdict.limit, verdict.rank, verdict.what) == ("data", 2, "read")
    begin = "rank 2 waits 29 % of the time for data: reading takes 90 % of worker time; that machine's disk is slow"
    assert verdict.sentence.startswith(begin)


def test_one_rank_that_is_slow() -> None:
    fast, slow = totals(forward=2.0, backward=12.0), totals(forward=8.0, backward=6.0)
    verdict = judge([fast, slow, fast], 4, 3, 12)
    assert (verdict.limit, verdict.rank) == ("rank", 1)
    begin = "the other ranks wait 41 % of the time for rank 1: until its backward it takes 81 ms a step, and others 21 ms;"
    assert verdict.sentence.startswith(begin)


def test_a_model_that_limits() -> None:
    verdict = judge([totals(data=0.1), totals(data=0.05)], 4, 2, 4, "cuda")
    assert (verdict.limit, verdict.what) == ("model", "backward")
    begin = "the model limits: forward, backward and update take 98 % of the time, data is waited for 1.0 %; --amp bf16"
    assert verdict.sentence.startswith(begin)
    assert judge([Totals()], 0).limit == "model"  # nothing measured yet


def test_laps_of_a_trainer() -> None:
    waits = Waits(torch.device("cpu"), num_workers=2, profile=3)
    for step in range(3):
        waits.begin()
        waits.lap("data")
        waits.batch({"worker": 1, "seconds": {timing.READ: 1.0, timing.WAIT: 2.0}, "spans": [("read", 0.0, 1.0)]})
        waits.lap("forward")
        if step == 1:
            first = waits.close()
    assert first.steps == 2 and first.loader == {"read": 2.0, "wait": 4.0} and first.trainer.keys() == {"data", "forward"}
    assert waits.is_traced(at_end=False) and waits.close().steps == 1
    assert waits.close_all().steps == 3 and waits.close_all().loader["read"] == 3.0
    assert waits.spans is not None and [name for name, _, _ in waits.spans] == ["data", "forward"] * 3
    assert waits.worker_spans == [(1, [("read", 0.0, 1.0)])] * 3
