"""Training from servers is training from a local disk: the same audits, cached or not, over HTTP and S3, with faults on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import servers
import shard_maker
import torch
import yaml
from commands import Command, last_step
from launching import base, global_batches, launch
from remote_shards import nginx, published, read_ids, site  # noqa: F401

from data import ShardError, build_loader, load_shards, remote, retrying
from engine import checkpoint
from scripts import show_batch

SIZES = (7, 5, 3, 1, 0, 41)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retrying, "LONGEST_PAUSE", 0.05)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with servers.s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A new bucket's URL, with credentials as s3fs takes them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(remote, "_stores", {})
    store, _ = remote.open_store("s3://x/y")
    name = f"bucket-{os.urandom(4).hex()}"
    store.mkdir(name)
    return f"s3://{name}"


@pytest.fixture(scope="module")
def gs() -> Iterator[str]:
    with servers.gs_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["s3", "gs"])
def any_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket's URL, of each kind of store in turn."""
    if request.param == "s3":
        return request.getfixturevalue("bucket")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("gs"))
    monkeypatch.setattr(remote, "_stores", {})
    name = f"bucket-{os.urandom(4).hex()}"
    remote.open_store("gs://x/y")[0].mkdir(name)
    return f"gs://{name}"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cache_dir", [None, "none"])
def test_the_audit_is_that_of_local_files(site, published, cache_dir, world_size, num_workers) -> None:
    paths = published(SIZES)
    kwargs = {"world_size": world_size, "num_workers": num_workers}
    assert read_ids(site.shards(6), cache_dir=cache_dir, **kwargs) == read_ids(paths, **kwargs)


@pytest.mark.parametrize("cache_dir", [None, "none"])
def test_columns_are_those_of_local_files(site, tmp_path, cache_dir) -> None:
    rows = np.random.default_rng(0).integers(0, 60_000, (40, 33), np.uint16)
    shards = shard_maker.write_shards(tmp_path / "local", *([{"bin": row.tobytes()} for row in rows[k : k + 10]] for k in (0, 10, 20, 30)))
    for shard in shards:
        for path in (shard.path, shard.index_path):
            (site.folder / os.path.basename(path)).write_bytes(Path(path).read_bytes())
    remote_shards = load_shards([f"{site.url}/{i}.tar" for i in range(4)], cache_dir=cache_dir)
    for batches in zip(*(build_loader(s, batch_size=12, task="tokens", epochs=2) for s in (shards, remote_shards)), strict=True):
        assert torch.equal(batches[0]["tokens"], batches[1]["tokens"]) and batches[0]["ids"] == batches[1]["ids"]


