"""data/shards.py: patterns -> indexed shards, in parallel, and the dataset.json that speaks for them."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tar_maker as tm

from data import shards
from data.errors import ShardError
from data.shards import Shard, index_shards, load_shards, read_dataset_json


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def write_shards(folder: Path, sizes: list[int]) -> None:
    for i, num in enumerate(sizes):
        tm.write_shard(folder / f"{i:03d}.tar", num)


def test_load_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, [7, 5, 0])
    found = load_shards(str(tmp_path / "{000..002}.tar"))
    path = str(tmp_path / "000.tar")
    assert found[0] == Shard(path, "000.tar", path, path + ".idx", 7, os.path.getsize(path), None)
    assert [shard.num_samples for shard in found] == [7, 5, 0]
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize("daemon", [False, True])
def test_processes_and_threads_give_the_same_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon: bool) -> None:
    """At once, instead of after a moment alone; a daemonic process may have no children and takes threads."""
    write_shards(tmp_path, list(range(1, 25)))
    (tmp_path / "024.tar.gz").write_bytes(gzip.compress((tmp_path / "023.tar").read_bytes()))
    monkeypatch.setattr(shards, "_ALONE_SECONDS", -1)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", daemon)  # type: ignore[attr-defined]
    before = set(multiprocessing.active_children())  # the pool of the collective tests, where it has been started
    found = load_shards(str(tmp_path), num_workers=3)
    assert [shard.num_samples for shard in found] == [*range(1, 25), 24]
    assert set(multiprocessing.active_children()) <= before
    monkeypatch.setattr(shards, "_ALONE_SECONDS", 100)
    assert load_shards(str(tmp_path), num_workers=3) == load_shards(str(tmp_path), num_workers=1) == found


@pytest.mark.parametrize("alone", [-1, 100])
def test_bad_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: int) -> None:
    write_shards(tmp_path, [3, 3, 3, 3])
    monkeypatch.setattr(shards, "_ALONE_SECONDS", alone)
    (tmp_path / "001.tar").write_bytes(b"")
    (tmp_path / "004.tar").mkdir()
    (tmp_path / "005.tar").symlink_to("nowhere")
    with pytest.raises(ShardError) as caught:
        load_shards(str(tmp_path), num_workers=2)
    message = f"{tmp_path}/001.tar: empty (0 bytes): no tar in it; download or make it again (and 2 more of the 6 shards)"
    assert str(caught.value) == message
    results = list(index_shards([str(tmp_path / f"{i:03d}.tar") for i in range(6)], num_workers=2))
    assert [str(result).partition(": ")[2] for result in results if isinstance(result, ShardError)] == [
        "empty (0 bytes): no tar in it; download or make it again",
        "can't be read: Is a directory",
        "can't be read: No such file or directory",
    ]
    assert [result[1] for result in results if not isinstance(result, ShardError)] == [False] * 3  # all but those are indexed


def test_damaged_shards_are_used_and_named(tmp_path: Path) -> None:
    path = tm.write_shard(tmp_path / "x.tar", 3)
    path.write_bytes(path.read_bytes()[:5000])
    (shard,) = load_shards(str(path))
    assert shard.num_samples == 2
    assert shard.damage == "cut in the padding of the last member at byte 5000: 904 bytes after its first 2 samples are not used"


def test_a_killed_worker_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, [1, 1, 1])
    monkeypatch.setattr(shards, "_ALONE_SECONDS", -1)
    monkeypatch.setattr(shards, "load_index", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ShardError, match="a process that indexed shards was killed .out of memory.*try again with fewer workers"):
        load_shards(str(tmp_path), num_workers=2)


def test_progress_is_shown_when_it_takes_long(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, [1, 1, 1])
    load_shards(str(tmp_path))
    assert capsys.readouterr() == ("", "")
    bars: list[dict] = []

    class Bar:
        def __init__(self, **options: object) -> None:
            bars.append(options)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self) -> None:
            bars.append({})

    monkeypatch.setattr("tqdm.tqdm", Bar)
    load_shards(str(tmp_path))
    assert bars[0] == {"total": 3, "desc": "indexing shards", "unit": "shard", "delay": 2, "disable": False, "leave": False}
    assert len(bars) == 4
    load_shards(str(tmp_path), progress=False)
    assert bars[4]["disable"]


SLOW = r"""
import os, sys, time, types
sys.modules["data"] = types.ModuleType("data")  # without what data/__init__.py imports: torch takes seconds
sys.modules["data"].__path__ = ["data"]
from data import shards
shards._ALONE_SECONDS = -1
def load_index(*_):
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(30)
shards.load_index = load_index
try:
    shards.load_shards(sys.argv[1], num_workers=2)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_workers_end_with_their_parent(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    write_shards(tmp_path, [1, 1, 1, 1])
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", SLOW, tmp_path], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(sent)
        assert parent.wait(timeout=20) == status
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(is_running(pid) for pid in workers)
        assert parent.stderr.read() == b""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# dataset.json


def write_json(folder: Path, splits: list[str], classes: list[str] | None = None) -> dict:
    folder.mkdir(exist_ok=True)
    content = {"version": 1, "splits": {split: {"shards": []} for split in splits}, "classes": classes or ["cat", "dog"]}
    (folder / "dataset.json").write_text(json.dumps(content))
    return content


def test_dataset_json_beside_the_shards(tmp_path: Path) -> None:
    assert read_dataset_json([str(tmp_path / "0.tar")]) is None
    content = write_json(tmp_path, ["all"])
    write_shards(tmp_path, [1, 1])
    assert read_dataset_json(load_shards(str(tmp_path))) == read_dataset_json([str(tmp_path / "000.tar")]) == content


def test_dataset_json_above_the_shards_of_a_split(tmp_path: Path) -> None:
    content = write_json(tmp_path, ["train", "val"])
    paths = [str(tmp_path / split / "0.tar") for split in ("train", "val", "other")]
    assert read_dataset_json(paths[:1]) == read_dataset_json(paths[:2]) == content
    assert read_dataset_json(paths[2:]) is None
    assert read_dataset_json(paths) is None  # it does not speak for all of them


def test_another_tools_dataset_json(tmp_path: Path) -> None:
    contents: list[object] = [[], {"splits": ["train"]}, {"name": "x"}, "text", None]
    for content in contents:
        (tmp_path / "dataset.json").write_text(json.dumps(content))
        assert read_dataset_json([str(tmp_path / "0.tar")]) is None


def test_dataset_json_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(ShardError, match=r"dataset.json: not JSON \(.*\): make it again or remove it"):
        read_dataset_json([str(tmp_path / "0.tar")])
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "dataset.json").mkdir()
    with pytest.raises(ShardError, match="dataset.json: can't be read: Is a directory"):
        read_dataset_json([str(tmp_path / "0.tar")])


def test_two_data_sets_need_the_same_classes(tmp_path: Path) -> None:
    write_json(tmp_path / "a", ["all"])
    write_json(tmp_path / "b", ["all"])
    paths = [str(tmp_path / "a" / "0.tar"), str(tmp_path / "b" / "0.tar")]
    assert read_dataset_json(paths)
    write_json(tmp_path / "b", ["all"], ["dog", "cat"])
    with pytest.raises(
        ShardError, match="b/dataset.json: its classes differ from those of .*a/dataset.json.*make_shards.py --classes FILE"
    ):
        read_dataset_json(paths)
