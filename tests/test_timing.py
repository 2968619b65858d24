"""data/timing.py: every moment of a worker belongs to one name."""

from __future__ import annotations

import threading
import time

import pytest

from data import timing


def test_laps_add_up_to_the_time_that_passed() -> None:
    begin = time.perf_counter()
    timing.restart()
    for _ in range(3):
        time.sleep(0.01)
        timing.lap(timing.READ)
        time.sleep(0.02)
        timing.lap(timing.DECODE)
    took = time.perf_counter() - begin
    seconds = timing.take()["seconds"]
    assert seconds.keys() == {"read", "decode"}
    assert sum(seconds.values()) == pytest.approx(took, abs=0.005)
    assert 0.03 <= seconds["read"] < seconds["decode"]
    assert timing.take() == {"worker": 0, "seconds": {}}


def test_spans_only_where_they_are_wanted() -> None:
    timing.restart()
    timing.lap("a")
    assert "spans" not in timing.take()
    timing.restart(spans=True)
    for name in ("a", "a", "b", "a"):
        timing.lap(name)
    taken = timing.take()
    names = [name for name, _, _ in taken["spans"]]
    assert names == ["a", "b", "a"]  # neighbours of one name are one span
    ends = [end for _, _, end in taken["spans"]]
    assert [begin for _, begin, _ in taken["spans"]][1:] == ends[:-1]
    assert sum(end - begin for _, begin, end in taken["spans"]) == pytest.approx(sum(taken["seconds"].values()))
    assert timing.take()["spans"] == []


def test_other_threads_do_not_count() -> None:
    timing.restart()
    thread = threading.Thread(target=timing.lap, args=("other",))
    thread.start()
    thread.join()
    timing.lap("mine")
    assert timing.take()["seconds"].keys() == {"mine"}
    timing.restart()
