"""The command line is frozen: every flag and default stands here literally. Recipes and checkpoints only fill in what was left out."""

from __future__ import annotations

import pytest

from engine import flags
from engine.flag_types import split_interval

DEFAULTS = {
    "data": None,
    "val_data": None,
    "task": "image-classification",
    "label": "cls",
    "classes": None,
    "num_classes": None,
    "img_size": None,
    "scale": None,
    "hflip": 0.5,
    "no_aug": False,
    "decoder": "auto",
    "auto_augment": None,
    "color_jitter": 0.0,
    "reprob": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "workers": None,
    "cache_dir": None,
    "cache_size": None,
    "stream": False,
    "epoch_samples": None,
    "allow_pipe": False,
    "max_bad": 0.01,
    "num_frames": 32,
    "sampling_rate": 2,
    "target_fps": 30.0,
    "short_side": None,
    "test_data": None,
    "test_size": None,
    "num_ensemble_views": None,
    "num_spatial_crops": None,
    "ensemble": "sum",
    "epochs": 10,
    "batch_size": None,
    "seed": 0,
    "no_shuffle": False,
    "shuffle_block": 16_384,
    "lanes": 1,
    "model": "resnet18",
    "model_kwargs": None,
    "pretrained": None,
    "init_from": None,
    "freeze": None,
    "opt": "sgd",
    "lr": None,
    "lr_base": None,
    "backbone_lr": None,
    "layer_decay": 1.0,
    "momentum": 0.9,
    "weight_decay": 5e-5,
    "sched": "cosine",
    "min_lr": 0.0,
    "warmup_epochs": None,
    "warmup_steps": None,
    "warmup_lr": 0.0,
    "loss": None,
    "smoothing": 0.0,
    "clip_grad": 0.0,
    "grad_accum": 1,
    "ema": 0.0,
    "sync_bn": False,
    "find_unused_parameters": False,
    "amp": "off",
    "channels_last": False,
    "compile": None,
    "tf32": False,
    "output": "runs",
    "name": None,
    "resume": None,
    "checkpoint_interval": 0,
    "checkpoint_hist": 0,
    "if_disk_full": "stop",
    "val_interval": 1,
    "precise_bn": 0,
    "save_predictions": False,
    "log_interval": 50,
    "profile": 0,
    "audit": False,
    "dry_run": False,
    "evaluate": False,
    "config": None,
    "device": None,
    "nproc_per_node": None,
    "nnodes": 1,
    "node_rank": 0,
    "dist_url": None,
    "dist_timeout": 300.0,
    "dist_backend": None,
}
# What --help says of each default; the Nones are worked out from the data or the machine, and the text says how.
SHOWN = {
    "data": "no default",
    "val_data": "default: none, and so no evaluation",
    "task": "default: image-classification",
    "label": "default: cls",
    "classes": "default: dataset.json beside the shards, else a scan",
    "num_classes": "default: as --classes says",
    "img_size": "default: median short side up to a multiple of 32, in 32..224",
    "scale": "default: 0.08 1; sizes up to 64 pad and crop",
    "hflip": "default: 0.5",
    "no_aug": "default: off",
    "decoder": "default: auto",
    "auto_augment": "default: none",
    "color_jitter": "default: 0.0",
    "reprob": "default: 0.0",
    "mixup": "default: 0.0",
    "cutmix": "default: 0.0",
    "workers": "default: cores / processes, at most 8",
    "cache_dir": "default: in the user's cache folder",
    "cache_size": "default: what it holds and 9/10 of the free disk",
    "stream": "default: off",
    "epoch_samples": "no default",
    "allow_pipe": "default: off",
    "max_bad": "default: 0.01",
    "num_frames": "default: 32",
    "sampling_rate": "default: 2",
    "target_fps": "default: 30.0",
    "short_side": "default: 256 320 for pictures of 224, and so in proportion",
    "test_data": "default: none",
    "test_size": "default: --img-size",
    "num_ensemble_views": "default: 10; 1 is the middle",
    "num_spatial_crops": "default: 3; 1 is the middle",
    "ensemble": "default: sum",
    "epochs": "default: 10",
    "batch_size": "default: 256, or the number of samples if that is less",
    "seed": "default: 0",
    "no_shuffle": "default: off",
    "shuffle_block": "default: 16384",
    "lanes": "default: 1",
    "model": "default: resnet18",
    "model_kwargs": "default: none",
    "pretrained": "default: random weights",
    "init_from": "default: random weights",
    "freeze": "default: train all",
    "opt": "default: sgd",
    "lr": "default: 0.1 per 256 samples of batch; adam and adamw 0.001 at 256, by the square root",
    "lr_base": "default: none",
    "backbone_lr": "default: --lr",
    "layer_decay": "default: 1.0",
    "momentum": "default: 0.9",
    "weight_decay": "default: 5e-05",
    "sched": "default: cosine",
    "min_lr": "default: 0.0",
    "warmup_epochs": "default: 1, or a tenth of the epochs if that is less",
    "warmup_steps": "default: none",
    "warmup_lr": "default: 0.0",
    "loss": "default: ce; bce where a sample has several labels",
    "smoothing": "default: 0.0",
    "clip_grad": "default: 0.0",
    "grad_accum": "default: 1",
    "ema": "default: 0.0",
    "sync_bn": "default: off",
    "find_unused_parameters": "default: off",
    "amp": "default: off",
    "channels_last": "default: off",
    "compile": "default: don't; inductor where only --compile is said",
    "tf32": "default: off",
    "output": "default: runs",
    "name": "default: time and model",
    "resume": "default: start afresh",
    "checkpoint_interval": "default: 0",
    "checkpoint_hist": "default: 0",
    "if_disk_full": "default: stop",
    "val_interval": "default: 1",
    "precise_bn": "default: 0",
    "save_predictions": "default: off",
    "log_interval": "default: 50",
    "profile": "default: 0",
    "audit": "default: off",
    "dry_run": "default: off",
    "evaluate": "default: off",
    "config": "default: none",
    "device": "default: cuda if there is a GPU",
    "nproc_per_node": "default: one per GPU, else 1",
    "nnodes": "default: 1",
    "node_rank": "default: 0",
    "dist_url": "default: a free port of this machine",
    "dist_timeout": "default: 300.0",
    "dist_backend": "default: nccl with GPUs, gloo without",
}
SHORT = {"-b": "batch_size", "-j": "workers", "-e": "evaluate", "-c": "config"}


