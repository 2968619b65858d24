"""data/prefetch.py: which shards the stream needs next; the process that fetches them."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from remote_shards import Site, nginx, published, read_ids, site  # noqa: F401

from data import Plan, ShardError, build_loader, load_shards
from data.prefetch import block_of, block_shards, blocks_from, check_room, describe_start, largest_blocks, machine_lanes, window_from

COUNTS = np.array([7, 5, 0, 3, 1, 41, 20, 9])


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_block_needs_just_the_shards_of_its_samples(lanes: int, shuffle: bool) -> None:
    plan = Plan(COUNTS, epochs=2, seed=1, shuffle=shuffle, shuffle_block=8, lanes=lanes)
    slots = plan.locate(np.arange(plan.num_positions))
    blocks = np.array([block_of(plan, p) for p in range(plan.num_positions)])
    expected = list(dict.fromkeys(map(tuple, blocks.tolist())))
    assert list(blocks_from(plan, 0)) == expected
    assert list(blocks_from(plan, 90)) == [block for block in expected if block >= block_of(plan, 90)]
    for epoch, block in expected:
        read = set(slots.shard[(blocks == (epoch, block)).all(axis=1)].tolist())
        assert set(block_shards(plan, epoch, block).tolist()) == read


def test_a_machine_of_some_lanes_needs_those_lanes_shards() -> None:
    plan = Plan(COUNTS, seed=1, shuffle_block=8, lanes=2)
    assert machine_lanes(plan, None, 4) is None and machine_lanes(plan, range(2), 4) == range(1)
    assert machine_lanes(plan, range(2, 4), 4) == range(1, 2) and machine_lanes(plan, range(1, 3), 4) == range(2)
    both = [block_shards(plan, 0, 0, range(lane, lane + 1)).tolist() for lane in (0, 1)]
    assert set(both[0]) | set(both[1]) == set(block_shards(plan, 0, 0).tolist())


def test_the_window_holds_what_comes_next_in_its_order() -> None:
    plan = Plan(COUNTS, epochs=3, seed=1, shuffle_block=8)
    sizes = COUNTS * 10
    for position in (0, 50, 200):
        whole = window_from(plan, position, sizes, 10**9)
        rest = range(position // 8 * 8, plan.num_positions) if position < 86 else range(position, plan.num_positions)
        assert set(whole) >= set(plan.locate(np.array(rest)).shard.tolist()) and len(whole) == len(set(whole))
        first = block_shards(plan, *block_of(plan, position)).tolist()
        assert sorted(whole[: len(first)]) == sorted(first)
        assert whole[0] == plan.locate(np.array([position])).shard[0]
        some = window_from(plan, position, sizes, 500)
        assert some == whole[: len(some)] and (sizes[some].sum() <= 500 or set(some) == set(first))


def test_a_limit_that_is_too_small_is_refused_with_the_one_that_would_do(site, published) -> None:
    published([30] * 8)
    shards = load_shards(site.shards(8), cache_dir=str(site.folder / "cache"), cache_size=10**9)
    plan = Plan(np.array([30] * 8), epochs=3, shuffle_block=30)
    sizes = np.array([shard.num_bytes for shard in shards])
    needed = largest_blocks(plan, sizes)
    assert sizes.max() < needed <= 3 * sizes.max()
    kwargs: dict[str, Any] = {"batch_size": 4, "epochs": 3, "shuffle_block": 30, "img_size": 32, "cache_dir": str(site.folder / "c")}
    with pytest.raises(ShardError) as refused:
        build_loader(site.shards(8), cache_size=needed - 1, **kwargs)
    assert str(refused.value).startswith(
        f"--cache-size {needed - 1:,} is too small: the shards of two neighbouring blocks of 30 samples have {needed:,} bytes: give"
    )
    build_loader(site.shards(8), cache_size=needed, **kwargs)
    check_room(plan, shards)
    first, block = describe_start(plan, 0, shards), block_shards(plan, 0, 0)
    assert first[0].startswith(f"the first block (30 samples) needs {len(block)} of 8 remote shards, ")
    assert f"; to fetch: {len(block)} shards, {sizes[block].sum() / 1e6:.1f} MB; cache {site.folder}/cache, at most 1.0 GB" in first[0]


def test_the_limit_holds_over_three_epochs_of_three_times_the_data(site, published) -> None:
    paths = published([40] * 12)
    folder = site.folder / "cache"
    total = sum(map(os.path.getsize, paths))
    limit = total // 3
    largest, done = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.is_set():
            try:
                largest = max(largest, sum(entry.stat().st_size for entry in os.scandir(folder / "shards")))
            except FileNotFoundError:
                pass
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    kwargs = {"epochs": 3, "shuffle_block": 20, "num_workers": 2}
    try:
        remote_ids = read_ids(site.shards(12), cache_dir=str(folder), cache_size=limit, **kwargs)
    finally:
        done.set()
        watcher.join()
    assert remote_ids == read_ids(paths, **kwargs)
    assert total // 6 < largest <= limit
    fetched = len({path for path, *_ in site.requests()})
    assert fetched == 12


def test_data_that_fits_is_fetched_once_and_by_one_process(site, published) -> None:
    paths = published([40] * 6)
    folder = str(site.folder / "cache")
    kwargs = {"epochs": 3, "num_workers": 2, "shuffle_block": 60}
    site.requests()
    assert read_ids(site.shards(6), cache_dir=folder, **kwargs) == read_ids(paths, **kwargs)
    assert sorted(path[-7:] for path, *_ in site.requests()) == [f"{i:03d}.tar" for i in range(6)]
    assert os.listdir(os.path.join(folder, "jobs")) == [] or len(os.listdir(os.path.join(folder, "jobs"))) == 1
    read_ids(site.shards(6), cache_dir=folder, **kwargs)
    assert site.requests() == []


def test_readers_go_on_when_the_process_that_fetches_is_killed(site, published) -> None:
    paths = published([20] * 12)
    kwargs: dict[str, Any] = {"batch_size": 12, "num_classes": 3, "img_size": 32, "shuffle_block": 20}
    loader = build_loader(site.shards(12), cache_dir=str(site.folder / "cache"), **kwargs)
    others = multiprocessing.active_children()  # such as the ranks of other tests
    ids = []
    for step, batch in enumerate(loader):
        ids.append(batch["ids"])
        if step == 1:
            (fetching,) = set(multiprocessing.active_children()) - set(others)
            fetching.kill()
            fetching.join()
    assert ids == [batch["ids"] for batch in build_loader(paths, **kwargs)]


def test_the_first_batch_of_a_thousand_shards_needs_a_few_of_them(site, published) -> None:
    published([10], side=64)
    size = os.path.getsize(site.folder / "000.tar")
    for number in range(1, 1000):
        os.link(site.folder / "000.tar", site.folder / f"{number:03d}.tar")
    (site.folder / "sizes.json").write_text(json.dumps({f"{number:03d}.tar": 10 for number in range(1000)}))
    site.requests()
    loader = build_loader(
        site.shards(1000), batch_size=8, num_classes=3, img_size=32, shuffle_block=40, cache_dir=str(site.folder / "cache"),
        cache_size=10 * size,
    )  # fmt: skip
    assert len(site.requests()) == 1  # the first shard, for its labels
    batches = iter(loader)
    next(batches)
    first = set(block_shards(loader.plan, 0, 0).tolist())
    fetched = [int(path[-7:-4]) for path, *_ in site.requests()]
    batches.close()  # type: ignore[attr-defined]
    assert len(first) in (4, 5) and len(set(fetched)) == len(fetched) <= 10  # nothing is fetched that the cache can't hold
    assert set(fetched[: len(first - {0})]) == first - {0}  # nothing else is asked for before the first batch is handed over


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_beyond_the_first_block_is_fetched_before_the_first_batch(site, published, num_workers) -> None:
    published([10] * 30)
    loader = build_loader(
        site.shards(30), batch_size=8, num_classes=3, img_size=32, shuffle_block=40, num_workers=num_workers,
        cache_dir=str(site.folder / "cache"), cache_size=10**9, stages=[Slowly(str(site.folder))],
    )  # fmt: skip
    site.requests()
    (line,) = describe_start(loader.plan, 0, loader.shards)
    first = set(block_shards(loader.plan, 0, 0).tolist())
    size = loader.shards[0].num_bytes / 1e6
    assert 0 not in first and line.endswith(f"; the first of the list, {size:.1f} MB, is read besides, for its labels")
    batches = iter(loader)
    next(batches)
    assert set(map(int, (site.folder / "seen").read_text().split())) <= {0, *first}
    end = time.monotonic() + 20
    while len(os.listdir(site.folder / "cache" / "shards")) < 30:  # then all of it comes, since there is room
        assert time.monotonic() < end
        time.sleep(0.02)
    batches.close()  # type: ignore[attr-defined]
    fetched = [int(path[-7:-4]) for path, *_ in site.requests()]
    assert set(fetched[: len(first)]) == first and sorted(fetched) == list(range(1, 30))


class Slowly:
    """A stage that gives a fetching process time to go too far, and notes what is in the cache before the first batch is handed over."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, samples):
        time.sleep(0.3)
        try:
            with open(os.path.join(self.folder, "seen"), "x") as seen:
                seen.write(" ".join(name[:3] for name in os.listdir(os.path.join(self.folder, "cache", "shards"))))
        except FileExistsError:
            pass
        yield from samples
