"""What the user writes to name shards -> their paths.

in: a pattern, or several  ->  out: absolute paths of files that exist, and URLs, in the order of the patterns
Invariant: nothing is passed over in silence: what names nothing, or less than it says, is a `ShardError` that tells what is there.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import unquote

from .errors import ShardError
from .urls import base_name, is_url, redact, scheme, sibling, split_query

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
MAX_NAMES = 1_000_000  # a slip such as {0..99999999} ends here, not in the swap
EXAMPLE = "'shards/{000..099}.tar'"


def expand(patterns: str | Sequence[str]) -> list[str]:
    """Patterns -> absolute paths of shards that exist, and URLs (with what is secret in them), in order. Raises ShardError.

    A pattern is a file, a folder (its tars, sorted), `{000..099}`, `{a,b}`, `<000..099>`, a glob (sorted), a `.txt` list of
    patterns, a URL, or several of these joined by `::`. A file whose name looks like a pattern is taken as that file. In URLs braces work
    everywhere, globs and folders where the store has listings.
    """
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    if not given:
        raise ShardError(f"no shards: a pattern is needed, such as {EXAMPLE}")
    paths = [path if is_url(path) else os.path.abspath(path) for pattern in given for path in _expand_one(pattern, "", ())]
    seen: set[str] = set()
    for path in map(redact, paths):
        if path in seen:
            apart = ": what differs after a question mark tells no shards apart" if is_url(path) else ""
            raise ShardError(f"{path}: named twice; each shard may stand in the patterns once{apart}")
        seen.add(path)
    return paths


def fit_pattern(paths: Sequence[str]) -> str:
    """The shortest pattern that names these files: the last number of their names as ranges, `::` between different names."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    parts: list[str] = []
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)((?:-of-\d+)?[^\d/]*)", path, re.S | re.A)
        if match:
            groups[match[1], match[3]].append(match[2])
        else:
            parts.append(path)
    for (before, after), numbers in groups.items():
        padded = {len(n) for n in numbers if n.startswith("0") and len(n) > 1}
        by_width: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            by_width[len(number) if len(number) in padded else 0].append(int(number))
        parts += [before + _format_ranges(sorted(n), width) + after for width, n in sorted(by_width.items(), reverse=True)]
    return "::".join(parts)


