"""Checkpoints are written beside the training, one at a time, and what can't be written is told once."""

from __future__ import annotations

import threading

import pytest
import torch
from test_checkpoint import content

from engine import checkpoint
from engine.saver import Clock, Saver, snapshot


def saver(folder, told=None, keep=0, go_on=False):
    return Saver(folder, keep=keep, go_on=go_on, tell=(told if told is not None else []).append)


def with_step(step):
    values = content(step)
    return {**values, "progress": {**values["progress"], "step": step}}


def test_what_is_written_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    may_write = threading.Event()
    whole = checkpoint._write

    def write(path, saved):
        assert may_write.wait(20)
        whole(path, saved)

    monkeypatch.setattr(checkpoint, "_write", write)
    writer = saver(tmp_path)
    values = with_step(1)
    writer.save(values, best=True)  # returns while nothing is written
    assert not (tmp_path / "last.pt").exists()
    values["model"]["layer.weight"].zero_()  # the training goes on
    values["progress"]["step"] = 2
    may_write.set()
    writer.wait()
    written = checkpoint.read(tmp_path / "last.pt")
    assert torch.equal(written["model"]["layer.weight"], torch.arange(1000.0) + 1) and written["progress"]["step"] == 1
    assert (tmp_path / "best.pt").exists()


def test_a_save_waits_for_the_one_before(tmp_path):
    writer = saver(tmp_path, keep=3)
    for step in range(1, 8):
        writer.save(with_step(step), best=False)
        writer.poll()
    writer.wait()
    assert checkpoint.read(tmp_path / "last.pt")["progress"]["step"] == 7
    assert checkpoint.read(tmp_path / "previous.pt")["progress"]["step"] == 6
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "last.pt", "previous.pt", *(f"step-{step:08d}.pt" for step in (5, 6, 7)),
    ]  # fmt: skip
    assert "checkpoint" not in [thread.name for thread in threading.enumerate()]


def test_a_write_that_fails_is_raised_at_the_next_call_or_told(tmp_path, monkeypatch):
    def write(path, saved):
        raise OSError(28, "No space left on device")

    folder = tmp_path / "checkpoints"
    first = saver(folder)
    first.save(with_step(1), best=False)
    first.wait()
    monkeypatch.setattr(checkpoint, "_write", write)
    told: list[str] = []
    stops = saver(folder)
    stops.save(with_step(2), best=False)
    with pytest.raises(OSError, match=r"no checkpoint could be written \(No space left on device\); the one before it is whole"):
        stops.wait()
    stops.wait()  # once
    goes_on = saver(folder, told, go_on=True)
    goes_on.save(with_step(2), best=False)
    goes_on.save(with_step(3), best=False)
    goes_on.wait()
    assert len(told) == 2 and told[0].startswith(f"warning: {folder}: no checkpoint could be written (No space left on device)")
    assert checkpoint.read(folder / "last.pt")["progress"]["step"] == 1


def test_a_snapshot_shares_no_memory_and_keeps_the_memory_order():
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    copied = snapshot({"a": [weight, (1, "x")], "b": None})
    weight.fill_(1)
    assert copied["a"][0].sum() == 0 and copied["a"][1] == (1, "x") and copied["b"] is None
    assert copied["a"][0].is_contiguous(memory_format=torch.channels_last)


def test_a_clock_with_no_time_is_never_due(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("engine.saver.time.monotonic", lambda: now[0])
    never, clock = Clock(0), Clock(60)
    told = []
    for now[0] in (130.0, 160.0, 161.0, 219.0, 400.0, 401.0):
        told.append(clock.due())
        assert not never.due()
    assert told == [False, True, False, False, True, False]
