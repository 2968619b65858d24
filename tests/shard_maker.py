"""Labelled shards for tests, and the dataset.json beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tar_maker import END, join_samples

from data.shards import Shard, load_shards


def write_shards(folder: Path, *shards: Sequence[Mapping[str, bytes]], keys: str = "s{:04d}") -> list[Shard]:
    """Shards 0.tar, 1.tar, ... of the samples given as {field: bytes}."""
    folder.mkdir(parents=True, exist_ok=True)
    serial = 0
    for number, samples in enumerate(shards):
        named = [(keys.format(serial + i), fields) for i, fields in enumerate(samples)]
        serial += len(samples)
        (folder / f"{number}.tar").write_bytes(join_samples(named) + END)
    return load_shards([str(folder / f"{number}.tar") for number in range(len(shards))])


def labelled(source: str, *labels: bytes) -> list[dict[str, bytes]]:
    return [{"jpg": b"x", source: label} for label in labels]


def write_listing(folder: Path, classes: Sequence[str]) -> None:
    names = sorted(path.name for path in folder.glob("*.tar"))
    split = {"shards": [{"name": name, "samples": 1, "bytes": 1, "sha256": ""} for name in names], "samples": 1, "bytes": 1}
    listing = {"version": 1, "splits": {"all": split}, "classes": list(classes), "fields": ["cls", "jpg"], "arguments": {}}
    (folder / "dataset.json").write_text(json.dumps(listing))
