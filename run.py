"""Train a PyTorch model on many processes straight from WebDataset tar shards.

The story of a run: flags -> `prepare` in the parent (a mistake is one line and exit 2) -> `mp.spawn(process_fn)` -> `main` in
every process: loaders, model, optimizer, training, evaluation, checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from data import Plan, build_loader, load_shards
from data.pipeline import check_fingerprint, shards_fingerprint
from data.tasks import create_task, default_img_size, read_classes, resolve_labels
from engine import checkpoint, distributed, flags, runs
from engine.evaluate import evaluate
from engine.metrics import cut_back
from engine.optim import check_optimizer, create_optimizer, default_lr, lr_at
from engine.report import Report
from engine.train import Progress, Trainer
from models import check_model, create_model


def main(args: argparse.Namespace) -> None:
    """One process of a run, from joining the others to the last line."""
    stop = distributed.StopRequest(args.launcher)
    torch.set_num_threads(args.num_threads)  # set, not inherited: sums in another number of parts round differently
    ranks = distributed.start(
        args.local_rank, nproc=args.nproc_per_node, nnodes=args.nnodes, node_rank=args.node_rank, dist_url=args.dist_url,
        store_port=args.store_port, backend=args.dist_backend, device=args.device,
    )  # fmt: skip
    saved = ranks.broadcast(args.checkpoint)
    folder = ranks.broadcast(open_folder(args) if ranks.rank == 0 else None)

    loading = {"batch_size": args.batch_size, "task": args.task, "img_size": args.img_size, "rank": ranks.rank,
               "world_size": ranks.world_size, "num_workers": args.workers, "pin_memory": args.device == "cuda"}  # fmt: skip
    val_loader = build_loader(args.val_shards, labels=args.val_labels, training=False, **loading) if args.val_shards else None
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = create_model(args.model, args.num_classes, args.img_size).to(ranks.device)
    progress = Progress.from_state(saved["progress"], ranks.rank, ranks.device) if saved else Progress()
    if saved:
        model.load_state_dict(saved["model"])
    report = Report(
        folder, rank=ranks.rank, total=args.total, epochs=args.epochs, audit=args.audit,
        start=saved["stream"]["samples_seen"] if saved else 0, resume_step=progress.step if saved else None,
    )  # fmt: skip
    report.start([f"global batch {args.batch_size} = {shares(args.batch_size, ranks.world_size)}", *args.messages], **args.start_facts)

    def run_evaluation() -> dict[str, Any]:
        assert val_loader is not None
        return evaluate(model, val_loader, ranks, on_batch=lambda batch: report.batch(progress.step, batch, split="val"))

    if args.evaluate:
        report.evaluation(epoch=saved["epoch"], step=progress.step, **run_evaluation())
        report.end("evaluated", steps=progress.step, samples_seen=saved["stream"]["samples_seen"], best=progress.best)
        return distributed.shut_down()

    loader = build_loader(
        args.shards, labels=args.labels, training=True, epochs=args.epochs, seed=args.seed, shuffle=not args.no_shuffle,
        shuffle_block=args.shuffle_block, lanes=args.lanes, transform=args.transform, **loading,
    )  # fmt: skip
    optimizer = create_optimizer(model, args.opt, args.lr, args.momentum, args.weight_decay)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["stream"], step=progress.step)

    def schedule(position: int) -> float:
        warmup = args.warmup_epochs * loader.num_samples
        return lr_at(position, total=args.total, warmup=warmup, base_lr=args.lr, warmup_lr=args.warmup_lr, sched=args.sched)

    device_ids = [ranks.local_rank] if args.device == "cuda" else None
    finished = Trainer(
        model=DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True),
        loader=loader, optimizer=optimizer, schedule=schedule, ranks=ranks, report=report, progress=progress, stop=stop,
        evaluate=run_evaluation if val_loader is not None else None, facts=args.facts, max_bad=args.max_bad,
        log_interval=args.log_interval, checkpoint_interval=args.checkpoint_interval,
    ).run()  # fmt: skip
    report.end("finished" if finished else "stopped", steps=progress.step, samples_seen=loader.position, best=progress.best)
    distributed.shut_down()
    if not finished:
        raise SystemExit(distributed.STOPPED)


def process_fn(local_rank: int, args: argparse.Namespace) -> None:
    """What each process runs."""
    args = copy.copy(args)
    args.local_rank = local_rank
    main(args)


def open_folder(args: argparse.Namespace) -> Path:
    """Rank 0 makes the run folder, or cuts the one it goes on in back to the checkpoint's step."""
    output = Path(args.output)
    folder = args.folder or runs.create_folder(output, args.name, args.model)
    checkpoint.sweep(folder / "checkpoints")
    cut_back(folder, args.checkpoint["progress"]["step"] if args.checkpoint else 0)
    runs.write_manifest(folder, args.shards, {**flags.kept(args), "world_size": args.start_facts["world_size"]})
    return folder


