"""A Verdict, told: as lines for a terminal, or as JSON.

in: Verdict  ->  out: lines, a dict
Invariant: what comes from the shards (names, keys, labels, reasons) is escaped, so that no terminal acts on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import printable
from .found import FieldSizes, ShardCheck
from .mending import Mend, Mended
from .verdict import Problem, Verdict

MAX_ROWS = 40  # shards in the table; with more, only those with problems
_TOP = 10


def describe_shards(verdict: Verdict) -> list[str]:
    """The table of shards."""
    kinds = _kinds_by_shard(verdict)
    checks = list(verdict.checks)
    shown = checks if len(checks) <= MAX_ROWS else [check for check in checks if check.path in kinds]
    rows = [["shard", "samples", "size", "bad", "index", "verdict"]]
    for check in shown[: 10 * MAX_ROWS]:
        state = ", ".join(kinds.get(check.path, ["ok"]))
        rows.append([
            printable(check.name), f"{check.num_samples:,}", format_bytes(check.num_bytes), f"{len(check.bad_indexes):,}",
            "-" if check.error else check.index, state,
        ])  # fmt: skip
    lines = align(rows, "lrrrll") if len(rows) > 1 else []
    if len(shown) < len(checks):
        lines.append(f"({len(checks) - len(shown):,} more shards without a problem)")
    if len(shown) > 10 * MAX_ROWS:
        lines.append(f"({len(shown) - 10 * MAX_ROWS:,} more shards with problems)")
    return lines


def describe_set(verdict: Verdict, names: Sequence[str] | None = None) -> list[str]:
    """Fields, classes, pictures, then problems and notes. `names`: of the classes."""
    total = verdict.num_samples
    size = format_bytes(sum(check.num_bytes for check in verdict.checks))
    unusable = sum(bool(check.error) for check in verdict.checks)
    there = f"{len(verdict.checks):,} shard{'s' if len(verdict.checks) > 1 else ''}"
    lines = [f"{total:,} samples in {there}, {size}{f'; {unusable} of the shards can not be used' if unusable else ''}"]
    if verdict.num_verified:
        lines.append(f"{verdict.num_verified:,} of the shards have the sha256 that dataset.json gives")
    if verdict.fields:
        rows = [["field", "samples", "share", "bytes", "least", "mean", "most"]]
        rows += [_field_row(name, sizes, total) for name, sizes in sorted(verdict.fields.items(), key=lambda one: -one[1].count)[:20]]
        lines += ["", *align(rows, "lrrrrrr")]
        lines += [f"({len(verdict.fields) - 20} more fields)"] if len(verdict.fields) > 20 else []
    if verdict.classes:
        lines += ["", *_describe_classes(verdict.classes, names)]
    if verdict.picture_sizes:
        lines += ["", f"pictures: {_top(verdict.picture_modes)}", f"sizes: {_top(verdict.picture_sizes)}"]
    for title, found in ("problems:", verdict.problems), ("notes:", verdict.notes):
        lines += ["", title, *(f"  {_problem_line(one)}" for one in found[:100])] if found else []
        lines += [f"  and {len(found) - 100} more"] if len(found) > 100 else []
    return lines


def describe_mended(mends: Sequence[tuple[Mend, Mended]], folder: str) -> list[str]:
    """What --fix wrote."""
    records = [one.record for _, one in mends if one.record is not None]
    left_out = sum(len(one.left_out) for _, one in mends)
    renamed = [pair for _, one in mends for pair in one.renamed]
    shards = f"{len(records):,} clean shard{'s' * (len(records) != 1)}"
    lines = [f"wrote {_samples(sum(r.samples for r in records))} into {shards} in {folder}"]
    if left_out:
        lines[0] += f"; {_samples(left_out)} left out, each named in its dataset.json"
    if renamed:
        first = printable(f"{renamed[0][0]} is {renamed[0][1]}")
        lines.append(f"{_samples(len(renamed))} had the key of an earlier one and got another: {first}{', ...' if renamed[1:] else ''}")
    return lines


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Everything, as JSON values. At most 1,000 bad samples a shard are listed; all are counted."""
    kinds = _kinds_by_shard(verdict)
    return {
        "ok": not verdict.problems,
        "samples": verdict.num_samples,
        "bytes": sum(check.num_bytes for check in verdict.checks),
        "bad_samples": verdict.num_bad,
        "problems": [one._asdict() for one in verdict.problems],
        "notes": [one._asdict() for one in verdict.notes],
        "fields": {name: _sizes_json(sizes) for name, sizes in verdict.fields.items()},
        "missing_fields": verdict.missing,
        "classes": {str(name): count for name, count in verdict.classes.most_common()},
        "picture_sizes": dict(verdict.picture_sizes.most_common()),
        "picture_modes": dict(verdict.picture_modes.most_common()),
        "repeated_keys": _places_json(verdict, verdict.repeated),
        "copies": _places_json(verdict, verdict.copies),
        "shards": [_shard_json(check, kinds.get(check.path, [])) for check in verdict.checks],
    }


