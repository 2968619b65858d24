"""The flag table, and how a command line, a recipe and a checkpoint become one set of values.

in: argv  ->  out: a Namespace with every flag, and `explicit`: the names that the user gave (a recipe's count as given)
Invariant: a default is written here once, and --help shows it. A flag given wins over a recipe, both win over a checkpoint,
and a checkpoint wins over a default.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from data.plan import SHUFFLE_BLOCK
from data.urls import redact_pattern

from .flag_types import byte_size, integer, interval, number

# group -> rows of (names, default, keywords of add_argument, help). A default of None is worked out from the data or the
# machine; the help then says how.
Row = tuple[str, Any, dict[str, Any], str]
FLAGS: dict[str, list[Row]] = {
    "data": [
        ("--data", None, {"nargs": "+", "metavar": "PATTERN"}, "training shards: 'a/{000..099}.tar', <000..099>, globs, folders, .txt lists, a::b (no default)"),
        ("--val-data", None, {"nargs": "+", "metavar": "PATTERN"}, "validation shards (default: none, and so no evaluation)"),
        ("--task", "image-classification", {"metavar": "NAME"}, "what a sample is"),
        ("--label", "cls", {"metavar": "FIELD"}, "where the label is: cls, txt, or json:dotted.path"),
        ("--classes", None, {"metavar": "FILE"}, "class names: a dataset.json or a list (default: dataset.json beside the shards, else a scan)"),
        ("--num-classes", None, {"type": integer(1), "metavar": "N"}, "number of classes (default: as --classes says)"),
        ("--img-size", None, {"type": integer(1), "metavar": "N"}, "side of the model's pictures (default: median short side up to a multiple of 32, in 32..224)"),
        ("--scale", None, {"type": number(0.0, 1.0), "nargs": 2, "metavar": ("MIN", "MAX")}, "share of the picture that a random crop covers (default: 0.08 1; sizes up to 64 pad and crop)"),
        ("--hflip", 0.5, {"type": number(0.0, 1.0), "metavar": "P"}, "how often a training picture is mirrored"),
        ("--no-aug", False, {"action": "store_true"}, "train on the evaluation's transform"),
        ("--decoder", "auto", {"choices": ["auto", "native", "python"]}, "who decodes JPEGs: auto takes native (built by make where it can be) and goes on without it"),
        ("--auto-augment", None, {"choices": ["randaugment", "trivialaugment"]}, "change training pictures by a policy (default: none)"),
        ("--color-jitter", 0.0, {"type": number(0.0, 1.0), "metavar": "X"}, "change brightness, contrast and saturation of training pictures by up to this share"),
        ("--reprob", 0.0, {"type": number(0.0, 1.0), "metavar": "P"}, "how often a box of a training picture is erased"),
        ("--mixup", 0.0, {"type": number(0.0), "metavar": "ALPHA"}, "blend pairs of pictures, by shares from Beta(ALPHA, ALPHA); 0: don't"),
        ("--cutmix", 0.0, {"type": number(0.0), "metavar": "ALPHA"}, "paste parts of pictures into others; with --mixup too, a step does one of them; 0: don't"),
        ("-j --workers", None, {"type": integer(0), "metavar": "N"}, "loader workers per process (default: cores / processes, at most 8)"),
        ("--cache-dir", None, {"metavar": "FOLDER"}, "where remote shards are kept; none: read single samples over the network (default: in the user's cache folder)"),
        ("--cache-size", None, {"type": byte_size, "metavar": "SIZE"}, "the most that --cache-dir may hold, like 200GB (default: what it holds and 9/10 of the free disk)"),
        ("--stream", False, {"action": "store_true"}, "read training shards from end to end, without indexes: each sample once an epoch is then not promised"),
        ("--epoch-samples", None, {"type": integer(1), "metavar": "N"}, "what --stream calls an epoch (no default)"),
        ("--allow-pipe", False, {"action": "store_true"}, "with --stream: run the commands that --data names as pipe:COMMAND"),
        ("--max-bad", 0.01, {"type": number(0.0, 1.0), "metavar": "SHARE"}, "stop when more than this share of the samples seen (and more than 10) is bad"),
    ],
    "clips": [
        ("--num-frames", 32, {"type": integer(1), "metavar": "N"}, "frames of a clip (for --task video-classification, as the other flags here)"),
        ("--sampling-rate", 2, {"type": integer(1), "metavar": "N"}, "take every Nth frame"),
        ("--target-fps", 30.0, {"type": number(0.001), "metavar": "FPS"}, "frames a second of the video that is sampled so, whatever the file has"),
        ("--short-side", None, {"type": integer(1), "nargs": 2, "metavar": ("MIN", "MAX")}, "what a training video's short side is brought to before it is cropped (default: 256 320 for pictures of 224, and so in proportion)"),
    ],
    "test": [
        ("--test-data", None, {"nargs": "+", "metavar": "PATTERN"}, "test shards: tested after the training, or with --evaluate (default: none)"),
        ("--test-size", None, {"type": integer(1), "metavar": "N"}, "side of the test's pictures (default: --img-size)"),
        ("--num-ensemble-views", None, {"type": integer(1), "metavar": "N"}, "clips of each test video, spread from its start to its end (default: 10; 1 is the middle)"),
        ("--num-spatial-crops", None, {"type": integer(1), "metavar": "N"}, "crops of each such clip, spread along its long side (default: 3; 1 is the middle)"),
        ("--ensemble", "sum", {"choices": ["sum", "max"]}, "how they answer together: the mean of their probabilities, or the highest of each class"),
    ],
    "stream": [
        ("--epochs", 10, {"type": integer(1), "metavar": "N"}, "epochs to train"),
        ("-b --batch-size", None, {"type": integer(1), "metavar": "N"}, "global batch, over all processes (default: 256, or the number of samples if that is less)"),
        ("--seed", 0, {"type": integer(0), "metavar": "N"}, "seed of order, augmentation and weights"),
        ("--no-shuffle", False, {"action": "store_true"}, "read in index order"),
        ("--shuffle-block", SHUFFLE_BLOCK, {"type": integer(1), "metavar": "N"}, "samples that are permuted together"),
        ("--lanes", 1, {"type": integer(1), "metavar": "N"}, "cut the shards into N lanes; a multiple of the machines keeps each to its own shards"),
    ],
    "model and optimizer": [
        ("--model", "resnet18", {"metavar": "NAME"}, "a torchvision classification model (of pictures or of clips), resnet9, resnet20, tiny, slowfast_8x8_r50 and its kind, or timm:NAME where timm is installed"),
        ("--model-kwargs", None, {"nargs": "+", "metavar": "NAME=VALUE"}, "keywords of the model's constructor, such as width_per_group=8 dropout=0.5 (default: none)"),
        ("--pretrained", None, {"metavar": "torchvision|PATH"}, "start from weights: torchvision's own, or a file's; the head is made anew where the classes differ (default: random weights)"),
        ("--init-from", None, {"metavar": "PATH"}, "start from the weights of a checkpoint or run folder, all of them (default: random weights)"),
        ("--freeze", None, {"nargs": "+", "metavar": "PREFIX"}, "don't train the parameters whose names begin so (default: train all)"),
        ("--opt", "sgd", {"metavar": "NAME"}, "sgd (Nesterov), adamw or adam"),
        ("--lr", None, {"type": number(0.0), "metavar": "X"}, "peak learning rate (default: 0.1 per 256 samples of batch; adam and adamw 0.001 at 256, by the square root)"),
        ("--lr-base", None, {"type": number(0.0), "metavar": "X"}, "in place of --lr: the rate for a batch of 256, scaled as the default is (default: none)"),
        ("--backbone-lr", None, {"type": number(0.0), "metavar": "X"}, "peak learning rate of all but the head (default: --lr)"),
        ("--layer-decay", 1.0, {"type": number(0.0, 1.0), "metavar": "X"}, "each layer's share of the rate of the layer after it"),
        ("--momentum", 0.9, {"type": number(0.0, 0.9999), "metavar": "X"}, "momentum, or adam's first beta"),
        ("--weight-decay", 5e-5, {"type": number(0.0), "metavar": "X"}, "weight decay; norms and biases have none"),
        ("--sched", "cosine", {"metavar": "NAME"}, "cosine, step, linear or constant"),
        ("--min-lr", 0.0, {"type": number(0.0), "metavar": "X"}, "learning rate at the end of cosine and linear"),
        ("--warmup-epochs", None, {"type": number(0.0), "metavar": "X"}, "epochs of warm-up (default: 1, or a tenth of the epochs if that is less)"),
        ("--warmup-steps", None, {"type": integer(0), "metavar": "N"}, "in place of --warmup-epochs: steps of warm-up (default: none)"),
        ("--warmup-lr", 0.0, {"type": number(0.0), "metavar": "X"}, "learning rate at the warm-up's start"),
        ("--loss", None, {"choices": ["ce", "bce"]}, "cross entropy, or a yes or no for each class (default: ce; bce where a sample has several labels)"),
        ("--smoothing", 0.0, {"type": number(0.0, 0.999), "metavar": "X"}, "label smoothing: how much of a label is spread over all classes"),
        ("--clip-grad", 0.0, {"type": number(0.0), "metavar": "NORM"}, "scale gradients down to this norm; 0: don't"),
        ("--grad-accum", 1, {"type": integer(1), "metavar": "N"}, "micro-batches that a process cuts its part of the batch into; the batch stays what -b says"),
        ("--ema", 0.0, {"type": number(0.0, 0.999999), "metavar": "DECAY"}, "evaluate and keep an average of the weights too, for example 0.999; 0: don't"),
        ("--sync-bn", False, {"action": "store_true"}, "batch norm over the whole global batch (GPUs only)"),
        ("--find-unused-parameters", False, {"action": "store_true"}, "for a model that leaves some parameters out of some steps"),
    ],
    "speed": [
        ("--amp", "off", {"choices": ["off", "bf16", "fp16"]}, "mixed precision; fp16 scales its loss"),
        ("--channels-last", False, {"action": "store_true"}, "keep pictures and filters with their channels side by side in memory: faster for convolutions"),
        ("--compile", None, {"nargs": "?", "const": "inductor", "metavar": "BACKEND"}, "torch.compile the model (default: don't; inductor where only --compile is said)"),
        ("--tf32", False, {"action": "store_true"}, "let GPUs multiply float32 matrices in TF32"),
    ],
    "run": [
        ("--output", "runs", {"metavar": "FOLDER"}, "where run folders are made"),
        ("--name", None, {"metavar": "NAME"}, "the run folder's name (default: time and model)"),
        ("--resume", None, {"metavar": "auto|PATH"}, "go on from a checkpoint or run folder; auto: the folder --name says, else the newest that fits (default: start afresh)"),
        ("--checkpoint-interval", 0, {"type": interval, "metavar": "STEPS|TIME"}, "also save every so many steps, or so often (90s, 10m, 1.5h); 0: at the ends of epochs only"),
        ("--checkpoint-hist", 0, {"type": integer(0), "metavar": "N"}, "also keep the last N checkpoints, as step-NUMBER.pt"),
        ("--if-disk-full", "stop", {"choices": ["stop", "go-on"]}, "what to do where a checkpoint can't be written; the one before it is kept"),
        ("--val-interval", 1, {"type": integer(1), "metavar": "EPOCHS"}, "epochs between two evaluations; there is one after the last"),
        ("--precise-bn", 0, {"type": integer(0), "metavar": "N"}, "before an evaluation, take batch norm's statistics over N training batches; 0: don't"),
        ("--save-predictions", False, {"action": "store_true"}, "write each evaluation's scores, ids and labels to val_predictions.npz"),
        ("--log-interval", 50, {"type": integer(1), "metavar": "STEPS"}, "steps between two lines of the log"),
        ("--profile", 0, {"type": integer(0), "metavar": "STEPS"}, "write trace.json, for ui.perfetto.dev: who did what when in the first steps (0: none)"),
        ("--audit", False, {"action": "store_true"}, "write every consumed sample's id to audit/"),
        ("--dry-run", False, {"action": "store_true"}, "check everything and train nothing: data, classes, model, memory, the loader's speed"),
        ("-e --evaluate", False, {"action": "store_true"}, "only evaluate the checkpoint that --resume names, on --val-data, --test-data or both"),
        ("-c --config", None, {"metavar": "FILE"}, "a recipe: YAML whose keys are flag names; flags win over it (default: none)"),
    ],
    "launch": [
        ("--device", None, {"choices": ["cuda", "cpu"]}, "where to train (default: cuda if there is a GPU)"),
        ("--nproc-per-node", None, {"type": integer(1), "metavar": "N"}, "processes on this machine (default: one per GPU, else 1)"),
        ("--nnodes", 1, {"type": integer(1), "metavar": "N"}, "machines"),
        ("--node-rank", 0, {"type": integer(0), "metavar": "N"}, "which machine this is"),
        ("--dist-url", None, {"metavar": "URL"}, "where ranks meet: tcp://, file:// or env:// (default: a free port of this machine)"),
        ("--dist-timeout", 300.0, {"type": number(1.0), "metavar": "SECONDS"}, "how long to wait for ranks that have not come up"),
        ("--dist-backend", None, {"choices": ["nccl", "gloo", "mpi"]}, "what carries the gradients (default: nccl with GPUs, gloo without)"),
    ],
}
# These describe a start, not the training: a checkpoint does not bring them back.
NOT_KEPT = frozenset({
    "workers", "cache_dir", "cache_size", "allow_pipe", "output", "name", "resume", "evaluate", "config", "dry_run", "profile",
    "if_disk_full", "save_predictions", "device", "nproc_per_node", "nnodes", "node_rank", "dist_url", "dist_timeout", "dist_backend",
})  # fmt: skip
# These say where data lies, and may differ from machine to machine; what lies there may not.
PLACES = frozenset({"data", "val_data", "test_data", "classes", "pretrained", "init_from"})

EXAMPLES = """examples:
  python run.py --data 'shards/{000..099}.tar' --model resnet50
  python run.py --data shards/train --val-data shards/val --epochs 90 -b 1024 --name first
  python run.py --data shards/train --val-data shards/val --epochs 90 -b 1024 --name first --resume auto
  python run.py --evaluate --val-data shards/val --resume runs/first/checkpoints/best.pt
