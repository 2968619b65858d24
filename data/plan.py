"""Which sample stands at position p of the stream, and who reads it.

in: the number of samples in each shard, a seed  ->  out: shard and index for any position, the slots of any rank's batch
Invariant: pure and O(1): the sample at a position follows from (seed, position) alone. Batch size, ranks and workers only cut
the stream, they never change it; nothing before a position has to be played to know what stands there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

import numpy as np

ROUNDS = 4
ORDER, BLOCK, AUGMENT = 0, 1, 2  # what a key is for: the third entry of every seed tuple
SHUFFLE_BLOCK = 16_384


def permute(index: np.ndarray, size: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Where a keyed permutation of range(size) sends `index`; no table is built.

    index: int64 (n,), each below its size; size: int64 (n,) or one int; keys: uint64 (n, ROUNDS) or (ROUNDS,).
    A Feistel network over a grid of a x b cells with a*b >= size (M. Luby and C. Rackoff, 1988), and cycle-walking for the
    few cells past size (J. Black and P. Rogaway, 2002). The grid is nearly square, so hardly any index walks.
    """
    size = np.broadcast_to(np.asarray(size, np.int64), index.shape)
    keys = np.broadcast_to(keys, (*index.shape, ROUNDS))
    a = np.ceil(np.sqrt(size)).astype(np.int64)
    b = -(-size // np.maximum(a, 1))
    out = _feistel(index, a, b, keys)
    walking = np.flatnonzero(out >= size)
    while walking.size:
        out[walking] = _feistel(out[walking], a[walking], b[walking], keys[walking])
        walking = walking[out[walking] >= size[walking]]
    return out


def _feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(x, b)
    for i in range(0, ROUNDS, 2):
        left = (left + _mix(right, keys[:, i], a)) % a
        right = (right + _mix(left, keys[:, i + 1], b)) % b
    return left * b + right


def _mix(x: np.ndarray, key: np.ndarray, modulus: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (splitmix64, G. Steele et al., 2014) of x and key, reduced to range(modulus)."""
    return (_finalise(x.astype(np.uint64) + key) % modulus.astype(np.uint64)).astype(np.int64)


def _finalise(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=4096)
def _keys(*seed: int) -> np.ndarray:
    return np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one rank's batch, or of any run of positions: arrays of one length.

    position, epoch, shard, index (in its shard) and sample (0..N-1, in index order) are int64; valid is bool.
    """

    position: np.ndarray
    epoch: np.ndarray
    shard: np.ndarray
    index: np.ndarray
    sample: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """The stream over `epochs` epochs of the samples that `counts` (samples per shard, zeros allowed) names.

    shuffle=False is index order; `lanes` then has no effect. Raises ValueError for no samples or a value out of range.
    """

    counts: np.ndarray
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    shuffle_block: int = SHUFFLE_BLOCK
    lanes: int = 1
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        counts = np.ascontiguousarray(self.counts, np.int64)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "num_samples", int(counts.sum()))
        if self.num_samples == 0:
            raise ValueError(f"the {len(counts)} shards hold no samples: nothing to read")
        bounds = {"epochs": (1, None), "seed": (0, 2**32), "shuffle_block": (1, 2**31), "lanes": (1, self.num_samples + 1)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value < low or (high is not None and value >= high):
                upper = "" if high is None else f" and at most {high - 1}"
                raise ValueError(f"{name} is {value}: it must be at least {low}{upper}")

    @property
    def num_positions(self) -> int:
        """Where training ends."""
        return self.epochs * self.num_samples

    def num_steps(self, start: int, batch_size: int) -> int:
        """How many global batches are left from position `start`."""
        return max(0, ceil((self.num_positions - start) / batch_size))

    def epochs_completed(self, start: int, batch_size: int) -> int:
        """How many epochs the global batch at `start` completes (the batch row `epoch_end`)."""
        end = min(start + batch_size, self.num_positions)
        return end // self.num_samples - start // self.num_samples

    def lane_of(self, position: np.ndarray) -> np.ndarray:
        """The lane of each position; all are in lane 0 when nothing is shuffled."""
        return position % self.num_samples % (self.lanes if self.shuffle else 1)

    def locate(self, position: np.ndarray) -> Slots:
        """What stands at each position (int64, any order); positions past the end go on as if epochs had no end."""
        position = np.asarray(position, np.int64)
        epoch, offset = np.divmod(position, self.num_samples)
        shard, index, sample = (np.empty_like(position) for _ in range(3))
        for e in np.unique(epoch):
            here = epoch == e
            shard[here], index[here], sample[here] = self._locate_in_epoch(int(e), offset[here])
        return Slots(position, epoch, shard, index, sample, position < self.num_positions)

    def _locate_in_epoch(self, epoch: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        order, ends = shard_order(self, epoch)
        place = self._shuffled(epoch, q) if self.shuffle else q  # rank of the sample in the order of shards
        nth = np.searchsorted(ends, place, side="right")  # empty shards end where they start, so none is found
        shard = order[nth]
        index = place - (ends[nth] - self.counts[shard])
        return shard, index, _shard_starts(self)[shard] + index

    def _shuffled(self, epoch: int, q: np.ndarray) -> np.ndarray:
        lane, j = q % self.lanes, q // self.lanes
        short, longer = divmod(self.num_samples, self.lanes)  # the first `longer` lanes hold one sample more
        lane_size = short + (lane < longer)
        block, within = np.divmod(j, self.shuffle_block)
        size = np.minimum(self.shuffle_block, lane_size - block * self.shuffle_block)
        num_blocks = -(-(short + 1) // self.shuffle_block)
        pairs, which = np.unique(lane * num_blocks + block, return_inverse=True)
        keys = np.stack([_keys(self.seed, epoch, BLOCK, *divmod(pair, num_blocks)) for pair in pairs.tolist()])[which]
        lane_start = lane * short + np.minimum(lane, longer)
        return lane_start + block * self.shuffle_block + permute(within, size, keys)

    def batch(self, start: int, batch_size: int, rank: int, world_size: int) -> Slots:
        """The ceil(batch_size / world_size) slots of `rank` in the global batch of positions [start, start + batch_size).

        Slots are dealt in order of lanes, so that a machine can keep to its own lanes. A rank whose share is one short is
        padded with the slot that its neighbour also has, masked: ordinary data, counted once.
        """
        return self.batches([start], batch_size, rank, world_size)[0]

    def batches(self, starts: Sequence[int], batch_size: int, rank: int, world_size: int) -> list[Slots]:
        """`batch` of several starts: what numpy does for 256 positions takes hardly less time than for 4,096."""
        assert 0 <= rank < world_size <= batch_size
        position = np.asarray(starts, np.int64)[:, None] + np.arange(batch_size)
        if self.lanes > 1 and self.shuffle:
            position = np.take_along_axis(position, np.argsort(self.lane_of(position), axis=1, kind="stable"), axis=1)
        first, end = rank * batch_size // world_size, (rank + 1) * batch_size // world_size
        width = -(-batch_size // world_size)
        found = self.locate(np.ascontiguousarray(position[:, first : first + width]).reshape(-1))
        found.valid.reshape(-1, width)[:, end - first :] = False
        columns = (found.position, found.epoch, found.shard, found.index, found.sample, found.valid)
        return [Slots(*[column[at : at + width] for column in columns]) for at in range(0, len(starts) * width, width)]

    def sample_rng(self, epoch: int, sample: int) -> np.random.Generator:
        """The generator of a sample's augmentation: the same whoever reads it, and after a resume."""
        return self.sample_rngs(np.array([epoch]), np.array([sample]))(0)

    def sample_rngs(self, epoch: np.ndarray, sample: np.ndarray) -> Callable[[int], np.random.Generator]:
        """`sample_rng` of many, int64 (n,) each: i -> the generator of sample i, to be used up before the next is asked for.

        One generator is set to one state after the other, which takes a twentieth of the time that making one takes.
        """
        keys = np.stack([_keys(self.seed, int(e), AUGMENT, 0) for e in epoch])
        states = _finalise(_finalise(sample.astype(np.uint64)[:, None] + keys) ^ keys[:, ::-1]).tolist()
        source = np.random.PCG64(0)
        generator = np.random.Generator(source)

        def rng(i: int) -> np.random.Generator:
            a, b, c, d = states[i]
            state = {"state": a << 64 | b, "inc": c << 64 | d | 1}  # PCG's increment is odd
            source.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}  # type: ignore[typeddict-item]
            return generator

        return rng


@lru_cache(maxsize=4)  # a step may straddle two epochs; 10^5 shards cost 1.6 MB an entry
def shard_order(plan: Plan, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.arange(len(plan.counts))
    if plan.shuffle:
        # where the permutation sends i is the i-th shard
        order = permute(order, len(order), _keys(plan.seed, epoch, ORDER))
    return order, np.cumsum(plan.counts[order])


@lru_cache(maxsize=4)
def _shard_starts(plan: Plan) -> np.ndarray:
    return np.cumsum(plan.counts) - plan.counts


def fingerprint(shards: Iterable[tuple[str, int, int]]) -> dict[str, int | str]:
    """What a set of shards is, in a few bytes: totals, and a hash over (relative path, samples, bytes) in order."""
    digest = hashlib.sha256()
    totals = [0, 0, 0]
    for path, num_samples, num_bytes in shards:
        digest.update(f"{path}\0{num_samples}\0{num_bytes}\n".encode("utf-8", "surrogateescape"))
        totals = [totals[0] + 1, totals[1] + num_samples, totals[2] + num_bytes]
    return {"shards": totals[0], "samples": totals[1], "bytes": totals[2], "hash": digest.hexdigest()[:32]}
