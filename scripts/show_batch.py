"""List who stands in a global batch of a run: `python scripts/show_batch.py runs/first --step 1234`.

in: a run folder, a step  ->  out: position, epoch, shard, index, key, offset, valid of every slot of every rank
Invariant: it follows from the plan alone (what the run's start wrote, the shards' indexes), for steps taken, lost or to come.
"""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/show_batch.py` puts scripts/ there, not the root

from data.errors import ShardError, StaleIndexError, printable  # noqa: E402
from data.index import read_index  # noqa: E402
from data.shards import index_shards  # noqa: E402
from data.store import ShardFiles  # noqa: E402
from data.tar import TarDamage, parse_sample, split_name, walk  # noqa: E402
from engine.flags import Parser, integer  # noqa: E402
from engine.history import History, HistoryError, ShardRow, read_history  # noqa: E402

EXAMPLES = """examples:
  python scripts/show_batch.py runs/first --step 1234
  python scripts/show_batch.py runs/first --step 1234 --rank 3                   # only what rank 3 read
  python scripts/show_batch.py runs/first --step 1234 --world-size 8 --rank 7    # who would have, of 8 processes
  python scripts/show_batch.py runs/first --epoch 2                              # epoch 2's slots of the first step that has any

Steps count from 1, epochs and ranks from 0, as in metrics.jsonl. Columns are parted by tabs. `offset` is where the sample's first
header is in the (decompressed) tar. `valid` is the plan's: false for padding and past the last epoch; which samples turned out bad
is in bad_samples.jsonl. exit status: 0, or 2 if it can't be told."""

COLUMNS = ("step", "rank", "slot", "position", "epoch", "shard", "index", "key", "offset", "valid")


class UsageError(ValueError):
    """A flag that this run has no answer to; the message is one line."""


def choose_step(history: History, step: int | None, epoch: int | None) -> int:
    """The step that --step and --epoch mean. Raises UsageError."""
    first, last = history.starts[0].step + 1, history.last_step
    if not history.shards or first > last:
        raise UsageError(f"{history.folder}: this run has no training step; it only evaluated?")
    if step is not None:
        if not first <= step <= last:
            raise UsageError(f"--step {step}: this run has the steps {first}..{last}")
        return step
    assert epoch is not None
    begin, end = history.starts[0].position, history.starts[-1].end
    position = max(epoch * history.num_samples, begin)
    if position // history.num_samples != epoch or position >= end:
        epochs = f"{begin // history.num_samples}..{(end - 1) // history.num_samples}"
        raise UsageError(f"--epoch {epoch}: this run has the epochs {epochs} (the first is 0)")
    start = next(start for start in reversed(history.starts) if start.position <= position)
    return start.step + (position - start.position) // start.batch_size + 1


def find_samples(shards: Sequence[ShardRow], shard: np.ndarray, index: np.ndarray) -> dict[tuple[int, int], tuple[str, int]]:
    """(shard number, index) -> (key, offset of its first header) for each sample, opening each shard once. Raises ShardError."""
    found = {}
    for number in np.unique(shard).tolist():
        row = shards[number]
        wanted = np.unique(index[shard == number]).tolist()
        for i, (key, offset) in zip(wanted, read_keys(row, wanted), strict=True):
            found[number, i] = key, offset
    return found


def read_keys(row: ShardRow, indexes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(key, offset) of samples of a shard: only their headers are read, of a remote one the samples. Raises ShardError."""
    (found,) = index_shards([row.path])
    if isinstance(found, ShardError):
        raise found
    shard = found[0]
    if (shard.num_samples, shard.num_bytes) != (row.num_samples, row.num_bytes):
        raise ShardError(
            f"{row.path}: {shard.num_samples} samples in {shard.num_bytes} bytes, but the run saw {row.num_samples} in "
            f"{row.num_bytes}: it was changed since, so who stood there can't be told"
        )
    if shard.remote is not None:
        files = ShardFiles()
        for i in indexes:
            data, offset = files.read(shard, i)
            yield parse_sample(data, offset, row.path)[0], offset
        return
    offsets, tar_path = read_index(shard.index_path), shard.tar_path
    with open(tar_path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as tar:
        for i in indexes:
            yield read_key(tar, int(offsets[i]), int(offsets[i + 1]), row.path), int(offsets[i])


def read_key(tar: mmap, offset: int, end: int, path: str) -> str:
    """The key of the sample at `offset`. Raises StaleIndexError."""
    try:
        for member in walk(tar, offset, end):
            parts = split_name(member.name) if member.is_file else None
            if parts is not None:
                return parts[0]
    except TarDamage:
        pass
    raise StaleIndexError(f"{path}: its index does not fit it: no sample at byte {offset}; run scripts/index_shards.py --rebuild on it")


def as_column(text: str) -> str:
    """A path or key as one column: backslashes, tabs, line ends and what no terminal should get are escaped."""
    return printable(text.replace("\\", "\\\\"))


def show(folder: Path, step: int | None, epoch: int | None, rank: int | None, world_size: int | None) -> None:
    """Print the slots that the flags ask for. Raises HistoryError, UsageError, ShardError: one line each."""
    history = read_history(folder)
    step = choose_step(history, step, epoch)
    start = history.start_of(step)
    world_size = world_size or start.world_size
    if world_size > start.batch_size:
        raise UsageError(f"--world-size {world_size}: the global batch of step {step} is {start.batch_size}, a sample each at least")
    if rank is not None and rank >= world_size:
        raise UsageError(f"--rank {rank}: step {step} has the ranks 0..{world_size - 1}")
    plan, position = history.plan(start), start.position + (step - start.step - 1) * start.batch_size
    rows = [
        (r, slot, slots)
        for r in (range(world_size) if rank is None else [rank])
        for slots in [plan.batch(position, start.batch_size, r, world_size)]
        for slot in range(len(slots.valid))
        if epoch in (None, int(slots.epoch[slot]))
    ]
    if not rows:
        raise UsageError(f"--epoch {epoch}: no slot of step {step}{'' if rank is None else f' on rank {rank}'} is of it; leave --epoch out")
    samples = find_samples(
        history.shards, np.array([slots.shard[slot] for _, slot, slots in rows]), np.array([slots.index[slot] for _, slot, slots in rows])
    )
    print(*COLUMNS, sep="\t")
    for r, slot, slots in rows:
        shard, index = int(slots.shard[slot]), int(slots.index[slot])
        key, offset = samples[shard, index]
        path = as_column(history.shards[shard].path)
        valid = "true" if slots.valid[slot] else "false"
        print(step, r, slot, slots.position[slot], slots.epoch[slot], path, index, as_column(key), offset, valid, sep="\t")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="show_batch.py",
        description="List the samples of a global batch of a run, computed from its plan: no audit and no checkpoint is needed.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--step", type=integer(1), metavar="N", help="the step, from 1")
    text = "only this epoch's slots; without --step, of the first step that has any"
    parser.add_argument("--epoch", type=integer(0), metavar="E", help=text)
    parser.add_argument("--rank", type=integer(0), metavar="R", help="only this rank's slots")
    parser.add_argument("--world-size", type=integer(1), metavar="W", help="cut for W processes (default: those that took the step)")
    args = parser.parse_args(argv)
    try:
        if args.step is None and args.epoch is None:
            raise UsageError("--step N or --epoch E is missing: which batch?")
        show(args.run, args.step, args.epoch, args.rank, args.world_size)
    except (HistoryError, UsageError, ShardError) as error:
        print(f"show_batch.py: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