"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    source = ""  # the recipe that is being read

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ")
        if word != message:
            own = [flag_name(option) for option in self._option_string_actions if option.startswith("--")]
            near = nearest(word.split("=")[0].split()[0], own, cutoff=0.6)
            message += f"; the nearest flag is --{near[0]}" if near else "; --help lists the flags"
        self.exit(2, f"{self.prog}: error: {self.source}{' '.join(message.split())}\n")


def flag_name(names: str) -> str:
    """`-b --batch-size` -> batch_size."""
    return names.split()[-1].lstrip("-").replace("-", "_")


def spelled(name: str) -> str:
    """batch_size -> `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def defaults() -> dict[str, Any]:
    """Every flag's default."""
    return {flag_name(names): default for rows in FLAGS.values() for names, default, _, _ in rows}


BARE = frozenset(flag_name(names) for rows in FLAGS.values() for names, _, how, _ in rows if how.get("nargs") == "?")  # with or without a value


def nearest(name: str, among: Iterable[str], cutoff: float = 0.0) -> list[str]:
    """The flag among these whose name is most like this one, as it is typed; none if no name is as like as `cutoff`, in 0..1."""
    near = difflib.get_close_matches(name.strip("-").replace("-", "_"), list(among), n=1, cutoff=cutoff)
    return [flag.replace("_", "-") for flag in near]


