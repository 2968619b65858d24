"""Addresses of shards: what is one, and how it is written where others may read it.

in: what the user wrote  ->  out: the same without its secrets
Invariant: what `redact` and `scrub` return holds no user name, password, query or fragment of any URL: signatures and tokens
stand there, and messages, metrics, checkpoints and cache names are made of what these return.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from typing import Any

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>|]+")


def is_url(text: str) -> bool:
    """Whether this names something that is not on this machine's disks. `file:` URLs are paths."""
    return scheme(text) not in ("", "file")


def scheme(text: str) -> str:
    """`s3` of `s3://bucket/x.tar`, lower-cased; empty for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def redact(url: str) -> str:
    """The URL without user, password, query and fragment, and so those in a `pipe:` command; paths, and globs of stores that have no
    queries, stay as they are."""
    if not is_url(url):
        return _IN_TEXT.sub(lambda match: redact(match[0]), url) if url.startswith("pipe:") else url
    start, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if scheme(url) in ("abfs", "abfss", "hf") and ":" not in host:  # container@account, revisions: no secrets
        return f"{start}://{host}{slash}{path.partition('?')[0]}"
    return f"{start}://{host.partition('?')[0].rpartition('@')[2]}{slash}{path.partition('?')[0].partition('#')[0]}"


def redact_pattern(value: Any) -> Any:
    """What was given as patterns, joined by `::` or in a list, without secrets; None stays None."""
    if isinstance(value, str):
        return "::".join(map(redact, value.split("::")))
    return [redact_pattern(item) for item in value] if isinstance(value, (list, tuple)) else value


def scrub(text: str) -> str:
    """A message of a library, in one line, with every URL in it redacted."""
    return " ".join(_IN_TEXT.sub(lambda match: redact(match[0]), text).split())


def split_query(url: str) -> tuple[str, str]:
    """(what comes before the query, the query with its question mark). Object stores have none."""
    base, mark, query = url.partition("?")
    return base, mark + query


def with_suffix(url: str, suffix: str) -> str:
    """The URL of the file whose name is longer by `suffix`; signatures of the query go with it."""
    base, query = split_query(url)
    return base + suffix + query


def sibling(url: str, name: str) -> str:
    """The URL of another file, named relative to the folder of this one; it never leaves the host or bucket."""
    base, query = split_query(url)
    start, _, path = base.partition("://")
    host, _, path = path.partition("/")
    joined = posixpath.normpath("/" + posixpath.join(path.rpartition("/")[0], name.lstrip("/"))).replace("//", "/")
    return f"{start}://{host}{joined}{query}"


def parent_of(url: str) -> str:
    """The URL of the folder, with the query: `sibling` of it lies in the folder above."""
    base, query = split_query(url)
    return base.rpartition("/")[0] + query


def base_name(url: str) -> str:
    """The file name."""
    return posixpath.basename(split_query(url)[0])


def folder_of(url: str) -> str:
    """The redacted URL of the folder."""
    return redact(url).rpartition("/")[0]


def relative_names(paths: Sequence[str]) -> list[str]:
    """Each path or redacted URL below the folder common to all: the same for a data set wherever it lies."""
    parts = [tuple(path.replace("://", ":/", 1).split("/") if is_url(path) else os.path.normpath(path).split("/")) for path in paths]
    common = os.path.commonprefix([part[:-1] for part in parts])
    return ["/".join(part[len(common) :]) for part in parts]
