"""Where the pictures or videos come from: a folder, an archive, a table or annotations that name files and labels.

in: the path the user gave  ->  out: `Source`: one `Entry` per picture or video, and a reader for their bytes
Invariant: entries are sorted by name; a name is relative to the deepest folder common to all of them, so a folder, its
zip and its tar give the same entries. Names from an archive are never used as paths. A source is one of pictures or of videos: the
kind that it has more of; files of the other are passed over.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .pictures import PICTURE_SUFFIXES
from .readers import Entry, FolderReader, TarReader, ZipReader
from .tables import TABLE_SUFFIXES, SourceError, read_annotations, read_table
from .video_files import VIDEO_SUFFIXES

SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_LITTER = frozenset(["__macosx", "thumbs.db", "desktop.ini", "@eadir"])  # beside all names that begin with a dot


@dataclass
class Source:
    """What `open_source` found; `unlabelled` and `passed_over` are names that did not become entries."""

    entries: list[Entry]
    reader: FolderReader | TarReader | ZipReader
    what: str = "picture"  # or "video"
    from_table: bool = False
    unlabelled: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    damage: str = ""
    missing: list[str] = field(default_factory=list)  # annotated ids that have no file


def open_source(path: str, columns: tuple[str, str] | None = None, annotations: str | None = None) -> Source:
    """Look at `path` and list its pictures or videos with their labels; raises SourceError where there are none."""
    if not os.path.exists(path):
        raise SourceError(f"{path}: no such file or folder")
    if annotations is not None:
        source = _open_annotated(path, annotations)
    elif os.path.isdir(path):
        source = _open_folder(path, columns)
    elif path.lower().endswith(TABLE_SUFFIXES):
        source = _open_table(path, columns)
    else:
        if columns:
            raise SourceError(f"--columns names columns of a CSV, TSV or JSONL table, and {path} is none")
        source = _open_archive(path)
    if not source.entries:
        suffixes = ", ".join(sorted(PICTURE_SUFFIXES)), ", ".join(sorted(VIDEO_SUFFIXES))
        raise SourceError(f"{path}: no picture found ({suffixes[0]}), and no video ({suffixes[1]})")
    source.entries.sort()
    videos = sum(suffix_of(entry.name) in VIDEO_SUFFIXES for entry in source.entries)
    source.what = "video" if 2 * videos > len(source.entries) else "picture"
    return source


# --- folders


def _open_folder(path: str, columns: tuple[str, str] | None) -> Source:
    tables = sorted(n for n in os.listdir(path) if n.lower().endswith(TABLE_SUFFIXES) and not _is_litter(n))
    found: list[tuple[str, int, Any]] = []
    passed_over: list[str] = []
    if not columns:
        for name, size in _walk_folder(path):
            if suffix_of(name) in PICTURE_SUFFIXES | VIDEO_SUFFIXES:
                found.append((unicodedata.normalize("NFC", name), size, name))
            else:
                passed_over.append(name)
        found = _of_one_kind(found, passed_over)
        if not tables or len({_folder_of(name) for name, _, _ in found}) > 1:
            return _label_by_folder(path, found, FolderReader(path), passed_over)
    if len(tables) != 1:
        which = f"{len(tables)} tables ({', '.join(tables)}): give one of them as SOURCE" if tables else "no table"
        raise SourceError(f"{path}: --columns needs one CSV, TSV or JSONL table in this folder, and it holds {which}")
    return _open_table(os.path.join(path, tables[0]), columns)


def _walk_folder(root: str) -> Iterator[tuple[str, int]]:
    """(path in root, size) of all files; links are followed, but not into a folder that they lie in."""
    pending: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(root),))]
    while pending:
        folder, above = pending.pop()
        with os.scandir(os.path.join(root, folder)) as listing:
            for item in listing:
                if _is_litter(item.name):
                    continue
                name = f"{folder}/{item.name}" if folder else item.name
                if item.is_dir():
                    real = os.path.realpath(item.path) if item.is_symlink() else os.path.join(above[-1], item.name)
                    if real not in above:
                        pending.append((name, (*above, real)))
                else:
                    try:
                        status = item.stat()
                    except FileNotFoundError:  # a link to nowhere: named when it is read
                        yield name, -1
                    else:
                        if stat.S_ISREG(status.st_mode):  # reading a pipe would hang
                            yield name, status.st_size


# --- tables


def _open_table(path: str, columns: tuple[str, str] | None) -> Source:
    """Paths of a table are relative to it, or else to one folder beside it (`labels.csv` beside `images/`)."""
    rows = read_table(path, columns)
    home = os.path.dirname(path) or "."
    folders = sorted(item.path for item in os.scandir(home) if item.is_dir() and not _is_litter(item.name))
    bases = [base for base in (home, *folders) if os.path.exists(os.path.join(base, rows[0][0]))]
    if not bases:
        raise SourceError(
            f"{path}: {rows[0][0]!r} of its first row is neither in {home} nor in a folder there: "
            "paths must be relative to the table"
        )
    places = [os.path.abspath(os.path.join(bases[0], name)) for name, _ in rows]
    names = [unicodedata.normalize("NFC", place.replace(os.sep, "/")) for place in places]
    strip = len(_common_folder({_folder_of(name) for name in names})) + 1
    entries = [
        Entry(name[strip:], unicodedata.normalize("NFC", label), "", _size_of(place), place)
        for name, place, (_, label) in zip(names, places, rows, strict=True)
    ]
    return Source(entries, FolderReader(""), from_table=True)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # named when it is read
        return -1


# --- annotations


def _open_annotated(path: str, annotations: str) -> Source:
    """Videos of a folder that are named by id (`<id>.mp4`, `<id>_000010_000020.mp4`), whose labels stand in Kinetics' JSON."""
    if not os.path.isdir(path):
        raise SourceError(f"{path}: --annotations goes with a folder of videos that are named by id, and this is none")
    wanted = read_annotations(annotations)
    splits = {split for _, split in wanted.values()}
    source = Source([], FolderReader(path), from_table=True)
    there = set()
    for name, size in _walk_folder(path):
        stem = name.rpartition("/")[2].rpartition(".")[0]
        identity = stem if stem in wanted else re.sub(r"_\d+_\d+$", "", stem)
        if suffix_of(name) not in VIDEO_SUFFIXES or identity not in wanted:
            source.passed_over.append(name)
            continue
        label, split = wanted[identity]
        there.add(identity)
        source.entries.append(Entry(unicodedata.normalize("NFC", name), label, split if len(splits) > 1 else "", size, name))
    source.missing = [identity for identity in wanted if identity not in there]
    if not source.entries:
        raise SourceError(f"{path}: none of the {len(wanted)} ids of {annotations} has a video here (such as {next(iter(wanted))}.mp4)")
    return source


