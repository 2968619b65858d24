"""A remote shard becomes a local one: fetched once a machine, checked, indexed; or its samples are read where they are.

in: a shard that says where it comes from  ->  out: an open file of it, its index, or the bytes of samples
Invariant: what is handed out is the version that was seen when the run began: size, tag (ETag), sha256 and number of samples are compared,
and a shard that
differs is refused by name.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import remote
from .cache import cache_dir
from .errors import ShardError, StaleIndexError
from .index import build_index, read_index, write_index
from .retrying import ATTEMPTS, ChangedError
from .shard_cache import PART, ShardCache
from .tar import Buffer, is_header
from .urls import base_name, redact

if TYPE_CHECKING:
    from .shards import Shard

CHUNK = 8 << 20  # bytes of one request
CHUNK_THREADS = 4  # requests at once for one shard
GZIP = b"\x1f\x8b\x08"


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a shard comes from, and how its version is told. `url` and `index_url` (empty: none is published) may hold secrets, so "
    "they are not shown."""

    url: str = field(repr=False)
    size: int
    tag: str
    ranges: bool = True
    sha256: str = ""
    index_url: str = field(default="", repr=False)
    cache: ShardCache | None = field(default=None, compare=False)

    @property
    def entry(self) -> str:
        """Its name in a cache: other places, sizes and versions have others."""
        stamp = f"{redact(self.url)}\0{self.size}\0{self.tag}"
        digest = hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return f"{base_name(self.url)[-100:]}-{digest}.tar"

    @property
    def index_path(self) -> str:
        """Where its index lies on this machine, once it is there."""
        if self.cache is not None:
            return self.cache.index_path(self.entry)
        return os.path.join(cache_dir(), "index", f"{self.entry}.idx")


def open_fetched(source: Remote, num_samples: int | None) -> int:
    """A descriptor of the shard in the cache, fetched now where it isn't there; not evicted until it is closed. Raises ShardError.

    num_samples: what the shard must hold; None where that is to be found out.
    """
    assert source.cache is not None
    while True:
        fd = source.cache.open(source.entry)
        if fd is not None and os.path.exists(source.index_path):
            return fd
        if fd is not None:  # its index was removed
            try:
                _write_index(source, source.cache.path(source.entry), num_samples)
            finally:
                os.close(fd)
            continue
        fetch(source, num_samples, wait=True)


def bring(shard: Shard) -> None:
    """See to it that the files that a shard names are here: those of a remote one are fetched. Raises ShardError."""
    if shard.remote is not None:
        os.close(open_fetched(shard.remote, shard.num_samples))


def fetch(source: Remote, num_samples: int | None, wait: bool) -> bool | None:
    """Bring a shard into the cache, unless it is there. Where `wait` is False: None if another process is at it, False if there is no room.

    Raises ShardError for what can't be fetched, and for what arrives and is not what it should be.
    """
    cache = source.cache
    assert cache is not None
    with cache.writing(source.entry, wait) as fd:
        if fd is None:
            return cache.has(source.entry) or None
        if not cache.reserve(source.entry, fd, source.size, wait):
            return False
        try:
            download(source, fd)
            _write_index(source, cache.path(source.entry) + PART, num_samples)
            cache.publish(source.entry, fd)
        except OSError as error:
            raise ShardError(f"{cache.folder}: can't be written: {error.strerror}; --cache-dir says where the cache is") from None
    return True


def download(source: Remote, fd: int) -> None:
    """Write a whole shard to an open file. Raises ShardError."""
    if source.ranges:

        def get(start: int) -> None:
            end = min(start + CHUNK, source.size)
            _write_at(fd, remote.read(source.url, start, end, source.tag), start)

        remote.map_threads(get, range(0, source.size, CHUNK), CHUNK_THREADS)
    else:
        _stream_whole(source, fd)
    if not source.url.startswith("http"):  # there every answer told its tag
        now = remote.stat(source.url)
        if (now.size, now.tag) != (source.size, source.tag):
            raise remote.changed(source.url)
    if source.sha256 and _sha256(fd) != source.sha256:
        advice = "it was changed, or damaged on its way: upload it again"
        raise ShardError(f"{redact(source.url)}: its sha256 is not the one in dataset.json, or on the Hub: {advice}")


