"""data/shard_cache.py: room, locks and evictions, between real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from data import shard_cache
from data.errors import ShardError
from data.shard_cache import ShardCache, open_cache


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return open_cache(str(tmp_path / "cache"), 1000)


def put(cache: ShardCache, name: str, size: int, wait: bool = False) -> bool:
    with cache.writing(name, wait) as fd:
        if fd is None or not cache.reserve(name, fd, size, wait):
            return False
        os.pwrite(fd, b"x" * size, 0)
        cache.publish(name, fd)
        return True


def names(cache: ShardCache) -> list[str]:
    return sorted(os.listdir(os.path.join(cache.folder, "shards")))


def in_child(work: Callable[..., None], *args: object) -> BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=work, args=args)
    child.start()
    return child


def wait_until(what: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_least_recently_used_goes_first(cache: ShardCache) -> None:
    for name in "abc":
        assert put(cache, name, 300)
    used = cache.open("a")
    assert used is not None
    os.close(used)
    assert put(cache, "d", 300) and names(cache) == ["a", "c", "d"]
    assert put(cache, "e", 600) and names(cache) == ["d", "e"]
    assert cache.used() == 900 and cache.open("b") is None


def test_what_is_open_is_not_evicted(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "PATIENCE", 0.2)
    assert put(cache, "a", 600)
    fd = cache.open("a")
    assert fd is not None
    assert not put(cache, "b", 600) and names(cache) == ["a"]
    with pytest.raises(ShardError, match="no room for b in 0 s: other jobs hold it; raise --cache-size"):
        put(cache, "b", 600, wait=True)
    threading.Timer(0.3, os.close, (fd,)).start()
    monkeypatch.setattr(shard_cache, "PATIENCE", 20)
    assert put(cache, "b", 600, wait=True) and names(cache) == ["b"]


def test_what_can_never_fit_is_said(cache: ShardCache) -> None:
    with pytest.raises(ShardError, match="b has 1,001 bytes, and the cache may hold 1,000: raise --cache-size"):
        put(cache, "b", 1001)
    assert names(cache) == []


def hold_part(cache: ShardCache, name: str, size: int) -> None:
    with cache.writing(name, True) as fd:
        assert fd is not None and cache.reserve(name, fd, size, True)
        time.sleep(60)


def test_a_killed_writer_leaves_no_lock_and_no_room_taken(cache: ShardCache) -> None:
    child = in_child(hold_part, cache, "a", 800)
    wait_until(lambda: cache.used() == 800)
    assert not put(cache, "a", 800) and not put(cache, "b", 300)  # it lives: its entry and its room are its own
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert names(cache) == ["a.part"]
    assert put(cache, "b", 300) and names(cache) == ["b"]
    assert put(cache, "a", 700) and names(cache) == ["a", "b"]


def test_a_second_writer_waits_and_finds_the_entry(cache: ShardCache) -> None:
    with cache.writing("a", True) as fd:
        assert fd is not None and cache.reserve("a", fd, 10, True)
        found: list[object] = []

        def second() -> None:
            with cache.writing("a", True) as other:
                found.append(other)

        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        assert not found
        os.pwrite(fd, b"x" * 10, 0)
        cache.publish("a", fd)
    thread.join()
    assert found == [None] and names(cache) == ["a"]


def test_what_a_running_job_needs_is_spared_from_others_but_not_from_readers(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "GRACE", 0.2)
    import fcntl

    jobs = Path(cache.folder) / "jobs"
    (jobs / "dead").write_text("b")
    with open(jobs / "alive", "w") as job:
        fcntl.flock(job, fcntl.LOCK_EX)
        job.write("a\nc")
        job.flush()
        for name in "abc":
            assert put(cache, name, 300)
        assert put(cache, "d", 300) and names(cache) == ["a", "c", "d"] and os.listdir(jobs) == ["alive"]
        assert not put(cache, "e", 700)
        assert names(cache) == ["a", "c"]  # d was nobody's
        assert put(cache, "e", 700, wait=True) and names(cache) == ["c", "e"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {disk} && {os.sys.executable} -c 'if True:\n"  # type: ignore[attr-defined]
        f"  from data.shard_cache import open_cache\n"
        f"  cache = open_cache({str(disk)!r:s}, 10**9)\n"
        f"  with cache.writing(\"x.tar\", True) as fd: cache.reserve(\"x.tar\", fd, 2_000_000, True)'"
    ).replace("'" + str(disk) + "'", '"' + str(disk) + '"')
    root = Path(__file__).resolve().parents[1]
    ran = subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (
        f"ShardError: {disk}: the disk is full: no room for the 2,000,000 bytes of x.tar; give a smaller --cache-size than 1,000,000,000, "
        "or a --cache-dir on another disk" in ran.stderr
    ), ran.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardError, match=f"--cache-dir {tmp_path}/file/x: .*Not a directory; give a folder that can be written"):
        open_cache(str(tmp_path / "file" / "x"), None)


def test_the_default_limit_is_what_the_disk_has_left(tmp_path: Path) -> None:
    cache = open_cache(str(tmp_path), None)
    disk = os.statvfs(tmp_path)
    assert 0 < cache.limit < disk.f_blocks * disk.f_frsize
