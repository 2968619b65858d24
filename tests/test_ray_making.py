"""data/ray_making.py: shards made by a Ray cluster of two nodes on this machine are those of a local run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import servers
from photos import content, make_folder, refused, run, some_classes
from test_remote_training import bucket, s3  # noqa: F401

from data import remote
from scripts import make_shards


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", some_classes(20))


def test_a_missing_package_is_named_with_what_installs_it(photos, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import of a package that isn't there meets
    error = refused(capsys, photos, tmp_path / "out", "--executor", "ray")
    assert error == "--executor ray needs a package that is missing: pip install 'ray>=2.60,<3'"


def test_no_cluster_is_one_line(photos, tmp_path, monkeypatch, capsys) -> None:
    address = f"127.0.0.1:{servers.free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    error = refused(capsys, photos, tmp_path / "out", "--executor", "ray")
    assert error.startswith(f"--executor ray: no cluster can be reached at {address} ([Errno 111] Connection refused): start one")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with a core each; its workers have the environment of its start."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            made.add_node(num_cpus=1)
            made.wait_for_nodes()
            yield made.address
        finally:
            made.shutdown()


@pytest.mark.full
def test_a_folder_has_the_bytes_of_a_local_run(cluster, photos, tmp_path, monkeypatch, capsys) -> None:
    (photos / "ant" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    words = ["--split", "train=0.8,val=0.2", "--num-shards", "5", "--resize", "5"]
    assert run(photos, tmp_path / "local", *words) == 0
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.chdir(tmp_path)  # relative paths mean the same on the machines of the cluster
    assert make_shards.main(["photos", "out", *words, "--executor", "ray"]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "local")
    (tmp_path / "out" / "train" / "001.tar").unlink()
    capsys.readouterr()
    assert make_shards.main(["photos", "out", *words, "--executor", "ray"]) == 0
    assert f"{tmp_path}/out: 5 of 6 shards are there already" in capsys.readouterr().err
    assert content(tmp_path / "out") == content(tmp_path / "local")
    strict = refused(capsys, photos, tmp_path / "strict", "--executor", "ray", "--strict")
    assert strict.startswith("ant/broken.jpg: ") and strict.endswith("(without --strict it would be left out)")


@pytest.mark.full
def test_a_store_has_the_bytes_of_a_local_run(bucket, cluster, photos, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert run(photos, tmp_path / "local", "--num-shards", "4") == 0
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    assert run(photos, f"{bucket}/set", "--num-shards", "4", "--executor", "ray") == 0
    names = [*(f"{i:03d}.tar{end}" for i in range(4) for end in ("", ".idx")), "dataset.json"]
    assert sorted(base for base in remote.list_names(f"{bucket}/set/")) == sorted(f"{bucket}/set/{name}" for name in names)
    for name in names:
        assert remote.read_whole(f"{bucket}/set/{name}") == (tmp_path / "local" / name).read_bytes()
    assert not os.listdir(tmp_path / "xdg" / "shardline" / "making")
    assert f"--data '{bucket}/set/{{000..003}}.tar'" in capsys.readouterr().out
    described = json.loads((tmp_path / "local" / "dataset.json").read_text())
    assert run(photos, f"{bucket}/set", "--num-shards", "4", "--seed", "1", "--executor", "ray", "--overwrite") == 0
    assert json.loads(remote.read_whole(f"{bucket}/set/dataset.json") or b"")["digest"] != described["digest"]
    assert run(photos, tmp_path / "other", "--num-shards", "4", "--seed", "1") == 0
    assert remote.read_whole(f"{bucket}/set/000.tar.idx") == (tmp_path / "other" / "000.tar.idx").read_bytes()


@pytest.mark.full
def test_a_run_that_stopped_goes_on_in_the_store(bucket, cluster, photos, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    (photos / "bee" / "zz.jpg").write_bytes(b"\xff\xd8\xff no picture")  # in the last shard
    words = ["--num-shards", "4", "--no-shuffle", "--executor", "ray"]
    error = refused(capsys, photos, f"{bucket}/set", *words, "--strict")  # one at a time
    assert error.startswith("bee/zz.jpg: ")
    assert sorted(url[-7:] for url in remote.list_names(f"{bucket}/set/") if url.endswith(".tar")) == [f"{i:03d}.tar" for i in range(3)]
    assert run(photos, f"{bucket}/set", *words) == 0
    assert f"{bucket}/set: 3 of 4 shards are there already" in capsys.readouterr().err
    assert run(photos, tmp_path / "local", *words[:3]) == 0
    for name in ("000.tar", "003.tar", "003.tar.idx", "dataset.json"):
        assert remote.read_whole(f"{bucket}/set/{name}") == (tmp_path / "local" / name).read_bytes()