def _format_ranges(numbers: Sequence[int], width: int) -> str:
    """Sorted numbers -> `{000..014}`, or `{{000..002},005}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a:0{width}}" if a == b else f"{{{a:0{width}}..{b:0{width}}}}" for a, b in runs]
    return texts[0] if len(texts) == 1 else "{" + ",".join(texts) + "}"


def _expand_one(pattern: str, folder: str, lists: tuple[str, ...]) -> list[str]:
    """`folder` is what relative paths are relative to; `lists` are the .txt files that led here."""
    if not pattern.strip():
        raise ShardError(f"an empty pattern: write one such as {EXAMPLE}")
    path = os.path.join(folder, pattern)
    if not is_url(folder) and not is_url(pattern) and os.path.lexists(path):
        return _expand_path(path, lists)
    if pattern.startswith("file:"):
        if is_url(folder):
            raise ShardError(f"{pattern}: a list from a server names no files of this machine: write such shards into a list here")
        return _expand_url(pattern, folder, lists)
    if "::" in pattern:
        return [p for part in pattern.split("::") for p in _expand_one(part, folder, lists)]
    if pattern == "-":
        raise ShardError("-: standard input is read with --stream alone, as the only source of --data: name shards, or give that")
    if pattern.lower().startswith("pipe:"):
        raise ShardError(f"{pattern}: commands are not run: copy what it writes to a disk, or give --stream and --allow-pipe")
    if is_url(pattern):
        return _expand_remote(pattern, lists)
    if is_url(folder):  # a line of a list that lies elsewhere names nothing on this machine
        return _expand_remote(sibling(folder, pattern), lists)
    names = expand_braces(os.path.join(folder, os.path.expanduser(pattern)), pattern)
    found: list[str] = []
    missing: list[str] = []
    for name in names:
        if os.path.lexists(name):
            found += _expand_path(name, lists)
        elif glob.has_magic(name):
            found += _expand_glob(name, lists)
        else:
            missing.append(name)
    if missing:
        raise _missing_error(pattern, names, missing)
    return found


def _expand_url(url: str, folder: str, lists: tuple[str, ...]) -> list[str]:
    path = re.sub("^file:(//(localhost)?(?=/))?", "", url)
    try:
        return _expand_one(path, folder, lists)
    except ShardError:  # as it stands it names nothing: %20 and the like may be escapes
        if unquote(path) == path:
            raise
    return _expand_one(unquote(path), folder, lists)


def _expand_remote(url: str, lists: tuple[str, ...]) -> list[str]:
    """The URLs that one URL with braces, a glob, a folder's or a list's stands for. Whether shards are there is asked for all at once, "
    "later."""
    from . import remote

    remote.open_store(url)  # raises for what is no store, and where its package is missing
    has_listings = scheme(url) not in ("http", "https")
    found: list[str] = []
    for name in expand_braces(url, redact(url)):
        path = split_query(name)[0]
        if path.endswith(".txt"):
            found += _read_remote_list(name, lists)
        elif has_listings and glob.has_magic(name):
            matches = remote.glob(name)
            found += [match for match in matches if match.endswith(SHARD_SUFFIXES)] if name.endswith("*") else matches
            if not matches:
                raise ShardError(f"{redact(name)}: no file matches")
        elif has_listings and not path.endswith(SHARD_SUFFIXES):
            tars = sorted(n for n in remote.list_names(path + "/") if n.endswith(SHARD_SUFFIXES) and not base_name(n).startswith("."))
            if not tars:
                raise ShardError(f"{redact(name)}: this folder holds no *.tar")
            found += tars
        elif path.endswith("/") or "*" in path:
            raise ShardError(f"{redact(name)}: HTTP servers list no folders: name the shards, {{000..099}}.tar, or a .txt list")
        else:
            found.append(name)
    return found


def _read_remote_list(url: str, lists: tuple[str, ...]) -> list[str]:
    from . import remote

    shown = redact(url)
    if shown in lists:
        raise ShardError(f"{shown}: a list that names itself ({' -> '.join([*lists, shown])})")
    content = remote.read_whole(url, limit=1 << 28)
    if content is None:
        raise ShardError(f"{shown}: this list is not there (404), or may not be read (403)")
    lines = [re.sub(r"(^|\s+)#.*", "", line.strip()) for line in content.decode("utf-8-sig", "surrogateescape").splitlines()]
    found = [p for line in lines if line for p in _expand_one(line, url, (*lists, shown))]
    if not found:
        raise ShardError(f"{shown}: this list names no shard: write one pattern a line, such as {EXAMPLE}")
    return found


def expand_braces(path: str, pattern: str) -> list[str]:
    from braceexpand import braceexpand

    braced = re.sub(r"<([^<>{}]*(?:\.\.|,)[^<>{}]*)>", r"{\1}", path)
    for first, last in re.findall(r"\{(\d+)\.\.(\d+)", braced):  # braceexpand makes a whole range before it yields from it
        if abs(int(last) - int(first)) >= MAX_NAMES:
            raise ShardError(f"{pattern}: bad pattern: it names more than {MAX_NAMES:,} shards")
    try:
        names = list(itertools.islice(braceexpand(braced, escape=False), MAX_NAMES + 1))
    except ValueError:
        raise ShardError(f"{pattern}: bad pattern: a brace is not closed or not opened; write ranges like {EXAMPLE}") from None
    if len(names) > MAX_NAMES:
        raise ShardError(f"{pattern}: bad pattern: it names more than {MAX_NAMES:,} shards")
    wrong = re.search(r"[{<]\d+(\.+|-|:|,)?\d*[}>]", names[0])
    if wrong and not os.path.lexists(names[0]):
        raise ShardError(f"{pattern}: bad pattern: {wrong[0]!r} is no range; write ranges like {EXAMPLE}")
    return names


