"""Make WebDataset shards from pictures or videos: `python scripts/make_shards.py photos/ shards/`.

in: a folder of class folders, a .zip, .tar or .tar.gz of one, a table, or a folder of videos and Kinetics' annotations
-> out: 000.tar ..., their indexes, dataset.json
Invariant: the same pictures and arguments give the same bytes, whatever the number of workers, and however often the run was
killed and started again on the way.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python scripts/make_shards.py` puts scripts/ there, not the root

from data.errors import ShardError  # noqa: E402
from data.made import report_left_out, report_result, report_source, tell  # noqa: E402
from data.making import ShardWork, gather, make_here  # noqa: E402
from data.output import OutputFolder  # noqa: E402
from data.packing import class_index, class_names, fingerprint, no_collector, pack_entries, split_entries  # noqa: E402
from data.publishing import prepare_staging, send_shards, send_summary  # noqa: E402
from data.restarts import describe_unmarked, restart_arguments  # noqa: E402
from data.shards import num_cores  # noqa: E402
from data.sources import open_source  # noqa: E402
from data.tables import SourceError  # noqa: E402
from data.urls import is_url, redact  # noqa: E402
from engine.flags import Parser, integer  # noqa: E402

DIGITS = ROOT / "examples" / "digits.zip"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        make_shards(**vars(args))
    except (SourceError, ShardError) as error:
        tell(f"make_shards.py: {error}")
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        tell(f"make_shards.py: {where}{error.strerror or error}")
        return 2
    except BrokenProcessPool:
        tell(
            "make_shards.py: a worker process was killed (out of memory?): run the same command again, it goes on where "
            "it stopped; fewer --workers need less memory"
        )
        return 2
    except KeyboardInterrupt:
        tell("make_shards.py: interrupted: the same command goes on where it stopped")
        return 130
    return 0


def make_shards(
    source: str,
    out: str,
    *,
    columns: tuple[str, str] | None,
    annotations: str | None,
    classes: str | None,
    split: dict[str, float] | None,
    shard_size: int | None,
    num_shards: int | None,
    max_bytes: int | None,
    seed: int,
    shuffle: bool,
    resize: int | None,
    resize_video: int | None,
    restart_markers: bool,
    encode: str,
    strict: bool,
    overwrite: bool,
    workers: int | None,
    executor: str,
) -> None:
    """The whole story; raises SourceError, ShardError and OSError for what the user can mend."""
    apart = executor == "ray"  # on other machines, which have another working folder
    source = os.path.abspath(source) if apart else source
    cut = {"shard_size": shard_size, "num_shards": num_shards, "max_bytes": max_bytes}
    with no_collector():
        found = open_source(source, columns, annotations)
        report_source(source, found, strict)
        entries = found.entries
        names = class_names(entries, found.from_table, read_class_list(classes))
        if split:
            if any(entry.split for entry in entries):
                raise SourceError(f"{source}: its folders are splits already: leave --split out")
            entries = split_entries(entries, split, seed)
            if left := [name for name in split if name not in {entry.split for entry in entries}]:
                tell(f"note: {source}: no picture is left for {', '.join(left)}: the first of each class goes to the largest split")
        plans = pack_entries(entries, class_index(names, entries), seed=seed, shuffle=shuffle, **cut)

    arguments: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "split": split, "resize": resize, **cut}
    arguments |= restart_arguments(restart_markers) | ({"resize_video": resize_video} if resize_video else {})
    arguments |= {"encode": encode} if encode != "keep" else {}
    digest = fingerprint(entries, names, arguments)
    target, out = out, prepare_staging(out, digest, overwrite)
    out, elsewhere = (os.path.abspath(out), target if is_url(target) else "") if apart else (out, "")
    folder = OutputFolder(out, digest, {"source": os.path.basename(os.path.abspath(source)), **arguments}, elsewhere)
    done = folder.prepare([plan.path for plan in plans], overwrite, source)
    try:
        missing = [plan for plan in plans if plan.path not in done]
        if done:
            tell(f"{redact(elsewhere) or out}: {len(done)} of {len(plans)} shards are there already")
        work = ShardWork(out, folder.journal, found.reader, resize, strict, resize_video, restart_markers, encode == "raw")
        if apart:
            from data.ray_making import make_on_ray

            results = make_on_ray(work, missing, workers, elsewhere)
        else:
            results = make_here(work, missing, workers or num_cores())
        done |= gather(results, total=len(entries), ahead=len(entries) - sum(len(plan.items) for plan in missing))
        done = {plan.path: done[plan.path] for plan in plans}
        report_left_out(done, len(entries), strict, found.what)
        if restart_markers:
            tell(describe_unmarked([shard.unmarked for shard in done.values()], len(entries)))
        folder.finish(done, names)
    finally:
        folder.close()
    if elsewhere:
        send_summary(out, target)
    elif is_url(target):
        tell(send_shards(out, list(done), target, anew=overwrite))
    report_result(target, done, names, found.what)


def read_class_list(path: str | None) -> list[str] | None:
    if path is None:
        return None
    from data.classes import read_classes

    return read_classes(path)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="make_shards.py",
        description="Make WebDataset shards (.tar) from pictures or videos, with their indexes and dataset.json. A run that was "
        "killed goes on where it stopped when the same command is given again.",
        epilog="The class of a picture is the first folder below the deepest folder common to all pictures; folders train, "
        "val and test at that place are splits. Each sample has the picture (bytes untouched without --resize), cls (the "
        "class number) and json (path and class). What is not a whole picture by a quick look (header, size, end mark; a "
        "full decode only where these are in doubt) is named and left out.",
    )
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="folder of class folders, a .zip, .tar, .tar.gz of one, a table "
        "(.csv, .tsv, .jsonl), or a folder of pictures or videos with one table in it (default: examples/digits.zip in 100 shards)")
    add("out", nargs="?", metavar="OUT", default="shards", help="folder for the shards, or a URL like s3://bucket/x: "
        "made in the cache folder first, then sent (default: %(default)s)")
    add("--columns", type=_columns, metavar="PATH,LABEL", help="a table's columns (default: path,label); paths are "
        "relative to the table, labels are class names or class numbers")
    add("--annotations", metavar="FILE", help="labels of videos that are named by id in SOURCE, as Kinetics' JSON has them: "
        '{"ID": {"annotations": {"label": "..."}, "subset": "..."}}; subsets become splits')
    add("--classes", metavar="FILE", help="class names in their order: a dataset.json, a JSON list, or one name a line")
    add("--split", type=_shares, metavar="train=0.9,val=0.1", help="deal the pictures of each class to splits")
    add("--shard-size", type=integer(1), metavar="N", help="samples in a shard (default: 1000)")
    add("--num-shards", type=integer(1), metavar="N", help="number of shards (of the largest split) instead")
    add("--max-bytes", type=_size, metavar="N", help="also end a shard before this size, like 500M (sizes as in the source)")
    add("--seed", type=int, default=0, help="of the order and of --split (default: %(default)s)")
    add("--no-shuffle", dest="shuffle", action="store_false", help="keep the order of the sorted names")
    add("--resize", type=integer(1), metavar="SHORT_SIDE", help="make larger pictures this small: same format, upright, "
        "JPEG quality 90")
    add("--resize-video", type=integer(1), metavar="SHORT_SIDE", help="re-encode larger videos this small: H.264 in MP4, upright, "
        "without sound; each frame keeps its time")
    add("--restart-markers", action="store_true", help="write JPEGs anew, losslessly, with restart markers: crops are decoded faster")
    add("--encode", choices=["keep", "raw"], default="keep", help="raw: pictures uncompressed (.ppm): 6 times the bytes, no decoding")
    add("--strict", action="store_true", help="stop at the first picture that can't be used")
    add("--overwrite", action="store_true", help="replace the shards in OUT (also needed where a picture changed under its name and size)")
    add("--workers", type=integer(1), metavar="N", help=f"processes (default: the cores, {num_cores()}; of a Ray cluster, all of its)")
    add("--executor", choices=["local", "ray"], default="local", help="ray: the machines of the Ray cluster that RAY_ADDRESS names, or "
        "that is found; they must share SOURCE, and OUT if it is a folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.num_shards and (args.shard_size or args.max_bytes):
        parser.error("--num-shards goes with neither --shard-size nor --max-bytes: give one")
    if args.annotations and args.columns:
        parser.error("--annotations and --columns both say where labels are: give one")
    if args.annotations and args.source is None:
        parser.error("--annotations needs SOURCE: the folder that holds the videos")
    if args.source is None:
        args.source = str(DIGITS)
        args.num_shards = args.num_shards or (None if args.shard_size or args.max_bytes else 100)
    if args.num_shards is None and args.shard_size is None:
        args.shard_size = 1000
    return args


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, like 500M")
    return int(match[1]) * 1000 ** " KMGT".index(match[2] or " ")


def _columns(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} does not name two columns, like file,label")
    return names[0], names[1]


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z][\w-]*)=(0?\.\d+)\s*", part)
        if not match or match[1] in shares or match[1] == "all":
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of splits and shares, like train=0.9,val=0.1")
        shares[match[1]] = float(match[2])
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) <= 0:
        raise argparse.ArgumentTypeError(f"the shares in {text!r} make {sum(shares.values()):g}, not 1")
    return shares


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # file names need not be text
    sys.exit(main())
