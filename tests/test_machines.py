"""Several machines: they meet, one dies, one comes back, one means another run, one never comes. See two_hosts.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from commands import ROOT, Command, children, last_step
from launching import global_batches, read_lines
from two_hosts import ADDRESSES, NoHosts, two_hosts

from engine.history import read_history
from engine.meeting import meet

pytestmark = pytest.mark.full
TORCHRUN = ["-m", "torch.distributed.run"]
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else PyTorch 2.14 can't take a machine back
PORT = 29500  # of a host that is the test's own
BOUND = 15  # seconds from a machine's end to everyone's


@pytest.fixture
def hosts(tmp_path):
    """Two hosts; skips where none can be made, but not in CI."""
    try:
        with two_hosts(tmp_path) as pair:
            yield pair
    except NoHosts as reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))


def words(*more):
    return ["--data", "train", "--model", "tiny", "--device", "cpu", "-j", 0, "--name", "run", "--audit", *more]


def start_both(hosts, url, *more, node_1=()):
    """run.py on both machines, without torchrun; node_1: what only the second is told."""
    place = ["--nnodes", 2, "--dist-url", url, *more]
    return [host.start([*words(), *place, "--node-rank", number, *(node_1 if number else ())]) for number, host in enumerate(hosts)]


PACED = """
import sys, time
sys.path.insert(0, {root!r})
import run

whole = run.create_model

def create_model(*args):
    model = whole(*args)
    model.register_forward_pre_hook(lambda *_: time.sleep(float(open({pace!r}).read())))
    return model

run.create_model = create_model
if __name__ == "__main__":
    sys.exit(run.cli())
"""


class Pace:
    """A program that is run.py with a pause at every step, as long as `set` said last: a test then has time to act."""

    def __init__(self, folder: Path) -> None:
        self._file, path = folder / "pace", folder / "paced.py"
        self.set(0.0)
        path.write_text(PACED.format(root=str(ROOT), pace=str(self._file)))
        self.program = (path,)

    def set(self, seconds: float) -> None:
        part = self._file.with_suffix(".new")
        part.write_text(str(seconds))
        part.rename(self._file)


def starts(folder):
    """The start lines that rank 0 has written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == "start"]


def check_exact(folder, epochs, num_samples):
    """The audit is exact, every epoch whole, and every global batch the plan's next samples."""
    audit = subprocess.run([sys.executable, ROOT / "scripts" / "audit.py", folder], capture_output=True, text=True, check=False)
    assert (audit.returncode, audit.stdout.splitlines()[-1]) == (0, "exact"), audit.stdout + audit.stderr
    told = [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == "epoch"]
    assert [[line[name] for name in ("epoch", "seen", "distinct", "repeated", "missed")] for line in told] == [
        [epoch, num_samples, num_samples, 0, 0] for epoch in range(epochs)
    ]
    history, batches = read_history(folder), global_batches(folder)
    assert list(batches) == list(range(1, history.last_step + 1))
    for step, rows in batches.items():
        start = history.start_of(step)
        slots = history.plan(start).locate(np.arange(start.position_after(step - 1), start.position_after(step)))
        ids = [history.shards[shard].name for shard in slots.shard], slots.index.tolist()
        assert [row[:3] for row in rows] == sorted(zip(slots.epoch.tolist(), *ids, strict=True)), f"step {step}"


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_two_machines_meet(hosts, picture_shards, tmp_path, scheme):
    picture_shards([20, 13])
    url = f"tcp://{ADDRESSES[0]}:{PORT}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    if scheme == "file":
        meet(dist.FileStore(str(tmp_path / "meet")), 0, 1, 5.0, {"addresses": ["127.0.0.1"]})  # an earlier run's, left there
    nodes = start_both(hosts, url, "--epochs", 2, "-b", 9)
    assert [(node.wait(), node.err) for node in nodes] == [(0, "")] * 2
    assert nodes[0].out.splitlines()[0] == "global batch 9 = 2 processes, 4 or 5 each"
    assert nodes[1].out == ""
    check_exact(tmp_path / "runs" / "run", 2, 33)


def test_a_machine_that_dies_ends_the_run_and_both_go_on(hosts, picture_shards, tmp_path):
    picture_shards([40, 33, 27])
    pace, folder, url = Pace(tmp_path), tmp_path / "runs" / "run", f"tcp://one:{PORT}"
    pace.set(0.3)
    settings = words("--epochs", 3, "-b", 12, "--checkpoint-interval", 4, "--log-interval", 1, "--nnodes", 2, "--dist-url", url)
    nodes = [host.start([*settings, "--node-rank", number], pace.program) for number, host in enumerate(hosts)]
    nodes[0].wait_for(lambda: last_step(folder) >= 11)
    since = time.monotonic()
    hosts[1].die()
    assert nodes[0].wait() == 1
    nodes[0].wait_until_gone(0.5)
    assert time.monotonic() - since < BOUND
    assert nodes[0].err.startswith("run.py: error: the connection to another rank is lost (") and nodes[0].err.count("\n") == 1
    nodes = [host.start([*settings, "--resume", "auto", "--node-rank", number]) for number, host in enumerate(hosts)]
    assert [(node.wait(), node.err) for node in nodes] == [(0, "")] * 2
    assert [line["step"] for line in starts(folder)][1] in (8, 9, 12)
    check_exact(folder, 3, 100)


