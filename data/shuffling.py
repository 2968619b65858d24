"""How well a plan shuffles, and what that costs. PURE.

in: a Plan, the class and the bytes of every sample, a batch size  ->  out: Quality: displacement, class mix, bytes and shards a batch
Invariant: measured on the plan's own positions, so it is what a run would read. The ideal is a full permutation of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import Plan

READ_AHEAD = 128 << 10  # bytes: what Linux reads around a byte that is asked for
_BATCHES = 200  # looked at, spread over the epoch
_SEED = 5


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of every sample in index order: int64 (N,) each. shard: its number; start, size: its bytes there; label: a class
    number, -1 for none."""

    shard: np.ndarray
    start: np.ndarray
    size: np.ndarray
    label: np.ndarray


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one plan; shares are of all samples.

    displacement: mean distance between a sample's place in the stream and in the shards, as a share (a full permutation: 1/3).
    apart: about how many samples stand between two neighbours of a tar. classes: different ones in a batch, on average; class_gap: half
    the sum of the differences between a batch's class shares and the whole's, in 0..1; ideal_*: the same of a full permutation.
    batch_bytes: what a batch asks for; read_bytes: with the read-ahead around it; window_bytes: of the samples that are permuted
    together, over all lanes; shards: that a batch touches; window_shards: that the window touches.
    """

    block: int
    lanes: int
    displacement: float
    apart: float
    classes: float
    ideal_classes: float
    class_gap: float
    ideal_class_gap: float
    batch_bytes: float
    read_bytes: float
    window_bytes: float
    shards: float
    window_shards: float

    @property
    def mix(self) -> float:
        """How near the class mix is to the ideal: 1 is as good as a full permutation, 0 is one class a batch."""
        if self.ideal_class_gap >= 1:
            return 1.0
        return float(np.clip((1 - self.class_gap) / (1 - self.ideal_class_gap), 0, 1))


def measure(plan: Plan, stored: Stored, batch_size: int) -> Quality:
    """The quality of a plan's first epoch for global batches of `batch_size`."""
    total = plan.num_samples
    batch_size = min(batch_size, total)
    num_batches = max(1, total // batch_size)
    chosen = np.unique(np.linspace(0, num_batches - 1, min(_BATCHES, num_batches)).astype(np.int64))
    position = (chosen[:, None] * batch_size + np.arange(batch_size)).reshape(-1)
    sample = plan.locate(position).sample.reshape(len(chosen), batch_size)
    counts = np.bincount(stored.label + 1, minlength=1)
    gaps, kinds = _class_mix(stored.label[sample] + 1, counts)
    ideal_gap, ideal_kinds = _ideal_mix(counts, batch_size)
    shards = np.mean([len(np.unique(row)) for row in stored.shard[sample]])
    window = min(plan.shuffle_block * plan.lanes, total) if plan.shuffle else batch_size
    return Quality(
        block=plan.shuffle_block,
        lanes=plan.lanes,
        displacement=float(np.abs(position - sample.reshape(-1)).mean() / total),
        apart=window / 3 if plan.shuffle else 1.0,
        classes=float(kinds.mean()),
        ideal_classes=ideal_kinds,
        class_gap=float(gaps.mean()),
        ideal_class_gap=ideal_gap,
        batch_bytes=float(stored.size[sample].sum(axis=1).mean()),
        read_bytes=float(np.mean([_read_bytes(stored, row) for row in sample])),
        window_bytes=float(stored.size.sum() * window / total),
        shards=float(shards),
        window_shards=min(float(len(np.unique(stored.shard))), window * len(np.unique(stored.shard)) / total + plan.lanes),
    )


def blocks_around(block: int, num_samples: int) -> list[int]:
    """Block sizes to compare with `block`: a sixteenth to sixteen times, and all samples."""
    sizes = {max(1, min(block * factor // 16, num_samples)) for factor in (1, 4, 16, 64, 256)}
    return sorted(sizes | {min(block, num_samples), num_samples})


def _class_mix(labels: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of labels (batches, B): its distance from the whole's class shares, and how many classes it has."""
    shares = counts / counts.sum()
    gaps, kinds = [], []
    for row in labels:
        mine = np.bincount(row, minlength=len(counts))
        gaps.append(0.5 * np.abs(mine / len(row) - shares).sum())
        kinds.append(np.count_nonzero(mine))
    return np.array(gaps), np.array(kinds)


def _ideal_mix(counts: np.ndarray, batch_size: int) -> tuple[float, float]:
    """The same for batches drawn at random from all samples."""
    rng = np.random.default_rng(_SEED)
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = np.stack([labels[rng.integers(0, len(labels), batch_size)] for _ in range(100)])
    if batch_size * 2 > len(labels):  # with replacement would be too far off
        rows = np.stack([rng.permutation(labels)[:batch_size] for _ in range(100)])
    gaps, kinds = _class_mix(rows, counts)
    return float(gaps.mean()), float(kinds.mean())


def _read_bytes(stored: Stored, samples: np.ndarray) -> int:
    """Bytes of the pieces of READ_AHEAD that hold these samples."""
    first = (stored.start[samples] // READ_AHEAD).tolist()
    last = ((stored.start[samples] + stored.size[samples] - 1) // READ_AHEAD).tolist()
    pieces = {(s, i) for s, f, e in zip(stored.shard[samples].tolist(), first, last, strict=True) for i in range(f, e + 1)}
    return len(pieces) * READ_AHEAD
