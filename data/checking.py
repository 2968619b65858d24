"""One shard, looked through from end to end: what is in it, and what is wrong with it.

in: a shard's path, what to look at  ->  out: ShardCheck: counts, sizes, labels, pictures, bad samples, hashes of keys and content
Invariant: nothing is written but what reading a gzip shard needs (its decompressed copy in the cache), so a run may read the same
shards meanwhile. No torch: a check starts at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np

from .decoders import DECODERS, IMAGE_FIELDS, decode, open_picture
from .errors import DataError, SampleError, ShardError, StaleIndexError
from .found import MAX_KINDS, MAX_LISTED, OTHERS, FieldSizes, ShardCheck, count_kind, escape_key
from .index import build_index, map_tar, read_index
from .labels import LabelMap, read_label
from .patterns import expand
from .shards import map_processes
from .stills import open_frames
from .store import cut_reason, local_tar
from .tar import TarDamage, split_name, walk_raw
from .urls import is_url, redact
from .video import VIDEO_FIELDS, Video

_REMEMBERED = 100_000  # labels already read, by their bytes
_PIECE = 4 << 20  # bytes hashed at a time

Fields = list[tuple[str, int, int]]  # field, where its bytes are in the tar, how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a check looks at. `label`: a label source, read where the sample has its field, demanded where `demanded`; `labels`: the
    classes, where they are known. pictures: their headers are read. decode: every field that has a decoder is decoded. contents: bytes
    are hashed, to find copies. keep: the key and label of every sample are kept."""

    label: str = "cls"
    demanded: bool = False
    labels: LabelMap | None = None
    pictures: bool = True
    decode: bool = False
    contents: bool = True
    keep: bool = False


def check_shard(path: str, look: Look, with_sha256: bool = False) -> ShardCheck:
    """Look through one shard; what is wrong with it is in the result, nothing of that is raised."""
    check = ShardCheck(path)
    try:
        check.num_bytes = os.path.getsize(path)
        if with_sha256:
            check.sha256 = file_sha256(path)
        check.tar_path = local_tar(path)
        cut = cut_reason(check.tar_path)
        check.offsets, check.damage = build_index(check.tar_path, cut, path)
        check.index = _compare_index(check.tar_path + ".idx", check.offsets)
        if check.num_samples:
            with map_tar(check.tar_path, cut, path)[0] as tar:
                _Reader(check, look).read(tar, check.offsets)
    except ShardError as error:
        check.error = str(error).removeprefix(f"{path}: ")
    except OSError as error:
        check.error = f"can't be read: {error.strerror}"
    return check


def file_sha256(path: str) -> str:
    """The sha256 of a whole file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_fields_at(tar: mmap, start: int, end: int) -> tuple[str, Fields, str]:
    """Of the sample at tar[start:end]: (key, its fields, the name of one that is there twice, if any). Only headers are
    read. Raises StaleIndexError."""
    key, fields, doubled = "", [], ""
    names: set[str] = set()
    try:
        for raw_name, _, offset, size, is_file in walk_raw(tar, start, end):
            parts = split_name(raw_name.decode("utf-8", "surrogateescape")) if is_file else None
            if parts is None:
                continue
            key = key or parts[0]
            if parts[1] in names:
                doubled = doubled or parts[1]
                continue
            names.add(parts[1])
            fields.append((parts[1], offset, size))
    except TarDamage:
        fields = []
    if not fields:
        raise StaleIndexError(f"no sample at byte {start}: the index does not fit the tar; run scripts/index_shards.py --rebuild")
    return key, fields, doubled


def hash_bytes(data: bytes | memoryview) -> int:
    """64 bits of the bytes; two of a hundred million differing ones are equal with a chance of 0.03 %. Never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def _compare_index(index_path: str, offsets: np.ndarray) -> str:
    try:
        there = read_index(index_path)
    except FileNotFoundError:
        return "absent"
    except (ValueError, OSError):
        return "stale"
    return "fits" if np.array_equal(there, offsets) else "stale"