# --- archives


def _open_archive(path: str) -> Source:
    with open(path, "rb") as file:
        head = file.read(4)
    if head in (b"PK\x03\x04", b"PK\x05\x06"):
        members: Iterable[tuple[str, int, Any]] = _zip_members(path)
        reader: TarReader | ZipReader = ZipReader(path)
        damage = ""
    else:
        from .store import local_tar

        tar_path = local_tar(path)  # of a .tar.gz: decompressed once
        members, damage = _tar_members(path, tar_path)
        reader = TarReader(tar_path)
    found, passed_over = {}, []
    for name, size, where in members:
        parts = [part for part in name.split("/") if part not in ("", ".", "..")]
        if not parts or any(map(_is_litter, parts)):
            continue
        name = unicodedata.normalize("NFC", "/".join(parts))
        if suffix_of(name) in PICTURE_SUFFIXES | VIDEO_SUFFIXES:
            found[name] = (name, size, where)  # a name that comes again replaces the first, as in unpacking
        else:
            passed_over.append(name)
    source = _label_by_folder(path, _of_one_kind(list(found.values()), passed_over), reader, passed_over)
    source.damage = damage
    return source


def _zip_members(path: str) -> Iterator[tuple[str, int, Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise SourceError(f"{path}: not a whole zip archive ({error}): copy it again") from error
    for info in infos:
        if info.is_dir():
            continue
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            why = "encrypted" if info.flag_bits & 1 else f"compressed by method {info.compress_type}"
            raise SourceError(f"{path}: {info.filename} is {why}, which is not read: unpack it and give the folder")
        name = info.filename.replace("\\", "/") if info.create_system == 0 else info.filename  # by a Windows program
        yield name, info.file_size, (info.header_offset, info.compress_size, info.compress_type, info.CRC)


def _tar_members(shown: str, path: str) -> tuple[list[tuple[str, int, Any]], str]:
    from .tar import TarDamage, walk

    members: list[tuple[str, int, Any]] = []
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise SourceError(f"{shown}: empty file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            try:
                for member in walk(buffer):
                    if member.is_file:
                        members.append((member.name, member.size, member.data_offset))
            except TarDamage as damage:
                if not members:
                    raise SourceError(f"{shown}: not a folder, zip, tar, or table (.csv, .tsv, .jsonl)") from damage
                return members, f"damaged at byte {damage.offset} ({damage.reason}): only what lies before it is used"
    return members, ""


# --- class folders


def _label_by_folder(path: str, found: list[tuple[str, int, Any]], reader: Any, passed_over: list[str]) -> Source:
    """The class is the first folder below the deepest one common to all pictures, or the next where those are splits."""
    source = Source([], reader, passed_over=passed_over)
    if not found:
        return source
    common = _common_folder({_folder_of(name) for name, _, _ in found})
    strip = len(common) + 1 if common else 0
    top = {name[strip:].partition("/")[0] for name, _, _ in found if "/" in name[strip:]}
    splits = top & SPLIT_FOLDERS.keys() if top <= SPLIT_FOLDERS.keys() else set()
    if len(top & SPLIT_FOLDERS.keys()) > 1 and not splits:
        others = ", ".join(sorted(top - SPLIT_FOLDERS.keys())[:3])
        raise SourceError(f"{path}: folders named like splits lie beside {others}: move these away, or give a table")
    for name, size, where in found:
        name = name[strip:]
        head, _, rest = name.partition("/")
        label = rest if splits else name
        if "/" not in label:
            source.unlabelled.append(name)
            continue
        label = label.partition("/")[0]
        label = label.strip() or label
        source.entries.append(Entry(name, label, SPLIT_FOLDERS[head] if splits else "", size, where))
    if not source.entries:
        if any(name.endswith(".cls") for name in passed_over):
            raise SourceError(f"{path}: holds .cls files beside its pictures, so it is a shard already: train on it as it is")
        what = "videos" if suffix_of(min(found)[0]) in VIDEO_SUFFIXES else "pictures"
        raise SourceError(
            f"{path}: no class folders: all {len(found)} {what} lie in one folder (such as {min(found)[0]}); "
            "put each class into its own folder, or give a table with --columns PATH,LABEL"
        )
    return source


def _common_folder(folders: set[str]) -> str:
    """The deepest folder that all of these lie in: where the first and the last of them, sorted by parts, agree."""
    parts = [folder.split("/") for folder in folders]
    first, last = min(parts), max(parts)
    agree = [one == other for one, other in zip(first, last, strict=False)] + [False]
    return "/".join(first[: agree.index(False)])


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LITTER


def suffix_of(name: str) -> str:
    """What follows the last dot, in lower case; "" without one."""
    return name.rpartition(".")[2].lower() if "." in name else ""


def _of_one_kind(found: list[tuple[str, int, Any]], passed_over: list[str]) -> list[tuple[str, int, Any]]:
    """The videos where there are more of them than pictures, else the pictures; the others go to `passed_over`."""
    videos = [item for item in found if suffix_of(item[0]) in VIDEO_SUFFIXES]
    pictures = [item for item in found if suffix_of(item[0]) in PICTURE_SUFFIXES]
    kept, others = (videos, pictures) if len(videos) > len(pictures) else (pictures, videos)
    passed_over += [name for name, _, _ in others]
    return kept
