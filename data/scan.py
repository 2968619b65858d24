"""What labels, fields and pictures shards hold, found by walking the tars before training.

in: shards, a label source  ->  out: counts of labels; the usual size of pictures or videos
Invariant: touches headers and the bytes of one field only, and judges no single sample: bad ones are the loader's to report.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from .decoders import IMAGE_FIELDS
from .errors import DataError, ShardError
from .fetching import read_pieces
from .labels import list_fields, read_label, read_labels
from .shards import Shard, create_pool, describe_empty
from .tar import Buffer, TarDamage, split_name, walk_raw

# From here on a stored integer is a damaged label, not a class: one of them must not make a model of a billion outputs.
MAX_CLASSES = 1_000_000

_PEEK_PER_SHARD = 256  # samples
_PEEK = 4096  # samples
_PARALLEL_FROM = 200_000  # samples: below, starting processes takes longer than the scan


def walk_fields(shard: Shard, wanted: str = "") -> Iterator[tuple[str, str, memoryview]]:
    """(key, field, bytes) of every field, or every `wanted` one, in a shard's whole part. The bytes may be used until the
    next is asked for."""
    if not shard.num_samples:
        return
    if shard.remote is not None:
        for piece in read_pieces(shard):
            yield from _walk_fields(piece, wanted)
        return
    with open(shard.tar_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield from _walk_fields(mapped, wanted)


def _walk_fields(tar: Buffer, wanted: str) -> Iterator[tuple[str, str, memoryview]]:
    suffix = wanted.encode()
    with memoryview(tar) as view:
        try:
            for raw_name, _, offset, size, is_file in walk_raw(tar):
                if not is_file or (suffix and raw_name[-len(suffix) :].lower() != suffix):
                    continue
                named = split_name(raw_name.decode("utf-8", "surrogateescape"))
                if named is not None and (not wanted or named[1] == wanted):
                    with view[offset : offset + size] as data:
                        yield named[0], named[1], data
        except TarDamage:
            return


class _Seen:
    """The first samples of some shards, and what they hold, for the message when what was looked for is not there."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.fields: Counter[str] = Counter()
        self.num_samples = 0
        self.num_in_folders = 0
        self.shard: Shard | None = None

    def first_fields(self, shards: Iterable[Shard]) -> Iterator[tuple[str, memoryview]]:
        """(field, bytes) of the first samples of each shard, until _PEEK samples are seen."""
        for shard in shards:
            if self.num_samples >= _PEEK:
                return
            before, end = "", min(self.num_samples + _PEEK_PER_SHARD, _PEEK)
            for key, name, data in walk_fields(shard):
                if key != before:
                    if self.num_samples == end:
                        break
                    before = key
                    self.num_samples += 1
                    self.num_in_folders += "/" in key
                    self.shard = self.shard or shard
                self.fields[name] += 1
                yield name, data

    def error(self, missing: str, advice: str) -> ShardError:
        """What is missing, what there is instead, and what to do."""
        if self.shard is None:
            return ShardError(f"no {missing}: {describe_empty(self.shards)}")
        # a field is what follows the first dot: that of v1.0.jpg is 0.jpg; a few other files may lie among the pictures
        pictures = sum(count for field, count in self.fields.items() if field.rpartition(".")[2] in IMAGE_FIELDS)
        mostly = 0.8 * self.fields.total()
        if self.num_in_folders > 0.8 * self.num_samples and pictures > mostly and not {"cls", "json"} & set(self.fields):
            advice = f"this looks like class folders: run python scripts/make_shards.py {self.shard.path} OUT"
        return ShardError(f"no {missing} in {self.shard.path}: the fields of its first samples are {list_fields(self.fields)}; {advice}")


def peek_labels(shards: Sequence[Shard], source: str, several: bool = False) -> Counter[int | str]:
    """The labels of the first samples of the first shard that has any. Raises ShardError, naming what there is, if none
    has."""
    wanted = source.partition(":")[0]
    labels: Counter[int | str] = Counter()
    seen = _Seen(shards)
    reason = ""
    for shard in shards:
        for name, data in seen.first_fields([shard]):
            if name == wanted:
                try:
                    labels.update(_labels_in(source, data, several))
                except DataError as error:
                    reason = reason or error.reason
        if labels:
            return labels
    advice = "say where the label is with --label (cls, txt, json:a.b)"
    raise seen.error(f"label that can be read as {source!r} ({reason})" if reason else f"label field {wanted!r}", advice)


def count_labels(
    shards: Sequence[Shard], source: str, num_workers: int | None = None, several: bool = False
) -> Counter[int | str]:
    """How often every label occurs over all samples (each of which may have `several`); those that can't be read are left out. Raises
    ShardError where more than MAX_CLASSES differ."""
    if size := sum(shard.num_bytes for shard in shards if shard.remote is not None):
        say = f"all shards ({size / 1e6:,.1f} MB of them remote) are read through for their labels: nothing says which classes there are; "
        print(say + "--num-classes or --classes would, or a dataset.json beside the shards", file=sys.stderr, flush=True)
    num_workers = min(len(shards), num_workers or os.cpu_count() or 1)
    count = partial(_count_in_shard, source, several)
    if num_workers < 2 or sum(shard.num_samples for shard in shards) < _PARALLEL_FROM:
        return _add_counts(map(count, shards), source)
    pool = create_pool(num_workers)
    try:
        return _add_counts(pool.map(count, shards, chunksize=max(1, len(shards) // (8 * num_workers))), source)
    finally:
        pool.shutdown(cancel_futures=True)


def _add_counts(parts: Iterator[Counter[int | str]], source: str) -> Counter[int | str]:
    total: Counter[int | str] = Counter()
    for part in parts:
        total.update(part)
        if len(total) > MAX_CLASSES:
            raise ShardError(
                f"more than {MAX_CLASSES:,} different labels in {source!r}, such as {str(next(iter(total)))[:40]!r}: "
                "that is a caption or an id; say where the label is with --label (cls, txt, json:a.b)"
            )
    return total


def _labels_in(source: str, data: bytes | memoryview, several: bool) -> list[int | str]:
    return read_labels(source, data) if several else [read_label(source, data)]


def _count_in_shard(source: str, several: bool, shard: Shard) -> Counter[int | str]:
    wanted = source.partition(":")[0]
    raw = Counter(bytes(data) for _, _, data in walk_fields(shard, wanted))
    labels: Counter[int | str] = Counter()
    for data, count in raw.items():
        try:
            for label in _labels_in(source, data, several):
                labels[label] += count
        except DataError:
            continue  # these samples are reported when they are read
    return labels


def median_side(
    shards: Sequence[Shard], fields: Sequence[str], measure: Callable[[memoryview], int], limit: int, what: str
) -> int:
    """The median of what `measure` says of the first `limit` of such fields, up to a multiple of 32, within 32..224. Raises ShardError
    where there are none."""
    sides: list[int] = []
    seen = _Seen(shards)
    reason = ""
    for name, data in seen.first_fields(shards):
        if name in fields:
            try:
                sides.append(measure(data))
            except DataError as error:
                reason = reason or error.reason
            if len(sides) == limit:
                break
    if not sides:
        advice = f"a {what} is in one of {', '.join(fields)}"
        raise seen.error(f"{what} that can be read ({reason})" if reason else f"{what} field", advice)
    sides.sort()
    return min(224, max(32, -(-sides[len(sides) // 2] // 32) * 32))
