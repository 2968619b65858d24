"""Checkpoints: one whole file at every moment, a damaged one is noticed, a full disk changes nothing."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import zipfile
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from engine import checkpoint


def content(epoch):
    """A checkpoint of this program, as small as can be."""
    weights = {"layer.weight": torch.arange(1000.0) + epoch, "layer.bias": torch.ones(3)}
    state = {"state": {0: {"momentum_buffer": torch.full((1000,), float(epoch))}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    made = {**dict.fromkeys(checkpoint.KEYS), "version": checkpoint.VERSION, "epoch": epoch, "model": weights, "optimizer": state}
    for path in checkpoint.INNER:
        *parents, key = path.split(".")
        inner = made
        for parent in parents:
            inner[parent] = inner.get(parent) or {}
            inner = inner[parent]
        inner[key] = 0
    return made


@pytest.fixture
def folder(tmp_path):
    """A checkpoints folder with those of epochs 0 (previous) and 1 (last, best)."""
    checkpoint.save(tmp_path / "checkpoints", content(0))
    checkpoint.save(tmp_path / "checkpoints", content(1), best=True)
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def epoch_of(path):
    return checkpoint.read(path)["epoch"]


def test_a_save_keeps_the_one_before_it(folder):
    assert names(folder) == ["best.pt", "last.pt", "previous.pt"]
    assert [epoch_of(folder / name) for name in names(folder)] == [1, 1, 0]
    checkpoint.save(folder, content(2))
    assert [epoch_of(folder / name) for name in names(folder)] == [1, 2, 1]


def test_what_is_saved_comes_back_with_weights_only(folder):
    saved = torch.load(folder / "last.pt", weights_only=True)
    assert saved["model"].keys() == {"layer.weight", "layer.bias"}
    assert torch.equal(saved["model"]["layer.weight"], torch.arange(1000.0) + 1)
    loaded, path, warning = checkpoint.load(folder)
    assert (path, warning, loaded["epoch"]) == (folder / "last.pt", None, 1)
    assert torch.equal(loaded["optimizer"]["state"][0]["momentum_buffer"], torch.ones(1000))


def test_a_path_may_name_a_file_its_folder_or_the_run(folder):
    for path in (folder / "last.pt", folder, folder.parent):
        assert checkpoint.resolve(path) == folder / "last.pt"
    assert checkpoint.resolve(folder / "best.pt") == folder / "best.pt"
    (folder / "last.pt").unlink()  # a crash of the machine may leave this
    for path in (folder / "last.pt", folder, folder.parent):
        assert checkpoint.resolve(path) == folder / "previous.pt"
    for path in (folder / "none.pt", folder.parent / "none"):
        with pytest.raises(ValueError) as refused:
            checkpoint.resolve(path)
        assert str(refused.value) == f"--resume {path}: there is no checkpoint; give a .pt file, a run folder, or auto"


def damage(path, how):
    data = bytearray(path.read_bytes())
    path.unlink()  # best.pt may be the same file
    if how == "empty":
        data = bytearray()
    elif how == "cut":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[data.index(torch.arange(1000.0).numpy().tobytes()[400:440])] ^= 16
    elif how == "text":
        data = bytearray(b"<html>not found</html>")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("empty", "File is not a zip file"),
        ("cut", "File is not a zip file"),
        ("flipped", r"the checksum of [\w.]+/data/\d is wrong"),
        ("text", "File is not a zip file"),
    ],
)
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(folder, how, reason):
    damage(folder / "last.pt", how)
    loaded, path, warning = checkpoint.load(folder.parent)
    assert (path, loaded["epoch"]) == (folder / "previous.pt", 0)
    assert re.fullmatch(rf"{folder}/last.pt is damaged \({reason}\): going on from previous.pt, the one before it", str(warning))
    with pytest.raises(ValueError) as refused:  # a file named by itself has no other
        damage(folder / "best.pt", how)
        checkpoint.load(folder / "best.pt")
    assert re.fullmatch(rf"--resume {folder}/best.pt: not a whole checkpoint \({reason}\); give another file", str(refused.value))


def test_with_both_damaged_there_is_one_line(folder):
    damage(folder / "last.pt", "empty")
    damage(folder / "previous.pt", "cut")
    with pytest.raises(ValueError) as refused:
        checkpoint.load(folder)
    assert str(refused.value) == f"--resume {folder}/last.pt: not a whole checkpoint (File is not a zip file); give another file"


def test_no_flipped_bit_and_no_cut_goes_unnoticed(folder):
    whole = (folder / "last.pt").read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / "last.pt").unlink()
        (folder / "last.pt").write_bytes(data)
        loaded, path, _ = checkpoint.load(folder)  # from either, but never wrong values: some bytes only pad
        assert loaded["epoch"] == (1 if path.name == "last.pt" else 0)
        assert torch.equal(loaded["model"]["layer.weight"], content(loaded["epoch"])["model"]["layer.weight"])
    for size in range(0, len(whole), 501):
        (folder / "last.pt").write_bytes(whole[:size])
        assert checkpoint.load(folder)[1].name == "previous.pt"


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    torch.save({**content(0), "version": 99}, tmp_path / "newer.pt")
    torch.save({"function": os.system}, tmp_path / "evil.pt")
    torch.save({**content(0), "progress": {"step": 3}}, tmp_path / "less.pt")
    torch.save({**content(0), "stream": [1]}, tmp_path / "list.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("hello", "world")
    messages = {
        "other.pt": "not a checkpoint of a run, which holds class_names, epoch, flags, model, num_threads, optimizer, progress, stream, "
        "version, world_size; give another file",
        "less.pt": "not a checkpoint of a run: it holds no progress.bad; give another file",
        "list.pt": "not a checkpoint of a run: it holds no stream.version; give another file",
        "newer.pt": "its version is 99, and this program reads version 1",
        "evil.pt": "not a whole checkpoint (torch can't load it with weights_only=True: ",
        "zip.pt": "not a whole checkpoint (torch can't load it with weights_only=True: ",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError) as refused:
            checkpoint.load(tmp_path / name)
        assert str(refused.value).startswith(f"--resume {tmp_path}/{name}: {message}")
        assert "\n" not in str(refused.value)


def test_weights_of_another_model_are_refused(tmp_path):
    path, model = tmp_path / "x.pt", torch.nn.Linear(2, 3, device="meta")
    good = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    checkpoint.check_weights(path, good, model)
    wrong: dict[str, dict] = {
        "weight is (2, 2) there, (3, 2) in the model": {**good, "weight": torch.zeros(2, 2)},
        "bias is none there, (3,) in the model": {"weight": good["weight"]},
        "more is (1,) there, none in the model": {**good, "more": torch.zeros(1)},
        "bias is list there, (3,) in the model": {**good, "bias": [0, 0, 0]},
    }
    for reason, weights in wrong.items():
        with pytest.raises(ValueError) as refused:
            checkpoint.check_weights(path, weights, model)
        assert str(refused.value) == f"--resume {path}: its weights are another model's: {reason}; give another"


def test_a_folder_in_the_place_of_a_checkpoint_is_named(folder):
    (folder / "last.pt").unlink()
    (folder / "last.pt").mkdir()
    for path in (folder / "last.pt", folder, folder.parent):
        with pytest.raises(ValueError) as refused:
            checkpoint.resolve(path)
        assert str(refused.value) == f"--resume {folder}/last.pt: a folder, not a checkpoint: move it away, then resume again"


def files_stay_small():
    """No file of this process may grow past 4,000 bytes; the same error path as a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))