def _expand_path(path: str, lists: tuple[str, ...]) -> list[str]:
    if os.path.isdir(path):
        return _list_folder(path)
    return _read_list(path, lists) if path.endswith(".txt") else [path]


def _expand_glob(pattern: str, lists: tuple[str, ...]) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [m for m in matches if not os.path.isdir(m)]
    if pattern.endswith("*"):  # it was not meant for the indexes, the dataset.json and the README beside the shards
        files = [m for m in files if m.endswith(SHARD_SUFFIXES)] or [m for m in files if not m.endswith((".idx", ".json"))]
    if not matches:
        raise ShardError(f"{pattern}: no file matches; {_describe(_fixed_folder(pattern))}")
    return [p for match in files or matches for p in _expand_path(match, lists)]


def _fixed_folder(pattern: str) -> str:
    """The folder of a glob, up to the first part that has magic in it."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder


def _list_tars(folder: str) -> list[str]:
    return [os.path.join(folder, n) for n in sorted(os.listdir(folder)) if n.endswith(SHARD_SUFFIXES) and not n.startswith(".")]


def _list_folder(folder: str) -> list[str]:
    try:
        tars = _list_tars(folder)
    except OSError as error:
        raise ShardError(f"{folder}: can't be read: {error.strerror}") from None
    if not tars:
        raise ShardError(_describe(folder))
    return tars


def _read_list(path: str, lists: tuple[str, ...]) -> list[str]:
    """The shards of a .txt list: one pattern a line, relative to the list; # begins a comment."""
    path = os.path.abspath(path)
    if path in lists:
        raise ShardError(f"{path}: a list that names itself ({' -> '.join([*lists, path])})")
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = [re.sub(r"(^|\s+)#.*", "", line.strip()) for line in file]
    except OSError as error:
        raise ShardError(f"{path}: can't be read: {error.strerror}") from None
    found = [p for line in lines if line for p in _expand_one(line, os.path.dirname(path), (*lists, path))]
    if not found:
        raise ShardError(f"{path}: this list names no shard: write one pattern a line, such as {EXAMPLE}")
    return found


def _missing_error(pattern: str, names: Sequence[str], missing: Sequence[str]) -> ShardError:
    """What is missing, what is there instead, and the pattern that would fit."""
    gone = set(missing)
    there = [name for name in names if name not in gone]
    if len(names) == 1:
        return ShardError(f"{pattern}: no such file; {_describe(os.path.dirname(names[0]))}")
    if not there:
        return ShardError(f"{pattern}: none of its {len(names)} shards is there; {_describe(os.path.dirname(names[0]))}")
    shown = ", ".join(os.path.basename(name) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return ShardError(
        f"{pattern}: {len(missing)} of its {len(names)} shards {'is' if len(missing) == 1 else 'are'} missing ({shown}); "
        f"the pattern of those that are there is {_shown_pattern(there)}"
    )


def _shown_pattern(paths: Sequence[str]) -> str:
    pattern = fit_pattern(paths)
    return repr(pattern) if len(pattern) <= 400 else f"too long to write: put their {len(paths)} names into a .txt list"


def _describe(folder: str) -> str:
    """What a folder that does not hold the wanted shards holds instead."""
    folder = folder or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}"
    try:
        tars = _list_tars(folder)
        with os.scandir(folder) as entries:
            inner = [entry.path for entry in itertools.islice(entries, 100) if entry.is_dir() and _list_tars(entry.path)]
    except OSError as error:
        return f"{error.filename!r} can't be read: {error.strerror}"
    if tars:
        return f"{folder!r} holds {len(tars)} shards, named by {_shown_pattern(tars)}"
    if inner:
        return f"{folder!r} holds no *.tar, but folders with some: {', '.join(sorted(inner)[:5])}"
    return f"{folder!r} holds no *.tar; scripts/make_shards.py makes shards of folders of pictures"
