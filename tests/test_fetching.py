"""data/fetching.py and data/remote_files.py: shards that arrive whole or not at all, once a machine, in the version that was seen."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import servers
from remote_shards import nginx, published, read_ids, site  # noqa: F401

from data import ShardError, StaleIndexError, fetching, load_shards, remote, retrying
from data.fetching import fetch, open_fetched
from data.remote_files import RemoteFiles
from data.tar import parse_sample


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retrying, "LONGEST_PAUSE", 0.05)


def fetch_all(shards):
    for shard in shards:
        os.close(open_fetched(shard.remote, shard.num_samples))


def test_two_jobs_fetch_each_shard_once(site, published) -> None:
    published([60] * 8)
    shards = load_shards(site.shards(8), cache_dir=str(site.folder / "cache"))
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=fetch_all, args=(order,)) for order in (shards, shards, shards[::-1])]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert sorted(path[-7:] for path, *_ in site.requests()) == [f"{i:03d}.tar" for i in range(8)]


def test_a_fetch_that_is_killed_is_made_anew(site, published, monkeypatch) -> None:
    paths = published([60])
    slow = servers.faulty(site.server.url, lambda path, number: "stall" if path.endswith(".tar") and number > 3 else "")
    with slow as proxy:
        url = site.url.replace(site.server.url, proxy.url) + "/000.tar"
        (shard,) = load_shards(url, cache_dir=str(site.folder / "cache"))
        assert shard.remote is not None
        proxy.fault = lambda path, number: "stall"
        job = multiprocessing.get_context("fork").Process(target=fetch_all, args=([shard],))
        job.start()
        end = time.monotonic() + 20
        while not proxy.count["stall"]:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.1)
        assert job.pid is not None
        os.kill(job.pid, signal.SIGKILL)
        job.join()
        folder = site.folder / "cache" / "shards"
        assert [name[-5:] for name in os.listdir(folder)] == [".part"]
        proxy.fault = lambda path, number: ""
        assert fetch(shard.remote, shard.num_samples, wait=False)
    (name,) = os.listdir(folder)
    with open(paths[0], "rb") as local:
        assert (folder / name).read_bytes() == local.read()


def test_equal_names_of_other_places_do_not_collide(site, published) -> None:
    published([5])
    (site.folder / "other").mkdir()
    paths = published([5], classes=1)
    (site.folder / "other" / "000.tar").write_bytes(open(paths[0], "rb").read() + bytes(1024))
    cache = str(site.folder / "cache")
    both = load_shards([f"{site.url}/000.tar", f"{site.url}/other/000.tar"], cache_dir=cache)
    fetch_all(both)
    assert len({shard.tar_path for shard in both}) == 2 == len(os.listdir(os.path.join(cache, "shards")))


def test_a_sha256_that_is_not_the_published_one_is_refused(site, published) -> None:
    published([5])
    (shard,) = load_shards(f"{site.url}/000.tar")
    assert shard.remote is not None
    wrong = replace(shard.remote, sha256="0" * 64)
    with pytest.raises(ShardError, match="000.tar: its sha256 is not the one in dataset.json, or on the Hub: it was changed"):
        fetch(wrong, 5, wait=True)
    assert wrong.cache is not None and os.listdir(os.path.join(wrong.cache.folder, "shards")) == []


@pytest.mark.parametrize("cache_dir", ["none", None])
def test_a_shard_that_changes_after_the_start_is_refused_by_name(site, published, cache_dir) -> None:
    published([60])
    shards = load_shards(f"{site.url}/000.tar", cache_dir=cache_dir)
    data = (site.folder / "000.tar").read_bytes()
    (site.folder / "000.tar").write_bytes(data[:-512])
    with pytest.raises(ShardError) as refused:
        read_ids(shards)
    assert str(refused.value).startswith(f"{site.url}/000.tar: it changed on the server since its index was read")


def test_samples_are_read_by_range_neighbours_together(site, published) -> None:
    published([60])
    (shard,) = load_shards(f"{site.url}/000.tar", cache_dir="none")
    files = RemoteFiles()
    site.server.requests()
    files.read_ahead([shard], np.zeros(5, np.int64), np.array([3, 4, 5, 59, 3]))
    found = [parse_sample(*files.read(shard, i), shard.name)[0] for i in (3, 4, 5, 59)]
    assert found == ["s00003", "s00004", "s00005", "s00059"]
    assert len(site.requests(least=1)) == 2  # 3..5 together (and what lies within NEARBY), 59 apart
    parse_sample(*files.read(shard, 7), shard.name)
    assert len(site.requests(least=1)) == 1


def test_a_server_without_ranges(site, published) -> None:
    paths = published([60])

    class NoRanges(servers.FaultyProxy):
        def answer(self, request):
            del request.headers["Range"]
            super().answer(request)

    proxy = NoRanges(site.server.url, lambda path, number: "cut" if number == 3 else "")
    try:
        url = site.url.replace(site.server.url, proxy.url) + "/000.tar"
        assert not remote.stat(url).ranges
        assert read_ids(url) == read_ids(paths)
        with pytest.raises(ShardError, match="the server serves no ranges of it: use a cache"):
            read_ids(url, cache_dir="none")
    finally:
        proxy.close()


def test_a_fault_now_and_then_leaves_the_bytes_as_they_are(site, published, monkeypatch) -> None:
    paths = published([60] * 3)
    monkeypatch.setattr(fetching, "CHUNK", 20_000)
    faults = {"503": 0.05, "reset": 0.05, "cut": 0.05, "short": 0.05}
    with servers.faulty(site.server.url, servers.drawn(faults)) as proxy:
        url = site.shards(3).replace(site.server.url, proxy.url)
        for cache_dir in ("none", None):
            assert read_ids(url, cache_dir=cache_dir) == read_ids(paths)
        assert sum(proxy.count.values()) > 100 and all(proxy.count[kind] > 3 for kind in faults)


def test_an_index_beside_the_shard_that_lies_is_stale(site, published) -> None:
    published([60])
    shards = load_shards(f"{site.url}/000.tar", cache_dir="none")
    offsets = np.fromfile(site.folder / "000.tar.idx", "<u8")
    offsets[1:-1] += 512
    index_path = shards[0].index_path
    offsets.tofile(index_path)
    with pytest.raises(StaleIndexError, match="000.tar: its index does not fit it"):
        read_ids(shards)


def test_no_more_than_one_cached_shard_is_open_and_none_between_batches(site, published) -> None:
    published([5] * 4)
    shards = load_shards(site.shards(4))
    files = RemoteFiles()

    def opened():
        return [link for link in map(os.readlink, _descriptors()) if "/shards/" in link]

    for shard in shards:
        files.read(shard, 0)
        assert len(opened()) == 1
    files.close()
    assert opened() == [] and threading.active_count() < 100


def _descriptors():
    return [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
