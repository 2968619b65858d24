"""What make_shards tells of its work: what of a source is not used, what was left out, what was made and how to train on it.

in: a source, finished shards  ->  out: lines on the terminal
Invariant: nothing is left out in silence; what `strict` does not allow is a SourceError.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import printable
from .output import Done
from .sources import Source
from .tables import SourceError

_ROOT = Path(__file__).resolve().parents[1]
_SHOWN = 20  # pictures or videos left out that are named on the terminal; dataset.json has all


def tell(line: str) -> None:
    """One line on stderr, whatever is in the names it quotes."""
    print(printable(line), file=sys.stderr)


def report_source(path: str, source: Source, strict: bool) -> None:
    """Say what of the source is not used; with `strict` that is an error where it is a picture."""
    problems = [f"{path}: {source.damage}"] if source.damage else []
    if source.unlabelled:
        problems.append(f"{path}: {len(source.unlabelled)} {source.what}s lie in no class folder: {_some(source.unlabelled)}")
    if problems and strict:
        raise SourceError(problems[0])
    if source.passed_over:
        problems.append(f"{path}: {len(source.passed_over)} files are not {source.what}s: {_some(source.passed_over)}")
    if source.missing:
        problems.append(f"{path}: {len(source.missing)} annotated ids have no video here: {_some(source.missing)}")
    labels: dict[str, set[str]] = {}
    for entry in source.entries:
        labels.setdefault(entry.split, set()).add(entry.label)
    for split in labels.keys() - {"train"} if "train" in labels else ():
        if unseen := sorted(labels[split] - labels["train"]):
            problems.append(f"{path}: {split} has classes that train has not: {_some(unseen)}")
    for problem in problems:
        tell(f"note: {problem}")


def report_left_out(shards: dict[str, Done], total: int, strict: bool, what: str) -> None:
    left_out = [item for done in shards.values() for item in done.left_out]
    if left_out and strict:  # of an earlier run that was not
        name, reason = left_out[0]
        raise SourceError(f"{name}: {reason} (left out by an earlier run without --strict)")
    for name, reason in left_out[:_SHOWN]:
        tell(f"left out: {name}: {reason}")
    if len(left_out) == total:
        raise SourceError(f"none of the {total} {what}s can be read")
    if left_out:
        more = f", {len(left_out) - _SHOWN} of them not named here" if len(left_out) > _SHOWN else ""
        tell(f"left out: {len(left_out)} of {total} {what}s{more}; dataset.json has the list")


def report_result(out: str, shards: dict[str, Done], classes: Sequence[str], what: str) -> None:
    """What was made, and the command that trains on it."""
    splits: dict[str, list[str]] = {}
    for path in shards:
        splits.setdefault(os.path.dirname(path), []).append(path)
    for split, paths in splits.items():
        records = [shards[path].record for path in paths]
        samples, size = sum(r.samples for r in records), sum(r.bytes for r in records)
        shown = f"{len(paths)} shards" if len(paths) > 1 else "1 shard"
        print(f"{os.path.join(out, split).rstrip('/')}: {samples:,} {what}s of {len(classes)} classes in {shown}, {size / 1e6:,.1f} MB")
    train = "train" if "train" in splits else max(splits, key=lambda split: len(splits[split]))
    others = [split for split in ("val", "test", *splits) if split in splits and split != train]
    run = os.path.relpath(_ROOT / "run.py")
    command = ["python", run if not run.startswith("..") else str(_ROOT / "run.py"), "--data"]
    command.append(shard_pattern(out, splits[train]))
    if what == "video":
        command[2:2] = ["--task", "video-classification", "--model", "slowfast_8x8_r50"]
    if others:
        command += ["--val-data", shard_pattern(out, splits[others[0]])]
    print("\nTrain on it:\n\n    " + shlex.join(command))


def shard_pattern(out: str, paths: Sequence[str]) -> str:
    """One argument for --data that stands for these shards."""
    folder = os.path.join(out, os.path.dirname(paths[0]))
    first, last = (os.path.basename(path).partition(".")[0] for path in (paths[0], paths[-1]))
    if re.search(r"[{}<>*?\[\],]|::", folder):  # would be read as a pattern itself
        return folder.rstrip("/")
    return os.path.join(folder, f"{{{first}..{last}}}.tar" if len(paths) > 1 else f"{first}.tar")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
