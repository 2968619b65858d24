"""engine/waits.py: what a rank's time went by with."""

from __future__ import annotations

import time

import pytest
import torch

from data import timing
from engine.waits import Totals, Waits


def take_step(waits: Waits, worker: int = 0) -> None:
    waits.begin()
    waits.lap("data")
    waits.batch({"worker": worker, "seconds": {timing.READ: 1.0, timing.WAIT: 2.0}, "spans": [("read", 0.0, 1.0)]})
    waits.lap("forward")


def test_laps_of_a_trainer() -> None:
    waits = Waits(torch.device("cpu"), num_workers=2, profile=5)
    for step in range(5):
        assert not waits.is_traced(at_end=False)
        take_step(waits)
        if step == 3:
            first = waits.close()
    assert first.steps == 2 and first.loader == {"read": 2.0, "wait": 4.0} and first.trainer.keys() == {"data", "forward"}
    assert waits.is_traced(at_end=False) and waits.close().steps == 1
    assert waits.close_all().steps == 3 and waits.close_all().loader["read"] == 3.0
    assert waits.spans is not None and [name for name, _, _ in waits.spans] == ["data", "forward"] * 5
    assert waits.worker_spans == [(0, [("read", 0.0, 1.0)])] * 5
    waits.end_spans()
    assert not waits.is_traced(at_end=True)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_start_up_does_not_count(num_workers: int) -> None:
    waits = Waits(torch.device("cpu"), num_workers=num_workers)
    time.sleep(0.02)
    waits.lap("count")  # the model's forward of the warm-up
    for _ in range(max(1, num_workers)):  # no batch was made ahead
        waits.begin()
        time.sleep(0.01)
        waits.lap("data")
        waits.batch({"worker": 0, "seconds": {timing.READ: 1.0}})
        waits.lap("forward")
    assert waits.close() == Totals()
    take_step(waits)
    totals = waits.close()
    assert totals.steps == 1 and totals.trainer.keys() == {"data", "forward"} and totals.loader["read"] == 1.0
    assert totals.seconds < 0.01


def test_how_much_steps_vary() -> None:
    totals = Totals()
    for seconds in (1.0, 2.0, 3.0):
        totals.add_step({"data": seconds - 0.5, "forward": 0.5, "backward": 7.0})
    assert totals.own == pytest.approx(2.0) and totals.own_variance == pytest.approx(1 / 3)  # 1, the variance of a step, over 3 steps
    assert totals.share("backward") == pytest.approx(21 / 27)
    whole = Totals()
    for _ in range(2):
        whole.add(totals)
    assert whole.steps == 6 and whole.own == pytest.approx(2.0) and whole.own_variance == pytest.approx(0.8 / 6)
    assert Totals().own == Totals().own_variance == Totals().share("data") == 0.0
