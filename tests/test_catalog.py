"""data/catalog.py: how many samples remote shards hold, from whatever is published beside them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re

import pytest
from remote_shards import nginx, published, read_ids, site  # noqa: F401

from data import ShardError, build_loader, load_shards
from data.shards import index_shards, read_dataset_json


def sizes_json(folder, counts):
    (folder / "sizes.json").write_text(json.dumps({f"{i:03d}.tar": n for i, n in enumerate(counts)}))


def info_json(folder, counts):
    split = {"name": "train", "filenames": [f"train/{i:03d}.tar" for i in range(len(counts))], "shard_lengths": counts}
    (folder / "_info.json").write_text(json.dumps({"splits": {"train": split}}))


def stats_json(folder, counts):
    for i, count in enumerate(counts):
        (folder / f"{i:03d}_stats.json").write_text(json.dumps({"count": count + 2, "successes": count}))


def dataset_json(folder, counts):
    sizes = [os.path.getsize(folder / f"{i:03d}.tar") for i in range(len(counts))]
    shards = [{"name": f"{i:03d}.tar", "samples": n, "bytes": sizes[i], "sha256": ""} for i, n in enumerate(counts)]
    (folder / "dataset.json").write_text(json.dumps({"splits": {"all": {"shards": shards}}, "classes": ["a", "b", "c"]}))


def dataset_json_above(folder, counts):
    """In the parent folder: of a split named as the folder."""
    dataset_json(folder, counts)
    listing = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").unlink()
    listing["splits"] = {folder.name: listing["splits"]["all"], "other": {"shards": [{"name": "000.tar", "samples": 1}]}}
    (folder.parent / "dataset.json").write_text(json.dumps(listing))


@pytest.mark.parametrize("publish", [sizes_json, info_json, stats_json, dataset_json, dataset_json_above])
def test_counts_are_taken_from_what_is_published(site, published, publish, capfd) -> None:
    counts = [7, 0, 4]
    paths = published(counts, indexed=False)
    publish(site.folder, counts)
    try:
        shards = load_shards(site.shards(3) + "?sig=secret", cache_dir=str(site.folder / "cache"))
        assert [shard.num_samples for shard in shards] == counts and site.requests() == []
        assert [(shard.path, shard.name) for shard in shards] == [(f"{site.url}/{i:03d}.tar", f"{i:03d}.tar") for i in range(3)]
        assert "secret" not in repr(shards)
        classes = (read_dataset_json(shards) or {}).get("classes")
        assert classes == (["a", "b", "c"] if publish in (dataset_json, dataset_json_above) else None)
        assert read_ids(shards) == read_ids(paths)
    finally:
        (site.folder.parent / "dataset.json").unlink(missing_ok=True)
    assert capfd.readouterr().err == ""


def test_published_indexes_give_counts(site, published) -> None:
    published([7, 0, 4])
    assert [shard.num_samples for shard in load_shards(site.shards(3))] == [7, 0, 4]
    assert site.requests() == []


@pytest.mark.parametrize("cache_dir", ["none", "cache"])
def test_without_any_of_it_shards_are_read_through_once(site, published, capfd, cache_dir) -> None:
    paths = published([7, 0, 4], indexed=False)
    cache = cache_dir if cache_dir == "none" else str(site.folder / "cache")
    (site.folder / "001_stats.json").write_text("<html>not JSON</html>")
    shards = load_shards(site.shards(3), cache_dir=cache)
    assert [shard.num_samples for shard in shards] == [7, 0, 4]
    how = "read through" if cache_dir == "none" else "fetched into the cache"
    said = f"3 of 3 shards have no count or index beside them: their 0.1 MB are {how} and indexed first, 4 at once, since no order"
    err = capfd.readouterr().err
    assert said in err and re.search(r"\nindexed: 3 shards, 0\.1 MB in [\d.]+ s \([\d.]+ MB/s\); their indexes are kept\n", err)
    assert sorted(path[-7:] for path, *_ in site.requests()) == ["000.tar", "001.tar", "002.tar"]
    assert load_shards(site.shards(3), cache_dir=cache) == shards and site.requests() == []
    assert capfd.readouterr().err == ""
    assert read_ids(shards) == read_ids(paths)
    assert bool(site.requests()) == (cache_dir == "none")  # what came for its index is trained on, not fetched again


def test_a_cache_without_room_for_all_says_that_the_rest_comes_again(site, published, capfd) -> None:
    paths = published([20] * 6, indexed=False)
    limit = sum(map(os.path.getsize, paths)) // 2
    kwargs = {"cache_dir": str(site.folder / "cache"), "cache_size": limit, "shuffle_block": 20}
    assert read_ids(site.shards(6), **kwargs) == read_ids(paths, shuffle_block=20)
    assert f"; what the cache has no room for ({limit / 1e6:,.1f} MB) comes again later\n" in capfd.readouterr().err


def test_jobs_that_start_together_fetch_and_index_each_shard_once(site, published) -> None:
    published([20] * 6, indexed=False)
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=load_shards, args=(site.shards(6), None, False, str(site.folder / "cache"))) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert sorted(path[-7:] for path, *_ in site.requests()) == [f"{i:03d}.tar" for i in range(6)]


def test_a_count_that_is_wrong_is_noticed_when_the_shard_arrives(site, published) -> None:
    published([7, 4], indexed=False)
    sizes_json(site.folder, [7, 5])
    with pytest.raises(ShardError) as refused:
        read_ids(load_shards(site.shards(2)))
    assert str(refused.value) == (
        f"{site.url}/001.tar: it holds 4 samples, and its index or count says 5: write that anew with scripts/index_shards.py"
    )


def test_an_index_of_another_version_counts_as_none(site, published, capfd) -> None:
    paths = published([7, 4])
    (site.folder / "001.tar.idx").write_bytes((site.folder / "000.tar.idx").read_bytes())
    (site.folder / "000.tar.idx").write_bytes(b"short")
    assert read_ids(load_shards(site.shards(2))) == read_ids(paths)
    assert "2 of 2 shards have no count" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty (0 bytes): no tar in it"),
        (b"<!DOCTYPE html><html>" + b" " * 600, "a web page, not a tar"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 20, "a Git LFS pointer, not a tar"),
        (b"\x1f\x8b\x08" + b"x" * 2000, "compressed, which has no random access: use --stream, or upload it decompressed"),
        (b"hello" * 400, "not a tar (it starts with b'hello"),
    ],
)
def test_what_is_no_shard_is_named(site, published, content, message) -> None:
    published([3, 3], indexed=False)
    (site.folder / "001.tar").write_bytes(content)
    with pytest.raises(ShardError) as refused:
        load_shards(site.shards(2) + "?sig=secret")
    assert str(refused.value).startswith(f"{site.url}/001.tar: {message}") and "secret" not in str(refused.value)


def test_missing_shards_are_named_before_anything_is_read(site, published) -> None:
    published([3, 3])
    with pytest.raises(ShardError) as refused:
        load_shards([site.shards(2), f"{site.url}/{{002..005}}.tar?sig=secret"])
    assert str(refused.value) == f"{site.url}/002.tar: not there (404): check the name (and 3 more of the 6 shards)"
    results = list(index_shards([f"{site.url}/000.tar", f"{site.url}/009.tar"]))
    assert [isinstance(result, ShardError) for result in results] == [False, True]
    assert site.requests() == []


def test_local_and_remote_shards_make_one_data_set(site, published) -> None:
    paths = published([5, 6, 7])
    mixed = [paths[0], f"{site.url}/001.tar", paths[2]]
    assert read_ids(mixed) == read_ids(paths)
    assert build_loader(site.shards(3), batch_size=2, img_size=32).fingerprint == build_loader(paths, batch_size=2, img_size=32).fingerprint


def test_a_damaged_shard_gives_its_whole_samples_and_says_so_each_time(site, published) -> None:
    published([9], indexed=False)
    data = (site.folder / "000.tar").read_bytes()
    (site.folder / "000.tar").write_bytes(data[: len(data) // 2])
    for _ in range(2):
        (shard,) = load_shards(site.shards(1).replace("{000..000}", "000"))
        assert 0 < shard.num_samples < 9 and "bytes after its first" in (shard.damage or "")


def test_lists_at_a_url_name_their_neighbours(site, published) -> None:
    published([5, 6])
    (site.folder / "all.txt").write_text("# shards\n000.tar\n" + f"{site.url}/001.tar # the other\n")
    assert [shard.path for shard in load_shards(f"{site.url}/all.txt")] == [f"{site.url}/000.tar", f"{site.url}/001.tar"]
    (site.folder / "bad.txt").write_text("/etc/passwd.tar\n")
    with pytest.raises(ShardError, match="/etc/passwd.tar: not there"):
        load_shards(f"{site.url}/bad.txt")
    (site.folder / "loop.txt").write_text("loop.txt\n")
    with pytest.raises(ShardError, match="loop.txt: a list that names itself"):
        load_shards(f"{site.url}/loop.txt")
