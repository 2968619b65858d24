"""What is known of remote shards before they are read: that they are there, how large they are, how many samples they hold.

in: URLs  ->  out: a `Shard` for each, or why it is none
Invariant: every shard is asked for, so one that is missing or forbidden is named before training. Counts are taken from what is published
beside the
shards, and are compared with the shard itself when it arrives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from . import remote
from .errors import ShardError
from .fetching import Remote, load_index, read_damage, walk_shard
from .index import not_a_tar, read_index
from .shard_cache import ShardCache
from .shards import Shard
from .urls import base_name, folder_of, parent_of, redact, scheme, sibling, with_suffix

LIST_FROM = 8  # shards of one folder, from which on it is listed rather than each asked for
SCAN_THREADS = 4  # shards that are read through at once
Found = tuple[Shard, bool] | ShardError
T = TypeVar("T")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_remote(
    urls: Sequence[str], cache: ShardCache | None, progress: bool, rebuild: bool = False, say: Callable[[str], None] = _say
) -> list[Found]:
    """For each URL: (the shard, whether it was indexed just now), or why it is none.

    Counts come from an index here, a listing beside the shards, or an index beside the shard; a shard with none of these is read through.
    """
    _read_beside.cache_clear()
    listings: dict[str, dict[str, remote.Stat]] = {}
    stats = _stat_all(urls, listings, progress)
    sources: dict[str, Remote] = {}
    results: dict[str, Found] = {url: found for url, found in stats.items() if isinstance(found, ShardError)}
    for url, found in stats.items():
        if isinstance(found, remote.Stat):
            sources[url] = Remote(url, found.size, found.tag, found.ranges, found.sha256, cache=cache)
    counts = {} if rebuild else _counts_here(sources)
    _add_published(sources, counts, rebuild)
    _add_indexes(sources, counts, listings, rebuild, progress)
    if cache is None:  # a count alone is not enough to find a sample
        for url in [url for url in counts if not sources[url].index_url and not os.path.exists(sources[url].index_path)]:
            del counts[url]
    unknown = [url for url in sources if url not in counts]
    if unknown:
        size = sum(sources[url].size for url in unknown)
        how = "fetched into the cache and indexed" if cache else "read through and indexed"
        again = f"; what the cache has no room for ({cache.limit / 1e6:,.1f} MB) comes again later" if cache and size > cache.limit else ""
        say(
            f"{len(unknown):,} of {len(urls):,} shards have no count or index beside them: their {size / 1e6:,.1f} MB are {how} "
            f"first, {SCAN_THREADS} at once, since no order, no length of an epoch and no exact resume can be promised before "
            f"(scripts/index_shards.py URLS --out PLACE does it once and for all; --stream starts at once and promises less){again}"
        )
        results.update(_walk_all(unknown, sources, progress, say))
    for url, (count, sha256) in counts.items():
        results[url] = _as_shard(replace(sources[url], sha256=sha256 or sources[url].sha256), count, read_damage(sources[url])), False
    return [results[url] for url in urls]


def read_json_beside(url: str, name: str) -> Any:
    """A JSON file in the folder of a shard; None where there is none or it can't be read as JSON."""
    data = _read_beside(sibling(url, name))
    try:
        return None if data is None else json.loads(data.decode("utf-8-sig"))
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _read_beside(url: str) -> bytes | None:
    return remote.read_whole(url)


def _as_shard(source: Remote, count: int, damage: str | None) -> Shard:
    path = redact(source.url)
    tar_path = source.cache.path(source.entry) if source.cache is not None else path
    return Shard(path, base_name(path), tar_path, source.index_path, count, source.size, damage, source)


def _map_with_bar(what: str, work: Callable[[str], T], urls: Sequence[str], progress: bool) -> list[T]:
    """`remote.map_threads`, with a bar where it takes long: a hundred thousand questions do."""
    from tqdm import tqdm

    with tqdm(total=len(urls), desc=what, unit="shard", delay=2, disable=not progress, leave=False) as bar:

        def step(url: str) -> T:
            try:
                return work(url)
            finally:
                bar.update()

        return remote.map_threads(step, urls)


def _stat_all(
    urls: Sequence[str], listings: dict[str, dict[str, remote.Stat]], progress: bool
) -> dict[str, remote.Stat | ShardError]:
    """What the store says of each URL. `listings` gets those that were made: folder -> redacted URL -> what it says."""
    folders: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        folders[folder_of(url)].append(url)
    found: dict[str, remote.Stat | ShardError] = {}
    for folder, members in folders.items():
        if scheme(folder) not in ("http", "https") and len(members) >= LIST_FROM:
            try:
                listings[folder] = remote.list_names(sibling(members[0], ""))
            except ShardError:
                continue  # what may be read may not be listed
            found.update((url, listings[folder][redact(url)]) for url in members if redact(url) in listings[folder])
    rest = [url for url in urls if url not in found]
    found.update(zip(rest, _map_with_bar("asking for shards", _stat_shard, rest, progress), strict=True))
    return {url: _refuse_empty(url, stat) if isinstance(stat, remote.Stat) else stat for url, stat in found.items()}


def _stat_shard(url: str) -> remote.Stat | ShardError:
    try:
        stat = remote.stat(url)
    except ShardError as error:
        return error
    if stat.start and stat.start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"version https://git-lfs", b"PK\x03\x04")):
        return not_a_tar(redact(url), stat.start)
    return stat


def _refuse_empty(url: str, stat: remote.Stat) -> remote.Stat | ShardError:
    return stat if stat.size else ShardError(f"{redact(url)}: empty (0 bytes): no tar in it; upload it again")