def build_parser() -> Parser:
    """The parser; it sets only what was given, so that what was left out can be told from a default."""
    parser = Parser(
        prog="run.py",
        description="Train a PyTorch model on many processes straight from WebDataset tar shards.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, rows in FLAGS.items():
        group = parser.add_argument_group(title)
        for names, default, keywords, text in rows:
            shown = text if "default" in text else f"{text} (default: {'off' if default is False else default})"
            group.add_argument(*names.split(), help=shown.replace("%", "%%"), **keywords)
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags over recipe over defaults. A mistake is one line on stderr and exit 2."""
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    recipe = {}
    if "config" in given:
        try:
            recipe = read_recipe(Path(given["config"]), parser)
        except ValueError as error:
            parser.error(str(error))
    explicit = {**recipe, **given}
    return argparse.Namespace(**{**defaults(), **explicit}, explicit=frozenset(explicit))


def read_recipe(path: Path, parser: Parser) -> dict[str, Any]:
    """A YAML file of flag names and values, checked as if they had been typed. Raises ValueError, one line."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: can't be read ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: it must hold 'flag: value' lines, and holds a {type(values).__name__}")
    argv = [word for key, value in values.items() for word in _as_words(path, str(key), value)]
    parser.source = f"--config {path}: "
    return vars(parser.parse_args(argv))