def prepare(args: argparse.Namespace) -> None:
    """In the parent, before any process is started: check all that can be checked, and work out what was left open."""
    args.launcher = args.store_port = args.checkpoint = args.folder = None
    args.shards, args.messages = [], []
    prepare_launch(args)
    if args.evaluate and args.resume is None:
        raise ValueError("--evaluate needs --resume CHECKPOINT: there is nothing to evaluate")
    if args.resume is not None:
        prepare_resume(args)
    prepare_data(args)
    check_optimizer(args.opt, args.sched)
    check_model(args.model, args.num_classes, args.img_size, -(-args.batch_size // args.world_size))
    args.transform = {"scale": args.scale and tuple(args.scale), "hflip": args.hflip, "augment": not args.no_aug}
    create_task(args.task, training=True, labels=args.labels or args.val_labels, img_size=args.img_size, **args.transform)


def prepare_launch(args: argparse.Namespace) -> None:
    """Which device, how many processes, threads and workers."""
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
        args.workers = min(8, max(1, cores // args.nproc_per_node))
    if not args.evaluate:
        runs.check_output(Path(args.output))
    if args.name is not None:
        runs.check_name(Path(args.output), args.name, args.resume)


def prepare_resume(args: argparse.Namespace) -> None:
    """Find and read the checkpoint to go on from; flags that were left out take its values."""
    output, path = Path(args.output), Path(args.resume)
    if args.resume == "auto":
        folder = output / args.name if args.name else find_run(args)
        if folder is None or not runs.has_checkpoint(folder):
            args.messages.append(f"--resume auto: no checkpoint fits in {output if folder is None else folder}, starting afresh")
            args.folder = folder if folder is not None and folder.exists() else None
            return
        path = folder
    path = checkpoint.resolve(path)
    saved, warning = checkpoint.load(path)
    if warning:
        args.messages.append(f"warning: {warning}")
    flags.check_contradictions(args, saved["flags"])
    flags.restore(args, saved["flags"])
    args.checkpoint = saved
    args.folder = None if args.evaluate else runs.folder_of(path)
    if saved["world_size"] == args.world_size and saved["num_threads"] != args.num_threads:
        then, now = saved["num_threads"], args.num_threads
        args.messages.append(f"warning: {then} threads a process then, {now} now: sums may round differently")
    args.messages.append(f"going on from {path}: step {saved['progress']['step']}, {saved['stream']['samples_seen']:,} samples seen")


def find_run(args: argparse.Namespace) -> Path | None:
    """The run that --resume auto means without --name."""
    if not args.data:
        raise ValueError("--resume auto needs --data or --name to know which run it is")
    args.shards = load_shards(args.data)
    return runs.find_last_run(Path(args.output), shards_fingerprint(args.shards), args.model)


def prepare_data(args: argparse.Namespace) -> None:
    """Shards, classes, picture size, batch size: from the flags, the checkpoint, or the data itself."""
    saved = args.checkpoint or {}
    wanted = "val_data" if args.evaluate else "data"
    if getattr(args, wanted) is None:
        raise ValueError(f"--{wanted.replace('_', '-')} is missing: name the shards, for example 'shards/{{000..099}}.tar'")
    args.labels, names = None, saved.get("class_names")
    if args.classes and "classes" in args.explicit:
        names = read_classes(args.classes)
    classes: dict[str, Any] = {"classes": names, "num_classes": args.num_classes}
    if not args.evaluate:
        args.shards = args.shards or load_shards(args.data)
        args.labels = resolve_labels(args.shards, args.label, **classes)
        classes = {"classes": args.labels.names, "num_classes": args.labels.num_classes}
    args.val_shards = load_shards(args.val_data) if args.val_data else []
    args.val_labels = resolve_labels(args.val_shards, args.label, **classes) if args.val_shards else None
    args.num_classes = (args.labels or args.val_labels).num_classes
    main_shards = args.val_shards if args.evaluate else args.shards
    args.img_size = args.img_size or default_img_size(main_shards)
    plan = Plan(np.array([shard.num_samples for shard in main_shards]), args.epochs, args.seed, True, args.shuffle_block, args.lanes)
    if saved and not args.evaluate:
        check_same_data(args, saved)
    args.batch_size = args.batch_size or min(256, plan.num_samples)
    if args.batch_size < args.world_size:
        raise ValueError(f"--batch-size {args.batch_size} is the global batch, and smaller than the {args.world_size} processes: raise it")
    args.lr = default_lr(args.opt, args.batch_size) if args.lr is None else args.lr
    args.warmup_epochs = min(1.0, args.epochs / 10) if args.warmup_epochs is None else args.warmup_epochs
    args.total = 0 if args.evaluate else plan.num_positions
    seen = saved["stream"]["samples_seen"] if saved else 0
    step = saved["progress"]["step"] if saved else 0
    args.messages += describe(args, plan.num_samples)
    class_names = args.labels and args.labels.names and list(args.labels.names)
    args.facts = {"class_names": class_names, "flags": flags.kept(args), "num_threads": args.num_threads}
    args.start_facts = {
        "world_size": args.world_size, "num_samples": plan.num_samples, "num_shards": len(main_shards), "num_classes": args.num_classes,
        "batch_size": args.batch_size, "total_steps": 0 if args.evaluate else step + plan.num_steps(seen, args.batch_size),
        "model": args.model, "img_size": args.img_size, "lr": args.lr, "workers": args.workers, "device": args.device,
        "samples_seen": seen, "fingerprint": shards_fingerprint(main_shards),
    }  # fmt: skip
    if args.checkpoint and not args.evaluate and seen >= args.total:
        raise runs.AlreadyFinished(f"--resume {args.resume}: this run is finished, all {args.epochs} epochs are trained; raise --epochs for more")


def check_same_data(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Raises ValueError where the shards are not those of the checkpoint."""
    try:
        check_fingerprint(saved["stream"]["fingerprint"], shards_fingerprint(args.shards))
    except ValueError as error:
        raise ValueError(f"--resume: {error}{runs.first_difference(args.folder, args.shards) if args.folder else ''}") from error


def shares(batch_size: int, world_size: int) -> str:
    """How a global batch is cut: "4 x 64", or "3 processes, 85 or 86 each"."""
    low, rest = divmod(batch_size, world_size)
    return f"{world_size} processes, {low} or {low + 1} each" if rest else f"{world_size} x {low}"


def describe(args: argparse.Namespace, num_samples: int) -> list[str]:
    """What was chosen, for the first lines."""
    shards = args.val_shards if args.evaluate else args.shards
    labels = args.val_labels if args.evaluate else args.labels
    some = f" ({', '.join(labels.names[:5])}{', ...' if len(labels.names) > 5 else ''})" if labels.names else ""
    lines = [
        f"{num_samples:,} samples in {len(shards):,} shards, {args.num_classes} classes{some}, pictures of {args.img_size}x{args.img_size}",
        f"model {args.model}, {args.opt} lr {args.lr:g}, {args.epochs} epochs, {args.device}, {args.workers} workers a process",
    ]
    lines += [f"warning: {shard.path}: {shard.damage}" for shard in [*args.shards, *args.val_shards] if shard.damage]
    if args.batch_size > num_samples:
        lines.append(f"warning: the global batch of {args.batch_size} exceeds the {num_samples} samples: a step holds several epochs")
    if not args.val_shards:
        lines.append("no --val-data: no evaluation, and no best.pt")
    return lines


def cli(argv: list[str] | None = None) -> int:
    """The command: returns the exit code."""
    parsed_args = flags.parse_args(argv)
    try:
        prepare(parsed_args)
    except runs.AlreadyFinished as finished:
        print(finished)
        return 0
    except (ValueError, OSError) as error:
        print(f"run.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if distributed.under_torchrun():
        process_fn(distributed.torchrun_place()[2], parsed_args)
        return 0
    parsed_args.launcher = os.getpid()
    store = None
    if parsed_args.dist_url is None:
        store, parsed_args.store_port = distributed.host_store()
    world_size = parsed_args.nproc_per_node
    context = mp.spawn(process_fn, args=(parsed_args,), nprocs=world_size, join=False)
    code = distributed.supervise(context)
    del store  # it must outlive the ranks
    return code


if __name__ == "__main__":
    try:
        sys.exit(cli())
    except KeyboardInterrupt:
        sys.exit(distributed.INTERRUPTED)
