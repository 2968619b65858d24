"""Fixtures of tests that read from servers: one nginx for the whole run, each test its own folder in it.

in: nothing  ->  out: a folder and its URL; shards in it
Invariant: caches lie in the test's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import servers

from data import build_loader, load_shards


class Site(NamedTuple):
    """A folder and where a server shows it; `server` knows what was asked."""

    folder: Path
    url: str
    server: servers.Served

    def shards(self, count: int) -> str:
        return f"{self.url}/{{000..{count - 1:03d}}}.tar"

    def requests(self, suffix: str = ".tar", least: int = 513) -> list[tuple[str, int, int]]:
        """Those for shards since the last call that brought more than a shard's first block: (path, status, bytes)."""
        return [(path, status, sent) for path, status, sent in self.server.requests() if path.endswith(suffix) and sent >= least]


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Served]:
    root, home = tmp_path_factory.mktemp("www"), tmp_path_factory.mktemp("nginx")
    with servers.serve(root, home) as served:
        yield served


@pytest.fixture
def site(nginx: servers.Served, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    name = f"{len(os.listdir(nginx.root)):04d}"
    folder = nginx.root / name
    folder.mkdir()
    nginx.requests()
    return Site(folder, f"{nginx.url}/{name}", nginx)


@pytest.fixture
def published(site: Site, picture_shards: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """published(sizes) writes picture shards and their indexes into the site's folder; returns the paths of local copies."""

    def write(sizes: Sequence[int], indexed: bool = True, **kwargs: Any) -> list[str]:
        paths = picture_shards(sizes, name=f"local-{len(os.listdir(site.folder))}", **kwargs)
        load_shards(paths)
        for path in paths:
            for suffix in ("", ".idx") if indexed else ("",):
                (site.folder / (os.path.basename(path) + suffix)).write_bytes(Path(path + suffix).read_bytes())
        return paths

    return write


def read_ids(shards: Any, world_size: int = 1, **kwargs: Any) -> list[list[list[tuple]]]:
    """[step][rank] -> (epoch, shard, index, key) of its valid slots."""
    kwargs = {"batch_size": 12, "img_size": 32, "epochs": 2, "seed": 3, "num_classes": 3, **kwargs}
    ranks = []
    for rank in range(world_size):
        batches = build_loader(shards, rank=rank, world_size=world_size, **kwargs)
        ranks.append([
            [(e, *i) for e, i, v in zip(b["epoch"].tolist(), b["ids"], b["valid"].tolist(), strict=True) if v] for b in batches
        ])  # fmt: skip
    return [list(step) for step in zip(*ranks, strict=True)]
