"""Good samples of checked shards, written anew as clean shards.

in: a Verdict, an empty folder  ->  out: 000.tar, 001.tar, ... with indexes, one for each shard that has a good sample, and dataset.json
Invariant: the order of samples stays; a sample's bytes stay; no key is there twice. The shards read are left as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .checking import list_fields_at
from .errors import ShardError
from .found import ShardCheck
from .index import map_tar
from .verdict import Verdict, lacks
from .writer import ShardRecord, ShardWriter, shard_names, write_dataset_json

REPEATED = "the same key and content as an earlier sample"


@dataclass(frozen=True, slots=True)
class Mend:
    """What becomes of one shard: the samples to leave out (index -> why), and those that get another key (index -> its number)."""

    check: ShardCheck
    path: str
    left_out: dict[int, str]
    numbered: dict[int, int]
    missing: dict[str, int]


@dataclass(frozen=True, slots=True)
class Mended:
    """What was made of one shard. record: None where no sample was good."""

    record: ShardRecord | None
    left_out: list[tuple[int, str, str]]  # index, key, why
    renamed: list[tuple[str, str]]  # key, new key


def check_target(folder: str) -> None:
    """Raises ShardError unless new shards can be written there."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ShardError(f"{folder}: is a file: give a new folder for the clean shards")
    if os.path.isdir(folder) and os.listdir(folder):
        raise ShardError(f"{folder}: is not empty: give a new folder for the clean shards")


def plan_mends(verdict: Verdict, folder: str) -> list[Mend]:
    """One for each shard that has a good sample. A copy under its own key is left out; of different samples with one key the later get
    another, so that none is lost."""
    left_out: list[dict[int, str]] = []
    for check in verdict.checks:
        reasons = dict.fromkeys(check.bad_indexes, "bad")
        reasons.update((error.index, f"{error.field + ': ' if error.field else ''}{error.reason}") for error in check.bad)
        left_out.append(reasons)
    numbered: list[dict[int, int]] = [{} for _ in verdict.checks]
    for group in verdict.repeated:
        seen: list[int] = []
        for shard, index in group:
            content = int(verdict.checks[shard].content_hashes[index])
            if index in left_out[shard]:
                continue
            if content and content in seen:
                left_out[shard][index] = REPEATED
            elif seen:
                numbered[shard][index] = len(seen) + 1
            if index not in left_out[shard]:
                seen.append(content)
    used = [i for i, check in enumerate(verdict.checks) if len(left_out[i]) < check.num_samples]
    names = shard_names(len(used)) if used else []
    return [
        Mend(verdict.checks[i], os.path.join(folder, name), left_out[i], numbered[i], verdict.missing)
        for i, name in zip(used, names, strict=True)
    ]


def mend_shard(mend: Mend) -> Mended:
    """Write the good samples of one shard."""
    check = mend.check
    left_out: list[tuple[int, str, str]] = []
    renamed: list[tuple[str, str]] = []
    writer = ShardWriter(mend.path)
    num_written = 0
    try:
        with map_tar(check.tar_path)[0] as tar:
            for i in range(check.num_samples):
                key, fields, _ = list_fields_at(tar, int(check.offsets[i]), int(check.offsets[i + 1]))
                missing = lacks([name for name, _, _ in fields], mend.missing)
                reason = mend.left_out.get(i) or (f"no {missing}" if missing else "")
                if reason:
                    left_out.append((i, key, reason))
                    continue
                new_key = f"{key}-again{mend.numbered[i]}" if i in mend.numbered else key
                if new_key != key:
                    renamed.append((key, new_key))
                writer.add(new_key, {name: tar[offset : offset + size] for name, offset, size in fields})
                num_written += 1
        if not num_written:
            writer.discard()
            return Mended(None, left_out, renamed)
        record = writer.finish()
        writer.publish()
    except BaseException:
        writer.discard()
        raise
    return Mended(record, left_out, renamed)


def mend(
    verdict: Verdict, folder: str, classes: Sequence[str], arguments: dict[str, object], map_all: Callable[..., object] = map
) -> list[tuple[Mend, Mended]]:
    """Write the clean shards of a set, and their dataset.json. map_all: as `map`, perhaps over processes. Raises ShardError, OSError."""
    check_target(folder)
    os.makedirs(folder, exist_ok=True)
    mends = plan_mends(verdict, folder)
    done: list[Mended] = list(map_all(mend_shard, mends))  # type: ignore[call-overload]
    records = [one.record for one in done if one.record is not None]
    if not records:
        raise ShardError(f"{folder}: no sample is good, so no shard was written")
    left_out = [
        {"shard": os.path.basename(one.path), "name": key, "reason": reason}
        for one, result in zip(mends, done, strict=True)
        for _, key, reason in result.left_out
    ]
    write_dataset_json(os.path.join(folder, "dataset.json"), {"all": records}, classes, arguments, left_out=left_out)
    return list(zip(mends, done, strict=True))
