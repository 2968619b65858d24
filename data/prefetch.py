"""Shards come to this machine in the order in which the plan reads them, ahead of the readers.

in: a plan, a place in the stream, remote shards  ->  out: shards in the cache; what of the cache is still needed
Invariant: nothing depends on it but the time that readers wait: what isn't there yet, they fetch themselves. One process of a job does it
for all ranks
of its machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ShardError
from .fetching import fetch
from .plan import Plan, shard_order
from .shard_cache import ShardCache
from .workers import forking

if TYPE_CHECKING:
    from .shards import Shard

THREADS = 4  # shards that are fetched at once
POLL = 0.1  # seconds
LONGEST_WINDOW = 4096  # shards


def block_shards(plan: Plan, epoch: int, block: int, lanes: range | None = None) -> np.ndarray:
    """The shards that the `block`-th block of every lane (of `lanes`) touches, in the order of the epoch: int64, each once."""
    order, ends = shard_order(plan, epoch)
    num_lanes = plan.lanes if plan.shuffle else 1
    short, longer = divmod(plan.num_samples, num_lanes)
    parts = []
    for lane in lanes if lanes is not None and num_lanes > 1 else range(num_lanes):
        start = lane * short + min(lane, longer) + block * block_size(plan)
        end = min(start + block_size(plan), (lane + 1) * short + min(lane + 1, longer))
        if start < end:
            first, last = np.searchsorted(ends, [start, end - 1], side="right")
            touched = order[first : last + 1]
            parts.append(touched[plan.counts[touched] > 0])
    return np.array(list(dict.fromkeys(np.concatenate(parts).tolist())) if parts else [], np.int64)


def machine_lanes(plan: Plan, ranks: range | None, world_size: int) -> range | None:
    """The lanes that ranks of one machine read, whose slots are dealt in the order of lanes; None for all of them."""
    if ranks is None or plan.lanes == 1 or not plan.shuffle:
        return None
    return range(ranks.start * plan.lanes // world_size, ceil(ranks.stop * plan.lanes / world_size))


def block_size(plan: Plan) -> int:
    """Samples that are read in no order of their own. Without shuffling it is only what workers may be apart."""
    return plan.shuffle_block if plan.shuffle else min(plan.shuffle_block, 1024)


def block_of(plan: Plan, position: int) -> tuple[int, int]:
    """(epoch, block of every lane) at a position."""
    epoch, offset = divmod(position, plan.num_samples)
    return epoch, offset // (plan.lanes if plan.shuffle else 1) // block_size(plan)


def num_blocks(plan: Plan) -> int:
    """Blocks of an epoch's longest lane."""
    return ceil(ceil(plan.num_samples / (plan.lanes if plan.shuffle else 1)) / block_size(plan))


def blocks_from(plan: Plan, position: int) -> Iterator[tuple[int, int]]:
    """(epoch, block) from a position to the end of the stream."""
    epoch, block = block_of(plan, position)
    while epoch < plan.epochs:
        yield epoch, block
        epoch, block = (epoch, block + 1) if block + 1 < num_blocks(plan) else (epoch + 1, 0)


def window_from(plan: Plan, position: int, sizes: np.ndarray, limit: int, lanes: range | None = None) -> list[int]:
    """The shards that are read from a position on, in the order of first use, as many as `limit` bytes hold; the first block's in any "
    "case."""
    window: dict[int, None] = {}
    total = 0
    for number, (epoch, block) in enumerate(blocks_from(plan, position)):
        touched = block_shards(plan, epoch, block, lanes).tolist()
        if number == 0:  # what the next samples need comes first
            near = plan.locate(np.arange(position, min(position + 512, plan.num_positions))).shard
            touched = list(dict.fromkeys([shard for shard in near.tolist() if shard in set(touched)] + touched))
        for shard in touched:
            if shard in window:
                continue
            total += int(sizes[shard])
            if number and (total > limit or len(window) >= LONGEST_WINDOW):
                return list(window)
            window[shard] = None
        if len(window) == len(plan.counts):
            break
    return list(window)


def largest_blocks(plan: Plan, sizes: np.ndarray, lanes: range | None = None, epochs: int = 4) -> int:
    """Bytes of the shards of two neighbouring blocks, where that is most (in the first epochs, and across their ends): readers stand "
    "in both."""
    largest = 0
    before: set[int] = set()
    for epoch, block in blocks_from(plan, 0):
        if epoch >= epochs:
            break
        now = set(block_shards(plan, epoch, block, lanes).tolist())
        largest = max(largest, int(sizes[list(now | before)].sum()))
        before = now
    return largest


def check_room(plan: Plan, shards: Sequence[Shard]) -> None:
    """Raises ShardError where a cache's limit is too small for what the stream reads at one time."""
    cache = cache_of(shards)
    if cache is None:
        return
    sizes = remote_sizes(shards)
    if int(sizes.sum()) <= cache.limit:
        return
    needed = max(largest_blocks(plan, sizes), int(sizes.max()))
    if needed > cache.limit:
        raise ShardError(
            f"--cache-size {cache.limit:,} is too small: the shards of two neighbouring blocks of {block_size(plan):,} samples have "
            f"{needed:,} bytes: "
            "give at least that (in bytes, or like 200GB), or a smaller --shuffle-block"
        )