def test_torchrun_on_two_machines_saves_on_sigterm_and_goes_on(hosts, picture_shards, tmp_path):
    picture_shards([40, 33, 27])
    pace, folder = Pace(tmp_path), tmp_path / "runs" / "run"
    torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "one", "--master-port", PORT]
    settings = words("--epochs", 2, "-b", 10, "--log-interval", 1, "--resume", "auto")

    def start():
        return [host.start(settings, [*torchrun, "--node-rank", number, *pace.program]) for number, host in enumerate(hosts)]

    pace.set(0.5)
    nodes = start()
    nodes[0].wait_for(lambda: last_step(folder) >= 3)
    for node in nodes:
        node.send(signal.SIGTERM)  # to each torchrun, as srun does
    assert [node.wait() for node in nodes] == [1, 1]  # torchrun's code for a signal
    assert nodes[0].out.splitlines()[0] == "global batch 10 = 4 processes, 2 or 3 each"
    stopped = read_lines(folder / "metrics.jsonl")[-1]
    assert (stopped["event"], stopped["status"]) == ("end", "stopped") and 3 <= stopped["steps"] < 20
    pace.set(0.0)
    nodes = start()
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].err + nodes[1].err
    assert [line["step"] for line in starts(folder)] == [0, stopped["steps"]]
    check_exact(folder, 2, 100)


def test_elastic_goes_on_with_the_survivor_and_takes_the_other_back(hosts, picture_shards, tmp_path):
    picture_shards([40, 33, 27])
    pace, folder = Pace(tmp_path), tmp_path / "runs" / "run"
    pace.set(0.3)
    torchrun = [*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", 2, "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-id", "run",
                "--rdzv-endpoint", f"one:{PORT}", *pace.program]  # fmt: skip
    settings = words("--epochs", 6, "-b", 12, "--checkpoint-interval", 4, "--log-interval", 1, "--resume", "auto")
    one, two = (host.start(settings, torchrun, env=ELASTIC) for host in hosts)
    one.wait_for(lambda: starts(folder) and starts(folder)[-1]["world_size"] == 4 and last_step(folder) >= 11)
    hosts[1].die()
    one.wait_for(lambda: starts(folder)[-1]["world_size"] == 2 and last_step(folder) >= starts(folder)[-1]["step"] + 2)
    pace.set(4.0)
    two = hosts[1].start(settings, torchrun, env=ELASTIC)
    one.wait_for(lambda: starts(folder)[-1]["world_size"] == 4)
    pace.set(0.0)
    assert [node.wait() for node in (one, two)] == [0, 0], one.err + two.err
    print([(line["world_size"], line["step"]) for line in starts(folder)])
    assert [line["world_size"] for line in starts(folder)][-3:] == [4, 2, 4]
    check_exact(folder, 6, 100)


def test_torchrun_restarts_after_a_killed_rank(picture_shards, tmp_path):
    picture_shards([40, 33, 27])
    pace, folder = Pace(tmp_path), tmp_path / "runs" / "run"
    pace.set(0.3)
    settings = words("--epochs", 2, "-b", 12, "--checkpoint-interval", 4, "--log-interval", 1, "--resume", "auto")
    command = Command(tmp_path, settings, program=[*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 2, *pace.program])
    try:
        command.wait_for(lambda: last_step(folder) >= 6)
        os.kill(children(command.process.pid)[1], signal.SIGKILL)
        assert command.wait() == 0, command.err
    finally:
        command.kill()
    assert [line["step"] for line in starts(folder)] == [0, 4]
    check_exact(folder, 2, 100)


def test_another_copy_of_a_shard_is_named(hosts, picture_shards, tmp_path):
    picture_shards([20, 13])
    size = (tmp_path / "train" / "001.tar").stat().st_size
    shutil.copytree(tmp_path / "train", tmp_path / "copy")
    with open(tmp_path / "copy" / "001.tar", "ab") as file:
        file.write(bytes(10_240))  # more end blocks: the same samples
    nodes = start_both(hosts, f"tcp://one:{PORT}", node_1=["--data", "copy"])
    line = (
        f"run.py: error: the ranks don't mean the same run: shards 1 is 001.tar (13 samples, {size + 10_240} bytes) on rank 1 (two) "
        f"and 001.tar (13 samples, {size} bytes) on rank 0; give every machine the same flags and the same shards\n"
    )
    assert [(node.wait(), node.err) for node in nodes] == [(1, line)] * 2
    assert not (tmp_path / "runs").exists()


def test_another_flag_is_named(hosts, picture_shards, tmp_path):
    picture_shards([20, 13])
    nodes = start_both(hosts, f"tcp://one:{PORT}", "--lr", 0.25, node_1=["--lr", 0.5])
    line = (
        "run.py: error: the ranks don't mean the same run: --lr is 0.5 on rank 1 (two) and 0.25 on rank 0 (one); "
        "give every machine the same flags and the same shards\n"
    )
    assert [(node.wait(), node.err) for node in nodes] == [(1, line)] * 2


@pytest.mark.parametrize("missing", [0, 1])
def test_a_machine_that_never_comes_is_named(hosts, picture_shards, tmp_path, missing):
    picture_shards([20, 13])
    url = f"tcp://{ADDRESSES[0]}:{PORT}"
    there = hosts[1 - missing]
    node = there.start(words("--nnodes", 2, "--nproc-per-node", 2, "--node-rank", 1 - missing, "--dist-url", url, "--dist-timeout", 3))
    assert node.wait() == 1
    lines = f"rank 0 can't be reached at {url} within 3 s", "ranks 2, 3 of 4 did not come up within 3 s (--dist-timeout): see what they"
    assert node.err.splitlines()[-1].startswith(f"run.py: error: {lines[missing]}")  # torch's own log may stand before it
    assert node.err.count("run.py: error") == 1
