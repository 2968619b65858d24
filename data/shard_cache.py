"""The folder of fetched shards that all processes of a machine share: who fetches, who reads, what goes when room is needed.

in: an entry's name and size  ->  out: an open file of the whole entry, or the right and the room to write it
Invariant: an entry under its final name is whole. The sizes of entries and of those in the making never add up to more than the limit.
What a process
holds, it holds by a lock on the file itself, so a kill at any moment leaves nothing that is taken for whole, in use or reserved.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .cache import cache_dir
from .errors import ShardError

PART = ".part"
PATIENCE = 300.0  # seconds to wait for room that others hold
GRACE = 2.0  # seconds after which a reader that waits takes the room of what jobs will read later


@dataclass(frozen=True, slots=True)
class ShardCache:
    """`folder` holds shards/ (entries), index/ (their indexes, some bytes a sample and not counted) and jobs/ (what running jobs will read
    next).

    `limit`: bytes of shards/.
    """

    folder: str
    limit: int

    def path(self, name: str) -> str:
        return os.path.join(self.folder, "shards", name)

    def index_path(self, name: str) -> str:
        return os.path.join(self.folder, "index", f"{name}.idx")

    def has(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def open(self, name: str) -> int | None:
        """A descriptor of the entry, which won't be evicted until it is closed; None if there is no such entry."""
        try:
            fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        status = os.fstat(fd)
        if not status.st_nlink:  # evicted before the lock was ours
            os.close(fd)
            return None
        _note_use(fd)
        return fd

    @contextmanager
    def writing(self, name: str, wait: bool) -> Iterator[int | None]:
        """The descriptor of the entry's unfinished file, held by this process alone; `publish` it within the block, or it is removed.

        None where the entry is there meanwhile, or `wait` is False and another process writes it.
        """
        fd = self._lock_part(name, wait)
        try:
            if fd is not None and self.has(name):
                yield None
            else:
                yield fd
        finally:
            if fd is not None:
                self._remove_part(name, fd)
                os.close(fd)

    def publish(self, name: str, fd: int) -> None:
        """Give a written part its final name; it is on the disk before."""
        os.fsync(fd)
        _note_use(fd)
        os.replace(self.path(name) + PART, self.path(name))

    def reserve(self, name: str, fd: int, size: int, wait: bool) -> bool:
        """Make room for a part and give it its size. False where there is none without evicting what a running job is about to read,
        and `wait` is False. Raises ShardError where it can't ever fit, and where the disk is full."""
        if size > self.limit:
            raise ShardError(f"{self.folder}: {name} has {size:,} bytes, and the cache may hold {self.limit:,}: raise --cache-size")
        started = time.monotonic()
        while True:
            with self.locked():
                needed = self._needed()
                forced = wait and (not needed or time.monotonic() > started + GRACE)
                if self._make_room(size, needed) or (forced and self._make_room(size)):
                    self._allocate(name, fd, size)
                    return True
            if not wait:
                return False
            if time.monotonic() > started + PATIENCE:
                raise ShardError(
                    f"{self.folder}: no room for {name} in {PATIENCE:.0f} s: other jobs hold it; raise --cache-size ({self.limit:,})"
                )
            time.sleep(0.05)

    def used(self) -> int:
        """Bytes of all entries, the unfinished ones with the size that they will have."""
        return sum(size for _, size, _ in self._entries())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else makes room, or says what it needs."""
        fd = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _entries(self) -> list[tuple[str, int, int]]:
        """(name, size, when used last) of all files."""
        found = []
        with os.scandir(os.path.join(self.folder, "shards")) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                found.append((entry.name, status.st_size, status.st_mtime_ns))
        return found

    def _make_room(self, size: int, spare: Collection[str] = ()) -> bool:
        """Remove what nobody holds, unfinished files of dead processes first, then entries by last use, but none of `spare`."""
        entries = self._entries()
        excess = sum(entry[1] for entry in entries) + size - self.limit
        for name, entry_size, _ in sorted(entries, key=lambda entry: (not entry[0].endswith(PART), entry[2])):
            if excess <= 0:
                break
            if name not in spare and entry_size and _remove_unlocked(self.path(name)):
                excess -= entry_size
        return excess <= 0

    def _needed(self) -> set[str]:
        """Entries that running jobs will read soon."""
        needed: set[str] = set()
        folder = os.path.join(self.folder, "jobs")
        for job in os.listdir(folder):
            if not _remove_unlocked(os.path.join(folder, job)):
                try:
                    with open(os.path.join(folder, job), encoding="utf-8") as file:
                        needed.update(file.read().splitlines())
                except FileNotFoundError:
                    continue
        return needed

    def _lock_part(self, name: str, wait: bool) -> int | None:
        path = self.path(name) + PART
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            if _is_at(fd, path):
                os.ftruncate(fd, 0)  # of a process that was killed
                return fd
            os.close(fd)  # finished, or removed, while we waited
            if self.has(name):
                return None

    def _remove_part(self, name: str, fd: int) -> None:
        path = self.path(name) + PART
        if _is_at(fd, path):
            os.unlink(path)

    def _allocate(self, name: str, fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ShardError(
                    f"{self.folder}: the disk is full: no room for the {size:,} bytes of {name}; give a smaller --cache-size than "
                    f"{self.limit:,}, or a --cache-dir on another disk"
                ) from None
            os.ftruncate(fd, size)  # a file system that can't make room beforehand


def open_cache(folder: str | None, limit: int | None) -> ShardCache:
    """The cache in `folder` (default: in the user's cache folder), with at most `limit` bytes (default: what it has and nine tenths of
    what is free).

    Raises ShardError where it can't be written.
    """
    folder = os.path.join(cache_dir(), "remote") if folder is None else os.path.abspath(os.path.expanduser(folder))
    try:
        for name in ("shards", "index", "jobs"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        cache = ShardCache(folder, 0)
        with cache.locked():
            pass
    except OSError as error:
        raise ShardError(f"--cache-dir {folder}: {error.filename}: {error.strerror}; give a folder that can be written") from None
    if limit is None:
        disk = os.statvfs(folder)
        limit = cache.used() + disk.f_bavail * disk.f_frsize * 9 // 10
    return ShardCache(folder, limit)


def _note_use(fd: int) -> None:
    """The times of an entry say when it was used last; what the system notes by itself is coarse, or off."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _remove_unlocked(path: str) -> bool:
    """Remove a file unless some process holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, path):
            os.unlink(path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
