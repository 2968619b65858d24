"""The command: each mistake is one line on stderr and exit code 2, before any process is started."""

from __future__ import annotations

import os
import shutil
import tarfile
from typing import Any

import numpy as np
import pytest
import torch
from launching import base, launch
from picture_maker import encode
from shard_maker import write_listing, write_shards

import run
from data.tasks import TASKS
from engine import distributed


def samples(number, first=0, classes=3, **fields):
    """Samples with a noisy PNG whose red tells its class."""
    made = []
    rng = np.random.default_rng(0)
    for serial in range(first, first + number):
        label = serial % classes
        pixels = rng.integers(0, 90, (32, 32, 3), np.uint8)
        pixels[:, :, 0] += np.uint8(80 * label)
        made.append({"png": encode(pixels), "cls": str(label).encode(), **fields})
    return made


@pytest.fixture(scope="module")
def place(gloo_pool, tmp_path_factory):
    """A folder with shards in train/ (8, 6 and 7 samples) and val/ (5), and runs/first, stopped after 2 of 3 epochs."""
    folder = tmp_path_factory.mktemp("place")
    write_shards(folder / "train", samples(8), samples(6, 8), samples(7, 14))
    write_shards(folder / "val", samples(5), keys="v{:04d}")
    words = base([folder / "train"], folder, "first", 1, "-b", 7, "--epochs", 2)
    launch(gloo_pool, words)
    return folder


@pytest.fixture
def command(place, monkeypatch, capfd):
    """command(words) runs the command in `place` in this process: (exit code, stdout, lines of stderr). It may start no process."""
    monkeypatch.chdir(place)

    def spawn(*_, **__):
        raise AssertionError("a process was spawned")

    monkeypatch.setattr(run.mp, "spawn", spawn)
    monkeypatch.setattr(distributed, "host_store", spawn)
    before = sorted(path.name for path in (place / "runs").iterdir())

    def execute(words):
        capfd.readouterr()
        code: Any
        try:
            code = run.cli([str(word) for word in words])
        except SystemExit as stopped:  # argparse
            code = stopped.code
        out, err = capfd.readouterr()
        assert sorted(path.name for path in (place / "runs").iterdir()) == before
        return code, out, err.splitlines()

    return execute


def refusal(command, words):
    """The one line of a refused command, without its beginning."""
    code, out, lines = command(words)
    assert (code, out, len(lines)) == (2, "", 1), (code, out, lines)
    assert lines[0].startswith("run.py: error: ")
    return lines[0].removeprefix("run.py: error: ")


TRAIN = ["--device", "cpu", "--model", "tiny", "--data", "train"]
RESUME = ["--device", "cpu", "--resume", "runs/first"]
THERE = "'train' holds 3 shards, named by 'train/{0..2}.tar'"

