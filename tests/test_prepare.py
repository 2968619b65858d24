"""What the parent works out before a run: defaults from the data and the machine, and what --resume finds."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
from launching import base, launch
from shard_maker import write_listing, write_shards
from test_run import samples

from data import native
from data.native import why_absent
from engine import distributed, flags, runs
from engine.prepare import AlreadyFinished, prepare
from engine.report import count_workers


@pytest.fixture(scope="module")
def place(gloo_pool, tmp_path_factory):
    """train/ (8 and 6 samples), val/ (5), and runs/first: 2 of 3 epochs trained, stopped in the middle of the third."""
    folder = tmp_path_factory.mktemp("prepare")
    write_shards(folder / "train", samples(8), samples(6, 8))
    write_shards(folder / "val", samples(5), keys="v{:04d}")
    words = base([folder / "train"], folder, "first", 1, "-b", 7, "--val-data", folder / "val", "--checkpoint-interval", 5)
    launch(gloo_pool, words, crash_at=6)
    return folder


@pytest.fixture
def worked_out(place, monkeypatch, tmp_path):
    """worked_out(words) prepares a command in `place`, and gives its Namespace. Runs are made in a copy of its runs."""
    monkeypatch.chdir(place)
    shutil.copytree(place / "runs", tmp_path / "runs")

    def execute(*words):
        args = flags.parse_args(["--output", str(tmp_path / "runs"), "--device", "cpu", *map(str, words)])
        prepare(args)
        return args

    return execute


def decoder_line():
    absent = why_absent()
    return (
        f"JPEGs are decoded by the python decoder (the native one can't be used: {absent})"
        if absent
        else "JPEGs are decoded by the native decoder"
    )


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def test_the_bare_command_has_sensible_values(worked_out):
    args = worked_out("--data", "train")
    assert (args.model, args.epochs, args.batch_size, args.img_size, args.num_classes) == ("resnet18", 10, 14, 32, 3)
    assert (args.opt, args.sched, args.momentum, args.weight_decay) == ("sgd", "cosine", 0.9, 5e-5)
    assert args.lr == pytest.approx(0.1 * 14 / 256)
    assert (args.warmup_epochs, args.warmup_lr) == (1.0, 0.0)
    more = {"auto_augment": None, "color_jitter": 0.0, "reprob": 0.0}
    assert args.transform == {"scale": None, "hflip": 0.5, "augment": True, "decoder": args.decoder, **more}
    assert (args.nproc_per_node, args.dist_backend, args.num_threads, args.workers) == (1, "gloo", cores(), min(8, cores()))
    assert (args.val_shards, args.val_labels, args.checkpoint, args.folder, args.total) == ([], None, None, None, 140)
    workers = count_workers(args.workers)
    assert args.messages == [
        "global batch 14 = 1 x 14",
        "14 samples in 2 shards, 3 classes, pictures of 32x32",
        f"model resnet18 (11,178,051 parameters, 74 MFLOPs a picture), sgd lr 0.00546875, 10 epochs, cpu, {workers} a process",
        decoder_line(),
        "no --val-data: no evaluation, and no best.pt",
    ]


def test_values_follow_from_others(worked_out):
    args = worked_out("--data", "train", "--epochs", 4, "--opt", "adamw", "-b", 8, "--nproc-per-node", 3, "--img-size", 64)
    assert args.warmup_epochs == 0.4
    assert args.lr == pytest.approx(1e-3 * (8 / 256) ** 0.5)
    assert (args.num_threads, args.workers) == (max(1, cores() // 3), max(1, min(8, cores() // 3)))
    assert args.messages[0] == "global batch 8 = 3 processes, 2 or 3 each"
    assert args.facts["total_steps"] == 7
    assert worked_out("--data", "train", "-j", 0, "--warmup-epochs", 0, "--lr", 3).lr == 3.0


def test_the_batch_is_256_where_there_are_as_many(worked_out, tmp_path):
    write_shards(tmp_path / "many", samples(300))
    args = worked_out("--data", tmp_path / "many", "--model", "tiny")
    assert (args.batch_size, args.lr, args.facts["total_steps"]) == (256, 0.1, 12)


def test_a_batch_larger_than_an_epoch_is_warned_about(worked_out):
    args = worked_out("--data", "train", "-b", 40, "--epochs", 10)
    assert "warning: the global batch exceeds the 14 samples of an epoch: a step holds several epochs" in args.messages
    assert args.facts["total_steps"] == 4


def test_damage_of_a_shard_is_warned_about(worked_out, tmp_path):
    (shard, _) = write_shards(tmp_path / "cut", samples(8), samples(6))
    with open(shard.path, "r+b") as file:
        file.truncate(os.path.getsize(shard.path) - 1700)
    args = worked_out("--data", tmp_path / "cut")
    (warning,) = (line for line in args.messages if line.startswith("warning"))
    assert warning.startswith(f"warning: {shard.path}: ") and "bytes" in warning


def test_several_patterns_and_an_unquoted_brace_pattern(worked_out):
    for words in (["train/0.tar", "train/1.tar"], ["train/0.tar::train/1.tar"], ["train/<0..1>.tar"], ["train"]):
        assert [shard.name for shard in worked_out("--data", *words).shards] == ["0.tar", "1.tar"]


def test_names_come_from_the_listing_the_file_or_nowhere(worked_out, tmp_path):
    write_shards(tmp_path / "named", samples(6))
    write_listing(tmp_path / "named", ["ant", "bee", "cat"])
    args = worked_out("--data", tmp_path / "named", "--val-data", "val")
    assert (args.labels.names, args.val_labels.names, args.kept["class_names"]) == (("ant", "bee", "cat"),) * 2 + (["ant", "bee", "cat"],)
    assert args.messages[1] == "6 samples in 1 shard, 3 classes (ant, bee, cat), pictures of 32x32"
    (tmp_path / "names.txt").write_text("x\ny\nz\nmore\n")
    args = worked_out("--data", "train", "--classes", tmp_path / "names.txt")
    assert (args.labels.names, args.num_classes) == (("x", "y", "z", "more"), 4)
    assert worked_out("--data", "train", "--num-classes", 7).num_classes == 7
    assert worked_out("--data", "train").kept["class_names"] is None


def test_a_label_may_lie_in_json(worked_out, tmp_path):
    fields = [{**sample, "json": json.dumps({"a": {"b": f"name{n % 2}"}}).encode()} for n, sample in enumerate(samples(6))]
    write_shards(tmp_path / "json", fields)
    args = worked_out("--data", tmp_path / "json", "--label", "json:a.b")
    assert (args.labels.source, args.labels.names, args.num_classes) == ("json:a.b", ("name0", "name1"), 2)


def test_resume_auto_goes_on_with_the_newest_that_fits(worked_out, place, tmp_path):
    args = worked_out("--data", "train", "--model", "tiny", "--resume", "auto")
    assert args.folder == tmp_path / "runs" / "first"
    assert (args.facts["step"], args.facts["samples_seen"], args.facts["total_steps"]) == (5, 35, 6)
    assert (args.batch_size, args.epochs, args.lr, args.audit, args.val_data) == (7, 3, 0.05, True, [str(place / "val")])
    assert f"going on from {args.folder}/checkpoints/last.pt: step 5, 35 samples seen" in args.messages
    shutil.copytree(args.folder, tmp_path / "runs" / "second")
    newer = tmp_path / "runs" / "second" / "checkpoints" / "last.pt"
    os.utime(newer, (newer.stat().st_mtime + 50,) * 2)
    assert worked_out("--data", "train", "--model", "tiny", "--resume", "auto").folder == tmp_path / "runs" / "second"


def test_resume_auto_goes_on_with_the_one_that_is_named(worked_out, tmp_path):
    assert worked_out("--data", "train", "--resume", "auto").model == "tiny"  # a default is no wish
    args = worked_out("--name", "first", "--resume", "auto")  # even without --data and --model
    assert (args.folder, args.model, [shard.name for shard in args.shards]) == (tmp_path / "runs" / "first", "tiny", ["0.tar", "1.tar"])


def test_resume_auto_starts_afresh_where_nothing_fits_and_says_so(worked_out, tmp_path):
    output = tmp_path / "runs"
    for words in (["--data", "train", "--model", "resnet20"], ["--data", "val"]):  # another model, other data
        args = worked_out(*words, "--resume", "auto")
        assert (args.folder, args.checkpoint, args.facts["step"]) == (None, None, 0)
        assert f"--resume auto: no checkpoint fits in {output}, starting afresh" in args.messages
    args = worked_out("--data", "train", "--resume", "auto", "--name", "new")
    assert args.folder is None
    assert f"--resume auto: no checkpoint fits in {output}/new, starting afresh" in args.messages
    (output / "killed").mkdir()  # before its first checkpoint
    args = worked_out("--data", "train", "--resume", "auto", "--name", "killed")
    assert args.folder == output / "killed"


def test_a_damaged_newest_checkpoint_is_warned_about(worked_out, tmp_path):
    checkpoints = tmp_path / "runs" / "first" / "checkpoints"
    last = checkpoints / "last.pt"
    data = last.read_bytes()
    last.unlink()
    last.write_bytes(data[:-100])
    args = worked_out("--data", "train", "--model", "tiny", "--resume", "auto")
    assert (args.folder, args.facts["step"]) == (tmp_path / "runs" / "first", 4)
    assert f"warning: {last} is damaged (File is not a zip file): going on from previous.pt, the one before it" in args.messages
    runs.open_folder(**args.opening)
    assert worked_out("--data", "train", "--model", "tiny", "--resume", "auto").checkpoint == last


def test_a_path_goes_on_in_its_folder_or_under_a_new_name_in_another(worked_out, tmp_path):
    folder = tmp_path / "runs" / "first"
    for path in (folder, folder / "checkpoints", folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"):
        args = worked_out("--resume", path)
        assert args.folder == folder
    assert args.facts["step"] in (2, 4)
    assert worked_out("--resume", folder, "--name", "branch").folder is None
    shutil.copy(folder / "checkpoints" / "last.pt", tmp_path / "copy.pt")
    assert worked_out("--resume", tmp_path / "copy.pt").folder is None


def test_flags_win_over_the_checkpoint(worked_out):
    args = worked_out("--resume", "runs/first", "--epochs", 5, "-b", 10, "--lr", 0.5, "--weight-decay", 0.1)
    assert (args.epochs, args.batch_size, args.lr, args.weight_decay, args.model) == (5, 10, 0.5, 0.1, "tiny")
    assert args.facts["total_steps"] == 5 + 4  # (70 - 35) / 10


def test_another_number_of_threads_is_warned_about(worked_out, tmp_path):
    path = tmp_path / "runs" / "first" / "checkpoints" / "last.pt"
    saved = torch.load(path, weights_only=True)
    now = saved["num_threads"]
    torch.save({**saved, "num_threads": now + 5}, path)
    warning = f"warning: {now + 5} threads a process then, {now} now: sums may round differently"
    assert warning in worked_out("--name", "first", "--resume", "auto").messages
    assert warning not in worked_out("--name", "first", "--resume", "auto", "--nproc-per-node", 2).messages


def test_the_decoder_is_chosen_and_said(worked_out, tmp_path, monkeypatch):
    args = worked_out("--data", "train", "--decoder", "python")
    assert "JPEGs are decoded by the python decoder" in args.messages
    assert (args.decoder, args.transform["decoder"], args.kept["flags"]["decoder"]) == ("python", "python", "python")
    if not why_absent():
        args = worked_out("--data", "train", "--decoder", "native")
        assert args.agreed["--decoder"] == args.transform["decoder"] == "native" and decoder_line() in args.messages
    path = tmp_path / "runs" / "first" / "checkpoints" / "last.pt"
    saved = torch.load(path, weights_only=True)
    now = saved["flags"]["decoder"]
    other = {"native": "python", "python": "native"}[now]
    torch.save({**saved, "flags": {**saved["flags"], "decoder": other}}, path)
    warning = f"warning: the {other} decoder then, the {now} one now: their pixels differ a little"
    assert warning in worked_out("--name", "first", "--resume", "auto").messages
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "jpeg.so")
    native._load.cache_clear()
    try:
        with pytest.raises(ValueError, match="^the native decoder can't be used: it is not built: .*; --decoder auto goes on without it$"):
            worked_out("--data", "train", "--decoder", "native")
        assert decoder_line() in worked_out("--data", "train").messages
    finally:
        native._load.cache_clear()


def test_a_finished_run_raises(worked_out):
    with pytest.raises(AlreadyFinished, match="its 2 epochs are trained; raise --epochs for more"):
        worked_out("--resume", "runs/first", "--epochs", 2)


def test_an_evaluation_needs_no_training_data(worked_out, place, tmp_path, monkeypatch):
    shutil.move(place / "train", place / "gone")
    try:
        args = worked_out("--evaluate", "--resume", "runs/first/checkpoints/best.pt", "--name", "e")
    finally:
        shutil.move(place / "gone", place / "train")
    assert (args.shards, [shard.name for shard in args.val_shards], args.num_classes, args.img_size) == ([], ["0.tar"], 3, 32)
    assert (args.folder, args.facts["num_samples"], args.facts["total_steps"]) == (None, 5, 0)
    assert args.messages[0] == "global batch 7 = 1 x 7"
    assert not any(re.search("warning|--val-data", line) for line in args.messages)


def test_an_evaluation_matches_classes_by_name(worked_out, tmp_path):
    names = [f"class{number}" for number in range(10)]
    path = tmp_path / "runs" / "first" / "checkpoints" / "best.pt"
    saved = torch.load(path, weights_only=True)
    weights = {**saved["model"], "head.weight": torch.zeros(10, 384), "head.bias": torch.zeros(10)}
    torch.save({**saved, "class_names": names, "model": weights, "flags": {**saved["flags"], "num_classes": 10}}, path)
    write_shards(tmp_path / "other", samples(6))
    write_listing(tmp_path / "other", ["class7", "class0", "class3"])
    args = worked_out("--evaluate", "--resume", path, "--val-data", tmp_path / "other", "--lanes", 1)
    assert (args.num_classes, args.val_labels.num_classes, args.val_labels.remap) == (10, 10, (7, 0, 3))
    write_listing(tmp_path / "other", ["class7", "class0", "horse"])
    with pytest.raises(ValueError, match="1 of the 3 classes in the dataset.json of .* are not among the 10 given classes: 'horse'"):
        worked_out("--evaluate", "--resume", path, "--val-data", tmp_path / "other")


def test_lanes_of_the_training_do_not_limit_an_evaluation(worked_out, tmp_path):
    path = tmp_path / "runs" / "first" / "checkpoints" / "last.pt"
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, "flags": {**saved["flags"], "lanes": 12}}, path)
    assert worked_out("--evaluate", "--resume", path).facts["num_samples"] == 5


def test_machines_may_differ_in_where_things_lie_and_in_workers(worked_out, place, tmp_path):
    shutil.copytree(place / "train", tmp_path / "elsewhere" / "shards")
    shutil.copytree(place / "val", tmp_path / "elsewhere" / "held-out")
    both = ["--model", "tiny", "--nnodes", 2, "--dist-url", "tcp://one:29500"]
    one = worked_out("--data", "train", "--val-data", "val", "--node-rank", 0, "-j", 1, *both)
    there = ["--data", tmp_path / "elsewhere/shards/{0..1}.tar", "--val-data", tmp_path / "elsewhere/held-out"]
    two = worked_out(*there, "--node-rank", 1, *both)
    assert one.agreed == two.agreed
    assert one.agreed != worked_out("--data", "train", "--val-data", "val", "--node-rank", 1, "--lr", 3, *both).agreed


def test_under_torchrun_its_numbers_count(worked_out, monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    args = worked_out("--data", "train")
    assert (args.nproc_per_node, args.world_size, args.messages[0]) == (2, 4, "global batch 14 = 4 processes, 3 or 4 each")
    assert distributed.under_torchrun()


def test_a_task_that_is_not_of_pictures_is_refused(worked_out):
    with pytest.raises(ValueError, match=r"^--task bytes: run.py trains on pictures and videos; read other samples with data.build_loader"):
        worked_out("--data", "train", "--task", "bytes")
    known = "image-classification, multi-label-classification, video-classification, multi-label-video-classification, bytes, tokens"
    with pytest.raises(ValueError, match=f"task 'tea' is unknown; there are {known}"):
        worked_out("--data", "train", "--task", "tea")