def format_bytes(size: float) -> str:
    """`17 B`, `3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes everything")


def _kinds_by_shard(verdict: Verdict) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for problem in verdict.problems:
        if problem.shard:
            kinds.setdefault(problem.shard, []).append(problem.kind)
    return kinds


def _problem_line(problem: Problem) -> str:
    where = f"{printable(problem.shard)}: " if problem.shard else ""
    return f"{problem.kind}: {where}{printable(problem.text)}"


def _field_row(name: str, sizes: FieldSizes, total: int) -> list[str]:
    mean = sizes.total / sizes.count
    shown = [format_bytes(size) for size in (sizes.total, sizes.least, mean, sizes.most)]
    return [printable(name)[:40], f"{sizes.count:,}", f"{100 * sizes.count / total:.1f} %", *shown]


def _describe_classes(classes: Counter[int | str], names: Sequence[str] | None) -> list[str]:
    """How many there are, and a histogram of the largest and smallest."""
    counts = classes.most_common()
    high, low = counts[0][1], counts[-1][1]
    lines = [f"{len(counts):,} classes, {low:,} to {high:,} samples each"]
    shown: list[tuple[int | str, int] | None] = list(counts)
    if len(counts) > 2 * _TOP:
        shown = [*counts[:_TOP], None, *counts[-_TOP:]]
    rows = []
    for one in shown:
        if one is None:
            rows.append(["...", "", ""])
            continue
        label, count = one
        name = names[label] if names and isinstance(label, int) and label < len(names) else str(label)
        rows.append([printable(name)[:40], f"{count:,}", "#" * max(1, round(40 * count / high))])
    return lines + align(rows, "lrl")


def _top(counts: Counter[str]) -> str:
    shown = ", ".join(f"{what} {count:,}" for what, count in counts.most_common(_TOP))
    return shown + (f" and {len(counts) - _TOP} more" if len(counts) > _TOP else "")


def align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows of cells as lines with columns; sides: "l" or "r" for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justified = ([_justify(*one) for one in zip(row, widths, sides, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in justified]


def _justify(text: str, width: int, side: str) -> str:
    return text.ljust(width) if side == "l" else text.rjust(width)


def _sizes_json(sizes: FieldSizes) -> dict[str, int]:
    return {"samples": sizes.count, "bytes": sizes.total, "least": sizes.least, "most": sizes.most}


def _places_json(verdict: Verdict, groups: Iterable[Sequence[Any]]) -> list[list[dict[str, Any]]]:
    return [[{"shard": verdict.checks[place.shard].path, "index": place.sample} for place in group] for group in groups]


def _shard_json(check: ShardCheck, kinds: list[str]) -> dict[str, Any]:
    return {
        "path": check.path,
        "problems": kinds,
        "samples": check.num_samples,
        "bytes": check.num_bytes,
        "error": check.error or None,
        "damage": check.damage,
        "index": check.index,
        "sha256": check.sha256 or None,
        "fields": {name: _sizes_json(sizes) for name, sizes in check.fields.items()},
        "bad_samples": len(check.bad_indexes),
        "bad": [error.as_dict() for error in check.bad],
    }


def _samples(number: int) -> str:
    return f"{number:,} sample{'s' * (number != 1)}"
