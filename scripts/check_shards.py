"""Look through shards before a run does: `python scripts/check_shards.py 'shards/{000..099}.tar'`.

in: patterns that name shards, perhaps those of a validation set  ->  out: a table, the problems, perhaps JSON and clean shards
Invariant: the shards and their indexes are only read. The exit status says what the last line says: 0 no problem, 1 problems, 2 no check.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/check_shards.py` puts scripts/ there, not the root

from data.checking import Look, check_all, expand_local  # noqa: E402
from data.classes import read_classes  # noqa: E402
from data.labels import LabelMap, check_source  # noqa: E402
from data.mending import check_target, mend  # noqa: E402
from data.shards import map_processes, read_dataset_json  # noqa: E402
from data.telling import as_json, describe_mended, describe_set, describe_shards  # noqa: E402
from data.verdict import Verdict, find_overlap, judge, read_listed  # noqa: E402
from engine.flags import Parser, integer  # noqa: E402
from scripts.command import add_patterns, end  # noqa: E402

EXAMPLES = """examples:
  python scripts/check_shards.py 'shards/{000..099}.tar'
  python scripts/check_shards.py shards/train --val shards/val --decode         # every picture; samples that are in both sets
  python scripts/check_shards.py shards/train --label json:annotation.label --json report.json
  python scripts/check_shards.py shards/train --decode --fix shards/clean        # good samples into new, clean shards

Every shard is read from end to end, and none is changed. Without --decode only the headers of pictures are looked at.
exit status: 0 if there is no problem, 1 if there are some, 2 if the check can't be made."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return end("check_shards.py", lambda: run(**vars(args)))


def run(
    *,
    patterns: Sequence[str],
    val: Sequence[str] | None,
    label: str | None,
    classes: str | None,
    decode: bool,
    json_file: str | None,
    fix: str | None,
    workers: int | None,
) -> int:
    """Check, print, write what was asked for; the exit status. Raises ShardError, OSError."""
    if fix is not None:
        check_target(fix)
    if json_file is not None:
        open(json_file, "a").close()  # before the work, not after it
    names = None if classes is None else read_classes(classes)
    settings: dict[str, Any] = {"label": label, "names": names, "decode": decode, "workers": workers}
    train, train_names = check_set(expand_local(patterns), **settings)
    sets = {"": train}
    if val is not None:
        checked, val_names = check_set(expand_local(val), **settings)
        find_overlap(train, checked)
        sets = {"training set": train, "validation set": checked}
    for title, verdict in sets.items():
        shown_names = train_names if verdict is train else val_names
        print("\n".join([*([f"== {title} =="] if title else []), *describe_shards(verdict), "", *describe_set(verdict, shown_names), ""]))
    if json_file is not None:
        content: dict[str, Any] = {title.partition(" ")[0] or "shards": as_json(verdict) for title, verdict in sets.items()}
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n")
    if fix is not None:
        mends = mend(train, fix, train_names or (), {"mended": list(patterns), "label": label}, partial(map_with_bar, workers))
        print("\n".join(describe_mended(mends, fix)))
    num_problems = sum(len(verdict.problems) for verdict in sets.values())
    print(f"{num_problems} problem{'s' if num_problems > 1 else ''} found" if num_problems else "no problem found")
    return 1 if num_problems else 0


def map_with_bar(workers: int | None, work: Any, things: Sequence[Any]) -> Any:
    """`map_processes` for `mend`, with a progress bar."""
    return tqdm(map_processes(work, workers, things), total=len(things), desc="writing shards", unit="shard", delay=2, leave=False)


def check_set(
    paths: Sequence[str], *, label: str | None, names: Sequence[str] | None, decode: bool, workers: int | None
) -> tuple[Verdict, Sequence[str] | None]:
    """The verdict on some shards, and the names of their classes where they are known."""
    listed = read_listed(paths)
    own = (read_dataset_json(paths) or {}).get("classes") if listed else None
    known = names or (own if isinstance(own, list) and all(isinstance(name, str) for name in own) else None) or None
    labels = LabelMap(label or "cls", len(known), tuple(known)) if known else None
    look = Look(label=label or "cls", demanded=label is not None, labels=labels, decode=decode)
    checks = list(check_all(paths, look, listed, workers))
    return judge(checks, listed, len(known) if known else None), known


def label_source(text: str) -> str:
    """A type of label sources."""
    try:
        check_source(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="check_shards.py",
        description="Read shards from end to end and say what is in them and what is wrong with them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_patterns(parser)
    parser.add_argument("--val", nargs="+", metavar="PATTERN", help="a second set, whose samples must not be in the first")
    text = "where the label is: cls, txt, json:dotted.path (default: cls, where there is one)"
    parser.add_argument("--label", type=label_source, metavar="FIELD", help=text)
    parser.add_argument("--classes", metavar="FILE", help="class names (default: those of dataset.json beside the shards)")
    parser.add_argument("--decode", action="store_true", help="decode every picture, video, JSON, text and array, not only headers")
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write everything that was found to FILE, too")
    parser.add_argument("--fix", metavar="OUT", help="write the good samples into clean shards in the new folder OUT")
    parser.add_argument("-j", "--workers", type=integer(1), metavar="N", help="processes (default: one per core)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
