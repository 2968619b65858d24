"""Tables that name files and labels: CSV, TSV, or JSON lines.

in: a table and the names of two columns  ->  out: (path, label) per row, both as text
Invariant: every row gives both, or the row is named in the error; nothing is guessed from the values.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
DEFAULT_COLUMNS = ("path", "label")
SUBSETS = {"training": "train", "validate": "val", "validation": "val", "testing": "test"}  # other words stay as they are


class SourceError(ValueError):
    """A source that no shards can be made from; the message is one line for the user."""


def read_annotations(path: str) -> dict[str, tuple[str, str]]:
    """Kinetics' JSON, {id: {"annotations": {"label": ...}, "subset": ...}, ...} -> id: (label, split); split "" where none is said.
    Raises SourceError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise SourceError(f"--annotations {path}: can't be read ({error})") from error
    if not isinstance(content, dict) or not content:
        raise SourceError(f"--annotations {path}: it must be an object of videos by their ids, as Kinetics has it")
    found = {}
    for identity, about in content.items():
        notes = about.get("annotations") if isinstance(about, dict) else None
        label = notes.get("label") if isinstance(notes, dict) else None
        if not isinstance(label, str) or not label.strip():
            raise SourceError(f'--annotations {path}: {identity} has no {{"annotations": {{"label": "..."}}}}')
        subset = str(about.get("subset", ""))
        found[identity] = label.strip(), SUBSETS.get(subset, subset)
    return found


def read_table(path: str, columns: tuple[str, str] | None) -> list[tuple[str, str]]:
    """(path, label) of each row, in the order of the table; raises SourceError."""
    wanted = columns or DEFAULT_COLUMNS
    rows: list[tuple[str, str]] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for line, row in _rows_of_json(path, file) if path.lower().endswith(".jsonl") else _rows_of_csv(path, file):
                missing = [name for name in wanted if name not in row]
                if missing:
                    raise SourceError(
                        f"{path} line {line}: no column {missing[0]!r} among {', '.join(map(str, row))}: "
                        f"name those that hold path and label, like --columns {_example(row)}"
                    )
                values = [_text(row[name]) for name in wanted]
                if "" in values:
                    raise SourceError(f"{path} line {line}: the column {wanted[values.index('')]!r} is empty")
                rows.append((values[0], values[1]))
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    except csv.Error as error:
        raise SourceError(f"{path}: not a readable table ({error})") from error
    if not rows:
        raise SourceError(f"{path}: the table has no rows")
    return rows


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _example(row: dict[str, Any]) -> str:
    names = list(map(str, row))
    return f"{names[0]},{names[-1]}" if len(names) > 1 else "file,label"


def _rows_of_csv(path: str, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",", skipinitialspace=True)
    for row in reader:
        row.pop(None, None)  # type: ignore[call-overload]  # cells beyond the header
        yield reader.line_num, row


def _rows_of_json(path: str, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise SourceError(f"{path} line {line}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise SourceError(f"{path} line {line}: not a JSON object but {text.strip()[:40]!r}")
        yield line, row
