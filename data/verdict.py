"""Checks of single shards, put together: what is wrong with a set of shards, and what it holds.

in: ShardChecks, what dataset.json says of them, perhaps those of a second set  ->  out: Verdict: problems, notes, totals, repeats
Invariant: a problem is something that a run would stop at, mask, or be misled by; everything else is a note.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from .checking import list_fields_at
from .decoders import IMAGE_FIELDS
from .errors import ShardError, printable
from .found import OTHERS, FieldSizes, ShardCheck
from .index import map_tar
from .shards import read_dataset_json

PICTURE = "a picture"  # stands for whichever of IMAGE_FIELDS a sample has
USUAL = 0.95  # a field that so many samples have is missing from the others
_EXAMPLES = 5


class Problem(NamedTuple):
    """`kind`: unusable, damaged, stale index, changed, missing shard, bad samples, missing field, repeated key, copies, overlap, empty.
    shard: its path; empty where it is the set's."""

    kind: str
    shard: str
    text: str


class Place(NamedTuple):
    """A sample: the number of its shard in the set, and its index in it."""

    shard: int
    sample: int


@dataclass(slots=True)
class Verdict:
    """`repeated`: the places of each key that occurs more than once; `copies`: of each content that does, under several keys."""

    checks: Sequence[ShardCheck]
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    fields: dict[str, FieldSizes] = field(default_factory=dict)
    classes: Counter[int | str] = field(default_factory=Counter)
    picture_sizes: Counter[str] = field(default_factory=Counter)
    picture_modes: Counter[str] = field(default_factory=Counter)
    missing: dict[str, int] = field(default_factory=dict)  # a usual field -> samples without it
    repeated: list[list[Place]] = field(default_factory=list)
    copies: list[list[Place]] = field(default_factory=list)
    num_verified: int = 0  # shards whose sha256 is that of dataset.json

    @property
    def num_samples(self) -> int:
        """Samples in all shards that can be used."""
        return sum(check.num_samples for check in self.checks)

    @property
    def num_bad(self) -> int:
        """Samples that a run would mask."""
        return sum(len(check.bad_indexes) for check in self.checks)


def judge(checks: Sequence[ShardCheck], listed: Mapping[str, dict[str, Any]], num_classes: int | None = None) -> Verdict:
    """The verdict on a set. `listed`: what dataset.json says of each shard by path (`read_listed`)."""
    verdict = Verdict(checks)
    for check in checks:
        entry = listed.get(check.path)
        found = judge_shard(check, entry)
        verdict.problems += found
        if check.sha256 and entry and entry.get("sha256") and all(problem.kind != "changed" for problem in found):
            verdict.num_verified += 1
        if not check.error and not check.num_samples and not check.damage:
            verdict.notes.append(Problem("empty", check.path, "no samples in it"))
        for name, sizes in check.fields.items():
            verdict.fields.setdefault(name, FieldSizes()).merge(sizes)
        verdict.classes.update(check.classes)
        verdict.picture_sizes.update(check.picture_sizes)
        verdict.picture_modes.update(check.picture_modes)
    known = {check.path for check in checks}
    for path in sorted(listed.keys() - known):
        if not os.path.exists(path):
            verdict.problems.append(Problem("missing shard", path, "dataset.json lists it, but it is not there"))
    _find_missing(verdict)
    _find_repeats(verdict)
    _judge_classes(verdict, num_classes)
    if checks and not verdict.num_samples:
        verdict.problems.append(Problem("empty", "", "there is no sample in these shards"))
    return verdict