def _counts_here(sources: Mapping[str, Remote]) -> dict[str, tuple[int, str]]:
    """Samples of the shards whose indexes are on this machine already."""
    counts = {}
    for url, source in sources.items():
        try:
            counts[url] = len(read_index(source.index_path)) - 1, ""
        except (OSError, ValueError):
            continue
    return counts


def _add_published(sources: dict[str, Remote], counts: dict[str, tuple[int, str]], rebuild: bool) -> None:
    """Counts from the listings that tools leave beside shards: ours, open_clip's, timm's and the Hub's, img2dataset's."""
    groups: dict[str, list[str]] = defaultdict(list)
    for url in sources:
        if url not in counts and not rebuild:
            groups[folder_of(url)].append(url)
    for members in groups.values():
        for read_counts in (_from_dataset_json, _from_sizes_json, _from_info_json):
            published = read_counts(members[0])
            for url in members:
                entry = published.get(base_name(url))
                if url not in counts and entry is not None and entry[1] in (None, sources[url].size):  # else it speaks of another version
                    counts[url] = entry[0], entry[2]
            members = [url for url in members if url not in counts]
            if not members:
                break
        if members and _stats_json(members[0]) is not None:
            for url, count in zip(members, remote.map_threads(_stats_json, members), strict=True):
                if count is not None:
                    counts[url] = count, ""


Published = dict[str, tuple[int, int | None, str]]  # file name -> samples, bytes where told, sha256 where told


def _from_dataset_json(url: str) -> Published:
    """Ours: beside the shards, or in the parent folder if it lists their folder as a split."""
    folder = base_name(folder_of(url))
    for name in ("dataset.json", "../dataset.json"):
        splits = _mapping(_mapping(read_json_beside(url, name) if name[0] != "." else _parent_json(url)).get("splits"))
        if name[0] == ".":
            splits = {folder: splits.get(folder)}
        shards = [shard for split in splits.values() for shard in _mapping(split).get("shards") or () if isinstance(shard, dict)]
        found = {
            str(shard.get("name")): (shard["samples"], shard.get("bytes"), str(shard.get("sha256") or ""))
            for shard in shards
            if _is_count(shard.get("samples"))
        }
        if found:
            return found
    return {}


def _parent_json(url: str) -> Any:
    folder = folder_of(url)
    if folder.count("/") < 3:  # no parent below the host or bucket
        return None
    return read_json_beside(parent_of(url), "dataset.json")


def _from_sizes_json(url: str) -> Published:
    """open_clip's: {file name: samples}."""
    return {name: (count, None, "") for name, count in _mapping(read_json_beside(url, "sizes.json")).items() if _is_count(count)}


def _from_info_json(url: str) -> Published:
    """timm's and the Hub's: splits with file names and lengths of shards."""
    found: Published = {}
    for name in ("_info.json", "info.json"):
        for split in _mapping(_mapping(read_json_beside(url, name)).get("splits")).values():
            names, lengths = _mapping(split).get("filenames"), _mapping(split).get("shard_lengths")
            if isinstance(names, list) and isinstance(lengths, list) and len(names) == len(lengths):
                found.update({base_name(str(n)): (count, None, "") for n, count in zip(names, lengths, strict=True) if _is_count(count)})
    return found


def _stats_json(url: str) -> int | None:
    """img2dataset's, one a shard: 00000.tar has 00000_stats.json, which counts the pictures that were written."""
    content = _mapping(read_json_beside(url, base_name(url).removesuffix(".tar") + "_stats.json"))
    return content["successes"] if _is_count(content.get("successes")) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _add_indexes(
    sources: dict[str, Remote], counts: dict[str, tuple[int, str]], listings: Mapping[str, Mapping[str, remote.Stat]], rebuild: bool,
    progress: bool,
) -> None:  # fmt: skip
    """The published `.tar.idx` of each shard: its count, where nothing else told it; its place, where samples are read one by one."""
    wanted = [url for url, source in sources.items() if not rebuild and (url not in counts or source.cache is None)]

    def find(url: str) -> str:
        place = with_suffix(url, ".idx")
        listing = listings.get(folder_of(url))
        if listing is not None:
            return place if redact(place) in listing else ""
        try:
            return place if remote.stat(place).size else ""
        except ShardError:
            return ""

    for url, place in zip(wanted, _map_with_bar("asking for indexes", find, wanted, progress), strict=True):
        sources[url] = replace(sources[url], index_url=place)
    missing = [url for url in wanted if url not in counts and sources[url].index_url]

    def count(url: str) -> int | None:
        try:
            return len(load_index(sources[url], None)) - 1
        except ShardError:
            return None  # of another version of the shard: as if there were none

    for url, number in zip(missing, _map_with_bar("reading indexes", count, missing, progress), strict=True):
        if number is not None:
            counts[url] = number, ""


def _walk_all(urls: Sequence[str], sources: Mapping[str, Remote], progress: bool, say: Callable[[str], None]) -> dict[str, Found]:
    from tqdm import tqdm

    started = time.monotonic()
    size = sum(sources[url].size for url in urls)
    with tqdm(
        total=size, desc=f"indexing {len(urls):,} shards", unit="B", unit_scale=True, delay=2, disable=not progress, leave=False
    ) as bar:  # fmt: skip

        def walk(url: str) -> Found:
            try:
                count, damage = walk_shard(sources[url])
                return _as_shard(sources[url], count, damage), True
            except ShardError as error:
                return error
            finally:
                bar.update(sources[url].size)

        results = dict(zip(urls, remote.map_threads(walk, urls, SCAN_THREADS), strict=True))
    seconds = time.monotonic() - started
    rate = size / 1e6 / seconds
    say(f"indexed: {len(urls):,} shards, {size / 1e6:,.1f} MB in {seconds:,.1f} s ({rate:,.1f} MB/s); their indexes are kept")
    return results
