"""Loader workers: what a process does when it forks them."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import threading
import time

import pytest
from commands import ROOT, Command
from shard_maker import labelled, write_shards

from data.workers import forking, settle, thread_states


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="there is no /proc here")
def test_a_process_settles_before_it_forks():
    """A thread that works without the interpreter's lock, as those of a process group do, is waited for; one that sleeps is not."""
    sleeper, done = threading.Event(), []
    threads = [
        threading.Thread(target=lambda: done.append(len(hashlib.sha256(bytes(400 << 20)).digest()))),
        threading.Thread(target=sleeper.wait),
    ]
    for thread in threads:
        thread.start()
    try:
        settle(seconds=60)
        assert done == [32]
        assert {state for thread, state in thread_states() if thread == threads[1].native_id} == {"S"}
    finally:
        sleeper.set()


class Witness:
    """Says in a file which process ended it."""

    def __init__(self, path):
        self.path, self.cycle = path, self

    def __del__(self):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here")
def test_what_a_process_left_is_not_collected_by_its_workers(tmp_path):
    """Such as the process group of a model that is gone, whose threads a forked process does not have."""
    gc.collect()
    gc.disable()
    try:
        Witness(tmp_path / "ended")  # its cycle keeps it until the next collection
        with forking():
            worker = multiprocessing.get_context("fork").Process(target=gc.collect)
            worker.start()
        worker.join()
        assert worker.exitcode == 0 and not (tmp_path / "ended").exists()
        assert gc.get_freeze_count() == 0
        gc.collect()
        assert (tmp_path / "ended").read_text() == f"{os.getpid()}\n"
    finally:
        gc.enable()


FULL_PIPE = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from data import build_loader
task = {{"task": "bytes", "transform": {{"field": "jpg"}}, "num_classes": 3}}
loader = build_loader(sys.argv[1], batch_size=512, epochs=100, num_workers=1, prefetch_factor=32, **task)
batches = iter(loader)
next(batches)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="there is no /proc here")
def test_a_worker_whose_pipe_is_full_ends_when_its_rank_is_killed(tmp_path):
    """It can't send what it has made, and nobody will read it."""
    write_shards(tmp_path / "shards", labelled("cls", *[b"1"] * 512), keys="a-key-that-is-as-long-as-those-of-web-pictures-{:09d}")
    command = Command(tmp_path, [tmp_path / "shards"], program=("-c", FULL_PIPE))
    try:
        command.wait_for(lambda: "ready" in command.out)
        time.sleep(1.5)  # the pipe fills; a killed rank with an empty one would end its worker too
        command.process.kill()
        command.process.wait()
        command.wait_until_gone(30)
    finally:
        command.kill()