@pytest.mark.parametrize("cache_dir", [None, "none"])
def test_the_audit_over_object_stores_is_that_of_local_files(any_bucket, picture_shards, tmp_path, cache_dir, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    bucket = any_bucket
    paths = picture_shards([*SIZES, 4, 4, 4])
    load_shards(paths)
    for path in paths:
        for suffix in ("", ".idx"):
            remote.upload(path + suffix, f"{bucket}/train/{os.path.basename(path)}{suffix}")
    for pattern in (f"{bucket}/train/{{000..008}}.tar", f"{bucket}/train/", f"{bucket}/train/*.tar"):
        shards = load_shards(pattern, cache_dir=cache_dir)
        assert [shard.path for shard in shards] == [f"{bucket}/train/{i:03d}.tar" for i in range(9)]
    assert read_ids(shards, num_workers=2) == read_ids(paths)
    with pytest.raises(ShardError, match=f"{bucket}/train/009.tar: not there \\(404\\): check the name"):
        load_shards(f"{bucket}/train/{{000..009}}.tar")
    with pytest.raises(ShardError, match=f"{bucket}/no/\\*.tar: no file matches"):
        load_shards(f"{bucket}/no/*.tar")
    (tmp_path / "other").write_bytes(b"\0" * 10240)
    remote.upload(str(tmp_path / "other"), f"{bucket}/train/005.tar")
    with pytest.raises(ShardError, match="005.tar: it changed on the server"):
        read_ids(shards, cache_dir=cache_dir) if cache_dir else read_ids(load_fresh(shards, tmp_path))


def load_fresh(shards, tmp_path):
    """The same shards with an empty cache."""
    from dataclasses import replace

    from data.shard_cache import open_cache

    cache = open_cache(str(tmp_path / "fresh"), None)
    return [replace(shard, remote=replace(shard.remote, cache=cache)) for shard in shards]


@pytest.mark.parametrize("cache_dir", [None, "none"])
def test_signed_urls_of_a_list_are_read_and_kept_out_of_what_is_told(bucket, picture_shards, tmp_path, cache_dir, monkeypatch) -> None:
    """Each shard has a signature of its own, as an S3 server gives them; nothing is published beside the shards."""
    import boto3

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    paths = picture_shards(SIZES)
    client, signed = boto3.client("s3"), []
    for path in paths:
        remote.upload(path, f"{bucket}/signed/{os.path.basename(path)}")
        key = {"Bucket": bucket.removeprefix("s3://"), "Key": f"signed/{os.path.basename(path)}"}
        signed.append(client.generate_presigned_url("get_object", Params=key))
    assert all("Signature=" in url and "AWSAccessKeyId=" in url for url in signed)
    (tmp_path / "signed.txt").write_text("\n".join(signed))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    shards = load_shards(str(tmp_path / "signed.txt"), cache_dir=cache_dir)
    assert read_ids(shards, num_workers=2) == read_ids(paths)
    told = [repr(shards), *(os.path.join(folder, name) for folder, _, names in os.walk(tmp_path / "xdg") for name in names)]
    assert not [text for text in told if "Signature" in text or "AWSAccessKeyId" in text]
    assert shards[0].path == signed[0].partition("?")[0]


def test_faults_leave_the_audit_as_it_is(site, published) -> None:
    """One request in ten fails, one in twenty is cut."""
    paths = published([40] * 6)
    with servers.faulty(site.server.url, servers.drawn({"503": 0.05, "reset": 0.05, "cut": 0.03, "short": 0.02})) as proxy:
        url = site.shards(6).replace(site.server.url, proxy.url)
        for cache_dir in (None, "none"):
            assert read_ids(url, cache_dir=cache_dir, num_workers=2) == read_ids(paths)
        assert proxy.count["503"] and proxy.count["reset"] and proxy.count["cut"] + proxy.count["short"]


def test_a_run_on_two_ranks_says_what_it_needs_and_keeps_no_secret(gloo_pool, site, published, tmp_path, capsys) -> None:
    paths = published(SIZES)
    launch(gloo_pool, base(paths, tmp_path, "local", 2, "-j", 2))
    url = site.shards(6).replace("http://", "http://user:secret@") + "?sig=secret"
    (site.folder / "cache").mkdir()
    words = ["-j", 2, "--cache-dir", site.folder / "cache", "--cache-size", "1GB"]
    launch(gloo_pool, base([url], tmp_path, "remote", 2, *words))
    runs = tmp_path / "runs"
    assert global_batches(runs / "local") == global_batches(runs / "remote")
    shown = []
    for name in ("local", "remote"):  # without the query: a shard that needs a signature can't be looked into later
        assert show_batch.main([str(runs / name), "--step", "3"]) == 0
        shown.append([line.split("\t") for line in capsys.readouterr().out.splitlines()])
    assert [row[:5] + row[6:] for row in shown[0]] == [row[:5] + row[6:] for row in shown[1]]
    assert {row[5] for row in shown[1][1:]} <= {f"{site.url}/{i:03d}.tar" for i in range(6)}
    log = (runs / "remote" / "log.txt").read_text()
    assert "the first block (16,384 samples) needs 5 of 6 remote shards, 0.3 MB of 0.3 MB; to fetch: " in log
    for path in (runs / "remote").rglob("*"):
        if path.is_file():
            assert b"secret" not in path.read_bytes(), path
    assert yaml.safe_load((runs / "remote" / "args.yaml").read_text())["data"] == [site.shards(6)]
    saved = checkpoint.load(runs / "remote")[0]
    assert saved["flags"]["data"] == [site.shards(6)]
    local = json.loads((runs / "local" / "metrics.jsonl").read_text().splitlines()[0])
    assert saved["stream"]["fingerprint"] == local["fingerprint"]  # a run may move from one to the other


@pytest.mark.full
def test_a_run_that_is_killed_while_it_fetches_goes_on_exactly(gloo_pool, site, published, tmp_path) -> None:
    """Every process gets SIGKILL at once, the fetching one too, in the midst of a shard; the cache is a third of the data."""
    paths = published([40] * 12)
    limit = sum(map(os.path.getsize, paths)) // 3
    launch(gloo_pool, base(paths, tmp_path, "local", 2, "--shuffle-block", 20, "-j", 2))
    cache = site.folder / "cache"
    words = ["--shuffle-block", 20, "-j", 2, "--cache-dir", cache, "--cache-size", limit, "--num-classes", 3, "--checkpoint-interval", 4]
    folder = tmp_path / "runs" / "remote"

    def half_fetched() -> list[str]:
        return [entry.name for entry in os.scandir(cache / "shards") if entry.name.endswith(".part") and entry.stat().st_size]

    with servers.faulty(site.server.url, lambda path, number: "slow" if path.endswith(".tar") else "") as proxy:
        url = site.shards(12).replace(site.server.url, proxy.url) + "?sig=secret"
        argv = base([url], tmp_path, "remote", 2, *words)
        command = Command(tmp_path, argv)
        command.wait_for(lambda: (last_step(folder) >= 50 or (folder / "checkpoints" / "last.pt").exists()) and half_fetched())
        command.kill()
        assert command.alive() == [] and half_fetched() and last_step(folder) < 120
        again = Command(tmp_path, [*argv, "--resume", "auto"])
        try:
            assert again.wait() == 0, again.err
            again.wait_until_gone(15)
            assert "going on from" in again.out and "secret" not in again.out + again.err
        finally:
            again.kill()
    assert global_batches(folder) == global_batches(tmp_path / "runs" / "local")
    assert sum(entry.stat().st_size for entry in os.scandir(cache / "shards")) <= limit
    assert not half_fetched()


@pytest.mark.full
def test_two_runs_that_share_a_cache_fetch_each_shard_once(gloo_pool, site, published, tmp_path) -> None:
    """Nothing is published beside the shards either, so they are indexed once too."""
    paths = published([40] * 8, indexed=False)
    orders = {"first": 0, "second": 1}
    for name, seed in orders.items():
        launch(gloo_pool, base(paths, tmp_path, f"local-{name}", 1, "--seed", seed))
    words = ["-j", 2, "--cache-dir", site.folder / "cache"]
    jobs = [Command(tmp_path, base([site.shards(8)], tmp_path, name, 1, *words, "--seed", seed)) for name, seed in orders.items()]
    try:
        assert [job.wait() for job in jobs] == [0, 0], [job.err for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for name in orders:
        assert global_batches(tmp_path / "runs" / name) == global_batches(tmp_path / "runs" / f"local-{name}")
    assert sorted(path[-7:] for path, *_ in site.requests()) == [f"{i:03d}.tar" for i in range(8)]
