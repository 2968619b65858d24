"""Bytes of files in other places, through fsspec: HTTP, S3, GCS, the Hub, Azure, and what else is installed.

in: a URL  ->  out: its size and tag, ranges of its bytes; or a local file goes there
Invariant: a range that is returned is whole and of the version that was asked for. What may pass is tried again (retrying.py). What won't
pass is a ShardError of one line without secrets.
"""

from __future__ import annotations

import importlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from .errors import ShardError
from .retrying import ChangedError, NotThere, Passing, explained, retried
from .urls import is_url, redact, scheme, scrub

# scheme -> (what its fsspec file system imports, what installs it); any other scheme that fsspec knows works as well
STORES = {
    "http": ("aiohttp", "aiohttp"), "https": ("aiohttp", "aiohttp"), "s3": ("s3fs", "s3fs"), "s3a": ("s3fs", "s3fs"),
    "gs": ("gcsfs", "gcsfs"), "gcs": ("gcsfs", "gcsfs"), "hf": ("huggingface_hub", "huggingface_hub"),
    "az": ("adlfs", "adlfs"), "abfs": ("adlfs", "adlfs"), "abfss": ("adlfs", "adlfs"),
}  # fmt: skip
OBJECT_STORES = frozenset(STORES) - {"http", "https"}  # a file is there whole or not at all
_NO_STORES = frozenset({  # fsspec's names for local files, caches and files inside files
    "pipe", "data", "local", "asynclocal", "memory", "simplecache", "filecache", "blockcache", "cached", "zip", "tar", "libarchive",
    "reference", "dir", "dask", "generic", "async_wrapper", "asyncwrapper", "git", "github", "gist", "jlab", "jupyter", "pyscript", "root",
})  # fmt: skip

STALL = 30.0  # seconds without a byte, after which a connection is cut
THREADS = 32  # requests at once, where many small ones are made
_TAGS = ("ETag", "etag", "md5Hash", "sha256", "blob_id", "checksum", "LastModified", "last_modified", "mtime", "Last-Modified")

T = TypeVar("T")
S = TypeVar("S")


class Stat(NamedTuple):
    """`tag` changes with the content (an ETag mostly; "" if there is none); `start`: first bytes, where they came along; sha256: Hub."""

    size: int
    tag: str
    ranges: bool = True
    start: bytes = b""
    sha256: str = ""


class ShortRead(OSError):
    """Fewer bytes came than were asked for."""


def stat(url: str) -> Stat:
    """Size and tag. Raises ShardError, naming the URL, for what is not there (404), may not be read (403) or can't be reached."""

    def work(fs: Any, path: str) -> Stat:
        if scheme(url) in ("http", "https"):
            return _run(fs, _http_stat(fs, path))
        info = fs.info(path)
        if info["type"] == "directory":
            raise ShardError(f"{redact(url)}: a folder, not a shard: name its tars, or give the folder with a slash at its end")
        return _as_stat(info)

    return _with_store(url, work)


def read(url: str, start: int, end: int, tag: str = "") -> bytes:
    """Bytes start..end-1. Raises ChangedError where the file's tag, as far as the store tells it, is another one, and ShardError."""

    def work(fs: Any, path: str) -> bytes:
        if scheme(url) in ("http", "https"):
            data, found = _run(fs, _http_get(fs, path, start, end))
            if tag and found and found != tag:
                raise changed(url)
        elif fs.async_impl:
            data = _run(fs, fs._cat_file(path, start=start, end=end), patience=2 * STALL + (end - start) / 1e5)
        else:
            data = fs.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            if tag and scheme(url) not in ("http", "https") and _as_stat(fs.info(path)).tag != tag:
                raise changed(url)
            raise ShortRead(f"{len(data)} of {end - start} bytes came")
        return data

    return _with_store(url, work)


