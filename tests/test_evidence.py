"""evidence.py: an exact epoch is told from every other, whoever consumed it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.evidence import RESIDUES, Verdict, add, judge, new_sketch


def sketch_of(*parts):
    total = new_sketch()
    for part in parts:
        sketch = new_sketch()
        add(sketch, np.array(part, np.int64))
        total += sketch
    return total


@settings(deadline=None)
@given(num_samples=st.integers(1, 3 * RESIDUES), seed=st.integers(0, 99), ranks=st.integers(1, 5))
def test_an_exact_epoch_in_any_order_over_any_ranks(num_samples, seed, ranks):
    order = np.random.default_rng(seed).permutation(num_samples)
    verdict = judge(sketch_of(*np.array_split(order, ranks)), num_samples)
    assert verdict == Verdict(num_samples, num_samples, 0, 0) and verdict.exact


def test_repeats_and_losses_are_counted():
    everyone = list(range(10_000))
    assert judge(sketch_of(everyone, [5]), 10_000) == Verdict(10_001, 10_000, 1, 0)
    assert judge(sketch_of(everyone[3:]), 10_000) == Verdict(9_997, 9_997, 0, 3)
    assert judge(sketch_of(everyone[2:], [77, 78, 78]), 10_000) == Verdict(10_001, 9_998, 3, 2)


@pytest.mark.parametrize("lost, twice", [(1, 1 + RESIDUES), (7, 7 + 2 * RESIDUES), (5000, 5000 - RESIDUES)])
def test_a_swap_within_one_residue_is_seen(lost, twice):
    verdict = judge(sketch_of([n for n in range(20_000) if n != lost], [twice]), 20_000)
    assert verdict == Verdict(20_000, 19_999, 1, 1)


def test_numbers_whose_squares_overflow():
    samples = np.array([10**9, 4 * 10**9], np.int64)
    assert sketch_of(samples)[-1] == ((10**18 + 16 * 10**18 + 2**63) % 2**64) - 2**63
