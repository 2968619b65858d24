"""The image task: the right class and pixels in the right slot, or a DataError that names the field."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from picture_maker import encode, noise

from data.errors import DataError
from data.labels import LabelMap
from data.tasks import TASKS, ImageClassification, create_task, find_picture
from data.transforms import eval_transform, train_transform

INTEGERS = LabelMap("cls", 10)
NAMES = LabelMap("cls", 3, ("cat", "dog", "emu"))
PICTURE = encode(noise(16, 16))


def make_task(**settings) -> ImageClassification:
    return create_task("image-classification", **{"training": True, "labels": INTEGERS, "img_size": 16, **settings})


def test_task_writes_into_its_slot_only() -> None:
    task = make_task(training=False)
    batch = task.new_batch(3)
    assert batch["image"].shape == (3, 3, 16, 16) and batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [0, 0, 0] and batch["label"].dtype == torch.int64
    batch["image"].fill_(7)
    data = encode(noise(20, 16))
    task.write(batch, 1, {"__key__": "a", "jpg": data, "cls": b"4"}, None)
    assert batch["label"].tolist() == [0, 4, 0]
    assert torch.equal(batch["image"][1], eval_transform(data, 16))
    assert (batch["image"][[0, 2]] == 7).all()


def test_training_task_augments_with_the_rng_it_is_given() -> None:
    task = make_task(hflip=1.0)
    batch = task.new_batch(2)
    data = PICTURE
    for slot in range(2):
        task.write(batch, slot, {"png": data, "cls": b"1"}, np.random.default_rng(5))
    assert torch.equal(batch["image"][0], batch["image"][1])
    assert torch.equal(batch["image"][0], train_transform(data, np.random.default_rng(5), 16, hflip=1.0))
    plain = make_task(augment=False)
    plain.write(batch, 0, {"png": data, "cls": b"1"}, np.random.default_rng(5))
    assert torch.equal(batch["image"][0], eval_transform(data, 16))


def test_task_takes_scale() -> None:
    task = make_task(scale=(0.1, 0.1), hflip=0.0)
    batch = task.new_batch(1)
    data = encode(noise(50, 50))
    task.write(batch, 0, {"png": data, "cls": b"1"}, np.random.default_rng(0))
    assert torch.equal(batch["image"][0], train_transform(data, np.random.default_rng(0), 16, scale=(0.1, 0.1), hflip=0))


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"png": PICTURE}, "cls", "no label: the sample's fields are png"),
        ({"cls": b"1"}, "", "no picture: the sample's fields are cls"),
        ({"cls": b"1", "jpg": PICTURE, "png": PICTURE}, "jpg", "2 pictures in one sample: jpg, png"),
        ({"cls": b"11", "jpg": PICTURE}, "cls", "label 11 is outside the classes 0..9"),
        ({"cls": b"1", "jpg": b"junk"}, "jpg", "not a picture: 4 bytes that start with b'junk'"),
        ({"cls": b"1", "jpg": b""}, "jpg", "the file is empty"),
        ({"cls": b"", "jpg": PICTURE}, "cls", "the label is empty"),
    ],
)
def test_bad_samples(fields: dict[str, bytes], field: str, reason: str) -> None:
    task = make_task(training=False)
    with pytest.raises(DataError) as caught:
        task.write(task.new_batch(1), 0, {"__key__": "k", "__slot__": 0, **fields}, None)
    assert (caught.value.field, caught.value.reason) == (field, reason)


def test_every_picture_field_is_taken() -> None:
    for name in ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "tif", "tiff"):
        assert find_picture({"cls": b"", name: b"", "seg.png": b""}) == name


def test_a_fault_of_the_code_is_not_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.tasks.eval_transform", lambda *_, **__: 1 / 0)
    task = make_task(training=False)
    with pytest.raises(ZeroDivisionError):
        task.write(task.new_batch(1), 0, {"jpg": PICTURE, "cls": b"1"}, None)


def test_tasks_pickle() -> None:
    settings = {
        "image-classification": {"labels": NAMES, "img_size": 32, "scale": (0.5, 1)},
        "multi-label-classification": {"labels": NAMES, "img_size": 32, "reprob": 0.5},
        "video-classification": {"labels": NAMES, "img_size": 32, "hflip": 0.25},
        "multi-label-video-classification": {"labels": NAMES, "img_size": 32},
        "bytes": {"labels": NAMES, "field": "txt"},
        "tokens": {"length": 8, "dtype": "int32"},
    }
    assert settings.keys() == TASKS.keys()
    for name in TASKS:
        task = create_task(name, training=True, **settings[name])
        assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": (0, 1)}, "scale (0, 1) must be two shares of the area, 0 < MIN <= MAX <= 1"),
        ({"scale": (0.9, 0.1)}, "scale (0.9, 0.1) must be two shares of the area, 0 < MIN <= MAX <= 1"),
        ({"scale": (1, 2)}, "scale (1, 2) must be two shares of the area, 0 < MIN <= MAX <= 1"),
        ({"hflip": 1.5}, "hflip 1.5 must be a probability in 0..1"),
        ({"img_size": 0}, "img_size 0 must be at least 1 pixel"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_task(**settings)
    assert str(caught.value) == message


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="^task 'image-segmentation' is unknown; there are .*-video-classification, bytes, tokens$"):
        create_task("image-segmentation", training=True, labels=NAMES, img_size=32)