def refused(argv, capsys):
    """The one line of a command that argparse refuses."""
    with pytest.raises(SystemExit) as stopped:
        flags.parse_args([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1
    return err[:-1]


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_the_flags_and_their_defaults_are_these():
    assert flags.defaults() == DEFAULTS
    args = vars(flags.parse_args([]))
    assert args.pop("explicit") == frozenset()
    assert args == DEFAULTS
    options = {name for action in flags.build_parser()._actions for name in action.option_strings}
    assert options == {f"--{name.replace('_', '-')}" for name in DEFAULTS} | set(SHORT) | {"-h", "--help"}
    for short, name in SHORT.items():
        value = [] if DEFAULTS[name] is False else ["7"]
        if name != "config":
            assert name in flags.parse_args([short, *value]).explicit


def test_help_shows_every_default():
    parser = flags.build_parser()
    text = " ".join(parser.format_help().split())
    entries = {action.dest: str(action.help) for action in parser._actions if action.dest != "help"}
    assert entries.keys() == SHOWN.keys() == DEFAULTS.keys()
    for name, shown in SHOWN.items():
        assert entries[name].endswith(f"({shown})"), name
        assert entries[name] in text


def test_values_become_what_they_are():
    words = "--data a b --scale 0.2 1 --epochs 3 --lr 1e-3 --audit -j 0 --seed 5".split()
    args = flags.parse_args(words)
    assert (args.data, args.scale, args.epochs, args.lr, args.audit, args.workers) == (["a", "b"], [0.2, 1.0], 3, 1e-3, True, 0)
    assert args.explicit == {"data", "scale", "epochs", "lr", "audit", "workers", "seed"}
    sizes = {"200GB": 200 * 10**9, "1.5t": 1_500_000_000_000, "7": 7, "64 MB": 64_000_000, "2k": 2000}
    assert [flags.parse_args(["--cache-size", text]).cache_size for text in sizes] == list(sizes.values())


def test_signatures_and_passwords_are_not_kept():
    words = ["--data", "https://a:b@host/{0..3}.tar?sig=s::s3://bucket/x.tar", "local/?.tar", "--val-data", "https://host/v.tar?token=t"]
    kept = flags.kept(flags.parse_args(words))
    assert kept["data"] == ["https://host/{0..3}.tar::s3://bucket/x.tar", "local/?.tar"] and kept["val_data"] == ["https://host/v.tar"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epochs", "0"], "argument --epochs: '0' is not a whole number of at least 1"),
        (["-b", "-4"], "argument -b/--batch-size: '-4' is not a whole number of at least 1"),
        (["--seed", "1.5"], "argument --seed: '1.5' is not a whole number of at least 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number from 0 up"),
        (["--lr", "inf"], "argument --lr: 'inf' is not a number from 0 up"),
        (["--lr=-1"], "argument --lr: '-1' is not a number from 0 up"),
        (["--hflip", "2"], "argument --hflip: '2' is not a number in 0..1"),
        (["--scale", "0.5"], "argument --scale: expected 2 arguments"),
        (["--cache-size", "0GB"], "argument --cache-size: '0GB' is not a size in bytes, like 200GB"),
        (["--cache-size", "much"], "argument --cache-size: 'much' is not a size in bytes, like 200GB"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu' (choose from 'cuda', 'cpu')"),
        (["--dist-backend", "x"], "argument --dist-backend: invalid choice: 'x' (choose from 'nccl', 'gloo', 'mpi')"),
        (["--checkpoint-interval", "5x"], "argument --checkpoint-interval: '5x' is not a whole number of at least 0"),
        (["--checkpoint-interval", "-3m"], "argument --checkpoint-interval: expected one argument"),
        (["--checkpoint-interval", "xm"], "argument --checkpoint-interval: 'x' is not a number from 0.001 up"),
        (["--data"], "argument --data: expected at least one argument"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--batch", "3"], "unrecognized arguments: --batch 3; the nearest flag is --batch-size"),
        (["--learning-rate=3"], "unrecognized arguments: --learning-rate=3; the nearest flag is --sampling-rate"),
        (["shards/"], "unrecognized arguments: shards/; --help lists the flags"),
    ],
)
def test_a_wrong_flag_is_one_line(argv, message, capsys):
    line = refused(argv, capsys)
    if "choose from" in message:  # Python 3.12 no longer quotes the choices
        line, message = line.replace("'", ""), message.replace("'", "")
    assert line == f"run.py: error: {message}"


def test_a_recipe_counts_as_given_and_a_flag_wins_over_it(tmp_path):
    path = recipe(tmp_path, "epochs: 3\nbatch-size: 8\nlr: 1e-3\nmax_bad: 0.5\n")
    args = flags.parse_args(["-c", str(path), "--epochs", "4"])
    assert (args.epochs, args.batch_size, args.lr, args.max_bad) == (4, 8, 1e-3, 0.5)
    assert args.explicit == {"config", "epochs", "batch_size", "lr", "max_bad"}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("amp: off", {"amp": "off"}),
        ("amp: bf16\ncompile: true", {"amp": "bf16", "compile": "inductor"}),
        ("compile: eager", {"compile": "eager"}),
        ("compile: off", {"compile": None}),
    ],
)
def test_words_that_yaml_reads_as_booleans_mean_what_they_say(text, values, tmp_path):
    args = flags.parse_args(["-c", str(recipe(tmp_path, text + "\n"))])
    assert {name: getattr(args, name) for name in values} == values


def test_a_recipe_holds_lists_and_booleans(tmp_path):
    path = recipe(tmp_path, "data: [a b, c]\nval-data: one\nscale: [0.5, 1]\naudit: true\nno-aug: false\n")
    args = flags.parse_args(["-c", str(path)])
    assert (args.data, args.val_data, args.scale, args.audit, args.no_aug) == (["a b", "c"], ["one"], [0.5, 1.0], True, False)
    assert "no_aug" not in args.explicit
    assert flags.parse_args(["-c", str(recipe(tmp_path, "# nothing yet\n"))]).epochs == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "epoch: no such flag; the nearest is epochs"),
        ("batchsize: 3", "batchsize: no such flag; the nearest is batch-size"),
        ("b: 3", "b: no such flag; the nearest is label"),
        ("config: x.yaml", "config: a recipe can't name another"),
        ("epochs: 0", "argument --epochs: '0' is not a whole number of at least 1"),
        ("scale: 0.5", "argument --scale: expected 2 arguments"),
        ("device: tpu", "argument --device: invalid choice: 'tpu' (choose from 'cuda', 'cpu')"),
        ("epochs:", "epochs: it needs a value, or a list of values; leave the line out for the default"),
        ("data: []", "data: it needs a value, or a list of values; leave the line out for the default"),
        ("lr: {a: 1}", "lr: it needs a value, or a list of values; leave the line out for the default"),
        ("audit: 1", "audit: 1 is neither true nor false"),
        ("- epochs", "it must hold 'flag: value' lines, and holds a list"),
        ("epochs: [", "can't be read (while parsing a flow node expected the node content, but found '<stream end>' "),
    ],
)
def test_a_wrong_recipe_is_one_line_that_names_it(text, message, tmp_path, capsys):
    path = recipe(tmp_path, text)
    line = refused(["-c", path], capsys)
    if "choose from" in message:
        line, message = line.replace("'", ""), message.replace("'", "")
    assert line.startswith(f"run.py: error: --config {path}: {message}")
    assert "while parsing" in message or line.endswith(message)


