"""The life of loader workers: what they do with signals, with a batch that can't be sent, and when their rank goes.

in: torch's DataLoader workers  ->  out: the batches as they come, or a LoaderError that says what became of one
Invariant: a rank never waits for a batch that will not come, and no worker outlives its iterator.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any

from torch._utils import ExceptionWrapper

from .errors import LoaderError

if TYPE_CHECKING:
    from .stages import Batch


def init_worker(worker: int) -> None:
    """A worker leaves signals to its rank: it ends when the rank closes it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Queue._finalize_join = partial(join_sender, os.getppid())  # type: ignore[attr-defined]
    Queue._on_queue_feeder_error = property(lambda queue: partial(send_reason, queue))  # type: ignore[attr-defined]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Around a fork of this process: its threads are at rest, and its garbage stays its own.

    A child that collects what its parent had left runs destructors there: that of a process group joins threads which the child does not
    have, and crashes or hangs (seen with PyTorch 2.14.1). What is frozen when the fork comes stays so in the child.
    """
    settle()
    ours = gc.get_freeze_count() == 0
    gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def settle(seconds: float = 1.0) -> None:
    """Wait until this process's other threads sleep, before it forks: at most so long.

    A thread of a process group that has just finished a collective still makes or ends its Python thread state. Where the fork comes in
    between, CPython's lock of these states stays taken in the child, which then hangs before its first instruction (seen with 3.11.7).
    """
    own, end, quiet = threading.get_native_id(), time.monotonic() + seconds, 0
    while quiet < 3 and time.monotonic() < end:
        time.sleep(0.003)  # and so lets go of the interpreter, for which they may wait
        quiet = quiet + 1 if all(state == "S" for thread, state in thread_states() if thread != own) else 0


def thread_states() -> list[tuple[int, str]]:
    """(native id, state as in /proc: R runs or could, S sleeps, ...) of this process's threads; none where there is no /proc."""
    found = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                found.append((int(thread), file.read().rpartition(")")[2].split()[0]))
    except OSError:  # no /proc, or a thread that is just gone
        pass
    return found


def join_sender(rank: int, sender: weakref.ref[threading.Thread]) -> None:
    """Wait until a queue's thread has sent what is left, but not when the rank (a process id) is gone.

    Nobody reads the pipe then, and the worker, which holds its other end too, would wait for ever to write to it.
    """
    while (thread := sender()) is not None and thread.is_alive():
        thread.join(0.5)
        if os.getppid() != rank:
            os._exit(1)


def send_reason(queue: Any, error: Exception, item: Any) -> None:
    """What a worker's queue does where it can't send a batch: multiprocessing's drops it, and the rank would wait for it for ever.

    item: (number of the batch, the batch), which the reason replaces; or its bytes where the pipe itself failed, and nothing can be sent.
    """
    reason = f"a loader worker can't hand over a batch ({error}): mend that, or use no workers (-j 0)"
    if isinstance(item, tuple):
        return queue.put((item[0], ExceptionWrapper((LoaderError, LoaderError(reason), None), "in a DataLoader worker's queue")))
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def end_workers(workers: Sequence[BaseProcess]) -> None:
    """End workers that are still there when their iterator is gone, or when the program ends while it is held.

    Without it the end of the program waits for ever: multiprocessing sends them SIGTERM, which they ignore, and joins them.
    """
    alive = [worker for worker in workers if worker.is_alive()]
    if not alive:
        return
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main else None  # torch's handler would raise that one was killed
    for worker in alive:
        worker.kill()
    for worker in alive:
        worker.join()
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


def received(batches: Iterator[Batch], workers: Sequence[BaseProcess]) -> Iterator[Batch]:
    """The batches as they come; raises LoaderError where a worker was killed while it handed one over.

    torch notices a dead worker only while it waits; in the middle of a transfer a broken connection is all that is seen.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (ConnectionError, EOFError, FileNotFoundError):
            end = time.monotonic() + 1  # its connections break before its death is known
            while all(worker.is_alive() for worker in workers) and time.monotonic() < end:
                time.sleep(0.01)
            dead = [worker.pid for worker in workers if not worker.is_alive()]
            if not dead:
                raise
            raise LoaderError(
                f"DataLoader worker (pid {dead[0]}) was killed while it handed over a batch: "
                "it may have run out of memory (see dmesg); fewer --workers need less"
            ) from None
        yield batch