def _as_words(path: Path, key: str, value: Any) -> list[str]:
    """A recipe's entry as it would have been typed."""
    name = key.replace("-", "_")
    if name not in defaults():
        raise ValueError(f"--config {path}: {key}: no such flag; the nearest is {nearest(name, defaults())[0]}")
    if name == "config":
        raise ValueError(f"--config {path}: {key}: a recipe can't name another")
    items = value if isinstance(value, list) else [value]
    if not items or any(item is None or isinstance(item, (dict, list)) for item in items):
        raise ValueError(f"--config {path}: {key}: it needs a value, or a list of values; leave the line out for the default")
    flag = spelled(name)
    if isinstance(defaults()[name], bool):
        if not isinstance(value, bool):
            raise ValueError(f"--config {path}: {key}: {value} is neither true nor false")
        return [flag] if value else []
    if isinstance(value, bool):  # YAML reads off, no, on and yes so
        if name in BARE:
            return [flag] if value else []
        items = ["on" if value else "off"]
    return [f"{flag}={items[0]}"] if len(items) == 1 else [flag, *map(str, items)]


def restore(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Give every flag that was left out the value that a checkpoint's run had."""
    for name, value in saved.items():
        if name not in args.explicit and name not in NOT_KEPT and hasattr(args, name):
            setattr(args, name, value)


def kept(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that a checkpoint keeps, as plain values; signatures and passwords of URLs are not kept."""
    values = {name: getattr(args, name) for name in defaults() if name not in NOT_KEPT}
    return {name: redact_pattern(value) if name in PLACES else value for name, value in values.items()}


# A checkpoint decides these: another value would make it another run, or another model.
DECIDED = ("task", "model", "model_kwargs", "num_classes", "img_size", "num_frames", "sampling_rate", "target_fps", "opt", "freeze", "layer_decay", "backbone_lr", "seed", "no_shuffle", "shuffle_block", "lanes")
DECIDED_TO_EVALUATE = ("task", "model", "model_kwargs", "num_classes")


def check_contradictions(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Raises ValueError for a flag that was given and contradicts the checkpoint."""
    for name in DECIDED_TO_EVALUATE if args.evaluate else DECIDED:
        now, then = getattr(args, name), saved.get(name, defaults()[name])  # a checkpoint may be older than a flag
        if name in args.explicit and now != then:
            flag = spelled(name)
            against = f"{flag} {now} contradicts the checkpoint's {then}"
            if now is True:
                against = f"{flag} contradicts the checkpoint, which was made without it"
            raise ValueError(f"{against}: leave it out, or start without --resume")
