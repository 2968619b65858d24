"""Write the indexes of shards made elsewhere: `python scripts/index_shards.py 'shards/{000..099}.tar'`.

in: patterns that name shards  ->  out: `<shard>.tar.idx` beside each, and what was found on the way
Invariant: a shard that can't be used does not keep the others from being indexed; it is named, and the exit status says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/index_shards.py` puts scripts/ there, not the root

from data.errors import ShardError  # noqa: E402
from data.publishing import publish_indexes  # noqa: E402
from data.shards import Shard, expand, index_shards  # noqa: E402
from data.urls import redact  # noqa: E402
from engine.flags import Parser  # noqa: E402

EXAMPLES = """examples:
  python scripts/index_shards.py 'shards/{000..099}.tar'
  python scripts/index_shards.py /data/imagenet/train /data/imagenet/val
  python scripts/index_shards.py 's3://bucket/train/{000..999}.tar' --out s3://bucket/train
  python scripts/index_shards.py --rebuild -j 16 '/data/*/part-*.tar.gz'

run.py builds missing indexes by itself; this does it beforehand, for instance once for many jobs, or where those can't
write beside the shards. Remote shards without an index are read through once, four at a time; a run that was interrupted
goes on with those that are left. exit status: 0, or 2 if a shard can't be used."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return write_indexes(args.patterns, args.workers, args.rebuild, args.out)
    except OSError as error:
        print(f"index_shards.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ShardError as error:
        print(f"index_shards.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("index_shards.py: interrupted: the indexes written so far stay", file=sys.stderr)
        return 130


def write_indexes(patterns: Sequence[str], num_workers: int | None, rebuild: bool, out: str | None = None) -> int:
    """Index every shard, print what was done and what is wrong; the exit status."""
    paths = expand(patterns)
    num_bad = num_samples = 0
    done: Counter[str] = Counter()
    problems: list[str] = []  # printed at the end, apart from the progress bar
    shards = []
    for result in index_shards(paths, num_workers, rebuild=rebuild, cache_dir="none"):
        if isinstance(result, ShardError):
            problems.append(f"error: {result}")
            num_bad += 1
            continue
        shard, was_built = result
        num_samples += shard.num_samples
        shards.append(shard)
        done[describe(shard, was_built)] += 1
        if shard.damage:
            problems.append(f"damaged: {shard.path}: {shard.damage}")
        elif not shard.num_samples:
            problems.append(f"note: {shard.path}: no samples in it")
    for problem in problems:
        print(problem, file=sys.stderr)
    for what, count in done.items():
        print(f"{count:,} {'index' if count == 1 else 'indexes'} {what}")
    if out is not None:
        publish_indexes(shards, out)
        print(f"{len(shards):,} put into {redact(out)}")
    print(f"{len(paths) - num_bad:,} of {len(paths):,} shards can be used: {num_samples:,} samples")
    return 2 if num_bad else 0


def describe(shard: Shard, was_built: bool) -> str:
    """What was done for a shard; the place where that is not beside it."""
    folder = os.path.dirname(shard.index_path)
    place = "" if folder == os.path.dirname(shard.path) else f" in {folder}"
    return ("written" if was_built else "up to date already") + place


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="index_shards.py",
        description="Write the index of each shard: where its samples start. An index that fits its shard is left as it is.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "patterns", nargs="+", metavar="PATTERN", help="shards: {000..099}, {a,b}, globs, folders, .txt lists, URLs, a::b (quote them)"
    )
    parser.add_argument("-j", "--workers", type=positive, metavar="N", help="processes (default: one per core)")
    where = "also put the indexes into this folder or URL, such as the shards' own s3://bucket/train (default: beside local shards; "
    parser.add_argument("--out", metavar="PLACE", help=where + "those of remote shards stay in the user's cache folder)")
    parser.add_argument("--rebuild", action="store_true", help="write every index anew, also those that fit")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
