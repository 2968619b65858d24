"""The parent's part of a run, before any process is started: check all that can be checked, and work out what was left open.

in: the flags as parsed  ->  out: the same Namespace with every flag filled in, and what `main` needs besides: shards, labels, checkpoint
Invariant: a mistake is a ValueError of one line that names the flag; nothing is written but indexes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data import Plan, Shard, load_shards
from data.native import why_absent
from data.pipeline import shards_fingerprint
from data.prefetch import check_room, describe_start
from data.streaming import PROMISE, STDIN, ReadStream, check_readers, check_sources, stand_in, stream_labels, stream_sources
from data.tasks import create_task, default_img_size, has_several_labels, read_classes, resolve_labels, settings_of
from data.transforms import choose_decoder
from models import check_model, create_model, model_names

from . import checkpoint, distributed, flags, runs, weights
from .losses import default_loss
from .optim import check_optimizer, default_lr, scale_lr
from .report import opening_lines
from .resources import Cost, measure
from .settings import has_clips, model_options, num_frames, task_settings, view_settings


class AlreadyFinished(Exception):
    """The run that --resume names has nothing left to train."""


def prepare(args: argparse.Namespace) -> None:
    """All of it, in order. Raises ValueError, OSError, AlreadyFinished."""
    args.launcher = args.store_port = args.reader = None
    args.shards, args.messages = [], []
    prepare_launch(args)
    if args.evaluate and args.resume is None:
        raise ValueError("--evaluate needs --resume CHECKPOINT: there is nothing to evaluate")
    saved = prepare_resume(args)
    check_optimizer(args.opt, args.sched)
    check_training_flags(args)
    if args.model not in model_names():
        create_model(args.model, 1)  # raises: before the shards are read, which may take long
    if "img_size" not in settings_of(args.task):
        advice = "read other samples with data.build_loader (docs/extending.md)"
        raise ValueError(f"--task {args.task}: run.py trains on pictures and videos; {advice}")
    if not has_clips(args):
        prepare_decoder(args, saved)
    args.transform, args.model_options = task_settings(args), model_options(args.model_kwargs)
    create_task(args.task, training=True, labels=None, img_size=args.img_size or 1, **args.transform)
    prepare_data(args, saved)
    args.cost = prepare_model(args, saved)
    prepare_training(args, saved)


def prepare_launch(args: argparse.Namespace) -> None:
    """Which device, how many processes, threads and workers; where the run folder can be."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.nproc_per_node = distributed.count_processes(args.nproc_per_node, args.device)
    args.world_size = distributed.count_ranks(args.nproc_per_node, args.nnodes)
    args.dist_backend = args.dist_backend or ("nccl" if args.device == "cuda" else "gloo")
    distributed.check_launch(
        device=args.device, backend=args.dist_backend, nproc=args.nproc_per_node, nnodes=args.nnodes,
        node_rank=args.node_rank, dist_url=args.dist_url,
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    args.num_threads = max(1, cores // args.nproc_per_node)
    if args.workers is None:
        args.workers = min(8, args.num_threads)
    runs.check_output(Path(args.output))
    if args.name is not None:
        runs.check_name(Path(args.output), args.name, args.resume)


def prepare_resume(args: argparse.Namespace) -> dict[str, Any] | None:
    """Find and read the checkpoint to go on from; flags that were left out take its values."""
    args.checkpoint = args.folder = None
    if args.resume is None:
        return None
    path = Path(args.resume)
    if args.resume == "auto":
        folder = Path(args.output) / args.name if args.name else find_run(args)
        if folder is None or not runs.has_checkpoint(folder):
            where = folder or args.output
            if args.evaluate:
                raise ValueError(f"--resume auto: no checkpoint fits in {where}; name one to evaluate")
            args.messages.append(f"--resume auto: no checkpoint fits in {where}, starting afresh")
            args.folder = folder if folder and folder.exists() else None
            return None
        path = folder
    saved, args.checkpoint, warning = checkpoint.load(path)
    flags.check_contradictions(args, saved["flags"])
    flags.restore(args, saved["flags"])
    if not args.evaluate and (args.resume == "auto" or args.name is None):  # under a new --name it becomes a run of its own
        args.folder = runs.folder_of(args.checkpoint)
    args.messages += [f"warning: {warning}"] if warning else []
    then, now = saved["num_threads"], args.num_threads
    if then != now and saved["world_size"] == args.world_size and not args.evaluate:
        args.messages.append(f"warning: {then} threads a process then, {now} now: sums may round differently")
    seen = saved["stream"]["samples_seen"]
    args.messages.append(f"going on from {args.checkpoint}: step {saved['progress']['step']}, {seen:,} samples seen")
    return saved


def prepare_decoder(args: argparse.Namespace, saved: dict[str, Any] | None) -> None:
    """Which decoder JPEGs get; a checkpoint tells only whether it is another than then."""
    then = saved["flags"].get("decoder") if saved else None
    if "decoder" not in args.explicit:
        args.decoder = flags.defaults()["decoder"]
    wanted, args.decoder = args.decoder, choose_decoder(args.decoder)
    absent = f" (the native one can't be used: {why_absent()})" if wanted == "auto" and args.decoder == "python" else ""
    args.messages.append(f"JPEGs are decoded by the {args.decoder} decoder{absent}")
    if then not in (None, args.decoder) and not args.evaluate:
        args.messages.append(f"warning: the {then} decoder then, the {args.decoder} one now: their pixels differ a little")


def check_training_flags(args: argparse.Namespace) -> None:
    """Raises ValueError for flags that contradict each other or this machine."""
    given = args.explicit
    for one, other in (("lr", "lr_base"), ("warmup_epochs", "warmup_steps"), ("pretrained", "init_from")):
        if {one, other} <= given and getattr(args, one) is not None and getattr(args, other) is not None:
            raise ValueError(f"{flags.spelled(one)} and {flags.spelled(other)} say the same thing in two ways: give one of them")
    if args.backbone_lr is not None and args.lr == 0:
        raise ValueError("--backbone-lr with --lr 0: the head would not train; give --lr too")
    if args.sync_bn and args.device != "cuda":
        raise ValueError("--sync-bn needs GPUs (PyTorch has no synchronised batch norm for the CPU): leave it out")
    if args.compile and args.compile not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"--compile {args.compile}: PyTorch has no such backend here; it has {known}")
    if args.min_lr and args.sched not in ("cosine", "linear"):
        raise ValueError(f"--min-lr is where cosine and linear end; --sched {args.sched} does not go there: leave it out")


def prepare_model(args: argparse.Namespace, saved: dict[str, Any] | None) -> Cost:
    """Look at the model on the meta device, and at the weights it is to start from; what it costs."""
    rank_batch = 2 if args.evaluate else -(-resolve_batch_size(args) // args.world_size)
    if args.grad_accum > rank_batch and not args.evaluate:
        raise ValueError(f"--grad-accum {args.grad_accum} exceeds the {rank_batch} samples of a process: lower it, or raise --batch-size")
    smallest = max(1, rank_batch // args.grad_accum)
    args.testing, args.views = view_settings(args)
    test_size = args.testing["img_size"] if args.test_shards else None
    frames = num_frames(args)
    looked_at = check_model(args.model, args.num_classes, args.img_size, smallest, frames, args.model_options, test_size)
    if saved:
        checkpoint.check_weights(args.checkpoint, saved["model"], looked_at)
    shape = (3, args.img_size, args.img_size) if frames is None else (3, frames, args.img_size, args.img_size)
    cost = measure(looked_at.train(), torch.empty(min(smallest, 2), *shape, device="meta"))
    if saved is None and not args.evaluate and (args.pretrained or args.init_from or args.freeze):
        model = create_model(args.model, args.num_classes, args.img_size, **args.model_options)
        weights.freeze(model, args.freeze or ())
        line = weights.load_start(model, **weights.read_start(args.model, args.pretrained, args.init_from))
        args.messages += [line] if line else []
    return cost


def resolve_batch_size(args: argparse.Namespace) -> int:
    """Fill in the global batch."""
    shards = args.shards or args.val_shards or args.test_shards
    args.batch_size = args.batch_size or min(256, sum(shard.num_samples for shard in shards))
    if args.batch_size < args.world_size:
        raise ValueError(f"--batch-size {args.batch_size} is the global batch, and smaller than the {args.world_size} processes: raise it")
    return int(args.batch_size)


def find_run(args: argparse.Namespace) -> Path | None:
    """The run that --resume auto means without --name."""
    if not args.data:
        raise ValueError("--resume auto needs --data or --name to know which run it is")
    args.shards = prepare_stream(args) if args.stream else load_shards(args.data, cache_dir=args.cache_dir, cache_size=args.cache_size)
    return runs.find_last_run(Path(args.output), shards_fingerprint(args.shards), args.model if "model" in args.explicit else None)


def prepare_data(args: argparse.Namespace, saved: dict[str, Any] | None) -> None:
    """Shards, classes and picture size: from the flags, the checkpoint, or the data itself."""
    if args.evaluate and {"val_data", "test_data"} & args.explicit:  # not what the run evaluated on, besides
        args.val_data = args.val_data if "val_data" in args.explicit else None
        args.test_data = args.test_data if "test_data" in args.explicit else None
    wanted = "--val-data" if args.evaluate else "--data"
    if not (args.val_data or args.test_data if args.evaluate else args.data):
        raise ValueError(f"{wanted} is missing: name the shards, for example {wanted} 'shards/{{000..099}}.tar'")
    several = has_several_labels(args.task)
    classes: dict[str, Any] = {"classes": class_names(args, saved), "num_classes": args.num_classes}
    args.labels = args.val_labels = args.test_labels = None
    cache = {"cache_dir": args.cache_dir, "cache_size": args.cache_size}
    if args.evaluate:
        args.shards = []
    else:
        args.shards = args.shards or (prepare_stream(args) if args.stream else load_shards(args.data, **cache))
        if saved:
            runs.check_same_data(saved, args.shards, runs.folder_of(args.checkpoint))
        args.labels = (
            stream_labels(args.label, **classes) if args.stream else resolve_labels(args.shards, args.label, several=several, **classes)
        )
        classes = {"classes": args.labels.names, "num_classes": args.labels.num_classes}
    args.val_shards = load_shards(args.val_data, **cache) if args.val_data else []
    if args.val_shards:
        args.val_labels = resolve_labels(args.val_shards, args.label, several=several, **classes)
    args.test_shards = load_shards(args.test_data, **cache) if args.test_data else []
    if args.test_shards:
        args.test_labels = resolve_labels(args.test_shards, args.label, several=several, **classes)
    args.num_classes = (args.labels or args.val_labels or args.test_labels).num_classes
    args.img_size = args.img_size or default_img_size(args.shards or args.val_shards or args.test_shards, args.task)


def prepare_stream(args: argparse.Namespace) -> list[Shard]:
    """--stream: what is read without indexes; the one shard that stands for it."""
    if not (args.epoch_samples and args.img_size and (args.num_classes or args.classes)):
        raise ValueError("--stream needs --epoch-samples, --img-size and --num-classes or --classes: nothing is read before training")
    sources = stream_sources(args.data, args.allow_pipe)
    if sources == [STDIN] and "workers" not in args.explicit:
        args.workers = min(1, args.workers)
    check_readers(sources, args.world_size, args.workers)
    check_sources(sources)
    args.reader = ReadStream(tuple(sources), args.seed)
    args.messages.append(f"{PROMISE}; {len(sources):,} shards, {args.epoch_samples:,} samples are called an epoch")
    return [stand_in(args.data, args.epoch_samples)]


def class_names(args: argparse.Namespace, saved: dict[str, Any] | None) -> list[str] | None:
    """The names in the order of the model's outputs, as far as they are known without looking at the data."""
    names = saved["class_names"] if saved else None
    if args.classes is None or "classes" not in args.explicit:
        return names
    given = read_classes(args.classes)
    if names is not None and given != names:
        raise ValueError(f"--classes {args.classes} contradicts the checkpoint's classes: leave it out, or start without --resume")
    return given


def agreed_facts(args: argparse.Namespace) -> dict[str, Any]:
    """What every rank must have alike: data, classes and flags, but not where the data lies."""
    facts = {f"--{name.replace('_', '-')}": value for name, value in args.kept["flags"].items() if name not in flags.PLACES}
    for name, shards in (("shards", args.shards), ("validation shards", args.val_shards), ("test shards", args.test_shards)):
        facts[name] = shards_fingerprint(shards) if shards else None
    return {**facts, "the number of ranks": args.world_size, "the classes": args.kept["class_names"]}


def prepare_training(args: argparse.Namespace, saved: dict[str, Any] | None) -> None:
    """Batch, learning rate and length of the run; what its start event, its checkpoints and its folder tell."""
    shards, labels = (args.shards, args.labels)
    if args.evaluate:
        shards, labels = (args.val_shards or args.test_shards, args.val_labels or args.test_labels)
    order = {} if args.evaluate else {"epochs": args.epochs, "seed": args.seed, "shuffle_block": args.shuffle_block, "lanes": args.lanes}
    plan = Plan(np.array([shard.num_samples for shard in shards]), **order)
    args.total = plan.num_positions
    if args.lr is None or ("lr_base" in args.explicit and "lr" not in args.explicit):
        args.lr = default_lr(args.opt, args.batch_size) if args.lr_base is None else scale_lr(args.opt, args.lr_base, args.batch_size)
    if args.warmup_steps is not None and "warmup_epochs" not in args.explicit:
        args.warmup_epochs = args.warmup_steps * args.batch_size / plan.num_samples
    args.warmup_epochs = min(1.0, args.epochs / 10) if args.warmup_epochs is None else args.warmup_epochs
    args.curve = {"warmup_lr": args.warmup_lr, "min_lr": args.min_lr, "sched": args.sched}
    args.loss = args.loss or default_loss(args.task)
    step, seen = (saved["progress"]["step"], saved["stream"]["samples_seen"]) if saved else (0, 0)
    if saved and seen >= args.total and not args.evaluate:
        raise AlreadyFinished(f"{args.checkpoint}: this run is finished, its {args.epochs} epochs are trained; raise --epochs for more")
    args.facts = {
        "world_size": args.world_size, "num_samples": plan.num_samples, "num_shards": len(shards), "num_classes": args.num_classes,
        "batch_size": args.batch_size, "total_steps": 0 if args.evaluate else step + plan.num_steps(seen, args.batch_size),
        "model": args.model, "img_size": args.img_size, "num_frames": num_frames(args),
        "opt": args.opt, "lr": args.lr, "epochs": args.epochs, "workers": args.workers,
        "parameters": args.cost.parameters, "flops": args.cost.flops,
        "device": args.device, "step": step, "samples_seen": seen, "fingerprint": shards_fingerprint(shards),
    }  # fmt: skip
    names = list(labels.names) if labels.names else None
    args.kept = {"class_names": names, "flags": flags.kept(args), "num_threads": args.num_threads}
    args.agreed = agreed_facts(args)
    args.opening = {
        "output": Path(args.output), "name": args.name, "model": args.model, "folder": args.folder, "gone_on_from": args.checkpoint,
        "step": step, "shards": args.shards, "val_shards": args.val_shards, "flags": {**args.kept["flags"], "world_size": args.world_size},
    }  # fmt: skip
    args.messages = opening_lines(args.facts, names) + prepare_cache(args, seen) + args.messages
    every = [*args.shards, *args.val_shards, *args.test_shards]
    args.messages += [f"warning: {shard.path}: {shard.damage}" for shard in every if shard.damage]
    args.messages += [] if args.val_shards or args.evaluate else ["no --val-data: no evaluation, and no best.pt"]


def prepare_cache(args: argparse.Namespace, position: int) -> list[str]:
    """What the run says of remote shards before it starts. Raises ValueError where --cache-size is too small."""
    training = (args.epochs, args.seed, not args.no_shuffle, args.shuffle_block, args.lanes)
    lines = []
    once = (1, 0, False)
    for shards, order, start in ((args.shards, training, position), (args.val_shards, once, 0), (args.test_shards, once, 0)):
        if any(shard.remote for shard in shards):
            plan = Plan(np.array([shard.num_samples for shard in shards]), *order)
            check_room(plan, shards)
            lines += describe_start(plan, start, shards)
    return lines
