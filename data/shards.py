"""What the user wrote after --data -> the list of shards, each with its index.

in: patterns (str or several)  ->  out: list[Shard], in the order of the patterns
Invariant: every shard of the list exists, is a tar with an index that fits it, and stands there once; no order comes from the disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, cast

from .errors import ShardError
from .fetching import Remote
from .index import load_index
from .patterns import expand
from .store import cut_reason, local_tar
from .urls import base_name, folder_of, is_url, parent_of, sibling

__all__ = ["Shard", "expand", "index_shards", "load_shards", "read_dataset_json"]

_ALONE_SECONDS = 0.3  # how long one process works before others are started: shards with fresh indexes need none


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard that is there and indexed. `damage`: one line on what of it can't be read, without its name; None for a whole one."""

    path: str  # as the user named it, absolute; a URL without what is secret in it
    name: str  # file name
    tar_path: str  # a plain tar with its content: `path`, or a copy in the cache, which may yet have to be fetched
    index_path: str
    num_samples: int
    num_bytes: int  # of the file at `path`
    damage: str | None = None
    remote: Remote | None = None  # where it comes from, if that isn't a local disk


def load_shards(
    patterns: str | Sequence[str],
    num_workers: int | None = None,
    progress: bool = True,
    cache_dir: str | None = None,
    cache_size: int | None = None,
) -> list[Shard]:
    """Expand the patterns, and find or build the index of each shard. Raises ShardError for the first that is none.

    Works in parallel, with a progress bar on stderr when it takes more than two seconds. Remote shards will be cached in `cache_dir`
    ("none": not
    at all; None: in the user's cache folder), in at most `cache_size` bytes (None: nine tenths of what the disk has left).
    """
    results = list(index_shards(expand(patterns), num_workers, progress, cache_dir=cache_dir, cache_size=cache_size))
    errors = [result for result in results if isinstance(result, ShardError)]
    if errors:
        more = f" (and {len(errors) - 1} more of the {len(results)} shards)" if len(errors) > 1 else ""
        raise type(errors[0])(f"{errors[0]}{more}")
    return [result[0] for result in results if not isinstance(result, ShardError)]


def resolve_shards(shards: str | Sequence[str] | Sequence[Shard], cache_dir: str | None, cache_size: int | None) -> list[Shard]:
    """What patterns name, as `load_shards`, or the shards themselves."""
    if isinstance(shards, str) or any(isinstance(shard, str) for shard in shards):
        return load_shards(cast(Any, shards), cache_dir=cache_dir, cache_size=cache_size)
    return list(cast(Sequence[Shard], shards))


def index_shards(
    paths: Sequence[str],
    num_workers: int | None = None,
    progress: bool = True,
    rebuild: bool = False,
    cache_dir: str | None = None,
    cache_size: int | None = None,
) -> Iterator[tuple[Shard, bool] | ShardError]:
    """For each path or URL in turn: (the shard, whether its index was written just now), or why it is none."""
    from tqdm import tqdm

    urls = [path for path in paths if is_url(path)]
    remote = _load_remote(urls, cache_dir, cache_size, progress, rebuild) if urls else {}
    local = [path for path in paths if path not in remote] if remote else paths
    with tqdm(total=len(local), desc="indexing shards", unit="shard", delay=2, disable=not progress, leave=False) as bar:
        results = _index_all(local, num_workers or num_cores(), rebuild)
        for path in paths:
            if path in remote:
                yield remote[path]
            else:
                bar.update()
                yield next(results)


