"""The folder that shards are written to: what is done, what is missing, what may be removed.

in: a folder, the paths of the shards to be made, a digest of what makes them  ->  out: which are done; at the end dataset.json
Invariant: a shard counts as done only if the journal or dataset.json has its record under the same digest and the file has
that size. Nothing is removed but what this writer made or, when told to overwrite, shards named like its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .publishing import published_size
from .tables import SourceError
from .writer import ShardRecord, write_dataset_json

_JOURNAL = "dataset.json.part"
_SUMMARY = "dataset.json"
_OURS = re.compile(r"\d{3,}\.tar(\.idx)?")
_OUR_PATH = re.compile(r"([\w-]+/)?\d{3,}\.tar")
_UNFINISHED = re.compile(r"\.\d{3,}\.tar\.\d+\.part|\.\d{3,}\.tar\.idx\.[0-9a-f]+\.tmp|dataset\.json\.\d+\.part")
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.idx")
_PATIENCE = 5.0  # seconds that the lock of a killed run may outlive it, in its workers


class Done(NamedTuple):
    """A finished shard, the pictures left out of it as (name, reason), and how many got no restart markers, by reason."""

    record: ShardRecord
    left_out: list[tuple[str, str]]
    unmarked: dict[str, int] = {}


class _Earlier(NamedTuple):
    """What an earlier run left: digest and arguments it ran under, its finished shards by path."""

    digest: str
    arguments: dict[str, Any]
    done: dict[str, Done]


class OutputFolder:
    """`prepare` once, note each finished shard with `append_record`, then `finish`. url: where shards go as they are made, if not here."""

    def __init__(self, path: str, digest: str, arguments: Mapping[str, Any], url: str = "") -> None:
        self.path, self._url = path, url
        self.journal = os.path.join(path, _JOURNAL)
        self._digest = digest
        self._arguments = dict(arguments)
        self._lock = -1

    def prepare(self, shards: Sequence[str], overwrite: bool = False, source: str = "") -> dict[str, Done]:
        """Make the folder ready, and say which of `shards` (paths in it) are there already; raises SourceError.

        `source` is never removed, whatever its name.
        """
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise SourceError(f"{self.path}: is a file: give a folder for the shards")
        earlier = self._read_earlier()
        folders = {os.path.dirname(path) for path in (*shards, *(earlier.done if earlier else ()))} | {""}
        present = self._list(folders, lambda name: name.lower().endswith(_TARS))
        present += self._list(folders - {""}, (_SUMMARY, _JOURNAL).__contains__)  # of a data set on its own
        if overwrite:
            self._remove_earlier(earlier, present, folders, source)
            earlier, present = None, []
        self._refuse_others(earlier, present, shards)
        done = {path: done for path, done in (earlier.done if earlier else {}).items() if self._is_whole(path, done)}
        done = {path: done[path] for path in shards if path in done}
        if len(done) < len(shards) or os.path.exists(self.journal):
            self._start_journal({os.path.dirname(path) for path in shards} | {""})
        return done

    def finish(self, shards: Mapping[str, Done], classes: Sequence[str]) -> None:
        """Write dataset.json and put the journal away."""
        splits: dict[str, list[ShardRecord]] = {}
        for path, done in shards.items():
            splits.setdefault(os.path.dirname(path) or "all", []).append(done.record)
        left_out = [
            {"shard": path, "name": name, "reason": reason}
            for path, done in shards.items()
            for name, reason in done.left_out
        ]
        summary = os.path.join(self.path, _SUMMARY)
        write_dataset_json(summary, splits, classes, self._arguments, left_out=left_out, digest=self._digest)
        if os.path.exists(self.journal):
            os.unlink(self.journal)
        self.close()

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read_earlier(self) -> _Earlier | None:
        """Of a finished run, of an unfinished one, or of one that mends a finished one."""
        finished = _read_summary(os.path.join(self.path, _SUMMARY))
        journal = _read_journal(self.journal)
        if finished and journal and finished.digest == journal.digest:
            return journal._replace(done=finished.done | journal.done)
        return journal or finished

    def _refuse_others(self, earlier: _Earlier | None, present: Sequence[str], shards: Sequence[str]) -> None:
        way_out = "choose another folder, or give --overwrite to replace them"
        if any(os.path.basename(name) not in (_SUMMARY, _JOURNAL) and not _OURS.fullmatch(os.path.basename(name)) for name in present):
            way_out = "choose another folder"  # --overwrite would refuse: they are somebody else's
        if earlier and earlier.digest != self._digest:
            raise SourceError(f"{self.path}: holds shards made differently ({self._difference(earlier)}): {way_out}")
        ours = {name for path in shards for name in (path, path + ".idx")} if earlier else set()
        others = sorted(set(present) - ours)
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise SourceError(f"{self.path}: holds other shards ({', '.join(others[:3])}{more}): {way_out}")

    def _difference(self, earlier: _Earlier) -> str:
        for name, value in self._arguments.items():
            if name != "source" and earlier.arguments.get(name) != value:
                return f"{name} {earlier.arguments.get(name)}, now {value}"
        return "the pictures, their labels or the classes are not the same"

    def _remove_earlier(
        self, earlier: _Earlier | None, present: Sequence[str], folders: set[str], source: str
    ) -> None:
        made = {name for path in (earlier.done if earlier else ()) for name in (path, path + ".idx")}
        for name in present:
            base = os.path.basename(name)
            if base == _SUMMARY:
                _read_summary(os.path.join(self.path, name))  # raises where it is not ours
            elif base != _JOURNAL and name not in made and not _OURS.fullmatch(base):
                raise SourceError(f"{self.path}: {name} is not named like a shard of make_shards: move it away first")
        if os.path.exists(self.journal):
            self._take_lock(os.O_RDWR)  # nothing is pulled away from under a run
            self.close()
        doomed = [os.path.join(self.path, name) for name in sorted(made | set(present))]
        doomed = [path for path in doomed if os.path.lexists(path)]
        if any(os.path.exists(path) and os.path.samefile(path, source) for path in doomed if source):
            raise SourceError(f"{self.path}: --overwrite would remove the source {source}: choose another folder")
        for path in doomed:
            os.unlink(path)
        for name in self._list(folders, _UNFINISHED.fullmatch):
            os.unlink(os.path.join(self.path, name))
        for folder in folders - {""}:
            if os.path.isdir(os.path.join(self.path, folder)) and not os.listdir(os.path.join(self.path, folder)):
                os.rmdir(os.path.join(self.path, folder))
        for path in (self.journal, os.path.join(self.path, _SUMMARY)):  # last: until here they say what the shards are
            if os.path.exists(path):
                os.unlink(path)

    def _list(self, folders: set[str], wanted: Any) -> list[str]:
        """Paths, in the output folder, of the wanted names in these folders of it."""
        found = []
        for folder in sorted(folders):
            place = os.path.join(self.path, folder)
            if os.path.isdir(place):
                found += [os.path.join(folder, name) for name in sorted(os.listdir(place)) if wanted(name)]
        return found

    def _is_whole(self, path: str, done: Done) -> bool:
        if self._url:
            return published_size(self._url, path + ".idx") is not None and published_size(self._url, path) == done.record.bytes
        place = os.path.join(self.path, path)
        return os.path.exists(place + ".idx") and os.path.exists(place) and os.path.getsize(place) == done.record.bytes

    def _start_journal(self, folders: set[str]) -> None:
        for folder in folders:
            os.makedirs(os.path.join(self.path, folder), exist_ok=True)
        self._take_lock(os.O_RDWR | os.O_APPEND | os.O_CREAT)
        for name in self._list(folders, _UNFINISHED.fullmatch):
            os.unlink(os.path.join(self.path, name))
        if _read_journal(self.journal) is None:
            os.ftruncate(self._lock, 0)
            header = {"digest": self._digest, "arguments": self._arguments}
            os.write(self._lock, json.dumps(header).encode() + b"\n")
            os.fsync(self._lock)
        else:
            os.write(self._lock, b"\n")  # after a line that a crash may have cut

    def _take_lock(self, flags: int) -> None:
        self._lock = os.open(self.journal, flags, 0o644)
        if not _lock_file(self._lock):
            self.close()
            raise SourceError(f"{self.path}: another make_shards is writing there: wait for it, or choose another folder")


def append_record(journal: str, path: str, done: Done) -> None:
    """Note a finished shard: one write, so that lines of several processes don't mix."""
    record = done.record
    line = {
        "shard": path,
        "samples": record.samples,
        "bytes": record.bytes,
        "sha256": record.sha256,
        "fields": record.fields,
        "left_out": done.left_out,
        "unmarked": done.unmarked,
    }
    file = os.open(journal, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def _read_journal(path: str) -> _Earlier | None:
    if not os.path.exists(path):
        return None
    lines = []
    with open(path, encoding="utf-8") as file:
        for text in file:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue  # cut by a crash: that shard is made again
    if not lines or "digest" not in lines[0]:
        return None  # died before its first line was whole
    done = {line["shard"]: _parse_record(line) for line in lines[1:] if _OUR_PATH.fullmatch(line["shard"])}
    return _Earlier(lines[0]["digest"], lines[0]["arguments"], done)


def _parse_record(line: Mapping[str, Any]) -> Done:
    name = os.path.basename(line["shard"])
    record = ShardRecord(name, line["samples"], line["bytes"], line["sha256"], tuple(line["fields"]))
    return Done(record, [(name, reason) for name, reason in line["left_out"]], line.get("unmarked", {}))


def _read_summary(path: str) -> _Earlier | None:
    """A finished dataset.json as if it were a journal; raises SourceError where it is not ours."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return _parse_summary(json.load(file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{path}: not written by make_shards, so it is left alone: move it away or choose another folder"
        ) from error


def _parse_summary(content: Mapping[str, Any]) -> _Earlier:
    left_out: dict[str, list[tuple[str, str]]] = {}
    for item in content["left_out"]:
        left_out.setdefault(item["shard"], []).append((item["name"], item["reason"]))
    done = {}
    for split, described in content["splits"].items():
        for shard in described["shards"]:
            path = shard["name"] if split == "all" else f"{split}/{shard['name']}"
            if _OUR_PATH.fullmatch(path):
                line = {**shard, "shard": path, "fields": content["fields"], "left_out": left_out.get(path, [])}
                done[path] = _parse_record(line)
    return _Earlier(content["digest"], content["arguments"], done)


def _lock_file(file: int) -> bool:
    """Lock it, or say that another process has it. Workers of a killed run may hold it for a moment longer."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        except OSError:
            return True  # a file system without locks
