"""Fixtures that more than one test file uses."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from gloo_pool import GlooPool


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real files beside the checkout; a user's machine has none, and then the test skips."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"{folder} is missing: CI must have it")
        pytest.skip(f"real files are not at {folder}")
    return folder


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Four processes that collective tests share: starting them costs seconds."""
    pool = GlooPool(4)
    yield pool
    pool.close()


@pytest.fixture
def picture_shards(tmp_path: Path) -> Callable[..., list[str]]:
    """picture_shards(sizes, name="train", classes=3, side=32) writes shards of PNGs whose class can be learnt, returns their paths."""

    def write(sizes: Sequence[int], name: str = "train", classes: int = 3, side: int = 32) -> list[str]:
        from PIL import Image

        rng = np.random.default_rng((len(sizes), sum(sizes)))
        folder = tmp_path / name
        folder.mkdir()
        serial = 0
        for number, size in enumerate(sizes):
            with tarfile.open(folder / f"{number:03d}.tar", "w") as tar:
                for _ in range(size):
                    label = serial % classes
                    pixels = rng.integers(0, 90, (side, side, 3), np.uint8)
                    pixels[:, :, label % 3] += 100
                    png = io.BytesIO()
                    Image.fromarray(pixels).save(png, "PNG")
                    for field, data in (("png", png.getvalue()), ("cls", str(label).encode())):
                        info = tarfile.TarInfo(f"s{serial:05d}.{field}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
                    serial += 1
        return [str(folder / f"{number:03d}.tar") for number in range(len(sizes))]

    return write


@pytest.fixture
def train(gloo_pool: GlooPool, tmp_path: Path) -> Callable[..., Path]:
    """train(words, model=None) runs a small training in one process, on 24 pictures of 3 classes in train/, and gives its folder."""
    from launching import launch
    from shard_maker import write_shards
    from test_run import samples

    write_shards(tmp_path / "train", samples(9), samples(8, 9), samples(7, 17))
    number = 0

    def execute(*words: object, model: object = None) -> Path:
        nonlocal number
        number += 1
        some = ["--data", tmp_path / "train", "--model", "tiny", "--device", "cpu", "--output", tmp_path / "runs", "--name", number]
        launch(gloo_pool, [*some, "--epochs", 2, "-b", 8, "-j", 0, *words], None, None, model)
        return tmp_path / "runs" / str(number)

    return execute
