"""Samples with any number of labels, from their text to the mean average precision over ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from launching import base, launch, read_lines
from picture_maker import encode
from shard_maker import write_shards

from data.classes import resolve_labels
from data.errors import DataError
from data.labels import LabelMap, read_labels
from data.shards import load_shards
from data.tasks import create_task

TASK = ["--task", "multi-label-classification"]


@pytest.mark.parametrize(
    ("source", "data", "labels"),
    [
        ("txt", b"cat dog\n", ["cat", "dog"]),
        ("txt", b"polar bear, cat,", ["polar bear", "cat"]),
        ("txt", b" \n", []),
        ("cls", b"3, 0,3", [3, 0, 3]),
        ("cls", b"3 cat", [3, "cat"]),
        ("json:a.b", b'{"a": {"b": ["x", 2]}}', ["x", 2]),
        ("json:a", b'{"a": []}', []),
        ("json:a", b'{"a": "x y"}', ["x y"]),
    ],
)
def test_labels_as_they_are_stored(source, data, labels):
    assert read_labels(source, data) == labels


def test_labels_become_a_row_of_ones():
    task = create_task("multi-label-classification", training=False, labels=LabelMap("txt", 3, ("cat", "dog", "emu")), img_size=8)
    batch = task.new_batch(3)
    png = encode(np.zeros((8, 8, 3), np.uint8))
    for slot, text in enumerate((b"emu cat emu", b"", b"dog")):
        task.write(batch, slot, {"png": png, "txt": text}, None)
    assert batch["label"].dtype == torch.uint8 and batch["label"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    with pytest.raises(DataError) as bad:
        task.write(batch, 0, {"png": png, "txt": b"cat yak"}, None)
    assert (bad.value.reason, bad.value.field) == ("label 'yak' is not one of the 3 class names", "txt")
    with pytest.raises(DataError, match="no label: the sample's fields are png"):
        task.write(batch, 0, {"png": png}, None)
    with pytest.raises(DataError, match="label 'True' at 'a' is neither an integer nor a class name"):
        read_labels("json:a", b'{"a": [true]}')


@pytest.fixture
def shards(tmp_path):
    """36 pictures; which of red, green and blue are bright is what their labels say."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(36):
        there = rng.random(3) < 0.5
        pixels = rng.integers(0, 60, (32, 32, 3), np.uint8) + np.where(there, 140, 0).astype(np.uint8)
        names = [name for name, on in zip(("red", "green", "blue"), there, strict=True) if on]
        made.append({"png": encode(pixels), "json": json.dumps({"tags": names}).encode()})
    write_shards(tmp_path / "train", made[:20], made[20:])
    return tmp_path / "train"


def test_the_classes_are_found_in_the_lists(shards):
    labels = resolve_labels(load_shards(str(shards)), "json:tags", several=True)
    assert labels.names == ("blue", "green", "red")


def test_it_is_learnt_and_judged_alike_on_any_number_of_ranks(gloo_pool, shards, tmp_path):
    more = [*TASK, "--label", "json:tags", "--val-data", shards]
    launch(gloo_pool, base([shards], tmp_path, "first", 2, "--epochs", 16, "--lr", 0.5, *more))
    lines = [line for line in read_lines(tmp_path / "runs" / "first" / "metrics.jsonl") if line["event"] == "eval"]
    assert lines[-1]["map"] > 0.95 > lines[0]["map"]
    found = []
    for world_size in (1, 2, 3):
        words = ["--evaluate", "--val-data", shards, "--resume", tmp_path / "runs" / "first", "--device", "cpu", "-b", 8, "-j", 0,
                 "--nproc-per-node", world_size, "--output", tmp_path / "runs", "--name", world_size, "--save-predictions"]  # fmt: skip
        launch(gloo_pool, words)
        (line,) = (x for x in read_lines(tmp_path / "runs" / str(world_size) / "metrics.jsonl") if x["event"] == "eval")
        found.append((line["map"], line["top1"], line["num_samples"]))
    assert found == [(pytest.approx(lines[-1]["map"]), lines[-1]["top1"], 36)] * 3
    rows = [line.split("\t") for line in (tmp_path / "runs" / "3" / "classes.tsv").read_text().splitlines()]
    assert rows[0] == ["class", "samples", "right", "accuracy", "average_precision", "mostly_taken_for"]
    assert np.mean([float(row[4]) for row in rows[1:]]) == pytest.approx(found[0][0], abs=1e-4)
    with np.load(tmp_path / "runs" / "3" / "val_predictions.npz") as told:
        assert told["labels"].shape == told["scores"].shape == (36, 3)
    assert "mAP " in (tmp_path / "runs" / "first" / "log.txt").read_text()
