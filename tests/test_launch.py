"""The command as a shell runs it: it trains, and however it ends, it says why once and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import yaml
from commands import PATIENCE, Command, children, last_step
from launching import global_batches, launch, read_lines
from test_train import same_checkpoint

from engine import checkpoint

BOUND = 15  # seconds from a rank's end to everyone's


@pytest.fixture
def start(tmp_path):
    """start(words, ...) is a Command in tmp_path; none of its processes outlives the test."""
    commands = []

    def execute(words, **settings):
        commands.append(Command(tmp_path, words, **settings))
        return commands[-1]

    yield execute
    for command in commands:
        command.kill()


@pytest.fixture
def steady(picture_shards, tmp_path):
    """The words of a training of 60 steps on two processes; its folder is runs/run. Who stops it on the way gives more epochs."""
    picture_shards([40, 33, 27])
    return ["--data", "train", "--model", "tiny", "--device", "cpu", "--nproc-per-node", 2, "--name", "run", "--img-size", 160,
            "--epochs", 6, "-b", 10, "-j", 1, "--log-interval", 1, "--checkpoint-interval", 3]  # fmt: skip


def told_once(command, message):
    """The message is the last thing on stderr, and nothing else fails there."""
    assert command.err.splitlines()[-1] == message
    assert command.err.count(message) == 1
    assert "failed:" not in command.err


def events(folder, name):
    return [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == name]


def test_the_bare_command_trains(start, picture_shards, tmp_path):
    picture_shards([20, 13])
    command = start(["--data", "train"])
    assert (command.wait(), command.err) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-resnet18")
    first = command.out.splitlines()[0]
    if not torch.cuda.is_available():
        assert first == "global batch 33 = 1 x 33"
    assert command.out.splitlines()[-1] == f"finished at step 10; everything is in runs/{folder.name}"
    assert "no --val-data: no evaluation, and no best.pt" in command.out
    assert {path.name for path in folder.iterdir()} >= {"args.yaml", "checkpoints", "log.txt", "metrics.jsonl", "shards.tsv"}
    assert any(path.name.startswith("events.out.tfevents") for path in folder.iterdir())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["last.pt", "previous.pt"]
    logged = [line[20:] for line in (folder / "log.txt").read_text().splitlines()]
    assert logged == command.out.splitlines()  # all of it, after a time
    kept = yaml.safe_load((folder / "args.yaml").read_text())
    assert (kept["model"], kept["epochs"], kept["batch_size"], kept["img_size"]) == ("resnet18", 10, 33, 32)
    assert [line["epoch"] for line in events(folder, "epoch")] == list(range(10))
    assert [(line["status"], line["steps"], line["samples_seen"]) for line in events(folder, "end")] == [("finished", 10, 330)]
    saved = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    assert saved["model"]["fc.weight"].shape == (3, 512)


def test_a_killed_rank_ends_the_run_and_auto_resume_ends_with_the_same_weights(start, steady, gloo_pool, tmp_path):
    folder = tmp_path / "runs" / "run"
    command = start([*steady, "--audit"])
    command.wait_for(lambda: last_step(folder) >= 14)  # in the middle of epoch 2
    killed = time.monotonic()
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait() == 1
    command.wait_until_gone(BOUND - (time.monotonic() - killed))
    told_once(command, "process 1 was killed by SIGKILL (it may have run out of memory, see dmesg)")
    assert checkpoint.load(folder)[0]["progress"]["step"] < last_step(folder) + 1

    resumed = start([*steady, "--audit", "--resume", "auto"])
    assert (resumed.wait(), resumed.err) == (0, "")
    assert f"going on from runs/run/checkpoints/last.pt: step {events(folder, 'start')[1]['step']}," in resumed.out
    whole = [str(tmp_path / word) if word == "train" else word for word in steady]
    launch(gloo_pool, [*whole, "--audit", "--name", "whole", "--output", tmp_path / "runs"])
    same_checkpoint(checkpoint.load(tmp_path / "runs" / "whole")[0], checkpoint.load(folder)[0])
    assert global_batches(folder) == global_batches(tmp_path / "runs" / "whole")
    steps = [line["step"] for line in events(folder, "train")]
    assert steps == list(range(1, 61))  # no gap and no doubled line where it was cut back
    assert [line["epoch"] for line in events(folder, "epoch")] == list(range(6))


FAULTY = """
import sys
sys.path.insert(0, {root!r})
import torch.distributed
import run

whole = run.create_model

def create_model(*args):
    model, calls = whole(*args), []
    def count(*_):
        calls.append(1)
        if len(calls) == 6 and torch.distributed.get_rank() == 1:
            open("raised", "w").close()
            raise {error}
    model.register_forward_pre_hook(count)
    return model

