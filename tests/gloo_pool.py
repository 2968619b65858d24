"""A pool of processes for collective tests: started once, then any function runs as ranks 0..W-1 in them.

in: a module-level function fn(rank, *args), which joins and leaves the process group by itself  ->  out: every rank's result
Invariant: an error of a rank is raised in the test with its traceback; a rank that hangs fails the test, and the pool is made anew.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailed(RuntimeError):
    """A rank raised; the message holds every failed rank's traceback."""


def _serve(connection: Connection) -> None:
    os.environ.pop("RANK", None)
    while True:
        job = connection.recv()
        if job is None:
            return
        rank, fn, args = job
        try:
            answer = (True, fn(rank, *args))
        except BaseException:
            import torch.distributed as dist

            text = traceback.format_exc()
            if dist.is_initialized():
                dist.destroy_process_group()
            answer = (False, text)
        connection.send(answer)


class GlooPool:
    """`size` waiting processes; `run` uses the first W of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._connections, self._processes = [], []
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,))  # not a daemon: it starts loader workers
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
        """The results of fn(rank, *args) on ranks 0..world_size-1. Raises RankFailed."""
        used = self._connections[:world_size]
        for rank, connection in enumerate(used):
            connection.send((rank, fn, args))
        answers: dict[int, Any] = {}
        while len(answers) < world_size:
            ready = wait([c for i, c in enumerate(used) if i not in answers], timeout=timeout)
            if not ready:
                self.close()
                self._start()
                raise RankFailed(f"ranks {sorted(set(range(world_size)) - set(answers))} gave no answer in {timeout} s")
            for ready_one in ready:
                rank = next(i for i, c in enumerate(used) if c is ready_one)
                try:
                    answers[rank] = used[rank].recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
        failures = [f"rank {rank}: {text}" for rank, (good, text) in sorted(answers.items()) if not good]
        if failures:
            raise RankFailed("\n".join(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                pass  # it died; the test has said so
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
