"""The stages of the pipeline between a batch's plan and its tensors.

in: BatchPlan  ->  out: the batch, a dict of tensors and of what is known of each slot
Invariant: a batch keeps its slots: what can't be read, decoded or labelled is masked and named, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .block import Layout, new_tensors, pack
from .columns import Columns, columns_of, parse_samples
from .errors import DataError, SampleError
from .ids import Ids
from .plan import Plan, Slots
from .shards import Shard
from .store import ShardFiles
from .tar import parse_sample
from .timing import COLLATE, HAND_OVER, READ, STAGES, TRANSFORM, lap, take

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One rank's batch before it is read: the step number, how many epochs it completes, its slots."""

    step: int
    epoch_end: int
    slots: Slots


@dataclass(slots=True)
class RawBatch:
    """One rank's batch as read: encoded sample dicts (`__key__`, `__url__`, `__slot__`, fields), what is known of each slot."""

    plan: BatchPlan
    samples: list[dict[str, Any]]
    ids: Any  # a sequence of (shard file name, index, key), one a slot
    errors: list[tuple[int, DataError]]
    columns: Columns | None = None  # in place of samples, where they are read all at once


@dataclass(frozen=True, slots=True)
class ReadColumns:
    """Stage 2 of tasks that collate a batch at once: the samples read into one buffer, neighbours with one read."""

    shards: Sequence[Shard]
    files: ShardFiles

    def __call__(self, plans: Iterable[BatchPlan]) -> Iterator[RawBatch]:
        for plan in plans:
            raw = self._read(plan)
            lap(READ)
            yield raw

    def _read(self, plan: BatchPlan) -> RawBatch:
        shard, index = plan.slots.shard, plan.slots.index
        self.files.remote.read_ahead(self.shards, shard, index)
        data, place, size, offset = self.files.read_many(self.shards, shard, index)
        self.files.remote.close()  # what nobody holds may be evicted
        columns, keys, errors = parse_samples(data, place, size, offset, lambda i: self.shards[shard[i]].name)
        names = {number: self.shards[number].name for number in set(shard.tolist())}
        return RawBatch(plan, [], Ids(names, shard, index, keys), errors, columns)


@dataclass(frozen=True, slots=True)
class ReadSamples:
    """Stage 2: every slot's sample, one read each, grouped into fields."""

    shards: Sequence[Shard]
    files: ShardFiles

    def __call__(self, plans: Iterable[BatchPlan]) -> Iterator[RawBatch]:
        for plan in plans:
            raw = RawBatch(plan, [], [("", 0, "")] * len(plan.slots.shard), [])
            self.files.remote.read_ahead(self.shards, plan.slots.shard, plan.slots.index)
            # in the order of the disk; slots keep their places through __slot__
            for slot in np.lexsort((plan.slots.index, plan.slots.shard)).tolist():
                self._read(raw, slot, self.shards[plan.slots.shard[slot]], int(plan.slots.index[slot]))
            self.files.remote.close()
            raw.samples.sort(key=lambda sample: sample["__slot__"])
            lap(READ)
            yield raw

    def _read(self, raw: RawBatch, slot: int, shard: Shard, index: int) -> None:
        data, offset = self.files.read(shard, index)
        try:
            key, fields = parse_sample(data, offset, shard.name)
        except DataError as error:
            key = error.key
            raw.errors.append((slot, error))
        else:
            raw.samples.append({"__key__": key, "__url__": shard.path, "__slot__": slot, **fields})
        raw.ids[slot] = (shard.name, index, key)


@dataclass(frozen=True, slots=True)
class RunStages:
    """Stage 3: the user's own webdataset stages, over the samples of one batch at a time."""

    stages: Sequence[Callable[[Iterator[dict]], Iterable[dict]]]

    def __call__(self, batches: Iterable[RawBatch]) -> Iterator[RawBatch]:
        for raw in batches:
            offered = {sample["__slot__"] for sample in raw.samples}
            stream: Iterable[dict] = ({k: bytes(v) if isinstance(v, memoryview) else v for k, v in s.items()} for s in raw.samples)
            for stage in self.stages:
                stream = stage(iter(stream))
            raw.samples = list(stream)
            for sample in raw.samples:
                slot = sample.get("__slot__")
                if slot not in offered:
                    raise ValueError(
                        f"a stage returned a sample with __slot__ {slot!r}, which is unknown or came twice; "
                        "a stage may change or drop samples, but must hand on each one's __slot__"
                    )
                offered.discard(slot)
            lap(STAGES)
            yield raw