def read_whole(url: str, limit: int = 1 << 30) -> bytes | None:
    """All bytes of a small file, or None where there is none. A 403 counts as none: stores that may not be listed answer so."""
    try:
        found = stat(url)
        if found.size > limit:
            raise ShardError(f"{redact(url)}: {found.size} bytes: too large for what it should be")
        if found.size <= len(found.start) or not found.size:
            return found.start[: found.size]
        if not found.ranges:
            return b"".join(stream(url))
        return read(url, 0, found.size, found.tag)
    except NotThere:
        return None


def stream(url: str) -> Iterator[bytes]:
    """The bytes in order, in pieces; raises ShardError. Not tried again once the first piece is out."""
    if scheme(url) in ("http", "https"):
        file = _with_store(url, lambda fs, path: fs.open(path, block_size=0, size=1))  # any size: it is not asked for then
    else:
        file = _with_store(url, lambda fs, path: fs.open(path, block_size=8 << 20, cache_type="readahead"))
    with file:
        while piece := _read_piece(url, file):
            yield piece


def _read_piece(url: str, file: Any) -> bytes:
    try:
        return explained(url, lambda: bytes(file.read(1 << 20)))
    except Passing as error:
        raise ShardError(f"{redact(url)}: its transfer broke off: {error}") from None


def list_names(url: str) -> dict[str, Stat]:
    """The files right in a folder, as URLs -> what the listing says of each. Raises ShardError; HTTP has no listings."""
    protocol = url.partition("://")[0]

    def work(fs: Any, path: str) -> dict[str, Stat]:
        entries = fs.ls(path.rstrip("/"), detail=True)
        return {f"{protocol}://{_full(fs, e['name'])}": _as_stat(e) for e in entries if e["type"] == "file"}

    return _with_store(url, work)


def glob(url: str) -> list[str]:
    """The files that match, sorted. Raises ShardError."""

    def work(fs: Any, path: str) -> list[str]:
        found = fs.glob(path, detail=True)
        return sorted(f"{url.partition('://')[0]}://{_full(fs, name)}" for name, entry in found.items() if entry["type"] == "file")

    return _with_store(url, work)


def upload(local: str, url: str) -> None:
    """Put a whole file there; under its final name it is whole or not there. Raises ShardError."""
    if scheme(url) in ("http", "https"):
        raise ShardError(f"{redact(url)}: HTTP servers are only read from: write to a folder or a store (s3://, gs://, az://, hf://)")

    def work(fs: Any, path: str) -> None:
        if scheme(url) in OBJECT_STORES:
            fs.put_file(local, path)
            return
        part = f"{path}.{uuid.uuid4().hex}.part"
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.put_file(local, part)
        fs.mv(part, path)

    _with_store(url, work)


def map_threads(work: Callable[[S], T], items: Sequence[S], threads: int = THREADS) -> list[T]:
    """`map` with many requests at once; the first error, in the order of the items, is raised."""
    if len(items) < 2:
        return [work(item) for item in items]
    pool = ThreadPoolExecutor(min(threads, len(items)))
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def changed(url: str) -> ChangedError:
    return ChangedError(
        f"{redact(url)}: it changed on the server since its index was read: start again, and don't write to the shards of a running job"
    )


def open_store(url: str) -> tuple[Any, str]:
    """(the fsspec file system of a URL, the path in it). Raises ShardError where there is none, or its package is missing.

    One a process and place: they are neither made for forks nor shared between threads by fsspec itself.
    """
    name = scheme(url)
    if not is_url(url) or name in _NO_STORES:
        raise ShardError(f"{redact(url)}: {name}: is no store of shards; there are {', '.join(STORES)}, and others that fsspec knows")
    try:
        from fsspec.registry import get_filesystem_class

        if name in ("gs", "gcs"):  # else gcsfs asks for the kind of a bucket over gRPC, which is not made for forked readers
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        if name in STORES:
            importlib.import_module(STORES[name][0])
        kind = get_filesystem_class(name)
    except ImportError:
        raise ShardError(f"{redact(url)}: needs a package that is missing: {_install(name)}") from None
    except ValueError:
        raise ShardError(f"{redact(url)}: fsspec knows no store named {name!r}; there are {', '.join(STORES)}") from None
    given = kind._get_kwargs_from_urls(url)
    key = (os.getpid(), name, repr(given))
    if key not in _stores:
        try:
            _stores[key] = kind(**{**_options(name), **given}, skip_instance_cache=True)
        except ValueError as error:  # what it needs to know of an account is not there
            raise ShardError(f"{redact(url)}: {scrub(str(error))}") from None
    return _stores[key], kind._strip_protocol(url)


