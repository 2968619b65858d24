"""plan.py: every sample once, whoever reads it; the same batches for any cut; no table, no replay."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import plan as plan_module
from data.plan import ROUNDS, Plan, fingerprint, permute

counts_strategy = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0)


def make_plan(counts, **kwargs):
    kwargs["lanes"] = min(kwargs.get("lanes", 1), sum(counts))
    return Plan(np.array(counts), **kwargs)


def as_pairs(slots, mask=None):
    mask = np.ones(len(slots.shard), bool) if mask is None else mask
    return list(zip(slots.epoch[mask].tolist(), slots.shard[mask].tolist(), slots.index[mask].tolist(), strict=True))


def test_plan_is_pure():
    tree = ast.parse(Path(plan_module.__file__).read_text())
    imported = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "collections", "dataclasses", "functools", "hashlib", "math", "numpy"}


def test_golden_first_ids():
    # pinned: another order would silently change every run that is resumed with a newer version
    slots = Plan(np.array([7, 5, 3, 1, 0, 41]), epochs=3, seed=0).locate(np.arange(12))
    assert slots.sample.tolist() == GOLDEN[0]
    slots = Plan(np.array([7, 5, 3, 1, 0, 41]), epochs=3, seed=1, shuffle_block=10, lanes=4).locate(np.arange(57, 69))
    assert slots.sample.tolist() == GOLDEN[1]
    big = Plan(np.full(1000, 1000), epochs=2, seed=7).locate(np.array([0, 1, 999_999, 1_000_000]))
    assert big.sample.tolist() == GOLDEN[2]


GOLDEN = (
    [41, 26, 11, 0, 29, 45, 15, 32, 53, 36, 3, 5],
    [18, 31, 46, 1, 19, 32, 50, 0, 17, 34, 47, 11],
    [263133, 734169, 73768, 401337],
)


@settings(deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**32 - 1))
def test_permute_is_a_permutation(size, key):
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    assert sorted(permute(np.arange(size), size, keys).tolist()) == list(range(size))


def test_permute_spreads_evenly():
    size, tries = 100, 2000
    landed = np.zeros(size)
    for key in range(tries):
        landed[permute(np.array([3]), size, np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64))] += 1
    assert landed.min() > 2 and landed.max() < 45  # mean 20, Poisson


@settings(deadline=None)
@given(
    counts=counts_strategy,
    seed=st.integers(0, 2**32 - 1),
    block=st.integers(1, 50),
    lanes=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_every_epoch_has_each_sample_once(counts, seed, block, lanes, shuffle):
    plan = make_plan(counts, epochs=3, seed=seed, shuffle_block=block, lanes=lanes, shuffle=shuffle)
    slots = plan.locate(np.arange(plan.num_positions))
    starts = np.cumsum(counts) - counts
    assert (slots.sample == starts[slots.shard] + slots.index).all()
    for epoch in range(3):
        assert sorted(slots.sample[slots.epoch == epoch].tolist()) == list(range(sum(counts)))
    if not shuffle:
        assert slots.sample.tolist() == list(range(sum(counts))) * 3


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        return Plan(np.array([50, 50]), epochs=2, seed=seed).locate(np.arange(100) + 100 * epoch).sample.tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(x) for x in orders}) == 4


@settings(deadline=None, max_examples=60)
@given(
    counts=counts_strategy,
    world_size=st.integers(1, 8),
    num_workers=st.integers(0, 5),
    batch_size=st.integers(1, 70),
    lanes=st.integers(1, 6),
    start=st.integers(0, 100),
)
def test_ranks_and_workers_cut_the_same_batches(counts, world_size, num_workers, batch_size, lanes, start):
    batch_size = max(batch_size, world_size)
    plan = make_plan(counts, epochs=3, seed=5, shuffle_block=16, lanes=lanes)
    start = min(start, plan.num_positions)
    steps = plan.num_steps(start, batch_size)
    made = {}
    for worker in range(max(num_workers, 1)):
        for n in range(worker, steps, max(num_workers, 1)):
            assert n not in made
            made[n] = [plan.batch(start + n * batch_size, batch_size, rank, world_size) for rank in range(world_size)]
    assert sorted(made) == list(range(steps))
    seen = []
    for n in range(steps):
        position = np.arange(start + n * batch_size, start + (n + 1) * batch_size)
        expected = as_pairs(plan.locate(position), position < plan.num_positions)
        parts = [as_pairs(slots, slots.valid) for slots in made[n]]
        assert {len(slots.valid) for slots in made[n]} == {-(-batch_size // world_size)}
        assert sorted(sum(parts, [])) == sorted(expected)  # union and disjointness: the same multiset
        seen += expected
    # nothing repeated, nothing dropped, from the start to the end
    assert seen == as_pairs(plan.locate(np.arange(start, plan.num_positions)))
    assert sum(plan.epochs_completed(start + n * batch_size, batch_size) for n in range(steps)) == 3 - start // sum(counts)


@settings(deadline=None)
@given(counts=counts_strategy, first=st.integers(1, 40), then=st.integers(1, 40), steps=st.integers(0, 5))
def test_another_batch_size_after_a_resume_goes_on_at_the_next_sample(counts, first, then, steps):
    plan = make_plan(counts, epochs=2, seed=3)
    seen = []
    position = 0
    for _ in range(min(steps, plan.num_steps(0, first))):
        slots = plan.batch(position, first, 0, 1)
        seen += as_pairs(slots, slots.valid)
        position = min(position + first, plan.num_positions)
    for n in range(plan.num_steps(position, then)):
        slots = plan.batch(position + n * then, then, 0, 1)
        seen += as_pairs(slots, slots.valid)
    assert seen == as_pairs(plan.locate(np.arange(plan.num_positions)))


def test_masked_slots_hold_ordinary_samples():
    plan = Plan(np.array([10]), epochs=1, seed=0)
    past_end = plan.batch(8, 4, 0, 1)
    assert past_end.valid.tolist() == [True, True, False, False]
    assert past_end.epoch.tolist() == [0, 0, 1, 1]  # the stream simply goes on
    padded = [plan.batch(0, 4, rank, 3) for rank in range(3)]
    assert [slots.valid.tolist() for slots in padded] == [[True, False], [True, False], [True, True]]
    assert padded[0].sample[1] == padded[1].sample[0]


def test_lanes_keep_a_machine_to_its_own_shards():
    counts = np.full(64, 100)
    plan = Plan(counts, epochs=1, seed=2, lanes=4, shuffle_block=200)
    read: list[set[int]] = [set(), set()]
    for start in range(0, plan.num_positions, 32):
        for rank in range(4):
            read[rank // 2].update(plan.batch(start, 32, rank, 4).shard.tolist())
    assert len(read[0] & read[1]) == 0
    assert len(read[0]) == len(read[1]) == 32


def test_more_epochs_than_a_batch_has_samples_for():
    plan = Plan(np.array([3]), epochs=5, seed=0)
    assert [plan.epochs_completed(start, 8) for start in (0, 8)] == [2, 3]
    assert plan.num_steps(0, 8) == 2


def test_augmentation_follows_epoch_and_sample_only():
    draws = {(e, s): Plan(np.array([9]), seed=4).sample_rng(e, s).random() for e in (0, 1) for s in (0, 1)}
    assert len(set(draws.values())) == 4
    assert Plan(np.array([9]), epochs=7, seed=4, lanes=2).sample_rng(1, 1).random() == draws[1, 1]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"counts": [0, 0]}, "the 2 shards hold no samples: nothing to read"),
        ({"counts": []}, "the 0 shards hold no samples: nothing to read"),
        ({"epochs": 0}, "epochs is 0: it must be at least 1"),
        ({"seed": -1}, "seed is -1: it must be at least 0 and at most 4294967295"),
        ({"shuffle_block": 0}, "shuffle_block is 0: it must be at least 1 and at most 2147483647"),
        ({"lanes": 6}, "lanes is 6: it must be at least 1 and at most 5"),
    ],
)
def test_values_out_of_range(kwargs, message):
    with pytest.raises(ValueError) as raised:
        Plan(**{"counts": np.array(kwargs.pop("counts", [5])), **kwargs})
    assert str(raised.value) == message


def test_a_billion_samples_cost_nothing():
    plan = Plan(np.full(100_000, 10_000), epochs=100, lanes=8)
    plan.locate(np.arange(4096))  # 10^5 shards are ordered once an epoch
    begin = time.perf_counter()
    for start in (5, 99 * 10**9):
        slots = plan.batch(start, 4096, 0, 1)
        assert slots.valid.all()
    # a bound that only a plan that replays or builds tables (seconds, gigabytes) breaks
    assert time.perf_counter() - begin < 5
    assert plan.counts.nbytes < 2**20


def test_fingerprint_says_what_the_data_is():
    one = fingerprint([("a.tar", 3, 10_240), ("b.tar", 4, 20_480)])
    assert (one["shards"], one["samples"], one["bytes"]) == (2, 7, 30_720)
    assert one == fingerprint([("a.tar", 3, 10_240), ("b.tar", 4, 20_480)])
    assert one["hash"] != fingerprint([("b.tar", 4, 20_480), ("a.tar", 3, 10_240)])["hash"]
    assert one["hash"] != fingerprint([("a.tar", 4, 10_240), ("b.tar", 3, 20_480)])["hash"]