MISTAKES = [
    (["--device", "cpu"], "--data is missing: name the shards, for example --data 'shards/{000..099}.tar'"),
    (["--data", "train/9.tar"], f"train/9.tar: no such file; {THERE}"),
    (["--data", "train/{0..4}.tar"],
     "train/{0..4}.tar: 2 of its 5 shards are missing (3.tar, 4.tar); the pattern of those that are there is 'train/{0..2}.tar'"),
    (["--data", "train/{0..2.tar"],
     "train/{0..2.tar: bad pattern: a brace is not closed or not opened; write ranges like 'shards/{000..099}.tar'"),
    (["--data", ""], "an empty pattern: write one such as 'shards/{000..099}.tar'"),
    (["--data", "train/*.tgz"], f"train/*.tgz: no file matches; {THERE}"),
    (["--data", "nowhere"], "nowhere: no such file; "
     "'.' holds no *.tar, but folders with some: ./train, ./val"),
    (["--data", "train", "train/0.tar"], "{place}/train/0.tar: named twice; each shard may stand in the patterns once"),
    ([*TRAIN, "--model", "renset18"],
     "--model renset18: no such model; the nearest are resnet18, resnet152, resnet101 (models/ lists them all)"),
    ([*TRAIN, "--task", "detection"], f"task 'detection' is unknown; there are {', '.join(TASKS)}"),
    ([*TRAIN, "--opt", "lion"], "--opt lion: no such optimizer; use one of sgd, adamw, adam"),
    ([*TRAIN, "--sched", "poly"], "--sched poly: no such schedule; use one of cosine, step, linear, constant"),
    ([*TRAIN, "--epochs", "0"], "argument --epochs: '0' is not a whole number of at least 1"),
    ([*TRAIN, "--scale", "0.9", "0.1"], "scale (0.9, 0.1) must be two shares of the area, 0 < MIN <= MAX <= 1"),
    ([*TRAIN, "-b", "3", "--nproc-per-node", "4"],
     "--batch-size 3 is the global batch, and smaller than the 4 processes: raise it"),
    ([*TRAIN, "--lanes", "22"], "lanes is 22: it must be at least 1 and at most 21"),
    ([*TRAIN, "--seed", 2**32], "seed is 4294967296: it must be at least 0 and at most 4294967295"),
    ([*TRAIN, "--label", "jsn"], "label source 'jsn' is not one of cls, txt, json:dotted.path"),
    ([*TRAIN, "--label", "json:a"], "no label field 'json' in {place}/train/0.tar: the fields of its first samples are cls, png; "
     "say where the label is with --label (cls, txt, json:a.b)"),
    ([*TRAIN, "--classes", "none.txt"], "classes file none.txt can't be read ([Errno 2] No such file or directory: 'none.txt'): "
     "give a dataset.json, a JSON list, or a text with one name a line"),
    ([*TRAIN, "--val-data", "val/7.tar"], "val/7.tar: no such file; 'val' holds 1 shards, named by 'val/0.tar'"),
    ([*TRAIN, "--dist-url", "http://x"], "--dist-url http://x: it must start with tcp://, file:// or env://"),
    ([*TRAIN, "--dist-backend", "nccl"], "--dist-backend nccl needs GPUs (--device cuda); use gloo on a CPU"),
    ([*TRAIN, "--nnodes", "2"],
     "--nnodes 2 needs --dist-url, for example tcp://HOST_OF_NODE_0:29500 or file:///a/shared/folder/new-file"),
    ([*TRAIN, "--node-rank", "1"], "--node-rank 1 is not in 0..0 (--nnodes 1)"),
    ([*TRAIN, "--name", "a/b"], "--name 'a/b': it must be the name of a folder, not a path; --output says where it is made"),
    ([*TRAIN, "--name", "first"], "--name first: runs/first exists; go on with --resume auto, or give another name"),
    ([*TRAIN, "--output", "train/0.tar/x"], "--output train/0.tar/x: {place}/train/0.tar is a file, not a folder; give another"),
    ([*TRAIN, "--resume", "none.pt"], "--resume none.pt: there is no checkpoint; give a .pt file, a run folder, or auto"),
    (["--device", "cpu", "--evaluate", "--val-data", "val"], "--evaluate needs --resume CHECKPOINT: there is nothing to evaluate"),
    (["--evaluate", *RESUME], "--val-data is missing: name the shards, for example --val-data 'shards/{000..099}.tar'"),
    (["--evaluate", "--device", "cpu", "--val-data", "val", "--resume", "auto", "--name", "second"],
     "--resume auto: no checkpoint fits in runs/second; name one to evaluate"),
    (["--device", "cpu", "--resume", "auto"], "--resume auto needs --data or --name to know which run it is"),
    ([*RESUME, "--model", "resnet18"], "--model resnet18 contradicts the checkpoint's tiny: leave it out, or start without --resume"),
    ([*RESUME, "--seed", "5"], "--seed 5 contradicts the checkpoint's 0: leave it out, or start without --resume"),
    ([*RESUME, "--data", "train/{0..1}.tar"],
     "--resume: the saved state is of other data: 3 shards then, 2 now; give the same shards. "
     "The first shard that differs is number 2: 2.tar (7 samples, {size2} bytes) then, none now"),
    ([*RESUME, "--data", "train/{1,0,2}.tar"],
     "--resume: the saved state is of other data: equal totals, but shards were renamed, reordered or changed in size. "
     "The first shard that differs is number 0: 0.tar (8 samples, {size0} bytes) then, 1.tar (6 samples, {size1} bytes) now"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[f"{number}" for number in range(len(MISTAKES))])
def test_a_mistake_is_one_line(command, place, words, message):
    message = message.replace("{place}", str(place))
    for number in range(3):
        message = message.replace(f"{{size{number}}}", str(os.path.getsize(place / "train" / f"{number}.tar")))
    assert refusal(command, words) == message


def test_what_is_no_shard_is_named(command, tmp_path):
    (tmp_path / "page.tar").write_text("<!DOCTYPE html><html>404</html>" * 50)
    (tmp_path / "noise.tar").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "empty.tar").touch()
    (tmp_path / "folder.tar").mkdir()
    (tmp_path / "none.tar").write_bytes(bytes(10240))
    names = ("page.tar", "noise.tar", "empty.tar", "folder.tar", "none.tar")
    lines = {name: refusal(command, [*TRAIN[:-1], tmp_path / name]) for name in names}
    assert lines["page.tar"] == f"{tmp_path}/page.tar: a web page, not a tar: its download failed; download it again"
    assert lines["noise.tar"].startswith(f"{tmp_path}/noise.tar: not a tar")
    assert lines["empty.tar"] == f"{tmp_path}/empty.tar: empty (0 bytes): no tar in it; download or make it again"
    assert lines["folder.tar"].startswith(f"'{tmp_path}/folder.tar' holds no *.tar; scripts/make_shards.py makes shards")
    assert "no samples" in lines["none.tar"]