def read_listed(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Path of a shard -> {"samples", "bytes", "sha256"} as the dataset.json of its folder has it. Raises ShardError."""
    listed = {}
    for folder in sorted({os.path.dirname(path) for path in paths}):
        content = read_dataset_json([os.path.join(folder, "x.tar")])
        splits = (content or {}).get("splits", {})
        split = splits.get(os.path.basename(folder)) or splits.get("all") or {}
        for entry in split.get("shards", ()):
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and os.path.basename(entry["name"]) == entry["name"]:
                listed[os.path.join(folder, entry["name"])] = entry
    return listed


def find_overlap(train: Verdict, val: Verdict) -> None:
    """Note in `val` which of its samples are in `train` too: the same content is a problem, the same key alone a note."""
    for name, kind, word in ("content_hashes", "overlap", "content"), ("key_hashes", "same keys", "key"):
        ours, their_places = _joined(train, name), _places(val)
        theirs = _joined(val, name)
        common = np.flatnonzero(np.isin(theirs, ours) & (theirs != 0))
        if not common.size:
            continue
        train_order = np.argsort(ours, kind="stable")
        shown = []
        for i in common[:_EXAMPLES].tolist():
            j = int(train_order[np.searchsorted(ours, theirs[i], sorter=train_order)])
            shown.append(f"{describe(val, their_places(i))} = {describe(train, _places(train)(j))}")
        more = ", ..." if common.size > _EXAMPLES else ""
        verb = "has" if common.size == 1 else "have"
        text = f"{common.size:,} of its {len(theirs):,} samples {verb} the {word} of a training sample: {'; '.join(shown)}{more}"
        (val.problems if kind == "overlap" else val.notes).append(Problem(kind, "", text))


def describe(verdict: Verdict, place: Place) -> str:
    """`shard sample N (key)`, for a message."""
    check = verdict.checks[place.shard]
    return printable(f"{check.name} sample {place.sample} ({_read_key(check, place.sample)})")


def judge_shard(check: ShardCheck, entry: Mapping[str, Any] | None) -> list[Problem]:
    """What is wrong with one shard. `entry`: what dataset.json says of it."""
    found = []
    if check.error:
        found.append(("unusable", check.error))
    if check.damage:
        found.append(("damaged", check.damage))
    if check.index == "stale":
        found.append(("stale index", "its .idx does not fit it: delete it, or run scripts/index_shards.py --rebuild"))
    if entry is not None and not check.error:
        for what, mine in ("bytes", check.num_bytes), ("samples", check.num_samples), ("sha256", check.sha256):
            if mine and entry.get(what) not in (None, "", mine):
                text = f"{what} {mine} is not the {entry[what]} of dataset.json: it was changed, or copied badly"
                found.append(("changed", text))
                break
    if check.bad_indexes:
        count = len(check.bad_indexes)
        found.append(("bad samples", f"{count:,} bad sample{'s' if count > 1 else ''}, the first is {check.bad[0]}"))
    return [Problem(kind, check.path, text) for kind, text in found]


def _find_missing(verdict: Verdict) -> None:
    """Fields that nearly all samples have, and those that lack them."""
    total = verdict.num_samples
    pictures: Counter[str] = Counter()
    sets = [(check, together, *what) for check in verdict.checks for together, what in check.field_sets.items()]
    for _, together, count, _, _ in sets:
        for name in {_group(name) for name in together}:
            pictures[name] += count
    for name, count in pictures.items():
        if name == OTHERS or not USUAL * total <= count < total:
            continue
        lacking = [row for row in sets if name not in {_group(one) for one in row[1]}]
        check, together, _, index, key = min(lacking, key=lambda row: (row[0].path, row[3]))
        verdict.missing[name] = total - count
        first = printable(f"{check.name} sample {index} ({key}), which has {', '.join(together) or 'none'}")
        verb = "lacks" if total - count == 1 else "lack"
        verdict.problems.append(Problem("missing field", "", f"{total - count:,} of {total:,} samples {verb} {name}: the first is {first}"))


def _group(name: str) -> str:
    return PICTURE if name in IMAGE_FIELDS else name


def lacks(fields: Sequence[str], missing: Mapping[str, int]) -> str:
    """The first usual field that a sample lacks, if any."""
    mine = {_group(name) for name in fields}
    return next((name for name in missing if name not in mine), "")


def _find_repeats(verdict: Verdict) -> None:
    keys, contents = _joined(verdict, "key_hashes"), _joined(verdict, "content_hashes")
    place = _places(verdict)
    verdict.repeated = [[place(i) for i in group] for group in _equal(keys)]
    verdict.copies = [[place(i) for i in group] for group in _equal(contents) if len({int(keys[i]) for i in group}) > 1]
    if verdict.repeated:
        within = sum(len({one.shard for one in group}) < len(group) for group in verdict.repeated)
        across = sum(len({one.shard for one in group}) > 1 for group in verdict.repeated)
        count = len(verdict.repeated)
        where = f"{within:,} within a shard, {across:,} across shards"
        text = f"{count:,} key{'s are' if count > 1 else ' is'} there more than once ({where}): {_show_groups(verdict, verdict.repeated)}"
        verdict.problems.append(Problem("repeated key", "", text))
    if verdict.copies:
        count = sum(len(group) - 1 for group in verdict.copies)
        verb = "is a copy" if count == 1 else "are copies"
        text = f"{count:,} sample{'s' if count > 1 else ''} {verb} of another, by content: {_show_groups(verdict, verdict.copies)}"
        verdict.notes.append(Problem("copies", "", text))


def _show_groups(verdict: Verdict, groups: Sequence[Sequence[Place]]) -> str:
    shown = [" = ".join(describe(verdict, one) for one in group[:3]) for group in groups[:_EXAMPLES]]
    return "; ".join(shown) + (", ..." if len(groups) > _EXAMPLES else "")


def _judge_classes(verdict: Verdict, num_classes: int | None) -> None:
    counts = verdict.classes
    if num_classes and len(counts) < num_classes:
        verdict.notes.append(Problem("classes", "", f"{num_classes - len(counts)} of the {num_classes} classes have no sample"))
    if len(counts) > 1:
        (most, high), (least, low) = counts.most_common()[0], counts.most_common()[-1]
        if high >= 10 * low:
            text = f"imbalance: class {most!s} has {high:,} samples, class {least!s} has {low:,} ({high / low:.0f} times fewer)"
            verdict.notes.append(Problem("classes", "", printable(text)))


def _joined(verdict: Verdict, name: str) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint64), *(getattr(check, name) for check in verdict.checks)])


def _places(verdict: Verdict) -> Any:
    """Number of a sample in the set -> its Place."""
    ends = np.cumsum([len(check.key_hashes) for check in verdict.checks])

    def place(number: int) -> Place:
        shard = int(np.searchsorted(ends, number, side="right"))
        return Place(shard, number - int(ends[shard]) + len(verdict.checks[shard].key_hashes))

    return place


def _equal(hashes: np.ndarray) -> list[list[int]]:
    """The positions of every value that is there more than once (0 is none), in the order of their first."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, int)
    ends = np.r_[starts[1:], len(ordered)]
    groups = [order[s:e].tolist() for s, e in zip(starts.tolist(), ends.tolist(), strict=True) if e - s > 1 and ordered[s]]
    return sorted(groups)


def _read_key(check: ShardCheck, index: int) -> str:
    try:
        tar: mmap = map_tar(check.tar_path)[0]
        with tar:
            return list_fields_at(tar, int(check.offsets[index]), int(check.offsets[index + 1]))[0]
    except ShardError:  # it was changed meanwhile
        return "?"
