"""What the user wrote after --data -> the list of shards, each with its index.

in: patterns (str or several)  ->  out: list[Shard], in the order of the patterns
Invariant: every shard of the list exists, is a tar with an index that fits it, and stands there once; no order comes from the disk.
"""

from __future__ import annotations

import glob
import itertools
import json
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from .errors import ShardError
from .index import load_index
from .store import cut_reason, local_tar

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
MAX_NAMES = 5_000_000  # a typing mistake such as {0..99999999} ends here, not in the swap


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard that is there and indexed. `damage`: one line on what of it can't be read, without its name; None for a whole one."""

    path: str  # as the user named it, absolute
    name: str  # file name
    tar_path: str  # a plain tar with its content: `path`, or a decompressed copy in the cache
    index_path: str
    num_samples: int
    num_bytes: int  # of the file at `path`
    damage: str | None = None


def expand(patterns: str | Sequence[str]) -> list[str]:
    """Patterns -> absolute paths of shards that exist, in order; raises ShardError for one that names nothing or too little.

    A pattern is a file, a folder (its tars, sorted), `{000..099}`, `{a,b}`, `<000..099>`, a glob (sorted), a `.txt` list of
    patterns, a `file:` URL, or several of these joined by `::`. A file whose name looks like a pattern is taken as that file.
    """
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    if not given:
        raise ShardError("no shards: --data needs a pattern such as 'shards/{000..099}.tar'")
    paths = [os.path.abspath(path) for pattern in given for path in _expand_one(pattern, "", ())]
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ShardError(f"{path}: named twice by {' '.join(given)!r}; each shard may stand there once")
        seen.add(path)
    return paths


def load_shards(patterns: str | Sequence[str], num_workers: int | None = None, progress: bool = True) -> list[Shard]:
    """Expand, and find or build the index of each; parallel, with a progress bar on stderr when it takes more than two seconds."""
    results = index_shards(expand(patterns), num_workers, progress)
    errors = [r for r in results if isinstance(r, ShardError)]
    if errors:
        more = f" (and {len(errors) - 1} more such shards)" if len(errors) > 1 else ""
        raise ShardError(f"{errors[0]}{more}")
    return [r[0] for r in results if not isinstance(r, ShardError)]


