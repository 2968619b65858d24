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
from engine import checkpoint, distributed, flags, launcher, runs
from engine.evaluate import evaluate, predict
from engine.handshake import check_same
from engine.optim import create_optimizer, lr_at
from engine.predictions import Predictions
from engine.prepare import AlreadyFinished, prepare
from engine.progress import Progress
from engine.report import Report
from engine.settings import has_clips
from engine.train import Trainer, load_optimizer
from engine.views import answer_views
from models import create_model


def main(args: argparse.Namespace) -> None:
    """One process of a run, from joining the others to the last line."""
    stop = launcher.StopRequest(args.launcher, at_once=args.evaluate)
    torch.set_num_threads(args.num_threads)  # set, not inherited: sums in another number of parts round differently
    ranks = distributed.start(
        args.local_rank, nproc=args.nproc_per_node, nnodes=args.nnodes, node_rank=args.node_rank, dist_url=args.dist_url,
        store_port=args.store_port, backend=args.dist_backend, device=args.device, seconds=args.dist_timeout,
    )  # fmt: skip
    check_same(ranks, args.agreed, {"shards": args.shards, "validation shards": args.val_shards, "test shards": args.test_shards})
    first = ranks.rank == 0
    saved = ranks.broadcast(checkpoint.read(args.checkpoint) if first and args.checkpoint else None)
    folder = ranks.broadcast(runs.open_folder(**args.opening) if first else None)
    progress = Progress.from_state(saved["progress"], ranks.rank, ranks.device) if saved else Progress()
    report = Report(
        folder, rank=ranks.rank, total=args.total, epochs=args.epochs, audit=args.audit,
        start=args.facts["samples_seen"], resume_step=progress.step if saved else None,
    )  # fmt: skip
    report.start(args.messages, **args.facts)

    first_here = ranks.rank - ranks.local_rank
    loading = {"batch_size": args.batch_size, "task": args.task, "img_size": args.img_size, "rank": ranks.rank,
               "world_size": ranks.world_size, "num_workers": args.workers, "pin_memory": args.device == "cuda",
               "local_ranks": range(first_here, first_here + args.nproc_per_node), "transform": args.transform}  # fmt: skip
    val_loader = build_loader(args.val_shards, labels=args.val_labels, training=False, **loading) if args.val_shards else None
    testing = {"labels": args.test_labels, "training": False, **loading, **args.testing}
    test_loader = build_loader(args.test_shards, **testing) if args.test_shards else None
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = create_model(args.model, args.num_classes, args.img_size, **args.model_options).to(ranks.device)
    if saved:
        model.load_state_dict(saved["model"])

    def run_evaluation() -> dict[str, Any]:
        assert val_loader is not None
        return evaluate(model, val_loader, ranks, on_batch=lambda batch: report.batch(progress.step, batch, split="val"))

    def run_test() -> None:
        assert test_loader is not None
        predictions, answer = Predictions(), partial(predict, model=model, device=ranks.device)
        if has_clips(args):
            answer = partial(answer_views, answer, how=args.ensemble, at_once=args.batch_size // ranks.world_size)
        result = evaluate(
            model, test_loader, ranks, answer=answer, on_answer=predictions.add,
            on_batch=lambda batch: report.batch(progress.step, batch, split="test"),
        )  # fmt: skip
        predictions.write(folder, ranks)
        report.test(step=progress.step, **result)

    if args.evaluate:
        if val_loader is not None:
            report.evaluation(epoch=saved["epoch"], step=progress.step, **run_evaluation())
        if test_loader is not None:
            run_test()
        report.end("evaluated", steps=progress.step, samples_seen=args.facts["samples_seen"], best=progress.best)
        return distributed.shut_down()

    loader = build_loader(
        args.shards, labels=args.labels, training=True, epochs=args.epochs, seed=args.seed, shuffle=not args.no_shuffle,
        shuffle_block=args.shuffle_block, lanes=args.lanes, reader=args.reader, **loading,
    )  # fmt: skip
    optimizer = create_optimizer(model, args.opt, args.lr, args.momentum, args.weight_decay)
    if saved:
        load_optimizer(optimizer, saved["optimizer"])
        loader.load_state_dict(saved["stream"], step=progress.step)
    warmup = args.warmup_epochs * loader.num_samples
    finished = Trainer(
        model=distributed.wrap(model, ranks), loader=loader, optimizer=optimizer, ranks=ranks, report=report, progress=progress, stop=stop,
        schedule=partial(lr_at, total=args.total, warmup=warmup, base_lr=args.lr, warmup_lr=args.warmup_lr, sched=args.sched),
        evaluate=run_evaluation if val_loader is not None else None, facts=args.kept, max_bad=args.max_bad,
        log_interval=args.log_interval, checkpoint_interval=args.checkpoint_interval,
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
