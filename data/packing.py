"""Which picture goes into which shard, under which key and class. PURE.

in: entries (name, label, split, size), a seed, sizes  ->  out: classes, and per shard the list of its items
Invariant: the result depends on the set of entries and the arguments, never on the order in which entries were found.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .readers import Entry
from .tables import SourceError
from .writer import BLOCK, shard_names

_MAX_KEY = 80  # bytes, so that key and field fit into a plain tar header
_quote = json.encoder.encode_basestring_ascii
_UNSAFE = re.compile(r"[^\w-]+")
_MAX_INTEGER_LABEL = 1_000_000


class Item(NamedTuple):
    """One sample to be written: its key, the class number for `cls`, and the picture."""

    key: str
    number: int
    entry: Entry


class ShardPlan(NamedTuple):
    """One shard to be written: its path in the output folder, and its items in order."""

    path: str
    items: list[Item]


def class_names(entries: Iterable[Entry], integers: bool, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """The classes, in the order of their integers: `given`, or the labels sorted (as numbers, where all are).

    Where `integers` may be class numbers (a table's labels) and all are, they stay what they are: the classes are 0..max.
    """
    labels = sorted({entry.label for entry in entries})
    are_numbers = all(label.isascii() and label.isdigit() for label in labels)
    if given is not None:
        unknown = sorted(set(labels) - set(given))
        are_indices = integers and are_numbers and unknown == labels and max(map(int, labels)) < len(given)
        if unknown and not are_indices:
            some = ", ".join(map(repr, unknown[:3])) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
            raise SourceError(f"class {some} is not among the {len(given)} of --classes: add it there or leave it out")
        return tuple(given)
    if integers and are_numbers:
        top = max(map(int, labels))
        if top >= _MAX_INTEGER_LABEL:
            raise SourceError(f"label {top} is too large for a class number: give the list of labels as --classes FILE")
        return tuple(map(str, range(top + 1)))
    return tuple(sorted(labels, key=lambda label: (int(label), label)) if are_numbers else labels)


def class_index(classes: Sequence[str], entries: Iterable[Entry]) -> dict[str, int]:
    """Label -> integer; a label that is no class name is a number already (`class_names` has checked that)."""
    positions = {name: index for index, name in enumerate(classes)}
    return {label: positions[label] if label in positions else int(label) for label in {e.label for e in entries}}


def split_entries(entries: Sequence[Entry], shares: Mapping[str, float], seed: int) -> list[Entry]:
    """Give each entry a split, so that every class has its share in each; the first of a class goes to the largest one.

    Within a class the order is drawn; each next entry goes to the split that is furthest behind its share so far.
    """
    order = sorted(entries, key=lambda entry: (entry.label, _draw(seed, "split", entry), entry))
    largest = max(shares, key=lambda split: shares[split])
    counts = dict.fromkeys(shares, 0)
    result = []
    before = None
    for number, entry in enumerate(order, start=1):
        split = max(shares, key=lambda name: shares[name] * number - counts[name]) if entry.label == before else largest
        before = entry.label
        counts[split] += 1
        result.append(entry._replace(split=split))
    return result


def pack_entries(
    entries: Sequence[Entry],
    index: Mapping[str, int],
    *,
    seed: int = 0,
    shuffle: bool = True,
    shard_size: int | None = None,
    num_shards: int | None = None,
    max_bytes: int | None = None,
) -> list[ShardPlan]:
    """Shards of `shard_size` samples (the last of a split may hold fewer), or as many as `num_shards` says.

    With splits, `num_shards` is the number for the largest; the others get shards of the same size.
    """
    by_name = sorted(entries)
    keys = unique_keys(by_name)
    items = [Item(key, index[entry.label], entry) for key, entry in zip(keys, by_name, strict=True)]
    if shuffle:
        items.sort(key=lambda item: _draw(seed, "order", item.entry))  # stable: equal names keep the order above
    splits: dict[str, list[Item]] = {}
    for item in items:
        splits.setdefault(item.entry.split, []).append(item)
    largest = max(map(len, splits.values()))
    if num_shards is not None and num_shards > largest:
        raise SourceError(f"--num-shards {num_shards} is more than the {largest} pictures: give {largest} or fewer")
    plans = []
    for split in sorted(splits, key=_split_rank):
        members = splits[split]
        if num_shards is not None:
            count = max(1, round(num_shards * len(members) / largest))
            cuts = [number * len(members) // count for number in range(count + 1)]
            runs = [members[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
        else:
            runs = _cut(members, shard_size or len(members), max_bytes)
        folder = f"{split}/" if split else ""
        plans += [ShardPlan(folder + name, run) for name, run in zip(shard_names(len(runs)), runs, strict=True)]
    return plans


def _cut(items: list[Item], shard_size: int, max_bytes: int | None) -> list[list[Item]]:
    if max_bytes is None:
        return [items[start : start + shard_size] for start in range(0, len(items), shard_size)]
    runs: list[list[Item]] = []
    used = 0
    for item in items:
        # Three headers (keys are short enough for plain ones), the picture, one block of cls, the json.
        size = 4 * BLOCK + _blocks(item.entry.size) + _blocks(len(describe(item.entry)))
        if not runs or len(runs[-1]) == shard_size or used + size > max_bytes:
            runs.append([])
            used = 2 * BLOCK  # the end of the archive
        runs[-1].append(item)
        used += size
    return runs


def _blocks(size: int) -> int:
    return max(size, 0) + -max(size, 0) % BLOCK


def describe(entry: Entry) -> bytes:
    """The `json` field of a sample. (Put together by hand: json.dumps takes three times as long.)"""
    return f'{{"path": {_quote(entry.name)}, "class": {_quote(entry.label)}}}'.encode()


def unique_keys(by_name: Iterable[Entry]) -> list[str]:
    """A key per entry: class and file name without what follows its last dot, made safe; the second of a kind gets "-2", ..."""
    taken: set[str] = set()
    next_number: dict[str, int] = {}
    keys = []
    for entry in by_name:
        stem = entry.name.rpartition("/")[2].rpartition(".")[0] or entry.name.rpartition("/")[2]
        base = key = _cut_text(_UNSAFE.sub("_", f"{entry.label}_{stem}"), _MAX_KEY)
        while key in taken:
            number = next_number[base] = next_number.get(base, 1) + 1
            key = f"{base}-{number}"
        taken.add(key)
        keys.append(key)
    return keys


def _cut_text(text: str, max_bytes: int) -> str:
    raw = text.encode()
    return text if len(raw) <= max_bytes else raw[:max_bytes].decode(errors="ignore")


def fingerprint(entries: Iterable[Entry], classes: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """A digest of all that decides the bytes of the shards, but for the contents of the pictures."""
    digest = hashlib.sha256(json.dumps([arguments, list(classes)], sort_keys=True).encode())
    for entry in sorted(entries):
        digest.update(f"{entry.name}\0{entry.label}\0{entry.split}\0{entry.size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _draw(seed: int, purpose: str, entry: Entry) -> bytes:
    """A number drawn for this name. A hash: it depends on no other entry and on no library's generator."""
    name = entry.name.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(name, digest_size=16, key=f"{seed} {purpose}".encode()).digest()


def _split_rank(split: str) -> tuple[int, str]:
    order = ("train", "val", "test")
    return (order.index(split) if split in order else len(order), split)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Lists of a million tuples hold no cycles, and the collector would look through them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