def describe_start(plan: Plan, position: int, shards: Sequence[Shard]) -> list[str]:
    """What a run says before its first step: what the first block needs, and how much of it has to be fetched."""
    if not any(shard.remote for shard in shards):
        return []
    cache = cache_of(shards)
    sizes = remote_sizes(shards)
    if cache is None:
        return [
            f"{np.count_nonzero(sizes):,} remote shards, {_size(int(sizes.sum()))}, without a cache: samples are read by range requests"
        ]
    first = [i for i in block_shards(plan, *block_of(plan, position)).tolist() if sizes[i]]
    missing = [i for i in first if not cache.has(_entry(shards[i]))]
    besides = "" if 0 in first or not sizes[0] else f"; the first of the list, {_size(int(sizes[0]))}, is read besides, for its labels"
    return [
        f"the first block ({block_size(plan):,} samples) needs {len(first):,} of {np.count_nonzero(sizes):,} remote shards, "
        f"{_size(int(sizes[first].sum()))} of "
        f"{_size(int(sizes.sum()))}; to fetch: {len(missing):,} shards, {_size(int(sizes[missing].sum()))}; cache {cache.folder}, at "
        f"most {_size(cache.limit)}{besides}"
    ]


def cache_of(shards: Sequence[Shard]) -> ShardCache | None:
    return next((shard.remote.cache for shard in shards if shard.remote is not None and shard.remote.cache is not None), None)


def remote_sizes(shards: Sequence[Shard]) -> np.ndarray:
    """Bytes of each shard; 0 of those on a local disk."""
    return np.array([shard.num_bytes if shard.remote is not None else 0 for shard in shards], np.int64)


def _entry(shard: Shard) -> str:
    assert shard.remote is not None
    return shard.remote.entry


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


class Prefetch:
    """As a context: a process that fetches ahead while the stream is read. `at(position)` tells how far it is consumed.

    Only the first rank of a machine that comes has one; others do nothing. lanes: those that this machine reads (None: all).
    """

    def __init__(self, shards: Sequence[Shard], plan: Plan, position: int, lanes: range | None = None) -> None:
        self._shards, self._plan, self._lanes = shards, plan, lanes
        self._position: Any = None
        self._process: BaseProcess | None = None
        self._start = position

    def __enter__(self) -> Prefetch:
        cache = cache_of(self._shards)
        if cache is None or "fork" not in multiprocessing.get_all_start_methods() or multiprocessing.current_process().daemon:
            return self
        digest = hashlib.sha256(repr([(s.path, s.num_bytes) for s in self._shards]).encode("utf-8", "surrogateescape"))
        digest.update(repr((self._plan.seed, self._plan.shuffle, self._plan.shuffle_block, self._plan.lanes, self._plan.epochs)).encode())
        path = os.path.join(cache.folder, "jobs", f"{os.getppid()}-{digest.hexdigest()[:16]}")
        job = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another rank of this job does it
            os.close(job)
            return self
        context = multiprocessing.get_context("fork")
        self._position = RawValue("q", self._start)  # no lock: a process that is killed would keep it
        process = context.Process(target=_run, args=(self._shards, self._plan, self._lanes, job, path, self._position), daemon=True)
        with forking():
            process.start()
        os.close(job)  # the lock is the process's now
        self._process = process
        self._end = Finalize(self, _stop, (process,), exitpriority=10)
        return self

    def at(self, position: int) -> None:
        """The stream is consumed up to here."""
        if self._position is not None:
            self._position.value = position

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._end()
            self._process = None


def _stop(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _run(shards: Sequence[Shard], plan: Plan, lanes: range | None, job: int, path: str, position: Any) -> None:
    from .shards import follow_parent

    follow_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as loader workers: until the rank has saved
    cache = cache_of(shards)
    assert cache is not None
    sizes = remote_sizes(shards)
    pool = ThreadPoolExecutor(THREADS)
    start = position.value
    while position.value < plan.num_positions:
        here, before_first = block_of(plan, position.value), position.value == start
        limit = 0 if before_first else cache.limit  # until a batch is handed over the line is for the first block alone
        window = [i for i in window_from(plan, position.value, sizes, limit, lanes) if sizes[i]]
        _tell(cache, job, path, [_entry(shards[i]) for i in window])
        while block_of(plan, position.value) == here and (position.value == start) == before_first:
            missing = [i for i in window if not cache.has(_entry(shards[i]))]
            if not missing:
                time.sleep(POLL)
                continue
            fetch_one = partial(_fetch_one, threading.Event(), position, plan, here)
            if not any(list(pool.map(fetch_one, [shards[i] for i in missing]))):
                time.sleep(POLL)
    os._exit(0)


def _fetch_one(left: threading.Event, position: Any, plan: Plan, here: tuple[int, int], shard: Shard) -> bool:
    """Whether the shard is there now. Once there is no room, or the readers are in another block, `left` ends the round."""
    assert shard.remote is not None
    if left.is_set() or block_of(plan, position.value) != here:
        return False
    try:
        fetched = fetch(shard.remote, shard.num_samples, wait=False)
    except ShardError:
        fetched = False  # whoever reads the shard meets the same, and says it
    if fetched is False:
        left.set()
    return bool(fetched)


def _tell(cache: ShardCache, job: int, path: str, names: Sequence[str]) -> None:
    """Say what this job needs: those are evicted last."""
    with cache.locked():
        os.ftruncate(job, 0)
        os.pwrite(job, "\n".join(names).encode("utf-8", "surrogateescape"), 0)
