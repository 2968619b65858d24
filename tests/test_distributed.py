"""Who a process is, how the ranks meet, and which launch flags are refused before any process is started."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from engine import distributed

GOOD: dict[str, Any] = {"device": "cpu", "backend": "gloo", "nproc": 2, "nnodes": 1, "node_rank": 0, "dist_url": None}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def torchrun(monkeypatch):
    """The environment that torchrun gives to its second process on its second machine."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def refusal(**changed):
    with pytest.raises(ValueError) as refused:
        distributed.check_launch(**{**GOOD, **changed})
    return str(refused.value)


def test_processes_are_as_told_else_one_per_gpu_else_one(monkeypatch):
    assert distributed.count_processes(None, "cpu") == 1
    assert distributed.count_processes(3, "cpu") == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert distributed.count_processes(None, "cuda") == 4
    assert distributed.count_processes(None, "cpu") == 1
    assert distributed.count_ranks(4, 2) == 8


def test_torchrun_s_numbers_win(torchrun):
    assert distributed.under_torchrun()
    assert distributed.torchrun_place() == (5, 8, 1)
    assert distributed.count_processes(7, "cpu") == 4
    assert distributed.count_ranks(7, 3) == 8


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_of_torchrun_is_none(torchrun, monkeypatch, missing):
    monkeypatch.delenv(missing)  # SLURM and others set WORLD_SIZE or RANK alone
    assert not distributed.under_torchrun()
    assert distributed.count_ranks(2, 3) == 6


def test_good_launches_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for url in (None, "tcp://node0:29500", "tcp://[::1]:29500", f"file://{tmp_path}/new", "env://"):
        distributed.check_launch(**{**GOOD, "dist_url": url})
    distributed.check_launch(**{**GOOD, "nnodes": 3, "node_rank": 2, "dist_url": "tcp://node0:29500"})


def test_several_machines_need_a_place_to_meet(torchrun, monkeypatch):
    distributed.check_launch(**{**GOOD, "nnodes": 2})  # torchrun has one
    monkeypatch.delenv("RANK")
    assert refusal(nnodes=2) == (
        "--nnodes 2 needs --dist-url, for example tcp://HOST_OF_NODE_0:29500 or file:///a/shared/folder/new-file"
    )


@pytest.mark.parametrize("url", ["tcp://", "tcp://node0", "tcp://:29500", "tcp://node0:port", "tcp://node0:99999"])
def test_a_tcp_url_names_host_and_port(url):
    assert refusal(dist_url=url) == f"--dist-url {url}: it must name a host and a port, as in tcp://HOST_OF_NODE_0:29500"


def test_a_file_url_names_a_file_in_a_folder_that_is_there(tmp_path):
    for path in ("relative/file", f"{tmp_path}/none/file", f"{tmp_path}"):
        assert refusal(dist_url=f"file://{path}") == (
            f"--dist-url file://{path}: it must be file:///FOLDER/NAME, a new file in a folder that is there on every machine"
        )


def test_an_env_url_needs_the_environment(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert refusal(dist_url="env://") == "--dist-url env://: MASTER_ADDR and MASTER_PORT must be set in the environment"
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert refusal(dist_url="env://") == "--dist-url env://: MASTER_ADDR must be set in the environment"


def test_other_mistakes_are_named(monkeypatch):
    assert refusal(dist_url="http://x") == "--dist-url http://x: it must start with tcp://, file:// or env://"
    assert refusal(nnodes=2, node_rank=2, dist_url="tcp://a:1") == "--node-rank 2 is not in 0..1 (--nnodes 2)"
    assert refusal(backend="nccl") == (
        "--dist-backend nccl needs GPUs (--device cuda); use gloo on a CPU"
        if torch.distributed.is_nccl_available()
        else "--dist-backend nccl: this PyTorch was built without it; use one of gloo"
    )
    if not torch.distributed.is_mpi_available():
        assert refusal(backend="mpi").startswith("--dist-backend mpi: this PyTorch was built without it; use one of ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(device="cuda") == "--device cuda: PyTorch finds no GPU on this machine; give --device cpu, or mend the driver"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert refusal(device="cuda") == "--nproc-per-node 2 is more than the 1 GPUs of this machine; give 1 or fewer"


def test_the_launcher_s_port_is_free_and_held():
    stores = [distributed.host_store() for _ in range(4)]
    assert len({port for _, port in stores}) == 4
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", stores[0][1]))


def join(rank, settings):
    """One rank: what it and the others are to each other."""
    ranks = distributed.start(rank, **settings)
    counts = torch.tensor([1, ranks.rank])
    ranks.start_sum(counts).wait()
    seen = (ranks.rank, ranks.world_size, str(ranks.device), ranks.broadcast(f"from {rank}"), ranks.gather(rank))
    total = ranks.sum(torch.tensor([0.5, float(ranks.rank)], dtype=torch.float64)).tolist()
    distributed.shut_down()
    distributed.shut_down()  # a second time does nothing
    return seen, counts.tolist(), total


def test_ranks_count_decide_and_tell_each_other(gloo_pool):
    store, port = distributed.host_store()
    answers = gloo_pool.run(3, join, {"nproc": 3, "store_port": port})
    del store
    assert answers == [((rank, 3, "cpu", "from 0", [0, 1, 2]), [3, 3], [1.5, 3.0]) for rank in range(3)]


def join_node(rank, nnodes, url):
    """A pool process as the only process of node `rank`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        return join(0, {"nproc": 1, "nnodes": nnodes, "node_rank": rank, "dist_url": url})
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_nodes_meet_at_a_url(gloo_pool, tmp_path):
    store, port = distributed.host_store()
    del store
    for url in (f"tcp://127.0.0.1:{port}", f"file://{tmp_path}/meet"):
        answers = gloo_pool.run(2, join_node, 2, url)
        assert [answer[0][:3] for answer in answers] == [(0, 2, "cpu"), (1, 2, "cpu")]