def load_index(source: Remote, num_samples: int | None) -> np.ndarray:
    """The shard's offsets, from this machine or from beside the shard. Raises ShardError."""
    path = source.index_path
    if not os.path.exists(path):
        if not source.index_url:
            raise ShardError(f"{redact(source.url)}: no index beside it, and none here: run scripts/index_shards.py, or use a cache")
        data = remote.read_whole(source.index_url) or b""
        offsets = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
        steps_up = bool((np.diff(offsets.view("<i8")) > 0).all())
        if (
            not offsets.size
            or len(data) % 8
            or not steps_up
            or int(offsets[-1]) > source.size
            or num_samples not in (None, len(offsets) - 1)
        ):
            raise StaleIndexError(
                f"{redact(source.index_url)}: not an index of its shard as it is now: write it anew with scripts/index_shards.py"
            )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_index(path, offsets, 0)
    try:
        return read_index(path)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path}: can't be read ({error}); delete it") from None


def walk_shard(source: Remote) -> tuple[int, str | None]:
    """(samples, damage) of a shard about which nothing is published: it is fetched and walked, and its index is kept."""
    if source.cache is not None:
        os.close(open_fetched(source, None))
        return len(read_index(source.index_path)) - 1, read_damage(source)
    folder = os.path.dirname(source.index_path)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # gone with this process, whatever becomes of it
            download(source, file.fileno())
            return _write_index(source, f"/proc/self/fd/{file.fileno()}", None)
    except OSError as error:
        raise ShardError(f"{folder}: can't be written: {error.strerror}; set XDG_CACHE_HOME to a folder with room") from None


def read_pieces(shard: Shard) -> Iterator[Buffer]:
    """A remote shard's samples in order: all of it, fetched and mapped, or some hundred samples after others. Each may be used until "
    "the next is asked for."""
    source = shard.remote
    assert source is not None
    if source.cache is None:
        offsets = load_index(source, shard.num_samples)
        for first in range(0, shard.num_samples, 256):
            yield remote.read(source.url, int(offsets[first]), int(offsets[min(first + 256, shard.num_samples)]), source.tag)
        return
    fd = open_fetched(source, shard.num_samples)
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped
    finally:
        os.close(fd)


def _write_index(source: Remote, path: str, num_samples: int | None) -> tuple[int, str | None]:
    name = redact(source.url)
    with open(path, "rb") as file:
        start = file.read(512)
    if start.startswith(GZIP) and not is_header(start):
        raise ShardError(f"{name}: compressed, which has no random access: use --stream, or upload it decompressed")
    offsets, damage = build_index(path, "", name)
    if num_samples not in (None, len(offsets) - 1):
        raise StaleIndexError(
            f"{name}: it holds {len(offsets) - 1} samples, and its index or count says {num_samples}: write that anew with "
            f"scripts/index_shards.py"
        )
    write_index(source.index_path, offsets, 0)
    if damage:
        with open(source.index_path + ".damage", "w", encoding="utf-8") as file:
            file.write(damage)
    return len(offsets) - 1, damage


def read_damage(source: Remote) -> str | None:
    try:
        with open(source.index_path + ".damage", encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _stream_whole(source: Remote, fd: int) -> None:
    """From a server without ranges: from the start again, where it breaks off."""
    for attempt in range(ATTEMPTS):
        position = 0
        try:
            for piece in remote.stream(source.url):
                if position + len(piece) > source.size:
                    raise remote.changed(source.url)
                _write_at(fd, piece, position)
                position += len(piece)
        except ChangedError:
            raise
        except ShardError:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if position == source.size:
            return
    raise ShardError(f"{redact(source.url)}: its transfer ended early {ATTEMPTS} times: {position} of {source.size} bytes came")


def _write_at(fd: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


def _sha256(fd: int) -> str:
    digest = hashlib.sha256()
    position = 0
    while piece := os.pread(fd, 1 << 22, position):
        digest.update(piece)
        position += len(piece)
    return digest.hexdigest()