def _load_remote(
    urls: Sequence[str], cache_dir: str | None, cache_size: int | None, progress: bool, rebuild: bool
) -> dict[str, tuple[Shard, bool] | ShardError]:
    from .catalog import load_remote
    from .shard_cache import open_cache

    cache = None if cache_dir == "none" else open_cache(cache_dir, cache_size)
    return dict(zip(urls, load_remote(urls, cache, progress, rebuild), strict=True))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _index_all(paths: Sequence[str], num_workers: int, rebuild: bool) -> Iterator[tuple[Shard, bool] | ShardError]:
    started = time.monotonic()
    num_done = 0
    for path in paths:
        if num_workers > 1 and time.monotonic() - started > _ALONE_SECONDS:
            break
        yield _index_one(path, rebuild)
        num_done += 1
    rest = paths[num_done:]
    if not rest:
        return
    chunk = max(1, min(num_done // 3, len(rest) // (4 * num_workers), 100))  # about a tenth of a second's work
    not_ours = set(multiprocessing.active_children())
    pool = create_pool(min(num_workers, len(rest)))
    try:
        # not pool.map: it cancels what is left when it is given up, and that trips over workers that are ended at the same time
        for future in [pool.submit(_index_some, rest[i : i + chunk], rebuild) for i in range(0, len(rest), chunk)]:
            yield from future.result()
    except BrokenProcessPool:
        raise ShardError("a process that indexed shards was killed (out of memory?); try again with fewer workers") from None
    except BaseException:  # Ctrl-C above all: what the workers are at may take minutes
        for child in set(multiprocessing.active_children()) - not_ours:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def map_processes(work: Callable[..., Any], num_workers: int | None, *arguments: Sequence[Any], apart: bool = False) -> Iterator[Any]:
    """`map` over processes, one for each core at most, which are started at once; in this process where there is only one thing to do,
    unless it is to be `apart`. The iterator raises ShardError where a process is killed."""
    num_workers = min(len(arguments[0]), num_workers or num_cores())
    if num_workers < 2 and not apart:
        return map(work, *arguments)
    pool = create_pool(max(1, num_workers))
    # submitted one by one: what is left is cancelled when the caller stops early
    return _results(pool, [pool.submit(work, *one) for one in zip(*arguments, strict=True)])


def _results(pool: Executor, futures: list[Future]) -> Iterator[Any]:
    try:
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        raise ShardError("a process was killed (out of memory?); try again with fewer workers (-j)") from None
    finally:
        pool.shutdown(cancel_futures=True)


def create_pool(num_workers: int) -> Executor:
    """Forked processes: walking a tar holds the GIL, and a spawned one would run the user's script again. Threads where none can be."""
    if "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon:
        return ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork"), initializer=follow_parent)
    return ThreadPoolExecutor(num_workers)


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it: a pool's worker would else wait for ever for a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def wait() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _index_some(paths: Sequence[str], rebuild: bool) -> list[tuple[Shard, bool] | ShardError]:
    return [_index_one(path, rebuild) for path in paths]


def _index_one(path: str, rebuild: bool) -> tuple[Shard, bool] | ShardError:
    try:
        tar_path = local_tar(path)
        info = load_index(tar_path, cut_reason(tar_path), path, rebuild)
        num_bytes = os.path.getsize(path)
    except ShardError as error:
        return error
    name = os.path.basename(path)
    return Shard(path, name, tar_path, info.index_path, info.num_samples, num_bytes, info.damage), info.built


def describe_empty(shards: Iterable[Shard]) -> str:
    """What to say of shards that hold no samples: the damage of the first that is damaged may be why."""
    damaged = next((f" ({shard.path}: {shard.damage})" for shard in shards if shard.damage), "")
    return f"the shards hold no samples{damaged}; give shards that do"


def read_dataset_json(shards: Iterable[Shard | str]) -> dict[str, Any] | None:
    """The dataset.json that speaks for all these shards: beside them, or in the parent folder if it lists their folder as a split.

    None if there is none, not one for all of them, or only another tool's; ShardError if it can't be read or two contradict.
    """
    paths = [shard if isinstance(shard, str) else shard.remote.url if shard.remote else shard.path for shard in shards]
    found = [_read_folder_json(folder) for folder in sorted({os.path.dirname(os.path.abspath(path)) for path in paths if not is_url(path)})]
    found += [_read_remote_json(url) for _, url in sorted({folder_of(path): path for path in paths if is_url(path)}.items())]
    listings = [entry for entry in found if entry is not None]
    if not listings or len(listings) < len(found):
        return None
    first_path, first = listings[0]
    for path, listing in listings[1:]:
        if listing.get("classes") != first.get("classes"):
            raise ShardError(
                f"{path}: its classes differ from those of {first_path}, so the shards beside them can't be used as one data set; "
                "make them with one class list (make_shards.py --classes FILE)"
            )
    return first


def _read_remote_json(url: str) -> tuple[str, dict[str, Any]] | None:
    """(redacted URL, content) of the dataset.json for the shard at `url`."""
    from .catalog import read_json_beside

    folder = folder_of(url)
    for place in (url, parent_of(url)) if folder.count("/") > 2 else (url,):  # nothing is above the host or bucket
        content = read_json_beside(place, "dataset.json")
        splits = content.get("splits") if isinstance(content, dict) else None
        if isinstance(splits, dict) and (place == url or base_name(folder) in splits):
            return folder_of(sibling(place, "x")) + "/dataset.json", content
    return None


def _read_folder_json(folder: str) -> tuple[str, dict[str, Any]] | None:
    """(path, content) of the dataset.json for the shards in `folder`."""
    parent, split = os.path.split(folder)
    for place in (folder, parent):
        path = os.path.join(place, "dataset.json")
        try:
            with open(path, encoding="utf-8-sig") as file:
                content = json.load(file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ShardError(f"{path}: can't be read: {error.strerror}") from None
        except ValueError as error:
            raise ShardError(f"{path}: not JSON ({error}): make it again or remove it") from None
        splits = content.get("splits") if isinstance(content, dict) else None
        if isinstance(splits, dict) and (place == folder or split in splits):
            return path, content
    return None
