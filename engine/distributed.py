"""Processes: who this one is, how the ranks find each other, and how the launcher ends them all.

in: the launch flags, torchrun's environment  ->  out: a `Ranks`; an exit code for the whole run
Invariant: this is the only file that reads RANK, WORLD_SIZE and LOCAL_RANK. However a run ends, no process of it is left.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STOPPED = 143  # the exit code of a run that SIGTERM stopped after it saved
INTERRUPTED = 130
GRACE = 3.0  # seconds that the other ranks get to fail by themselves, so that the first error can be told


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all: its rank, its device, and a gloo group on the CPU for counts and decisions."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: Any

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor on the CPU, in place."""
        dist.all_reduce(values, group=self.control)
        return values

    def start_sum(self, values: torch.Tensor) -> Any:
        """Like `sum`, but returns at once; `.wait()` on what it returns."""
        return dist.all_reduce(values, group=self.control, async_op=True)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values


def under_torchrun() -> bool:
    """Whether some launcher has started this process as one of many."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def torchrun_place() -> tuple[int, int, int]:
    """rank, world size and local rank as torchrun says them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def count_processes(nproc_per_node: int | None, device: str) -> int:
    """Processes on this machine: as told, else one per GPU, else one."""
    if under_torchrun():
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if nproc_per_node is not None:
        return nproc_per_node
    return max(1, torch.cuda.device_count() if device == "cuda" else 1)


def count_ranks(nproc: int, nnodes: int) -> int:
    """Processes on all machines."""
    return torchrun_place()[1] if under_torchrun() else nproc * nnodes


def check_launch(*, device: str, backend: str, nproc: int, nnodes: int, node_rank: int, dist_url: str | None) -> None:
    """Raises ValueError, one line, for launch flags that can't work here."""
    if device == "cuda" and nproc > torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ValueError(f"--nproc-per-node {nproc} is more than the {found} GPUs of this machine; give --device cpu or fewer")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank {node_rank} is not in 0..{nnodes - 1} (--nnodes {nnodes})")
    if nnodes > 1 and dist_url is None and not under_torchrun():
        raise ValueError(f"--nnodes {nnodes} needs --dist-url, for example tcp://HOST_OF_NODE_0:29500 or file:///a/shared/folder/new-file")
    if dist_url is not None and not dist_url.startswith(("tcp://", "file://", "env://")):
        raise ValueError(f"--dist-url {dist_url}: it must start with tcp://, file:// or env://")
    available = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    if not available[backend]:
        names = ", ".join(name for name, there in available.items() if there)
        raise ValueError(f"--dist-backend {backend}: this PyTorch was built without it; use one of {names}")
    if backend == "nccl" and device != "cuda":
        raise ValueError("--dist-backend nccl needs GPUs (--device cuda); use gloo on a CPU")


def host_store() -> tuple[Any, int]:
    """A key-value store for a one-machine run, held by the launcher: it takes a free port and keeps it, so no one else can."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def start(
    local_rank: int,
    *,
    nproc: int,
    nnodes: int = 1,
    node_rank: int = 0,
    dist_url: str | None = None,
    store_port: int | None = None,
    backend: str = "gloo",
    device: str = "cpu",
) -> Ranks:
    """Join the process group. rank = node_rank * nproc + local_rank, unless torchrun says it; blocks until all have come."""
    rank, world_size = node_rank * nproc + local_rank, nnodes * nproc
    place: dict[str, Any] = {"init_method": dist_url or "env://"}
    if under_torchrun():
        rank, world_size, local_rank = torchrun_place()
    elif store_port is not None:
        if sys.platform == "linux":  # a container's own name may not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = {"store": dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(minutes=5))}
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
    dist.init_process_group(backend, rank=rank, world_size=world_size, **place)
    where = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    # a group of its own: counts must not queue behind gradients, nor wait for a GPU
    return Ranks(rank, world_size, local_rank, where, dist.new_group(backend="gloo"))


def shut_down() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class StopRequest:
    """Remembers a SIGTERM until the ranks have agreed on a step to stop at. Leaves Ctrl-C to the launcher while that lives."""

    def __init__(self, launcher: int | None) -> None:
        self.requested = False
        self._launcher = launcher
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if launcher is not None:
            signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigterm(self, *_: object) -> None:
        self.requested = True

    def _on_sigint(self, *_: object) -> None:
        # torch sends SIGINT to a rank when its launcher is gone: no one is left who would end it
        if os.getppid() != self._launcher:
            kill_tree(os.getpid(), itself=False)
            os._exit(INTERRUPTED)


def supervise(context: Any) -> int:
    """Wait for the ranks that mp.spawn(join=False) started, and return the exit code of the run.

    0: all done. 143: stopped by SIGTERM (forwarded to the ranks; a second one kills). 130: Ctrl-C. 1: a rank failed; its
    traceback is printed once. No rank or loader worker outlives the call.
    """
    processes = context.processes
    terms = 0

    def forward(*_: object) -> None:
        nonlocal terms
        terms += 1
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM if terms == 1 else signal.SIGKILL)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        while any(process.exitcode is None for process in processes):
            multiprocessing.connection.wait([p.sentinel for p in processes if p.exitcode is None], timeout=1.0)
            if terms == 0 and any(p.exitcode not in (None, 0, STOPPED) for p in processes):
                return _fail(context)
            if terms > 1:
                break
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    finally:
        for process in processes:
            kill_tree(process.pid)
            process.join()
        signal.signal(signal.SIGTERM, previous)
    codes = {process.exitcode for process in processes}
    if codes == {0}:
        return 0
    if terms or codes <= {0, STOPPED}:
        return STOPPED
    return _fail(context)


def _fail(context: Any) -> int:
    """Print the first failure: a rank that a signal killed, else the earliest exception (the others' follow from it)."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(p.exitcode is None for p in context.processes):
        time.sleep(0.05)
    killed, raised = [], []
    for rank, process in enumerate(context.processes):
        error_file = Path(context.error_files[rank])
        if error_file.exists() and error_file.stat().st_size:
            raised.append((error_file.stat().st_mtime_ns, rank, pickle.loads(error_file.read_bytes())))  # torch wrote it
        elif process.exitcode is not None and process.exitcode < 0:
            killed.append((process.exitcode == -signal.SIGABRT, rank, signal.Signals(-process.exitcode).name))
    if killed and not (raised and min(killed)[0]):  # an abort follows from another's exception
        rank, name = min(killed)[1:]
        reason = "it may have run out of memory, see dmesg" if name == "SIGKILL" else "see the lines above"
        print(f"process {rank} was killed by {name} ({reason})", file=sys.stderr)
    elif raised:
        _, rank, text = min(raised)
        print(f"process {rank} failed:\n{text.rstrip()}", file=sys.stderr)
    else:
        codes = [p.exitcode for p in context.processes]
        print(f"a process ended without a word; the exit codes are {codes}", file=sys.stderr)
    return 1


def kill_tree(pid: int, itself: bool = True) -> None:
    """SIGKILL a process and all that it started (loader workers); where there is no /proc, those end by their own watch."""
    for child in _children(pid):
        kill_tree(child)
    if itself:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def hostname() -> str:
    """This machine's name, for messages."""
    return socket.gethostname()