run.create_model = create_model
if __name__ == "__main__":
    sys.exit(run.cli())
"""


def faulty(tmp_path, error):
    """A program that is run.py with a model that raises on rank 1 at its sixth batch."""
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY.format(root=str(Path(__file__).resolve().parents[1]), error=error))
    return [path]


def wait_from(command, mark):
    """The exit code, after everyone is gone; within BOUND from when the file `mark` was made."""
    command.wait_for(mark.exists)
    raised = mark.stat().st_mtime
    code = command.wait()
    command.wait_until_gone(max(0.1, BOUND - (time.time() - raised)))
    assert time.time() - raised < BOUND
    return code


def test_a_rank_that_raises_is_told_once(start, steady, tmp_path):
    command = start(steady, program=faulty(tmp_path, 'KeyError("boom")'))
    assert wait_from(command, tmp_path / "raised") == 1
    lines = command.err.splitlines()
    assert lines[:2] == ["process 1 failed:", "Traceback (most recent call last):"]
    assert lines[-1] == "KeyError: 'boom'"
    assert command.err.count("Traceback") == command.err.count("boom\")") == 1


@pytest.mark.full
def test_a_full_disk_is_one_line(start, steady, tmp_path):
    full = 'OSError(28, "No space left on device; mend that, then go on with --resume auto", "runs/run/metrics.jsonl")'
    command = start(steady, program=faulty(tmp_path, full))
    assert wait_from(command, tmp_path / "raised") == 1
    told_once(command, "run.py: error: runs/run/metrics.jsonl: No space left on device; mend that, then go on with --resume auto")
    assert command.err.count("\n") == 1


def test_ctrl_c_leaves_nobody(start, steady, tmp_path):
    command = start([*steady, "--epochs", 600])
    command.wait_for(lambda: last_step(tmp_path / "runs" / "run") >= 2)
    command.send(signal.SIGINT, to_group=True)
    assert command.wait() == 130
    command.wait_until_gone(BOUND)
    assert command.err == ""


@pytest.mark.parametrize("to_group", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sigterm_saves_and_auto_resume_goes_on(start, steady, gloo_pool, tmp_path, to_group):
    folder = tmp_path / "runs" / "run"
    command = start(steady)
    command.wait_for(lambda: last_step(folder) >= 4)
    command.send(signal.SIGTERM, to_group)
    assert (command.wait(), command.err) == (143, "")
    command.wait_until_gone(BOUND)
    step = last_step(folder)
    assert command.out.splitlines()[-1] == f"stopped at step {step}; everything is in runs/run"
    assert [(line["status"], line["steps"]) for line in events(folder, "end")] == [("stopped", step)]
    assert checkpoint.load(folder)[0]["progress"]["step"] == step < 60
    whole = [str(tmp_path / word) if word == "train" else word for word in steady]
    launch(gloo_pool, [*whole, "--output", tmp_path / "runs", "--resume", "auto"])
    launch(gloo_pool, [*whole, "--output", tmp_path / "runs", "--name", "whole"])
    same_checkpoint(checkpoint.load(tmp_path / "runs" / "whole")[0], checkpoint.load(folder)[0])
    assert [line["step"] for line in events(folder, "train")] == list(range(1, 61))


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_still_importing_can_be_stopped(start, steady, number, code):
    command = start(steady)
    command.wait_for(lambda: len(command.ranks()) == 2)
    time.sleep(0.5)
    command.send(number, to_group=True)
    assert (command.wait(), command.err) == (code, "")
    command.wait_until_gone(BOUND)


def test_a_killed_launcher_leaves_nobody(start, steady, tmp_path):
    command = start([*steady, "--epochs", 600])
    command.wait_for(lambda: last_step(tmp_path / "runs" / "run") >= 2)
    assert any(children(pid) for pid in command.ranks())  # with their loader workers
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    command.wait_until_gone(BOUND)
    assert command.err == ""


def test_a_killed_loader_worker_is_one_line(start, steady, tmp_path):
    command = start([*steady, "--epochs", 600])
    command.wait_for(lambda: last_step(tmp_path / "runs" / "run") >= 2)
    (worker,) = children(command.ranks()[1])
    os.kill(worker, signal.SIGKILL)
    since = time.monotonic()
    assert command.wait() == 1
    command.wait_until_gone(max(1.0, BOUND - (time.monotonic() - since)))
    assert command.err.count("\n") == 1, command.err
    (line,) = command.err.splitlines()
    assert line.startswith(f"run.py: error: DataLoader worker (pid{'(s)' if '(s)' in line else ''} {worker}) ")  # torch has two texts
    assert line.endswith(": it may have run out of memory (see dmesg); fewer --workers need less")


def test_a_shard_that_changes_under_the_run_is_one_line(start, steady, tmp_path):
    command = start([*steady, "--epochs", 60])
    command.wait_for(lambda: last_step(tmp_path / "runs" / "run") >= 2)
    for path in (tmp_path / "train").glob("*.tar"):
        with open(path, "r+b") as file:
            file.truncate(512)
    assert command.wait() == 1
    assert command.err.startswith("run.py: error: 00") and command.err.count("\n") == 1
    assert "its index does not fit it" in command.err


def test_two_runs_started_at_the_same_moment_both_finish(start, picture_shards, tmp_path):
    picture_shards([20, 13])
    words = ["--data", "train", "--model", "tiny", "--device", "cpu", "--nproc-per-node", 2, "--epochs", 2, "-j", 1]
    commands = [start(words) for _ in range(2)]
    assert [(command.wait(), command.err) for command in commands] == [(0, "")] * 2
    folders = {command.out.splitlines()[-1].partition("everything is in ")[2] for command in commands}
    assert len(folders) == 2
    assert {f"runs/{path.name}" for path in (tmp_path / "runs").iterdir()} == folders


def test_torchrun_trains_and_evaluates(start, picture_shards, tmp_path):
    picture_shards([20, 13])
    picture_shards([6, 5], name="val")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    words = ["--model", "tiny", "--device", "cpu", "--data", "train", "--val-data", "val", "--epochs", 2, "-b", 9, "-j", 1, "--name", "run"]
    program = [*torchrun, Path(__file__).resolve().parents[1] / "run.py"]
    command = start([*words, "--audit"], program=program)
    assert command.wait() == 0, command.err
    assert command.out.splitlines()[0] == "global batch 9 = 2 processes, 4 or 5 each"
    folder = tmp_path / "runs" / "run"
    assert [line["num_samples"] for line in events(folder, "eval")] == [11, 11]
    for split, count in (("train", 66), ("val", 22)):
        rows = [row for batch in global_batches(folder, split).values() for row in batch]
        assert len(rows) == count
    command.wait_until_gone(BOUND)


@pytest.mark.parametrize("scheme", ["tcp", pytest.param("file", marks=pytest.mark.full)])
def test_two_nodes_meet(start, picture_shards, tmp_path, scheme):
    picture_shards([20, 13])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    words = ["--data", "train", "--model", "tiny", "--device", "cpu", "--epochs", 2, "-b", 9, "-j", 0, "--name", "run", "--audit"]
    nodes = [
        start([*words, "--nnodes", 2, "--node-rank", rank, "--dist-url", url], env={"GLOO_SOCKET_IFNAME": "lo"}) for rank in range(2)
    ]  # fmt: skip
    assert [(node.wait(), node.err) for node in nodes] == [(0, "")] * 2
    assert nodes[0].out.splitlines()[0] == "global batch 9 = 2 processes, 4 or 5 each"
    assert nodes[1].out == ""
    rows = [row for batch in global_batches(tmp_path / "runs" / "run").values() for row in batch]
    assert len(rows) == len({row[:3] for row in rows}) == 66


@pytest.mark.full
def test_a_node_that_does_not_come_is_named(start, picture_shards, tmp_path):
    picture_shards([20, 13])
    words = ["--data", "train", "--model", "tiny", "--device", "cpu", "--nnodes", 2, "--dist-url", f"file://{tmp_path}/meet"]
    command = start([*words, "--dist-timeout", 2])
    assert command.wait() == 1
    assert command.err.startswith("run.py: error: rank 1 of 2 did not come up within 2 s (--dist-timeout): ")
    assert command.err.count("\n") == 1


@pytest.mark.full
def test_an_evaluation_can_be_stopped(start, picture_shards, tmp_path):
    picture_shards([20, 13])
    picture_shards([300], name="val", side=64)
    words = ["--model", "tiny", "--device", "cpu", "--nproc-per-node", 2, "--val-data", "val", "-j", 1]
    assert start([*words, "--data", "train", "--epochs", 1, "--name", "run"]).wait() == 0
    command = start([*words, "--evaluate", "--resume", "runs/run", "--name", "e", "-b", 2, "--img-size", 640, "--audit"])
    command.wait_for(lambda: (tmp_path / "runs" / "e" / "audit" / "rank1.jsonl").exists())
    command.send(signal.SIGTERM)
    assert (command.wait(), command.err) == (143, "")
    command.wait_until_gone(BOUND)
    assert not any(json.loads(line)["event"] == "eval" for line in (tmp_path / "runs" / "e" / "metrics.jsonl").read_text().splitlines())


def test_patience_outlasts_the_bound():
    assert PATIENCE > BOUND
