"""Run folders: each is made by one run only, found again by what it trained on, and told apart by its shards."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from test_checkpoint import content

from data import Shard
from engine import checkpoint, runs


def shard(path, num_samples=3, num_bytes=2048):
    return Shard(str(path), os.path.basename(path), str(path), f"{path}.idx", num_samples, num_bytes)


def start_run(folder, fingerprint="f", model="tiny", save=True, age=0.0):
    """A run folder as a run leaves it: its start line, and a checkpoint."""
    folder.mkdir(parents=True)
    line = {"event": "start", "fingerprint": {"hash": fingerprint}, "model": model}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    if save:
        checkpoint.save(folder / "checkpoints", content(0))
        then = time.time() - age
        os.utime(folder / "checkpoints" / "last.pt", (then, then))
    return folder


def open_folder(output, **settings):
    return runs.open_folder(output, settings.pop("name", None), "tiny", **{"shards": [], "val_shards": [], "flags": {}, **settings})


def test_folders_are_named_by_time_and_model_and_never_shared(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: runs.create_folder(tmp_path / "a" / "runs", None, "tiny"), range(64)))
    assert len({path.resolve() for path in made}) == 64
    stamp, _, model = made[0].name.partition("-tiny")
    assert time.strptime(stamp, "%Y%m%d-%H%M%S") and model in ("", *(f"-{number}" for number in range(2, 65)))


def test_of_two_runs_of_one_name_one_is_told(tmp_path):
    assert runs.create_folder(tmp_path, "first", "tiny") == tmp_path / "first"
    with pytest.raises(FileExistsError) as refused:
        runs.create_folder(tmp_path, "first", "tiny")
    assert (refused.value.filename, refused.value.strerror) == (
        str(tmp_path / "first"), "another run has just made it; give another --name",
    )  # fmt: skip


def test_a_second_run_in_a_folder_waits_for_the_first_then_is_told(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()

    def first():
        runs.hold(tmp_path)
        ready.set()
        leave.wait()

    process = context.Process(target=first)
    process.start()
    assert ready.wait(30)
    with pytest.raises(ValueError) as refused:
        runs.hold(tmp_path, seconds=0.3)
    assert str(refused.value) == (
        f"{tmp_path}: another run trains in it (process {process.pid} on {socket.gethostname()}): wait for its end, or give another --name"
    )
    threading.Timer(0.5, leave.set).start()
    runs.hold(tmp_path, seconds=30)
    process.join()
    assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x"])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(ValueError) as refused:
        runs.check_name(tmp_path, name, None)
    assert str(refused.value) == f"--name {name!r}: it must be the name of a folder, not a path; --output says where it is made"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "caf\udce9", "x" * 201, "\u00e9" * 101])
def test_a_name_is_a_line_of_text(tmp_path, name):
    with pytest.raises(ValueError) as refused:
        runs.check_name(tmp_path, name, None)
    assert str(refused.value).startswith(f"--name {name[:60]!r}: not for a folder: it must be text of one line and at most 200 bytes")
    assert str(refused.value).isprintable()
    runs.check_name(tmp_path, "größe 1.5 (final)", None)


def test_a_name_that_exists_is_refused_unless_it_is_gone_on_with(tmp_path):
    runs.check_name(tmp_path, "new", None)
    (tmp_path / "old").mkdir()
    runs.check_name(tmp_path, "old", "auto")
    for resume in (None, "last.pt"):
        with pytest.raises(ValueError) as refused:
            runs.check_name(tmp_path, "old", resume)
        assert str(refused.value) == f"--name old: {tmp_path}/old exists; go on with --resume auto, or give another name"


def test_an_output_that_can_hold_no_folder_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    runs.check_output(tmp_path)
    runs.check_output(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(ValueError) as refused:
            runs.check_output(output)
        assert str(refused.value) == f"--output {output}: {tmp_path}/file is a file, not a folder; give another"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as root, all can be written
    with pytest.raises(ValueError) as refused:
        runs.check_output(tmp_path / "runs")
    assert str(refused.value) == f"--output {tmp_path}/runs: no folder can be made in {tmp_path}, it can't be written; give another"


def test_the_last_run_is_the_newest_that_fits(tmp_path):
    def find(model="tiny"):
        return runs.find_last_run(tmp_path, {"hash": "f"}, model)

    assert find() is None
    assert runs.find_last_run(tmp_path / "none", {"hash": "f"}, "tiny") is None
    old = start_run(tmp_path / "z-old", age=100)
    new = start_run(tmp_path / "a-new", age=50)
    start_run(tmp_path / "other-model", model="resnet18")
    start_run(tmp_path / "other-data", fingerprint="g")
    start_run(tmp_path / "no-checkpoint", save=False)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "metrics.jsonl").write_bytes(b"\xff\n")
    assert find() == new
    os.utime(old / "checkpoints" / "last.pt")
    assert find() == old
    assert find("resnet18") == tmp_path / "other-model"


def test_a_run_with_only_its_previous_checkpoint_is_found(tmp_path):
    folder = start_run(tmp_path / "run")
    os.rename(folder / "checkpoints" / "last.pt", folder / "checkpoints" / "previous.pt")
    assert runs.has_checkpoint(folder)
    assert runs.find_last_run(tmp_path, {"hash": "f"}, "tiny") == folder


def test_a_folder_in_the_place_of_a_checkpoint_is_not_passed_over(tmp_path):
    folder = start_run(tmp_path / "run", save=False)
    (folder / "checkpoints" / "last.pt").mkdir(parents=True)
    assert runs.find_last_run(tmp_path, {"hash": "f"}, "tiny") == folder  # and checkpoint.resolve says what is wrong with it


def test_the_folder_of_a_checkpoint(tmp_path, monkeypatch):
    folder = start_run(tmp_path / "run")
    assert runs.folder_of(folder / "checkpoints" / "last.pt") == folder
    monkeypatch.chdir(folder / "checkpoints")
    assert runs.folder_of(Path("last.pt")) == folder
    (tmp_path / "copy.pt").write_bytes((folder / "checkpoints" / "last.pt").read_bytes())
    assert runs.folder_of(tmp_path / "copy.pt") is None


def test_a_folder_holds_what_the_run_is_made_of(tmp_path):
    shards = [shard("/data/a b/000.tar", 5, 10240), shard("/data/tab\there\nnew\\line\udcff.tar", 0, 1024)]
    folder = open_folder(tmp_path, name="first", shards=shards, val_shards=shards[:1], flags={"epochs": 3, "data": ["é"]})
    assert folder == tmp_path / "first"
    assert (folder / "shards.tsv").read_bytes() == (
        b"path\tsamples\tbytes\n/data/a b/000.tar\t5\t10240\n/data/tab\\there\\nnew\\\\line\xff.tar\t0\t1024\n"
    )
    assert (folder / "val_shards.tsv").read_bytes() == b"path\tsamples\tbytes\n/data/a b/000.tar\t5\t10240\n"
    assert yaml.safe_load((folder / "args.yaml").read_text()) == {"epochs": 3, "data": ["é"]}
    assert runs.first_difference(folder, shards) == ""


def test_going_on_cuts_back_and_makes_its_checkpoint_the_last(tmp_path):
    folder = start_run(tmp_path / "run")
    checkpoints = folder / "checkpoints"
    checkpoint.save(checkpoints, content(1))
    (checkpoints / "last.pt.123.part").touch()
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"event": "train", "step": step}) + "\n" for step in range(1, 6))
    opened = open_folder(tmp_path, folder=folder, gone_on_from=checkpoints / "previous.pt", step=3)
    assert opened == folder
    steps = [json.loads(line).get("step") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [None, 1, 2, 3]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["last.pt", "previous.pt"]
    assert checkpoint.read(checkpoints / "last.pt")["epoch"] == 0
    elsewhere = open_folder(tmp_path, name="branch", gone_on_from=checkpoints / "last.pt", step=3)
    assert not (elsewhere / "checkpoints").exists()


SHARDS = [shard("/data/000.tar"), shard("/data/001.tar", 4), shard("/data/002.tar")]


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (SHARDS, ""),
        ([shard(f"/moved/{s.name}", s.num_samples) for s in SHARDS], ""),
        (SHARDS[:2], "number 2: 002.tar (3 samples, 2048 bytes) then, none now"),
        ([*SHARDS, shard("/data/003.tar")], "number 3: none then, 003.tar (3 samples, 2048 bytes) now"),
        ([SHARDS[1], SHARDS[0], SHARDS[2]], "number 0: 000.tar (3 samples, 2048 bytes) then, 001.tar (4 samples, 2048 bytes) now"),
        (
            [SHARDS[0], shard("/data/001.tar", 4, 4096), SHARDS[2]],
            "number 1: 001.tar (4 samples, 2048 bytes) then, 001.tar (4 samples, 4096 bytes) now",
        ),
    ],
)
def test_the_first_shard_that_differs_is_named(tmp_path, now, difference):
    folder = open_folder(tmp_path, shards=SHARDS)
    assert runs.first_difference(folder, now) == (difference and f". The first shard that differs is {difference}")


def test_other_data_than_the_checkpoint_s_is_refused(tmp_path):
    folder = open_folder(tmp_path, shards=SHARDS)
    saved = {"stream": {"fingerprint": runs.shards_fingerprint(SHARDS)}}
    runs.check_same_data(saved, SHARDS, folder)
    with pytest.raises(ValueError) as refused:
        runs.check_same_data(saved, SHARDS[:2], folder)
    assert str(refused.value) == (
        "--resume: the saved state is of other data: 3 shards then, 2 now; give the same shards. "
        "The first shard that differs is number 2: 002.tar (3 samples, 2048 bytes) then, none now"
    )
    with pytest.raises(ValueError, match="3 shards then, 2 now; give the same shards$"):
        runs.check_same_data(saved, SHARDS[:2], None)
    (folder / "shards.tsv").unlink()
    with pytest.raises(ValueError, match="3 shards then, 2 now; give the same shards$"):
        runs.check_same_data(saved, SHARDS[:2], folder)
