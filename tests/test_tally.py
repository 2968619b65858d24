"""Counting one epoch: what is said of any mess of ids equals what counting ids in a dictionary says."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.history import ShardRow
from engine.tally import Places, Tally


def find(places: Places, ids: list[tuple[str, int]]) -> np.ndarray:
    return places.find((name for name, _ in ids), np.array([index for _, index in ids], np.int64))


def test_places_are_distinct_and_within_their_shard() -> None:
    places = Places([ShardRow("/a/x.tar", 3, 0), ShardRow("/a/empty.tar", 0, 0), ShardRow("/b/y.tar", 2, 0)])
    ids = [("x.tar", 0), ("x.tar", 2), ("y.tar", 0), ("y.tar", 1), ("y.tar", 2), ("y.tar", -1), ("empty.tar", 0), ("z.tar", 0)]
    assert find(places, ids).tolist() == [0, 2, 3, 4, -1, -1, -1, -1]
    assert (places.num_samples, places.size, places.shared, places.capacity) == (5, 5, [], None)


def test_shards_of_one_name_share_places() -> None:
    places = Places([ShardRow("/a/x.tar", 3, 0), ShardRow("/b/x.tar", 5, 0), ShardRow("/b/y.tar", 2, 0)])
    assert (places.num_samples, places.size, places.shared) == (10, 7, ["x.tar"])
    assert places.capacity is not None and places.capacity.tolist() == [2, 2, 2, 1, 1, 1, 1]


shard_lists = st.lists(st.tuples(st.sampled_from(["a/x", "b/x", "a/y", "b/y", "z"]), st.integers(0, 4)), unique_by=lambda shard: shard[0])
id_lists = st.lists(st.lists(st.tuples(st.sampled_from("xyzw"), st.integers(-1, 5)), max_size=20), max_size=5)


@settings(max_examples=200, deadline=None)
@given(shards=shard_lists, batches=id_lists)
def test_figures(shards: list[tuple[str, int]], batches: list[list[tuple[str, int]]]) -> None:
    places = Places([ShardRow(path, size, 0) for path, size in shards])
    tally = Tally(places)
    for ids in batches:
        tally.add(find(places, ids), num_bad=len(ids) // 3)
    there = Counter((path[-1], index) for path, size in shards for index in range(size))
    seen = Counter(i for ids in batches for i in ids)
    distinct = (there & seen).total()
    unknown = sum(times for i, times in seen.items() if i not in there)
    expected = (seen.total(), distinct, seen.total() - unknown - distinct, unknown, sum(len(ids) // 3 for ids in batches))
    assert (tally.seen, tally.distinct, tally.repeated, tally.unknown, tally.bad) == expected
    tally.close()
    assert (tally.seen, tally.distinct, tally.repeated, tally.unknown, tally.bad) == expected


def test_a_thousand_repeats_and_a_late_one() -> None:
    places = Places([ShardRow("x.tar", 2, 0)])
    tally = Tally(places)
    for _ in range(10):
        tally.add(np.zeros(100, np.int64), 0)
    assert (tally.seen, tally.distinct, tally.repeated) == (1000, 1, 999)
    tally.close()
    tally.add(np.array([1]), 0)
    assert (tally.seen, tally.distinct, tally.repeated) == (1001, 1, 1000)
