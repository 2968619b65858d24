"""data/publishing.py through index_shards.py and make_shards.py: indexes and shards go to where they are wanted."""

from __future__ import annotations

import json
import os
from pathlib import Path

from remote_shards import nginx, published, site  # noqa: F401
from test_remote_training import bucket, s3  # noqa: F401

from data import load_shards, remote
from scripts import index_shards, make_shards

DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits.zip"


def test_indexes_of_remote_shards_go_to_a_folder_and_are_made_once(site, published, tmp_path, capsys) -> None:
    paths = published([7, 0, 4], indexed=False)
    assert index_shards.main([site.shards(3) + "?sig=secret", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "3 indexes written in " in out and f"3 put into {tmp_path}/out" in out and "3 of 3 shards can be used: 11 samples" in out
    assert "secret" not in out + err and len(site.requests()) == 3
    for path in paths:
        assert (tmp_path / "out" / (os.path.basename(path) + ".idx")).read_bytes() == Path(path + ".idx").read_bytes()
    assert index_shards.main([site.shards(3)]) == 0 and "3 indexes up to date already in " in capsys.readouterr().out
    assert site.requests() == []
    assert index_shards.main([f"{site.url}/000.tar", paths[0], "--out", str(tmp_path / "out")]) == 2
    assert "two shards are named 000.tar: index their folders apart, each with its own --out" in capsys.readouterr().err
    assert index_shards.main([f"{site.url}/000.tar", "--out", site.url]) == 2
    assert "HTTP servers are only read from" in capsys.readouterr().err


def test_shards_are_made_and_indexed_in_a_store(bucket, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    words = [str(DIGITS), "--num-shards", "3", "--split", "train=0.8,val=0.2", "--workers", "1"]
    assert make_shards.main([*words[:1], f"{bucket}/digits", *words[1:]]) == 0
    out, err = capsys.readouterr()
    assert f"--data '{bucket}/digits/train/{{000..002}}.tar' --val-data {bucket}/digits/val/000.tar" in out, out
    assert f"{bucket}/digits: 8 files sent, 0 were there already" in err
    assert not os.listdir(tmp_path / "xdg" / "shardline" / "making")
    assert make_shards.main([*words[:1], str(tmp_path / "local"), *words[1:]]) == 0
    for name in ("train/000.tar", "train/002.tar.idx", "val/000.tar", "dataset.json"):
        assert remote.read_whole(f"{bucket}/digits/{name}") == (tmp_path / "local" / name).read_bytes()
    shards = load_shards(f"{bucket}/digits/train/")
    listed = json.loads((tmp_path / "local" / "dataset.json").read_text())["splits"]["train"]["shards"]
    assert [shard.num_samples for shard in shards] == [entry["samples"] for entry in listed]
    assert make_shards.main([str(DIGITS), f"{bucket}/digits", "--num-shards", "2", "--workers", "1"]) == 2
    assert f"{bucket}/digits: holds a dataset.json of other shards: choose another place, or give --overwrite" in capsys.readouterr().err
    remote.upload(str(tmp_path / "local" / "train" / "000.tar"), f"{bucket}/bare/000.tar")
    assert index_shards.main([f"{bucket}/bare/", "--out", f"{bucket}/bare"]) == 0
    assert remote.read_whole(f"{bucket}/bare/000.tar.idx") == (tmp_path / "local" / "train" / "000.tar.idx").read_bytes()
    assert make_shards.main([*words[:1], f"{bucket}/digits", *words[1:], "--seed", "1", "--overwrite"]) == 0
    assert make_shards.main([*words[:1], str(tmp_path / "other"), *words[1:], "--seed", "1"]) == 0
    for name in ("train/000.tar", "train/002.tar.idx", "val/000.tar", "dataset.json"):  # many are as large as those before
        assert remote.read_whole(f"{bucket}/digits/{name}") == (tmp_path / "other" / name).read_bytes()