@dataclass(frozen=True, slots=True)
class AssembleBatch:
    """Stage 4: decode, transform and label every sample straight into the batch's memory; mask what can't be.

    The memory is as the task's `new_batch` makes it; a task with `collate` fills a whole batch itself.
    """

    plan: Plan
    task: Any
    training: bool
    shared: bool  # the batch goes to another process
    piped: int = 0  # bytes of a block that is sent through the pipe

    def __call__(self, batches: Iterable[RawBatch]) -> Iterator[Batch]:
        fill = self._collate if hasattr(self.task, "collate") else _Writer(self.plan, self.task, self.training)
        for raw in batches:
            yield self._assemble(raw, fill)

    def _assemble(self, raw: RawBatch, fill: Callable[[RawBatch, Allocate], tuple[dict[str, torch.Tensor], np.ndarray]]) -> Batch:
        slots = raw.plan.slots

        def allocate(layout: Layout) -> dict[str, torch.Tensor]:
            num = len(slots.valid)
            ours: Layout = {"valid": (torch.bool, (num,)), "epoch": (torch.int64, (num,)), "sample": (torch.int64, (num,))}
            return new_tensors({**layout, **ours}, self.shared, self.piped)

        tensors, written = fill(raw, allocate)
        for name, value in (("valid", slots.valid & written), ("epoch", slots.epoch), ("sample", slots.sample)):
            tensors[name].numpy()[:] = value
        # a slot masked by the plan is read validly elsewhere, and reported there
        errors = [(slot, error) for slot, error in sorted(raw.errors, key=lambda pair: pair[0]) if slots.valid[slot]]
        batch = {
            **tensors,
            "ids": raw.ids,
            "step": raw.plan.step,
            "epoch_end": raw.plan.epoch_end,
            "errors": [_describe(raw.ids[slot], error) for slot, error in errors],
            "error_slots": [slot for slot, _ in errors],
        }
        lap(COLLATE)
        sent = pack(batch) if self.shared else batch
        lap(HAND_OVER)
        return {**sent, "times": take()}

    def _collate(self, raw: RawBatch, allocate: Allocate) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        valid = raw.plan.slots.valid
        columns = columns_of(raw.samples, len(valid)) if raw.columns is None else raw.columns
        tensors, written, errors = self.task.collate(columns, allocate)
        raw.errors.extend(errors)
        copy_into_holes([tensors[name] for name in self.task.same_shape if name in tensors], written, valid)
        return tensors, written


def _describe(where: tuple[str, int, str], error: DataError) -> SampleError:
    return SampleError(*where, error.field, error.reason)


Allocate = Callable[[Layout], dict[str, torch.Tensor]]


class _Writer:
    """Fills a batch sample by sample, with the task's `write`."""

    def __init__(self, plan: Plan, task: Any, training: bool) -> None:
        self.plan, self.task, self.training = plan, task, training
        self.template: dict[str, torch.Tensor] = {}
        self.layout: Layout = {}

    def __call__(self, raw: RawBatch, allocate: Allocate) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        slots = raw.plan.slots
        if not self.layout:  # every batch has the same number of slots
            made = self.task.new_batch(len(slots.valid))
            self.layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}
            self.template = {name: tensor for name, tensor in made.items() if tensor.any()}
        tensors = allocate(self.layout)
        for name, value in self.template.items():
            tensors[name].copy_(value)
        written = np.zeros(len(slots.valid), bool)
        lap(COLLATE)
        rngs = self.plan.sample_rngs(slots.epoch, slots.sample) if self.training else None
        for sample in raw.samples:
            slot = sample["__slot__"]
            try:
                self.task.write(tensors, slot, sample, rngs(slot) if rngs else None)
                written[slot] = True
            except DataError as error:
                raw.errors.append((slot, error))
            lap(TRANSFORM)
        copy_into_holes([tensors[name] for name in self.layout], written, slots.valid)
        return tensors, written


def copy_into_holes(tensors: Iterable[torch.Tensor], written: np.ndarray, valid: np.ndarray) -> None:
    """Fill every unwritten slot with a copy of the first good one (else zeros): batch norm must see ordinary data."""
    holes = np.flatnonzero(~written)
    good = np.flatnonzero(written & valid)
    for tensor in tensors:
        for hole in holes.tolist():
            if good.size:
                tensor[hole] = tensor[good[0]]
            else:
                tensor[hole].zero_()
