"""Train a PyTorch model on many processes straight from WebDataset tar shards.

The story of a run, from `cli` on: flags -> `prepare` in the parent (a mistake is one line and exit 2) -> `mp.spawn(process_fn)` ->
`main` in every process: loaders, model, optimizer, training, evaluation, checkpoints, test.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp

from data import build_loader
from engine import checkpoint, distributed, flags, launcher, runs, weights
from engine.dry_run import dry_run
from engine.ema import Ema
from engine.evaluate import evaluate
from engine.flag_types import split_interval
from engine.forward import Forward
from engine.handshake import check_same
from engine.limits import Setting, smaller_shards
from engine.losses import LOSSES
from engine.mixing import Mixing
from engine.optim import create_optimizer, lr_at
from engine.precise_bn import refresh_batch_norm
from engine.predictions import TEST_FILE, VAL_FILE
from engine.prepare import AlreadyFinished, prepare
from engine.progress import Progress
from engine.report import Report
from engine.saver import Saver
from engine.settings import has_clips
from engine.step import Step
from engine.train import Trainer
from engine.views import answer_views
from engine.waits import Waits
from models import create_model


def main(args: argparse.Namespace) -> None:
    """One process of a run, from joining the others to the last line."""
    stop = launcher.StopRequest(args.launcher, at_once=args.evaluate)
    torch.set_num_threads(args.num_threads)  # set, not inherited: sums in another number of parts round differently
    ranks = distributed.start(
        args.local_rank, nproc=args.nproc_per_node, nnodes=args.nnodes, node_rank=args.node_rank, dist_url=args.dist_url,
        store_port=args.store_port, backend=args.dist_backend, device=args.device, seconds=args.dist_timeout, tf32=args.tf32,
    )  # fmt: skip
    check_same(ranks, args.agreed, {"shards": args.shards, "validation shards": args.val_shards, "test shards": args.test_shards})
    first = ranks.rank == 0
    saved = ranks.broadcast(checkpoint.read(args.checkpoint) if first and args.checkpoint else None)
    folder = ranks.broadcast(runs.open_folder(**args.opening) if first else None)
    progress = Progress.from_state(saved["progress"], ranks.rank, ranks.device) if saved else Progress()
    report = Report(
        folder, rank=ranks.rank, total=args.total, epochs=args.epochs, audit=args.audit,
        start=args.facts["samples_seen"], resume_step=progress.step if saved else None,
        world_size=ranks.world_size, class_names=args.kept["class_names"],
    )  # fmt: skip
    report.start(args.messages, **args.facts)

    first_here = ranks.rank - ranks.local_rank
    loading = {"batch_size": args.batch_size, "task": args.task, "img_size": args.img_size, "rank": ranks.rank,
               "world_size": ranks.world_size, "num_workers": args.workers, "pin_memory": args.device == "cuda",
               "local_ranks": range(first_here, first_here + args.nproc_per_node), "transform": args.transform}  # fmt: skip
    stream = {"labels": args.labels, "training": True, "seed": args.seed, "shuffle": not args.no_shuffle,
              "shuffle_block": args.shuffle_block, "lanes": args.lanes, "reader": args.reader, **loading}  # fmt: skip
    val_loader: Any = build_loader(args.val_shards, labels=args.val_labels, training=False, **loading) if args.val_shards else None
    testing = {"labels": args.test_labels, "training": False, **loading, **args.testing}
    test_loader: Any = build_loader(args.test_shards, **testing) if args.test_shards else None

    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = create_model(args.model, args.num_classes, args.img_size, **args.model_options)
    start = ranks.broadcast(weights.read_start(args.model, args.pretrained, args.init_from) if first and not saved else None)
    if saved:
        model.load_state_dict(saved["model"])
    elif start:
        weights.load_start(model, **start)
    model = weights.place(model, ranks.device, frozen=args.freeze or (), channels_last=args.channels_last, sync_bn=args.sync_bn)
    ema = Ema(model, args.ema, saved and saved.get("ema")) if args.ema else None
    forward = Forward(ranks.device, amp=args.amp, channels_last=args.channels_last)

    judged = ema.model if ema else model
    judge = partial(evaluate, judged, ranks=ranks, forward=forward, loss=LOSSES[args.loss])

    def run_evaluation() -> dict[str, Any]:
        if args.precise_bn and not args.evaluate:
            refresh_batch_norm(judged, build_loader(args.shards, **stream), args.precise_bn, ranks, forward)
        file = folder / VAL_FILE if args.save_predictions else None
        return judge(loader=val_loader, on_batch=lambda batch: report.batch(progress.step, batch, split="val"), write_to=file)

    def run_test() -> None:
        answer = partial(forward.answer, judged)
        if args.views:
            answer = partial(answer_views, answer, **args.views)
        told = {"on_batch": lambda batch: report.batch(progress.step, batch, split="test"), "write_to": folder / TEST_FILE}
        report.test(step=progress.step, **judge(loader=test_loader, answer=answer, **told))

    if args.evaluate:
        if val_loader is not None:
            report.evaluation(epoch=saved["epoch"], step=progress.step, **run_evaluation())
        if test_loader is not None:
            run_test()
        report.end("evaluated", steps=progress.step, samples_seen=args.facts["samples_seen"], best=progress.best)
        return distributed.shut_down()

    profile = ranks.broadcast(args.profile)
    loader = build_loader(args.shards, epochs=args.epochs, profile=profile, **stream)
    optimizer = create_optimizer(
        model, args.opt, args.lr, args.momentum, args.weight_decay, layer_decay=args.layer_decay,
        backbone_scale=1.0 if args.backbone_lr is None else args.backbone_lr / args.lr,
    )  # fmt: skip
    step = Step(
        model=distributed.wrap(model, ranks, args.find_unused_parameters, args.compile), optimizer=optimizer, ema=ema, forward=forward,
        schedule=partial(lr_at, total=args.total, warmup=args.warmup_epochs * loader.num_samples, base_lr=args.lr, **args.curve),
        loss=LOSSES[args.loss], smoothing=args.smoothing, mixing=Mixing(args.mixup, args.cutmix, args.num_classes),
        grad_accum=args.grad_accum, clip_grad=args.clip_grad, seed=args.seed, rank=ranks.rank, world_size=ranks.world_size,
    )  # fmt: skip
    if saved:
        step.load(saved["optimizer"], saved.get("scaler"))
        loader.load_state_dict(saved["stream"], step=progress.step)
    finished = Trainer(
        model=model, step=step, loader=loader, ranks=ranks, report=report, progress=progress, stop=stop,
        saver=Saver(folder / "checkpoints", keep=args.checkpoint_hist, go_on=args.if_disk_full == "go-on", tell=report.console.line)
        if first else None,
        waits=Waits(ranks.device, num_workers=args.workers, profile=profile),
        setting=Setting(args.workers, args.num_threads, args.device, smaller_shards(args.img_size, has_clips(args))),
        evaluate=run_evaluation if val_loader is not None else None, val_interval=args.val_interval, facts=args.kept, max_bad=args.max_bad,
        log_interval=args.log_interval, checkpoint_every=split_interval(args.checkpoint_interval),
    ).run()  # fmt: skip
    if finished and test_loader is not None:
        run_test()
    report.end("finished" if finished else "stopped", steps=progress.step, samples_seen=loader.position, best=progress.best)
    distributed.shut_down()
    if not finished:
        raise SystemExit(launcher.STOPPED)


def process_fn(local_rank: int, args: argparse.Namespace) -> None:
    """What each process runs: `main`, with one line in place of a traceback where the code is not at fault."""
    args = copy.copy(args)
    args.local_rank = local_rank
    try:
        main(args)
    except Exception as error:
        launcher.end_workers()
        reason = launcher.plain_reason(error)
        if reason is None:
            raise
        raise launcher.Stopped(reason) from None


def cli(argv: list[str] | None = None) -> int:
    """The command: returns the exit code."""
    parsed_args = flags.parse_args(argv)
    try:
        prepare(parsed_args)
        if parsed_args.dry_run:
            dry_run(parsed_args)
            return 0
    except AlreadyFinished as finished:
        print(finished)
        return 0
    except (ValueError, OSError) as error:
        return complain(error, 2)
    if distributed.under_torchrun():
        code = 0
        try:
            process_fn(distributed.torchrun_place()[2], parsed_args)
        except launcher.Stopped as error:
            code = complain(error, launcher.FAILED)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        sys.stdout.flush()
        launcher.leave(code)  # torchrun waits for it before it starts the ranks again
    parsed_args.launcher = os.getpid()
    store = None
    if parsed_args.dist_url is None:
        store, parsed_args.store_port = distributed.host_store()
    world_size = parsed_args.nproc_per_node
    with launcher.scratch_folder():
        with launcher.ctrl_c_ignored():
            context = mp.spawn(process_fn, args=(parsed_args,), nprocs=world_size, join=False)
        code = launcher.supervise(context, first_rank=parsed_args.node_rank * world_size)
    del store  # it must outlive the ranks
    return code


def complain(error: Exception, code: int) -> int:
    """Say in one line on stderr what is wrong."""
    print(f"run.py: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    try:
        sys.exit(cli())
    except KeyboardInterrupt:
        sys.exit(launcher.INTERRUPTED)
