"""Processes: who this one is, and how the ranks find each other.

in: the launch flags, torchrun's environment  ->  out: a `Ranks`
Invariant: this is the only file that reads RANK, WORLD_SIZE and LOCAL_RANK.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .interfaces import choose_interface, tell_addresses
from .launcher import Stopped
from .meeting import meet


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

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's value in the order of ranks, on rank 0; None on the others."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.control)
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
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: PyTorch finds no GPU on this machine; give --device cpu, or mend the driver")
    if device == "cuda" and nproc > gpus:
        raise ValueError(f"--nproc-per-node {nproc} is more than the {gpus} GPUs of this machine; give {gpus} or fewer")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank {node_rank} is not in 0..{nnodes - 1} (--nnodes {nnodes})")
    if nnodes > 1 and dist_url is None and not under_torchrun():
        raise ValueError(f"--nnodes {nnodes} needs --dist-url, for example tcp://HOST_OF_NODE_0:29500 or file:///a/shared/folder/new-file")
    if dist_url is not None:
        _check_url(dist_url)
    available = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    if not available[backend]:
        names = ", ".join(name for name, there in available.items() if there)
        raise ValueError(f"--dist-backend {backend}: this PyTorch was built without it; use one of {names}")
    if backend == "nccl" and device != "cuda":
        raise ValueError("--dist-backend nccl needs GPUs (--device cuda); use gloo on a CPU")


def _check_url(url: str) -> None:
    scheme, _, rest = url.partition("://")
    if scheme == "tcp":
        try:
            good = bool(urlsplit(url).hostname and urlsplit(url).port)
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise ValueError(f"--dist-url {url}: it must name a host and a port, as in tcp://HOST_OF_NODE_0:29500")
    elif scheme == "file":
        folder = os.path.dirname(rest)
        if not rest.startswith("/") or not os.path.isdir(folder) or os.path.isdir(rest):
            raise ValueError(f"--dist-url {url}: it must be file:///FOLDER/NAME, a new file in a folder that is there on every machine")
    elif scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"--dist-url {url}: {' and '.join(missing)} must be set in the environment")
    else:
        raise ValueError(f"--dist-url {url}: it must start with tcp://, file:// or env://")


def _host_of(url: str) -> str | None:
    """The host where ranks meet; None where they meet in a file."""
    return os.environ.get("MASTER_ADDR") if url.startswith("env:") else urlsplit(url).hostname


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
    seconds: float = 300.0,
    tf32: bool = False,
) -> Ranks:
    """Join the process group. rank = node_rank * nproc + local_rank, unless torchrun says it.

    Blocks until all have come; raises Stopped that names who has not within `seconds`.
    """
    rank, world_size = node_rank * nproc + local_rank, nnodes * nproc
    if under_torchrun():
        rank, world_size, local_rank = torchrun_place()
        dist_url, store_port = "env://", None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32  # about float32's range, 10 bits of its 23
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
    store = _reach_store(dist_url, store_port, rank, timedelta(seconds=seconds))
    host = _host_of(dist_url) if dist_url is not None else None
    store, everyone = meet(store, rank, world_size, seconds, {"addresses": tell_addresses(host)})
    interface = choose_interface(host, [told["addresses"] for told in everyone])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=dist.PrefixStore("group", store))
    where = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    # a group of its own: counts must not queue behind gradients, nor wait for a GPU
    return Ranks(rank, world_size, local_rank, where, dist.new_group(backend="gloo"))


def _reach_store(dist_url: str | None, store_port: int | None, rank: int, timeout: timedelta) -> dist.Store:
    """The key-value store that all ranks share: the launcher's own, or where --dist-url says. Waits for nobody but who holds it."""
    if store_port is not None:
        return dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timeout)
    assert dist_url is not None
    url = urlsplit(dist_url)
    if url.scheme == "file":
        return dist.FileStore(url.path)
    holds_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    host, port = _host_of(dist_url), int(os.environ["MASTER_PORT"]) if url.scheme == "env" else url.port
    assert host is not None and port is not None  # `check_launch` has seen them
    try:
        return dist.TCPStore(host, port, is_master=holds_it, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        if holds_it:
            raise Stopped(f"rank 0 can't listen at port {port} ({dist_url}): does another program use it? ({reason})") from None
        raise Stopped(
            f"rank 0 can't be reached at {dist_url} within {timeout.total_seconds():g} s (--dist-timeout): "
            f"is its machine started, and the port open? ({reason})"
        ) from None


def wrap(model: nn.Module, ranks: Ranks, find_unused_parameters: bool = False, backend: str | None = None) -> DistributedDataParallel:
    """The model whose backward takes the mean of the gradients over all ranks, compiled where a backend of torch.compile is given.

    The shapes of batches never change, so shapes are compiled in. What is compiled is the wrapper: torch then cuts the graph where the
    gradients' buckets end, and they travel while the rest is computed.
    """
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
    )
    if backend is not None:
        wrapped.compile(dynamic=False, backend=backend)
    return wrapped


def shut_down() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
