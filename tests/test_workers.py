"""Loader workers: what a process does before it forks them."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from data.workers import settle, thread_states


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