_stores: dict[tuple[int, str, str], Any] = {}


def _install(name: str) -> str:
    package = STORES[name][1] if name in STORES else "its fsspec file system"
    return f"pip install fsspec {package} (or all stores: pip install -r requirements-remote.txt)"


def _options(name: str) -> dict[str, Any]:
    """What makes a stalled connection end; the user's own fsspec configuration stays in force for the rest."""
    if name in ("http", "https"):
        import aiohttp
        from fsspec.config import conf

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL)
        return {"client_kwargs": {"timeout": timeout, **conf.get(name, {}).get("client_kwargs", {})}, "encoded": True}
    if name in ("s3", "s3a"):
        limits = {"connect_timeout": STALL, "read_timeout": STALL, "max_pool_connections": THREADS}
        return {"use_listings_cache": False, "config_kwargs": limits}
    return {"use_listings_cache": False} if name in ("gs", "gcs") else {}


def _run(fs: Any, coroutine: Any, patience: float | None = None) -> Any:
    """Wait for a coroutine of the store's loop."""
    from fsspec.asyn import sync

    async def awaited() -> Any:
        import asyncio

        return await (coroutine if patience is None else asyncio.wait_for(coroutine, patience))

    return sync(fs.loop, awaited)


async def _http_stat(fs: Any, url: str) -> Stat:
    """One GET of the first block: signatures often allow no HEAD."""
    session = await fs.set_session()
    headers = {"Range": "bytes=0-511", "Accept-Encoding": "identity"}
    async with session.get(fs.encode_url(url), headers=headers) as response:
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
        total = re.fullmatch(r"bytes (?:\*|\d+-\d+)/(\d+)", response.headers.get("Content-Range", ""))
        if response.status == 416 and total:  # an empty file has no first byte
            return Stat(int(total[1]), tag)
        _check_status(response)
        if response.status == 206 and total:
            start = await response.read()
            if len(start) != min(512, int(total[1])):
                raise ShortRead(f"{len(start)} bytes came of the first block")
            return Stat(int(total[1]), tag, True, start)
        length = response.headers.get("Content-Length")
        if length is None:
            raise ShardError(f"{redact(url)}: the server tells no size of it: copy it to a local disk, or use --stream")
        return Stat(int(length), tag, False, await response.content.read(512))


async def _http_get(fs: Any, url: str, start: int, end: int) -> tuple[bytes, str]:
    session = await fs.set_session()
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    async with session.get(fs.encode_url(url), headers=headers) as response:
        if response.status == 416:
            raise changed(url)
        _check_status(response)
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
        if response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise ShortRead("another range came than was asked for")
            return await response.read(), tag
        if start:
            raise ShardError(f"{redact(url)}: the server serves no ranges of it: use a cache (leave --cache-dir none out)")
        return await response.content.readexactly(end), tag


def _check_status(response: Any) -> None:
    if response.status in (404, 410):
        raise FileNotFoundError(response.status)
    if response.status in (401, 403):
        raise PermissionError(response.status)
    response.raise_for_status()


def _full(fs: Any, name: str) -> str:
    return str(fs._strip_protocol(name)).lstrip("/")


def _as_stat(info: dict[str, Any]) -> Stat:
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    return Stat(int(info["size"] or 0), tag, sha256=getattr(info.get("lfs"), "sha256", ""))


def _with_store(url: str, work: Callable[[Any, str], T]) -> T:
    """work(file system, path), tried again while what it meets may pass."""
    return retried(url, lambda: work(*open_store(url)))
