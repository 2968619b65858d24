"""Files that were made here go to where they are wanted: a folder, or a place in a store.

in: local files, a folder or URL  ->  out: the same files there
Invariant: under its final name a file is whole or not there. A run that goes on does not send again what is there with the same size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence

from . import remote
from .cache import cache_dir
from .errors import ShardError
from .fetching import load_index
from .shards import Shard
from .tables import SourceError
from .urls import is_url, redact

UPLOADS = 4  # at once


def publish_indexes(shards: Sequence[Shard], place: str) -> None:
    """Put the index of each shard into a folder or a store, as `<shard>.idx`. Raises ShardError."""
    twice = [name for name, count in Counter(shard.name for shard in shards).items() if count > 1]
    if twice:
        raise ShardError(f"--out {redact(place)}: two shards are named {twice[0]}: index their folders apart, each with its own --out")

    def publish(shard: Shard) -> None:
        if shard.remote is not None:
            load_index(shard.remote, shard.num_samples)  # one that is published is brought here first
        put(shard.index_path, place, f"{shard.name}.idx")

    remote.map_threads(publish, shards, UPLOADS)


def publish_folder(folder: str, names: Sequence[str], url: str, anew: bool = False) -> int:
    """Send files of a folder, given by their paths in it, to a store; how many were sent now. Raises ShardError.

    anew: also where a file of that size is there already, which may be another one.
    """

    def send(name: str) -> bool:
        target = f"{url.rstrip('/')}/{name}"
        local = os.path.join(folder, name)
        try:
            if not anew and remote.stat(target).size == os.path.getsize(local):
                return False
        except remote.NotThere:
            pass
        remote.upload(local, target)
        return True

    return sum(remote.map_threads(send, names, UPLOADS))


def prepare_staging(out: str, digest: str, overwrite: bool) -> str:
    """Where shards that go to `out` are made: a folder itself; for a URL one that is the same for each run: one that was killed goes on.

    Raises SourceError where other shards lie at the URL.
    """
    if not is_url(out):
        return out
    earlier = published_digest(out)
    if earlier is not None and earlier != digest and not overwrite:
        raise SourceError(f"{redact(out)}: holds a dataset.json of other shards: choose another place, or give --overwrite to replace it")
    name = hashlib.sha256(redact(out).rstrip("/").encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = os.path.join(cache_dir(), "making", name)
    os.makedirs(folder, exist_ok=True)
    return folder


def send_shards(folder: str, paths: Sequence[str], url: str, anew: bool) -> str:
    """Shards that were made in `folder` go to a store, dataset.json last: it never lists what isn't there. What was done, in words."""
    sent = publish_folder(folder, [name for path in paths for name in (path + ".idx", path)], url, anew)
    send_summary(folder, url)
    return f"{redact(url)}: {sent} files sent, {2 * len(paths) - sent} were there already"


def send_summary(folder: str, url: str) -> None:
    """The last of what was made: dataset.json. The folder is not needed then."""
    publish_folder(folder, ["dataset.json"], url, anew=True)
    shutil.rmtree(folder)


def published_size(url: str, name: str) -> int | None:
    """Bytes of a file that was sent; None where it is not there. Raises ShardError."""
    try:
        return remote.stat(f"{url.rstrip('/')}/{name}").size
    except remote.NotThere:
        return None


def published_digest(url: str) -> str | None:
    """The digest of the shards that make_shards put there earlier; "" where something else lies there, None where nothing does."""
    content = remote.read_whole(f"{url.rstrip('/')}/dataset.json")
    if content is None:
        return None
    try:
        return str(json.loads(content)["digest"])
    except (ValueError, KeyError, TypeError):
        return ""


def put(local: str, place: str, name: str) -> None:
    """Copy one file into a folder or a store."""
    if is_url(place):
        remote.upload(local, f"{place.rstrip('/')}/{name}")
        return
    os.makedirs(place, exist_ok=True)
    part = os.path.join(place, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        shutil.copy2(local, part)
        os.replace(part, os.path.join(place, name))
    finally:
        if os.path.exists(part):
            os.unlink(part)
