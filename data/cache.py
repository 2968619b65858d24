"""The user's cache folder, for what can't stand beside a shard: decompressed copies and indexes of read-only places.

in: a shard's path, size and mtime  ->  out: the path of its entry
Invariant: an entry's name changes with the shard's path, size and mtime, so an entry never speaks for another file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile

from .errors import ShardError


def cache_dir() -> str:
    """The cache folder, made if missing: $XDG_CACHE_HOME/shardline, ~/.cache/shardline, or one of this user's in the temporary folder."""
    for parent in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        folder = os.path.join(parent, "shardline")
        if os.path.isabs(folder):
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError:
                continue
            if is_writable(folder):
                return folder
    folder = os.path.join(tempfile.gettempdir(), f"shardline-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        owner = os.lstat(folder).st_uid
    except OSError as error:
        raise ShardError(f"no cache folder: {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written") from None
    if owner != os.getuid():  # what another user put there is not to be trusted
        raise ShardError(f"no cache folder: {folder} belongs to another user; set XDG_CACHE_HOME to a folder that can be written")
    return folder


def is_writable(folder: str) -> bool:
    """Whether files can be made in `folder`; not where it is marked read-only for everybody, though root could."""
    try:
        marked = os.stat(folder).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    except OSError:
        return False
    return bool(marked) and os.access(folder, os.W_OK | os.X_OK)


def cached_path(kind: str, path: str, status: os.stat_result) -> str:
    """Where the entry of `kind` for the file `path` lies, without a suffix; its folder is made."""
    folder = os.path.join(cache_dir(), kind)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ShardError(f"no cache folder: {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written") from None
    stamp = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}"
    digest = hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(folder, f"{os.path.basename(path)[-100:]}-{digest}")