def test_a_tar_of_class_folders_leads_to_make_shards(command, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for name in ("cat/1.png", "dog/2.png"):
            (tmp_path / "x.png").write_bytes(samples(1)[0]["png"])
            tar.add(tmp_path / "x.png", name)
    assert refusal(command, [*TRAIN[:-1], tmp_path / "photos.tar"]) == (
        f"no label field 'cls' in {tmp_path}/photos.tar: the fields of its first samples are png; "
        f"this looks like class folders: run python scripts/make_shards.py {tmp_path}/photos.tar OUT"
    )


def test_what_is_no_checkpoint_is_named(command, tmp_path):
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    assert refusal(command, [*TRAIN, "--resume", tmp_path / "garbage.pt"]) == (
        f"--resume {tmp_path}/garbage.pt: not a whole checkpoint (File is not a zip file); give another file"
    )
    assert refusal(command, [*TRAIN, "--resume", tmp_path / "other.pt"]).startswith(
        f"--resume {tmp_path}/other.pt: not a checkpoint of a run, which holds "
    )


def test_with_every_checkpoint_damaged_nothing_is_started_afresh(command, place, tmp_path):
    shutil.copytree(place / "runs" / "first", tmp_path / "broken")
    for path in (tmp_path / "broken" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:500])
    assert refusal(command, [*TRAIN, "--output", tmp_path, "--name", "broken", "--resume", "auto"]) == (
        f"--resume {tmp_path}/broken/checkpoints/last.pt: not a whole checkpoint (File is not a zip file); give another file"
    )


def test_a_wrong_recipe_is_named(command, tmp_path):
    (tmp_path / "x.yaml").write_text("epoch: 3\n")
    assert refusal(command, ["-c", tmp_path / "x.yaml"]) == (
        f"--config {tmp_path}/x.yaml: epoch: no such flag; the nearest is epochs"
    )


def test_classes_must_fit_the_data_and_the_checkpoint(command, place, tmp_path):
    (tmp_path / "two.txt").write_text("cat\ndog\n")
    named = tmp_path / "named"
    write_shards(named, samples(4))
    write_listing(named, ["a", "b", "mouse"])
    assert refusal(command, [*TRAIN[:-1], named, "--classes", tmp_path / "two.txt"]) == (
        f"3 of the 3 classes in the dataset.json of {named}/0.tar are not among the 2 given classes: 'a', 'b', 'mouse'; "
        "leave those samples out, or train with all of the classes"
    )
    assert refusal(command, [*TRAIN[:-1], named, "--num-classes", "2"]) == (
        "num_classes is 2, but there are 3 class names ('a', 'b', 'mouse'): raise it, or leave it out"
    )
    saved = torch.load(place / "runs" / "first" / "checkpoints" / "last.pt", weights_only=True)
    torch.save({**saved, "class_names": ["a", "b", "c"]}, tmp_path / "named.pt")
    assert refusal(command, ["--device", "cpu", "--resume", tmp_path / "named.pt", "--classes", tmp_path / "two.txt"]) == (
        f"--classes {tmp_path}/two.txt contradicts the checkpoint's classes: leave it out, or start without --resume"
    )


def test_a_model_that_can_not_train_on_these_pictures_is_named(command):
    line = refusal(command, [*TRAIN, "--model", "alexnet", "--img-size", "32"])
    assert line.startswith("--model alexnet can't train on batches of 21 pictures of 32x32 per process: ")
    assert line.endswith("try --img-size 224, or a larger --batch-size if it is about the batch")


def test_more_processes_than_gpus_are_refused(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(command, ["--data", "train", "--device", "cuda"]) == (
        "--device cuda: PyTorch finds no GPU on this machine; give --device cpu, or mend the driver"
    )


def test_a_finished_run_says_so_and_that_is_no_failure(command, place):
    said = "this run is finished, its 2 epochs are trained; raise --epochs for more\n"
    for words in ([*RESUME], [*TRAIN, "--resume", "auto"], ["--device", "cpu", "--resume", "auto", "--name", "first"]):
        assert command(words) == (0, f"runs/first/checkpoints/last.pt: {said}", [])
    code, out, lines = command([*RESUME, "--data", "train", "--epochs", "1"])
    assert (code, lines) == (0, []) and out.endswith("its 1 epochs are trained; raise --epochs for more\n")


def test_a_mistake_of_the_machine_is_a_line_too(command, monkeypatch):
    def prepare(args):
        raise PermissionError(13, "Permission denied", "/x/000.tar.idx")

    monkeypatch.setattr(run, "prepare", prepare)
    assert refusal(command, TRAIN) == "[Errno 13] Permission denied: '/x/000.tar.idx'"