def index_shards(
    paths: Sequence[str], num_workers: int | None = None, progress: bool = True, rebuild: bool = False
) -> list[tuple[Shard, bool] | ShardError]:
    """For each path (the shard, whether its index was built just now), or why it is none."""
    from tqdm import tqdm

    num_workers = (
        num_workers or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    results: list[tuple[Shard, bool] | ShardError] = []
    started = time.monotonic()
    with tqdm(
        total=len(paths), desc="indexing shards", unit="shard", delay=2, disable=not progress, leave=False
    ) as bar:
        # fresh indexes cost next to nothing: a pool is worth its start only for what is left after a moment
        for path in paths:
            if num_workers > 1 and time.monotonic() - started > 0.3:
                break
            results.append(_index_one(path, rebuild))
            bar.update()
        rest = paths[len(results) :]
        if rest:
            chunk = max(1, min(64, len(rest) // (4 * num_workers)))
            with _create_pool(num_workers) as pool:
                for result in pool.map(_index_one, rest, itertools.repeat(rebuild), chunksize=chunk):
                    results.append(result)
                    bar.update()
    return results


def _create_pool(num_workers: int) -> Executor:
    """Forked processes (walking a tar holds the GIL, and a spawned one would run the user's script again), else threads."""
    if "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon:
        return ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork"))
    return ThreadPoolExecutor(num_workers)


def _index_one(path: str, rebuild: bool) -> tuple[Shard, bool] | ShardError:
    try:
        tar_path = local_tar(path)
        info = load_index(tar_path, cut_reason(tar_path), path, rebuild)
        num_bytes = os.path.getsize(path)
    except ShardError as error:
        return error
    name = os.path.basename(path)
    return Shard(path, name, tar_path, info.index_path, info.num_samples, num_bytes, info.damage), info.built


def read_dataset_json(shards: Sequence[Shard | str]) -> dict[str, Any] | None:
    """The dataset.json that speaks for all these shards: beside them, or in the parent folder if it lists their folder as a split.

    None if there is none (or not for all of them, or it is another tool's); ShardError if it can't be read or two contradict.
    """
    paths = [s if isinstance(s, str) else s.path for s in shards]
    found = [_read_folder_json(folder) for folder in sorted({os.path.dirname(os.path.abspath(path)) for path in paths})]
    first = found[0] if found else None
    if first is None or any(other is None for other in found):
        return None
    for other in found:
        if other is not None and other[1].get("classes") != first[1].get("classes"):
            raise ShardError(
                f"{other[0]}: its classes differ from those of {first[0]}: shards with different class lists can't be one data set; "
                "make them with one list (make_shards.py --classes FILE)"
            )
    return first[1]


def _read_folder_json(folder: str) -> tuple[str, dict[str, Any]] | None:
    for path, split in (
        (os.path.join(folder, "dataset.json"), ""),
        (os.path.join(os.path.dirname(folder), "dataset.json"), os.path.basename(folder)),
    ):
        try:
            with open(path, encoding="utf-8-sig") as file:
                content = json.load(file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ShardError(f"{path}: can't be read: {reason}; make it again or remove it") from None
        if (
            isinstance(content, dict)
            and isinstance(content.get("splits"), dict)
            and (not split or split in content["splits"])
        ):
            return path, content
    return None


def _expand_one(pattern: str, folder: str, lists: tuple[str, ...]) -> list[str]:
    """`folder` is what relative paths are relative to; `lists` are the .txt files that led here."""
    if not pattern.strip():
        raise ShardError("empty pattern: --data needs one such as 'shards/{000..099}.tar'")
    if pattern.startswith("file:"):
        return _expand_url(pattern, folder, lists)
    scheme = re.match(r"([a-z0-9+.-]+):(//|$)|(pipe):", pattern)
    if scheme:
        raise ShardError(f"{pattern}: only shards on a local disk can be read; copy them to one first")
    path = os.path.join(folder, os.path.expanduser(pattern))
    if os.path.lexists(path):
        return _expand_path(path, lists)
    if "::" in pattern:
        return [p for part in pattern.split("::") for p in _expand_one(part, folder, lists)]
    names = _expand_braces(path)
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
    except ShardError:
        if unquote(path) == path:
            raise
    return _expand_one(unquote(path), folder, lists)


def _expand_braces(path: str) -> list[str]:
    from braceexpand import braceexpand

    braced = re.sub(r"<([^<>{}]*(?:\.\.|,)[^<>{}]*)>", r"{\1}", path)
    try:
        names = list(itertools.islice(braceexpand(braced, escape=False), MAX_NAMES + 1))
    except ValueError as error:
        raise ShardError(f"{path}: bad pattern: {error}; ranges are written {{000..099}}") from None
    if len(names) > MAX_NAMES:
        raise ShardError(f"{path}: bad pattern: it names more than {MAX_NAMES:,} shards")
    return names


def _expand_path(path: str, lists: tuple[str, ...]) -> list[str]:
    if os.path.isdir(path):
        return _list_folder(path)
    return _read_list(path, lists) if path.endswith(".txt") else [path]


def _expand_glob(pattern: str, lists: tuple[str, ...]) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [m for m in matches if not os.path.isdir(m) and not m.endswith((".idx", ".json"))]
    if not files and not matches:
        raise ShardError(f"{pattern}: no file matches; {_what_is_there(os.path.dirname(pattern))}")
    return [p for match in files or matches for p in _expand_path(match, lists)]


def _list_folder(folder: str) -> list[str]:
    names = sorted(os.listdir(folder))
    tars = [os.path.join(folder, n) for n in names if n.endswith(SHARD_SUFFIXES) and not n.startswith(".")]
    if not tars:
        raise ShardError(f"{folder}: {_what_is_there(folder)}")
    return tars


def _read_list(path: str, lists: tuple[str, ...]) -> list[str]:
    """The shards of a .txt list: one pattern a line, relative to the list; # begins a comment."""
    path = os.path.abspath(path)
    if path in lists:
        raise ShardError(f"{path}: this list names itself ({' -> '.join([*lists, path])})")
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = [re.sub(r"(^|\s+)#.*", "", line.strip()) for line in file]
    except OSError as error:
        raise ShardError(f"{path}: can't be read: {error.strerror}") from None
    found = [p for line in lines if line for p in _expand_one(line, os.path.dirname(path), (*lists, path))]
    if not found:
        raise ShardError(f"{path}: this list names no shard")
    return found


def _missing_error(pattern: str, names: Sequence[str], missing: Sequence[str]) -> ShardError:
    """What is missing, what is there instead, and the pattern that would fit."""
    gone = set(missing)
    there = [n for n in names if n not in gone and not glob.has_magic(n)]
    shown = ", ".join(os.path.basename(n) for n in missing[:3]) + (", ..." if len(missing) > 3 else "")
    if there:
        return ShardError(
            f"{pattern}: {len(missing)} of its {len(names)} shards are missing ({shown}); "
            f"the {len(there)} that are there: {fit_pattern(there)!r}"
        )
    what = "no such file" if len(names) == 1 else f"none of its {len(names)} shards is there"
    return ShardError(f"{pattern}: {what}; {_what_is_there(os.path.dirname(names[0]))}")


def _what_is_there(folder: str) -> str:
    folder = folder or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}"
    entries = sorted(os.listdir(folder))
    tars = [os.path.join(folder, n) for n in entries if n.endswith(SHARD_SUFFIXES) and not n.startswith(".")]
    if tars:
        return f"{folder!r} holds {len(tars)} shards: {fit_pattern(tars)!r}"
    inner = [n for n in entries if any(glob.iglob(os.path.join(glob.escape(os.path.join(folder, n)), "*.tar")))]
    return f"{folder!r} holds no *.tar" + (f", but {', '.join(inner[:5])} below it does: name that" if inner else "")


def fit_pattern(paths: Sequence[str]) -> str:
    """The shortest pattern that names these files: their last number as ranges, `::` between different names."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    plain: list[str] = []
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", path, re.S)
        if match and "/" not in match[3]:
            width = len(match[2]) if match[2].startswith("0") else 0
            groups.setdefault((match[1], match[3], width), []).append(int(match[2]))
        else:
            plain.append(path)
    return "::".join([*(f"{a}{_ranges(sorted(n), width)}{b}" for (a, b, width), n in groups.items()), *plain])


def _ranges(numbers: Sequence[int], width: int) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a:0{width}}" if a == b else f"{{{a:0{width}}..{b:0{width}}}}" for a, b in runs]
    return texts[0] if len(texts) == 1 else "{" + ",".join(texts) + "}"
