"""The flags of the training itself, each by what it changes in a whole run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from launching import read_lines
from test_flag_effects import last, rates, weights

import run
from engine import flags
from engine.forward import Forward
from models import create_model


def events(folder, name):
    return [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == name]


def test_what_changes_pictures_or_targets_changes_what_is_learnt(train):
    changes: list[list] = [
        [], ["--auto-augment", "randaugment"], ["--auto-augment", "trivialaugment"], ["--color-jitter", 0.4], ["--reprob", 1],
        ["--mixup", 0.8], ["--cutmix", 1], ["--loss", "bce"], ["--smoothing", 0.2], ["--amp", "bf16"],
    ]  # fmt: skip
    learnt = [weights(train("--epochs", 1, *words)) for words in changes]
    for number, one in enumerate(learnt):
        assert not any(torch.equal(one, other) for other in learnt[:number]), changes[number]
    assert torch.equal(weights(train("--epochs", 1, *changes[5])), learnt[5])


class Telling(torch.nn.Module):
    """A model that notes in its buffers how it was run."""

    size: torch.Tensor
    compiled: torch.Tensor
    tf32: torch.Tensor

    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, num_classes)
        for name in ("size", "compiled", "channels_last"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("tf32", torch.tensor(float(torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32)))

    def forward(self, images):
        if self.training:
            self.size.fill_(images.shape[0])
            self.compiled.fill_(float(torch.compiler.is_compiling()))
        return self.head(self.conv(images).mean((2, 3)))


def telling(name, num_classes, img_size):
    return Telling(num_classes)


def test_what_the_model_is_told(train):
    def told(*words):
        state = last(train("--epochs", 1, *words, model=telling))["model"]
        order = state["conv.weight"].is_contiguous(memory_format=torch.channels_last)
        return int(state["size"]), order, bool(state["compiled"]), bool(state["tf32"])

    assert told() == (8, False, False, False)
    assert told("--grad-accum", 4, "--channels-last") == (2, True, False, False)
    assert told("--compile", "eager", "--tf32") == (8, False, True, True)


def test_rates_by_other_flags(train):
    told = ["--log-interval", 1, "--warmup-epochs", 0]
    assert rates(train(*told, "--lr", 0.3, "--sched", "linear")) == pytest.approx([0.3 * (1 - step / 6) for step in range(6)])
    down = rates(train(*told, "--lr", 0.3, "--sched", "linear", "--min-lr", 0.06))
    assert down == pytest.approx([0.3 - 0.04 * step for step in range(6)])
    assert rates(train(*told, "--sched", "constant", "--lr-base", 0.64)) == pytest.approx([0.02] * 6)
    assert rates(train(*told, "--sched", "constant", "--lr-base", 0.64, "--opt", "adam")) == pytest.approx([0.64 * (8 / 256) ** 0.5] * 6)
    warm = rates(train("--log-interval", 1, "--sched", "constant", "--lr", 0.4, "--warmup-steps", 4))
    assert warm == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_parts_of_the_model_have_rates_of_their_own(train):
    def groups(*words):
        saved = last(train("--lr", 0.4, "--sched", "constant", *words))
        return [(round(group["lr"], 9), len(group["params"])) for group in saved["optimizer"]["param_groups"]]

    assert groups() == [(0.4, 4), (0.4, 7)]
    # the head's weight and bias; then the backbone's filters and batch norms
    assert groups("--backbone-lr", 0.1) == [(0.4, 1), (0.4, 1), (0.1, 3), (0.1, 6)]
    decayed = groups("--layer-decay", 0.5)
    assert decayed == [(0.4, 1), (0.4, 1), (0.2, 1), (0.2, 2), (0.1, 1), (0.1, 2), (0.05, 1), (0.05, 2)]


def test_frozen_parts_stay_as_they_are(train):
    torch.manual_seed(0)
    start = create_model("tiny", 3).state_dict()
    end = last(train("--freeze", "features.0", "features.1"))["model"]
    same = {name for name, value in start.items() if torch.equal(value, end[name])}
    assert same == {name for name in start if name.startswith(("features.0", "features.1"))}  # batch norm's statistics too


def test_weights_to_start_from(train, tmp_path):
    still = ["--lr", 0, "--epochs", 1]
    parts = ("features.0.weight", "head.weight")
    first = train()
    learnt = last(first)["model"]
    for source in (first, first / "checkpoints" / "last.pt"):
        again = last(train(*still, "--init-from", source))
        assert all(torch.equal(again["model"][name], learnt[name]) for name in parts)
        assert again["progress"]["step"] == 3
    torch.save({"state_dict": {f"module.{name}": value for name, value in learnt.items()}}, tmp_path / "theirs.pth")
    other = last(train(*still, "--pretrained", tmp_path / "theirs.pth", "--num-classes", 5))["model"]
    assert torch.equal(other[parts[0]], learnt[parts[0]]) and other[parts[1]].shape[0] == 5
    assert torch.equal(last(train(*still, "--pretrained", tmp_path / "theirs.pth"))["model"][parts[1]], learnt[parts[1]])


def test_clipping_slows_the_weights_down(train):
    torch.manual_seed(0)
    start = create_model("tiny", 3).state_dict()["head.weight"]
    plain = ["--epochs", 1, "--momentum", 0, "--weight-decay", 0, "--sched", "constant", "--warmup-epochs", 0, "--lr", 0.1]
    moved = [(last(train(*plain, *words))["model"]["head.weight"] - start).norm() for words in ([], ["--clip-grad", 0.01])]
    assert moved[1] <= 3 * 0.1 * 0.01 * 1.001 < moved[0]


def test_the_average_is_kept_and_evaluated(train, tmp_path):
    folder = train("--ema", 0.9, "--val-data", tmp_path / "train")
    saved = last(folder)
    assert saved["ema"].keys() == saved["model"].keys()
    assert not torch.equal(saved["ema"]["head.weight"], saved["model"]["head.weight"])
    again = train("--resume", folder, "--epochs", 3, "--ema", 0.9, "--lr", 0)
    assert last(again)["progress"]["step"] == 9
    assert last(train())["ema"] is None
    evaluated = train("--evaluate", "--resume", folder, "--val-data", tmp_path / "train")
    assert [line["loss"] for line in events(evaluated, "eval")] == pytest.approx([events(folder, "eval")[-1]["loss"]])


def test_a_backend_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"^--compile nosuch: PyTorch has no such backend here; it has .*inductor"):
        run.prepare(flags.parse_args(["--data", "x", "--device", "cpu", "--compile", "nosuch"]))


def test_synchronised_batch_norm_needs_gpus():
    args = flags.parse_args(["--data", "x", "--device", "cpu", "--sync-bn"])
    with pytest.raises(ValueError) as refused:
        run.prepare(args)
    assert str(refused.value) == "--sync-bn needs GPUs (PyTorch has no synchronised batch norm for the CPU): leave it out"


class Partly(Telling):
    """Leaves its convolution out of every step after the first two."""

    def forward(self, images):
        self.size += 1
        seen = self.conv(images) if self.size <= 2 else images.repeat(1, 3, 1, 1)[:, :8]
        return self.head(seen.mean((2, 3)))


def partly(name, num_classes, img_size):
    return Partly(num_classes)


def test_a_model_may_leave_parameters_out(train):
    with pytest.raises(Exception, match="find_unused_parameters"):
        train(model=partly)
    assert last(train("--find-unused-parameters", model=partly))["progress"]["step"] == 6


def test_checkpoints_are_kept_by_number_and_written_by_time(train):
    kept = train("--checkpoint-interval", 1, "--checkpoint-hist", 3) / "checkpoints"
    assert sorted(path.name for path in kept.glob("step-*")) == [f"step-{number:08d}.pt" for number in (4, 5, 6)]
    assert torch.load(kept / "step-00000005.pt", weights_only=True)["progress"]["step"] == 5
    often = train("--checkpoint-interval", "0.001s", "--checkpoint-hist", 9) / "checkpoints"
    assert len(list(often.glob("step-*"))) == 6
    seldom = train("--checkpoint-interval", "5h", "--checkpoint-hist", 9) / "checkpoints"
    assert len(list(seldom.glob("step-*"))) == 2  # the ends of epochs


def fills_the_disk(name, num_classes, img_size):
    """After the first checkpoint, the pool's process can't write one: its folder is none any more."""
    from engine import checkpoint

    writes, whole = [0], checkpoint._write

    def write(path, content):
        writes[0] += 1
        if writes[0] == 2:
            checkpoint._write = whole
            raise OSError(28, "No space left on device")
        whole(path, content)

    checkpoint._write = write
    return create_model(name, num_classes, img_size)


def test_a_full_disk_stops_the_run_or_not(train, tmp_path):
    said = "no checkpoint could be written (No space left on device); the one before it is whole: make room, then go on with --resume auto"
    with pytest.raises(Exception, match="No space left on device"):
        train("--epochs", 3, model=fills_the_disk)
    assert last(tmp_path / "runs" / "1")["progress"]["step"] == 3
    folder = train("--epochs", 3, "--if-disk-full", "go-on", model=fills_the_disk)
    assert last(folder)["progress"]["step"] == 9
    assert f"warning: {folder}/checkpoints: {said}" in (folder / "log.txt").read_text()


def test_evaluations_come_every_so_many_epochs(train, tmp_path):
    folder = train("--epochs", 5, "--val-interval", 2, "--val-data", tmp_path / "train")
    assert [line["epoch"] for line in events(folder, "eval")] == [1, 3, 4]  # and after the last


def test_batch_norm_s_statistics_are_taken_anew(train, tmp_path):
    words = ["--val-data", tmp_path / "train", "--no-aug", "--lr", 0.01]
    trailing, precise, again = train(*words), train(*words, "--precise-bn", 3), train(*words, "--precise-bn", 3)
    assert torch.equal(last(trailing)["model"]["head.weight"], last(precise)["model"]["head.weight"])
    name = "features.1.running_mean"
    assert not torch.allclose(last(trailing)["model"][name], last(precise)["model"][name], rtol=1e-3)
    assert torch.equal(weights(precise), weights(again))
    # three batches of eight are the whole epoch: the statistics are those of all 24 pictures under the last weights
    model = create_model("tiny", 3)
    model.load_state_dict(last(precise)["model"])
    from data import build_loader

    images = torch.cat([batch["image"] for batch in build_loader(str(tmp_path / "train"), batch_size=8, img_size=32, training=False)])
    conv = model.get_submodule("features.0")
    expected = conv(Forward(torch.device("cpu")).pictures(images)).mean((0, 2, 3))
    torch.testing.assert_close(last(precise)["model"][name], expected, rtol=1e-3, atol=1e-4)


def test_predictions_are_written_if_asked_for(train, tmp_path):
    folder = train("--val-data", tmp_path / "train", "--save-predictions")
    with np.load(folder / "val_predictions.npz") as told:
        assert told["scores"].shape == (24, 3) and told["scores"].dtype == np.float32
        assert told["index"].tolist() == [*range(9), *range(8), *range(7)]
        assert told["shard"].tolist() == ["0.tar"] * 9 + ["1.tar"] * 8 + ["2.tar"] * 7
        right = int((told["scores"].argmax(1) == told["labels"]).sum())
    assert right == events(folder, "eval")[-1]["correct"]
    rows = [line.split("\t") for line in (folder / "classes.tsv").read_text().splitlines()]
    assert rows[0] == ["class", "samples", "right", "accuracy", "mostly_taken_for"] and len(rows) == 4
    assert sum(int(row[2]) for row in rows[1:]) == right == np.load(folder / "confusion.npy").trace()
    assert not (train("--val-data", tmp_path / "train") / "val_predictions.npz").exists()


def test_a_dry_run_tells_everything_and_trains_nothing(train, tmp_path, capsys, monkeypatch):
    train("--epochs", 1)
    monkeypatch.setattr(run.mp, "spawn", None)
    threads = torch.get_num_threads()
    words = ["--data", tmp_path / "train", "--model", "tiny", "--device", "cpu", "--output", tmp_path / "dry"]
    words += ["--epochs", 2, "-b", 8, "-j", 0]
    assert run.cli([*map(str, words), "--dry-run"]) == 0
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert "24 samples in 3 shards, 3 classes, pictures of 32x32" in lines
    assert "training classes: 0 8, 1 8, 2 8" in lines
    assert "3.0 steps an epoch, 6 in all, 1 of them warm-up" in lines
    batch = "one batch of 8 through model, loss and backward: loss "
    for start in ("memory of a process, estimated: 0.00 GiB (", "the loader gives ", batch):
        assert any(line.startswith(start) for line in lines), start
    assert lines[-1] == "nothing was trained"
    assert not (tmp_path / "dry").exists()
    assert run.cli([*map(str, words), "--dry-run", "--grad-accum", "9"]) == 2
    assert "--grad-accum 9 exceeds the 8 samples of a process" in capsys.readouterr().err


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(train, tmp_path):
    with pytest.raises(Exception, match="NotFinite") as stopped:
        train("--epochs", 4, "--lr", 1e30, "--warmup-epochs", 0, "--sched", "constant", "--checkpoint-interval", 1)
    folder = tmp_path / "runs" / "1"
    (told,) = read_lines(folder / "notfinite.jsonl")
    step = told["step"]
    message = str(stopped.value)
    assert f"the loss of step {step} is not finite, at " in message and "learning rate 1e+30, gradient norm nan" in message
    assert last(folder)["progress"]["step"] == step - 1
    assert len(told["ids"]) == 8 and told["not_finite"] and all(name in told["ids"] for name in told["not_finite"])
    assert json.dumps(told["not_finite"][0][2])[1:-1] in message
