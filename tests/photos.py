"""Folders of pictures to make shards from, and ways to look at what was made; used by several test files."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.make_shards import main


def picture(seed: int = 0, size: tuple[int, int] = (8, 6), kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (seed * 37 % 256, seed * 91 % 256, seed % 256)).save(out, kind, **options)
    return out.getvalue()


def make_folder(root: Path, files: dict[str, bytes | int]) -> Path:
    """Files by name; an integer stands for a picture of that seed."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(content) if isinstance(content, int) else content)
    return root


def some_classes(num: int = 5, classes: tuple[str, ...] = ("bee", "ant")) -> dict[str, bytes | int]:
    return {f"{name}/{i}.jpg": 10 * c + i for c, name in enumerate(classes) for i in range(num)}


def run(*args: str | Path) -> int:
    return main([*map(str, args), *(() if "--workers" in args else ("--workers", "1"))])


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """The one line that it ends with."""
    try:
        code = run(*args)
    except SystemExit as stop:  # argparse
        code = int(str(stop.code))
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1 and error.startswith("make_shards.py: "), error
    return error.strip().partition(": ")[2]


def samples(*shards: Path) -> dict[str, dict[str, bytes]]:
    """Key -> fields, in the order of the shards; read with tarfile, not with our parser."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                key, field = member.name.split(".", 1)
                fields = found.setdefault(key, {})
                assert field not in fields
                fields[field] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return found


def all_samples(out: Path) -> dict[str, dict[str, bytes]]:
    return samples(*sorted(out.rglob("*.tar")))


def paths(out: Path) -> list[str]:
    """The source paths, in the order of the samples."""
    return [json.loads(fields["json"])["path"] for fields in all_samples(out).values()]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "dataset.json").read_text())
