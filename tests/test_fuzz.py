"""Hostile bytes through the C decoder under AddressSanitizer and UndefinedBehaviorSanitizer. `make fuzz` runs a million (FUZZ_INPUTS)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from picture_maker import encode, noise
from PIL import Image

from data import native

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(native.why_absent()) or not shutil.which("gcc"), reason="no native part, or no gcc"),
]

SETTINGS: list[dict] = [
    {}, {"subsampling": 0}, {"subsampling": 1}, {"subsampling": "4:1:1"}, {"optimize": True}, {"progressive": True}, {"quality": 3},
    {"quality": 99}, {"restart_marker_blocks": 1}, {"restart_marker_blocks": 3}, {"restart_marker_rows": 1, "subsampling": 0},
]  # fmt: skip


def make_seeds(folder: Path) -> list[Path]:
    """Small JPEGs of every kind, with and without EXIF."""
    exif = Image.Exif()
    exif[0x010E], exif[0x0112] = "a text", 6
    paths = []
    for i, settings in enumerate(SETTINGS):
        image = Image.fromarray(noise(9, 7)).resize((50 + 7 * i, 40 + i), Image.Resampling.BICUBIC)
        for mode in ("RGB", "L"):
            more = {"exif": exif} if i % 2 else {}
            paths.append(folder / f"{i}{mode}.jpg")
            paths[-1].write_bytes(encode(image.convert(mode), "JPEG", **settings, **more))
    return paths


def test_hostile_bytes_do_no_harm(tmp_path: Path) -> None:
    inputs = int(os.environ.get("FUZZ_INPUTS", "20000"))
    program = tmp_path / "fuzz_native"
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", '-DSOURCES=""']
    sources = [Path(__file__).parent / "fuzz_native.c", *sorted(native.FOLDER.glob("*.c"))]
    command = ["gcc", *flags, f"-I{native.FOLDER}", "-o", program, *sources, "-ljpeg", "-lm"]
    subprocess.run([*map(str, command)], check=True, timeout=120)
    seed = os.environ.get("FUZZ_SEED", "1")
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1"}
    ran = subprocess.run(
        [program, str(inputs), seed, *make_seeds(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace"
    )
    print(ran.stdout.strip())
    if ran.returncode and (tmp_path / "fuzz-input.jpg").exists():
        shutil.copy(tmp_path / "fuzz-input.jpg", "fuzz-input.jpg")
    assert ran.returncode == 0, ran.stderr[-4000:]
    decoded = int(ran.stdout.split(", ")[2].split()[0])
    assert decoded > inputs / 20  # the mutations don't end at the first marker