class _Reader:
    """Fills a ShardCheck, sample by sample."""

    def __init__(self, check: ShardCheck, look: Look) -> None:
        self.check, self.look = check, look
        self.label_field = look.label.partition(":")[0]
        self._labels: dict[bytes, int | str] = {}

    def read(self, tar: mmap, offsets: np.ndarray) -> None:
        check, keep = self.check, self.look.keep
        keys, contents = [], []
        kept: list[bytes] = []
        with memoryview(tar) as view:
            for i, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
                key, fields, doubled = list_fields_at(tar, start, end)
                keys.append(hash_bytes(key.encode("utf-8", "surrogateescape")))
                contents.append(self._hash_largest(view, fields) if self.look.contents else 0)
                try:
                    self._sample(view, i, key, fields, doubled)
                except DataError as error:
                    check.bad_indexes.append(i)
                    if len(check.bad) < MAX_LISTED:
                        check.bad.append(SampleError(check.name, i, key, error.field, error.reason))
                if keep:
                    kept.append(escape_key(key))
                    if len(check.labels) <= i:
                        check.labels.append(None)
        check.key_hashes, check.content_hashes = np.array(keys, np.uint64), np.array(contents, np.uint64)
        check.keys = b"\n".join(kept)

    def _sample(self, view: memoryview, i: int, key: str, fields: Fields, doubled: str) -> None:
        """Count one sample. Raises DataError for the first thing that is wrong with it, when all is counted."""
        self._count_fields(i, key, fields)
        wrong: DataError | None = None
        if doubled:
            wrong = DataError("the sample has this field twice (two samples with one key beside each other?)", doubled)
        for name, offset, size in fields:
            with view[offset : offset + size] as data:
                try:
                    self._field(name, data)
                except DataError as error:
                    wrong = wrong or DataError(error.reason, name)
        if self.look.demanded and self.label_field not in [name for name, _, _ in fields]:
            wrong = wrong or DataError("no label", self.label_field)
        if wrong is not None:
            raise wrong

    def _count_fields(self, i: int, key: str, fields: Fields) -> None:
        check = self.check
        together = tuple(sorted(name for name, _, _ in fields))
        if together not in check.field_sets and len(check.field_sets) >= MAX_KINDS:
            together = (OTHERS,)
        count, first, first_key = check.field_sets.get(together, (0, i, key))
        check.field_sets[together] = count + 1, first, first_key
        for name, _, size in fields:
            if name not in check.fields and len(check.fields) >= MAX_KINDS:
                name = OTHERS
            check.fields.setdefault(name, FieldSizes()).add(size)

    def _field(self, name: str, data: memoryview) -> None:
        kind = name.rpartition(".")[2]
        if self.look.pictures and kind in IMAGE_FIELDS:
            picture = open_picture(data)
            width, height = picture.size
            count_kind(self.check.picture_sizes, f"{width}x{height}")
            count_kind(self.check.picture_modes, f"{picture.image.format} {picture.image.mode}")
        if self.look.decode and kind in VIDEO_FIELDS:
            self._video(data)
        if name == self.label_field:
            self._label(data)
        elif self.look.decode and kind in DECODERS:
            decode(name, data)

    def _video(self, data: memoryview) -> None:
        """Decode every frame, small."""
        with open_frames(data) as video:
            count_kind(self.check.picture_sizes, f"{video.size[0]}x{video.size[1]}")
            count_kind(self.check.picture_modes, f"{video.kind} video" if isinstance(video, Video) else "picture as video")
            for _ in video.read(range(video.num_frames), (16, 16)):
                pass

    def _label(self, data: memoryview) -> None:
        raw = bytes(data)
        label = self._labels.get(raw)
        if label is None:
            labels = self.look.labels
            label = read_label(self.look.label, raw) if labels is None else labels.parse({self.label_field: raw})
            if len(self._labels) < _REMEMBERED:
                self._labels[raw] = label
        self.check.classes[label] += 1
        if self.look.keep:
            self.check.labels.append(label)

    def _hash_largest(self, view: memoryview, fields: Fields) -> int:
        _, offset, size = max(fields, key=lambda one: one[2])
        if not size:
            return 0
        with view[offset : offset + size] as data:
            return hash_bytes(data)


def expand_local(patterns: str | Sequence[str]) -> list[str]:
    """The shards that patterns name. Raises ShardError for what is not on a local disk: every byte is looked at, and in any order."""
    paths = expand(patterns)
    if remote := next((path for path in paths if is_url(path)), None):
        advice = "copy the shards to a local disk first (contact_sheet.py, benchmark.py and predict.py take URLs)"
        raise ShardError(f"{redact(remote)}: every byte is read here, and that of local files only: {advice}")
    return paths


def check_all(
    paths: Sequence[str],
    look: Look,
    listed: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    progress: bool = True,
    apart: bool = False,
) -> Iterator[ShardCheck]:
    """The check of each shard, in order, made by several processes, with a progress bar on stderr when it takes over two seconds.

    listed: the shards whose sha256 is wanted. apart: as `map_processes` has it.
    """
    from tqdm import tqdm

    wanted = [path in (listed or {}) for path in paths]
    results = map_processes(check_shard, num_workers, paths, [look] * len(paths), wanted, apart=apart)
    return iter(tqdm(results, total=len(paths), desc="checking shards", unit="shard", delay=2, disable=not progress, leave=False))
