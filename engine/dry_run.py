"""`--dry-run`: everything that a run does before it trains, told in lines.

in: the flags, prepared  ->  out: lines: data, classes and how many samples each has, steps, memory, the loader's speed, one batch
through model and loss
Invariant: nothing is written but indexes; the first problem is an exception, as in a run.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data import Shard, build_loader
from data.labels import LabelMap
from data.scan import count_labels
from data.tasks import has_several_labels
from models import create_model

from . import weights
from .console import format_rate, format_seconds
from .forward import Forward
from .losses import LOSSES, masked_losses
from .report import count_workers
from .settings import num_frames

SECONDS = 5.0  # how long the loader is timed, at most
SHOWN = 12  # classes listed
STATES = {"sgd": 1, "adam": 2, "adamw": 2}  # tensors that an optimizer keeps for each weight


def dry_run(args: argparse.Namespace, tell: Callable[[str], None] = print) -> None:
    """Tell all of it. Raises ValueError."""
    if args.stream:
        raise ValueError("--dry-run counts samples and classes, which --stream does not know before it has read them: leave one out")
    for line in args.messages:
        tell(line)
    for what, shards, labels in (("training", args.shards, args.labels), ("validation", args.val_shards, args.val_labels)):
        if shards:
            tell(f"{what} classes: {describe_classes(shards, labels, has_several_labels(args.task))}")
    if args.evaluate:
        return
    per_epoch = args.facts["num_samples"] / args.batch_size
    tell(f"{per_epoch:,.1f} steps an epoch, {args.facts['total_steps']:,} in all, {args.warmup_epochs * per_epoch:,.0f} of them warm-up")
    tell(describe_memory(args))
    loader = build_loader(
        args.shards, batch_size=args.batch_size, task=args.task, img_size=args.img_size, labels=args.labels, transform=args.transform,
        epochs=args.epochs, seed=args.seed, shuffle=not args.no_shuffle, world_size=args.world_size, num_workers=args.workers,
    )  # fmt: skip
    batch, rate, bad = time_loader(loader)
    tell(
        f"the loader gives {format_rate(rate)} samples/s to a process that does nothing else, with {count_workers(args.workers)}"
        f"{f'; {len(bad)} bad samples among them, the first is {bad[0]}' if bad else ''}"
    )
    seconds, loss = try_batch(args, batch)
    samples = len(batch["valid"])
    epoch = format_seconds(args.facts["num_samples"] / args.world_size / min(rate, samples / seconds))
    tell(f"one batch of {samples} through model, loss and backward: loss {loss:.4f}, {seconds:.2f} s; an epoch would take {epoch} or more")
    tell("nothing was trained")


def describe_classes(shards: Sequence[Shard], labels: LabelMap, several: bool) -> str:
    """How many samples each class has, the largest first; and what is wrong with that."""
    counts: Counter[int] = Counter()
    unknown = 0
    for label, count in count_labels(shards, labels.source, several=several).items():
        try:
            counts[labels.index(label)] += count
        except ValueError:
            unknown += count
    largest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{labels.names[number] if labels.names else number} {count:,}" for number, count in largest[:SHOWN])
    more = f", and {len(counts) - SHOWN} more with {largest[-1][1]:,} or more" if len(counts) > SHOWN else ""
    empty = labels.num_classes - len(counts)
    missing = f"; {empty} of {labels.num_classes} classes have no sample" if empty else ""
    return f"{shown}{more}{missing}{f'; {unknown:,} labels are of no class' if unknown else ''}"


def describe_memory(args: argparse.Namespace) -> str:
    """An estimate of what training needs in one process, by part."""
    slots = -(-args.batch_size // args.world_size)
    copies = 2 + STATES[args.opt] + bool(args.ema)  # weights and gradients
    weight_bytes = 4 * args.cost.parameters * copies
    kept = args.cost.saved * -(-slots // args.grad_accum) // (1 if args.amp == "off" else 2)
    pictures = 15 * slots * args.img_size**2 * (num_frames(args) or 1)  # uint8, and float32 as the model's input
    parts = f"weights, gradients, optimizer {_gib(weight_bytes)}, activations {_gib(kept)}, pictures {_gib(pictures)}"
    return f"memory of a process, estimated: {_gib(weight_bytes + kept + pictures)} ({parts})"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def time_loader(loader: Any) -> tuple[dict[str, Any], float, list[Any]]:
    """(the first batch, samples a second after it, bad samples), over an epoch or SECONDS."""
    first: dict[str, Any] | None = None
    bad: list[Any] = []
    samples, started = 0, time.perf_counter()
    for batch in loader:
        bad += batch["errors"]
        if first is None:
            first, after_first = batch, time.perf_counter()
        else:
            samples += len(batch["valid"])
        if time.perf_counter() - after_first > SECONDS or batch["epoch_end"]:
            break
    assert first is not None
    now = time.perf_counter()
    return first, (samples / (now - after_first) if samples else len(first["valid"]) / (now - started)), bad


def try_batch(args: argparse.Namespace, batch: dict[str, Any]) -> tuple[float, float]:
    """Seconds and loss of a forward and a backward, on the device and in the precision that the run would have."""
    device = torch.device(args.device)
    torch.set_num_threads(args.num_threads)
    model = create_model(args.model, args.num_classes, args.img_size, **args.model_options)
    model = weights.place(model, device, frozen=args.freeze or (), channels_last=args.channels_last, sync_bn=False)
    forward = Forward(device, amp=args.amp, channels_last=args.channels_last)
    for _ in range(2):  # the first one also sets things up
        started = time.perf_counter()
        labels, valid = forward.move(batch["label"], batch["valid"])
        losses = masked_losses(LOSSES[args.loss], forward.answer(model, batch["image"]), labels, valid, args.smoothing)
        loss = losses.sum() / max(int(valid.sum()), 1)
        loss.backward()
        told = float(loss.detach())
    return time.perf_counter() - started, told