def test_a_full_disk_changes_nothing_and_is_named(folder):
    # In a process of its own: the limit would also end the test's own output.
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"), initializer=files_stay_small) as writer,
        pytest.raises(OSError) as refused,
    ):
        writer.submit(checkpoint.save, folder, content(2), best=True).result()
    assert refused.value.filename == str(folder)
    assert refused.value.strerror == (
        "no checkpoint could be written (File too large); the one before it is whole: make room, then go on with --resume auto"
    )
    assert names(folder) == ["best.pt", "last.pt", "previous.pt"]
    assert [epoch_of(folder / name) for name in names(folder)] == [1, 1, 0]


def test_a_crash_between_any_two_operations_leaves_a_whole_checkpoint(folder, monkeypatch):
    """Every rename and link in turn is the last thing that happens."""
    renames = []
    for stop_at in range(4):
        left = stop_at

        def replace(source, target, whole=os.replace):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            renames.append(os.path.basename(target))
            whole(source, target)

        monkeypatch.setattr(os, "replace", replace)
        try:
            checkpoint.save(folder, content(2), best=True)
        except KeyboardInterrupt:
            assert stop_at < 3
        assert epoch_of(folder / "last.pt") in (1, 2)
        assert {epoch_of(folder / name) for name in ("previous.pt", "best.pt")} <= {0, 1, 2}
        monkeypatch.undo()
    assert renames[-3:] == ["previous.pt", "last.pt", "best.pt"]
    checkpoint.sweep(folder)
    assert names(folder) == ["best.pt", "last.pt", "previous.pt"]


def test_without_hard_links_files_are_copied(folder, monkeypatch):
    def link(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", link)
    checkpoint.save(folder, content(2), best=True)
    assert [epoch_of(folder / name) for name in names(folder)] == [2, 2, 1]


def test_the_checkpoint_gone_on_from_becomes_the_last_one(folder):
    damage(folder / "last.pt", "cut")
    checkpoint.make_last(folder / "previous.pt")
    assert [epoch_of(folder / name) for name in names(folder)] == [1, 0, 0]
    checkpoint.save(folder, content(5))
    assert [epoch_of(folder / name) for name in names(folder)] == [1, 5, 0]
    checkpoint.make_last(folder / "last.pt")
    assert epoch_of(folder / "last.pt") == 5
