"""Runs of run.py inside the gloo pool, and what they leave: for tests that train.

in: a pool, the words of a command  ->  out: a run folder; the global batches that its audit tells of
Invariant: a run goes through `run.prepare` and `run.main` as the command's does; only the processes are the pool's.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import run
from engine import distributed, flags
from engine.report import Report


class Crash(Exception):
    """Stands for a kill: nothing after it runs."""


def run_main(rank, args, crash_at=None, sigterm_at=None, model=None):
    """One rank of a run, in a pool process; ends abruptly at a step where asked."""
    args.local_rank = rank
    whole, create_model = Report.batch, run.create_model
    run.create_model = model or create_model

    def batch(self, step, batch, split="train"):
        whole(self, step, batch, split)
        if split == "train" and step == crash_at:
            raise Crash(f"at step {step}")
        if split == "train" and step == sigterm_at and rank == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank hears it, all must stop

    Report.batch = batch  # type: ignore[method-assign]
    try:
        run.main(args)
    except Crash:
        distributed.shut_down()
    except SystemExit as stopped:
        return stopped.code
    finally:
        Report.batch, run.create_model = whole, create_model  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


def launch(pool, argv, crash_at=None, sigterm_at=None, model=None):
    """What run.py's command does, with the pool's processes in place of mp.spawn's."""
    args = flags.parse_args([str(word) for word in argv])
    run.prepare(args)
    store, args.store_port = distributed.host_store()
    codes = pool.run(args.world_size, run_main, args, crash_at, sigterm_at, model)
    del store
    return codes


def base(paths, tmp_path, name, world_size, *more):
    return ["--data", *paths, "--model", "tiny", "--device", "cpu", "--nproc-per-node", world_size, "--output", tmp_path / "runs",
            "--name", name, "--epochs", 3, "-b", 12, "-j", 0, "--lr", 0.05, "--audit", *more]  # fmt: skip


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def global_batches(folder, split="train"):
    """step -> the sorted (epoch, shard, index, key) that counted, over all ranks."""
    steps: dict[int, list] = {}
    for path in sorted((folder / "audit").glob("rank*.jsonl")):
        for line in read_lines(path):
            if line["split"] == split:
                rows = zip(line["epoch"], line["ids"], line["valid"], strict=True)
                steps.setdefault(line["step"], []).extend((epoch, *i) for epoch, i, valid in rows if valid)
    return {step: sorted(rows) for step, rows in sorted(steps.items())}


def spoil(path, member):
    """Overwrite a picture's bytes in place: the tar stays whole."""
    data = bytearray(Path(path).read_bytes())
    start = data.index(member) + 512
    data[start : start + 64] = bytes(64)
    times = os.stat(path)
    Path(path).write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