def test_a_missing_recipe_is_one_line(tmp_path, capsys):
    line = refused(["--config", tmp_path / "no.yaml"], capsys)
    assert line == f"run.py: error: --config {tmp_path}/no.yaml: can't be read ([Errno 2] No such file or directory: '{tmp_path}/no.yaml')"


def test_the_recipes_of_the_repo_are_good(request):
    for path in sorted((request.config.rootpath / "recipes").glob("*.yaml")):
        flags.parse_args(["-c", str(path)])


def test_a_checkpoint_wins_over_a_default_and_a_flag_over_it():
    args = flags.parse_args(["--epochs", "5", "--device", "cpu"])
    flags.restore(args, {"epochs": 3, "batch_size": 64, "lr": 0.5, "model": "tiny", "name": "other", "device": "cuda", "workers": 4})
    assert (args.epochs, args.batch_size, args.lr, args.model) == (5, 64, 0.5, "tiny")
    assert (args.name, args.device, args.workers) == (None, "cpu", None)  # these belong to a start
    assert not flags.NOT_KEPT & flags.kept(args).keys()
    assert flags.kept(args).keys() | flags.NOT_KEPT == DEFAULTS.keys()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "resnet18"], "--model resnet18 contradicts the checkpoint's tiny: leave it out, or start without --resume"),
        (["--seed", "1"], "--seed 1 contradicts the checkpoint's 0: leave it out, or start without --resume"),
        (["--lanes", "2"], "--lanes 2 contradicts the checkpoint's 1: leave it out, or start without --resume"),
        (["--shuffle-block", "2"], "--shuffle-block 2 contradicts the checkpoint's 16384: leave it out, or start without --resume"),
        (["--no-shuffle"], "--no-shuffle contradicts the checkpoint, which was made without it: leave it out, or start without --resume"),
        (["--img-size", "64"], "--img-size 64 contradicts the checkpoint's 32: leave it out, or start without --resume"),
        (["--num-classes", "4"], "--num-classes 4 contradicts the checkpoint's 3: leave it out, or start without --resume"),
        (["--opt", "adamw"], "--opt adamw contradicts the checkpoint's sgd: leave it out, or start without --resume"),
        (["--layer-decay", "0.7"], "--layer-decay 0.7 contradicts the checkpoint's 1.0: leave it out, or start without --resume"),
        (["--backbone-lr", "0.1"], "--backbone-lr 0.1 contradicts the checkpoint's None: leave it out, or start without --resume"),
        (["--task", "x"], "--task x contradicts the checkpoint's image-classification: leave it out, or start without --resume"),
    ],
)
def test_a_contradiction_with_the_checkpoint_is_named(argv, message):
    saved = {**DEFAULTS, "model": "tiny", "img_size": 32, "num_classes": 3}
    with pytest.raises(ValueError) as refused:
        flags.check_contradictions(flags.parse_args(argv), saved)
    assert str(refused.value) == message
    same = [word for name in ("model", "img_size", "num_classes") for word in (f"--{name.replace('_', '-')}", str(saved[name]))]
    flags.check_contradictions(flags.parse_args([*same, "--seed", "0"]), saved)
    flags.check_contradictions(flags.parse_args(["--epochs", "20", "-b", "5", "--lr", "3"]), saved)  # these may change


def test_an_evaluation_may_differ_in_what_the_weights_do_not_fix():
    saved = {**DEFAULTS, "model": "tiny", "img_size": 32, "num_classes": 3}
    flags.check_contradictions(flags.parse_args(["--evaluate", "--img-size", "64", "--seed", "3"]), saved)
    with pytest.raises(ValueError, match="--model resnet18 contradicts"):
        flags.check_contradictions(flags.parse_args(["--evaluate", "--model", "resnet18"]), saved)


def test_an_interval_is_steps_or_a_time():
    def split(text):
        return split_interval(flags.parse_args(["--checkpoint-interval", text]).checkpoint_interval)

    assert [split(text) for text in ("0", "500", "90s", "10m", "1.5h")] == [(0, 0.0), (500, 0.0), (0, 90.0), (0, 600.0), (0, 5400.0)]
