"""Evidence that an epoch had each sample exactly once: a sketch of what was consumed, against what must come of it.

in: the numbers of the samples that steps consumed  ->  out: seen, distinct, repeated, missed
Invariant: adding is order-free and sums over ranks, so the sketch needs no lists and no talk between ranks before the epoch's end.
What an exact epoch gives is known in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESIDUES = 4096  # 32 KB an epoch
SIZE = RESIDUES + 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one epoch consumed. Where not exact, repeated and missed are lower bounds: errors in one residue may cancel."""

    seen: int
    distinct: int
    repeated: int
    missed: int

    @property
    def exact(self) -> bool:
        """Whether every sample was consumed once."""
        return self.repeated == self.missed == 0


def new_sketch() -> np.ndarray:
    """An empty sketch: int64, how often each residue came, then the sum of the numbers and of their squares, modulo 2^64."""
    return np.zeros(SIZE, np.int64)


def add(sketch: np.ndarray, samples: np.ndarray) -> None:
    """Count consumed samples by their numbers (int64, 0..N-1), in place."""
    np.add.at(sketch, samples % RESIDUES, 1)
    with np.errstate(over="ignore"):
        sketch[-2] += samples.sum()
        sketch[-1] += (samples * samples).sum()


def judge(sketch: np.ndarray, num_samples: int) -> Verdict:
    """Compare the sum of all ranks' sketches of one epoch with an exact epoch of `num_samples`."""
    counts = sketch[:RESIDUES]
    surplus = counts - (num_samples // RESIDUES + (np.arange(RESIDUES) < num_samples % RESIDUES))
    seen = int(counts.sum())
    repeated, missed = int(surplus[surplus > 0].sum()), int(-surplus[surplus < 0].sum())
    if not repeated and not missed and (int(sketch[-2]), int(sketch[-1])) != _power_sums(num_samples):
        repeated = missed = 1  # one sample stood in for another of its residue
    return Verdict(seen, seen - repeated, repeated, missed)


def _power_sums(n: int) -> tuple[int, int]:
    """The sums of 0..n-1 and of their squares, as int64 that has wrapped."""
    return _wrapped(n * (n - 1) // 2), _wrapped((n - 1) * n * (2 * n - 1) // 6)


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
