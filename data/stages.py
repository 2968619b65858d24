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

from .errors import DataError, LoaderError, SampleError
from .plan import Plan, Slots
from .shards import Shard
from .store import ShardFiles
from .tar import parse_sample

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
    ids: list[tuple[str, int, str]]
    errors: list[tuple[int, DataError]]


@dataclass(frozen=True, slots=True)
class ReadSamples:
    """Stage 2: every slot's sample, one read each, grouped into fields."""

    shards: Sequence[Shard]
    files: ShardFiles

    def __call__(self, plans: Iterable[BatchPlan]) -> Iterator[RawBatch]:
        for plan in plans:
            raw = RawBatch(plan, [], [("", 0, "")] * len(plan.slots.shard), [])
            # in the order of the disk; slots keep their places through __slot__
            for slot in np.lexsort((plan.slots.index, plan.slots.shard)).tolist():
                self._read(raw, slot, self.shards[plan.slots.shard[slot]], int(plan.slots.index[slot]))
            raw.samples.sort(key=lambda sample: sample["__slot__"])
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
            yield raw


@dataclass(frozen=True, slots=True)
class AssembleBatch:
    """Stage 4: decode, transform and label every sample straight into the batch's memory; mask what can't be."""

    plan: Plan
    task: Any
    training: bool
    shared: bool  # the batch goes to another process

    def __call__(self, batches: Iterable[RawBatch]) -> Iterator[Batch]:
        for raw in batches:
            yield self._assemble(raw)

    def _assemble(self, raw: RawBatch) -> Batch:
        slots = raw.plan.slots
        tensors = self.task.new_batch(len(slots.valid))
        written = np.zeros(len(slots.valid), bool)
        for sample in raw.samples:
            slot = sample["__slot__"]
            rng = self.plan.sample_rng(int(slots.epoch[slot]), int(slots.sample[slot])) if self.training else None
            try:
                self.task.write(tensors, slot, sample, rng)
                written[slot] = True
            except DataError as error:
                raw.errors.append((slot, error))
        copy_into_holes(tensors, written, slots.valid)
        tensors["valid"] = torch.from_numpy(slots.valid & written)
        tensors["epoch"] = torch.from_numpy(slots.epoch)
        tensors["sample"] = torch.from_numpy(slots.sample)
        if self.shared:
            share(tensors)
        # a slot masked by the plan is read validly elsewhere, and reported there
        errors = [(slot, error) for slot, error in sorted(raw.errors, key=lambda pair: pair[0]) if slots.valid[slot]]
        return {
            **tensors,
            "ids": raw.ids,
            "step": raw.plan.step,
            "epoch_end": raw.plan.epoch_end,
            "errors": [SampleError(*raw.ids[slot], error.field, error.reason) for slot, error in errors],
            "error_slots": [slot for slot, _ in errors],
        }


def share(tensors: dict[str, torch.Tensor]) -> None:
    """Move tensors into shared memory, in place. Raises LoaderError where there is none left.

    Here, not in torch's queue: its thread drops what it can't send, and the batch would be missing without a word.
    """
    try:
        for tensor in tensors.values():
            tensor.share_memory_()
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        raise LoaderError(
            f"no shared memory left for a batch of {size:.1f} MiB (each worker holds up to three): "
            "enlarge /dev/shm (docker run --shm-size), or use fewer --workers or a smaller --batch-size"
        ) from None


def copy_into_holes(tensors: dict[str, torch.Tensor], written: np.ndarray, valid: np.ndarray) -> None:
    """Fill every unwritten slot with a copy of the first good one (else zeros): batch norm must see ordinary data."""
    holes = np.flatnonzero(~written)
    good = np.flatnonzero(written & valid)
    for tensor in tensors.values():
        for hole in holes.tolist():
            if good.size:
                tensor[hole] = tensor[good[0]]
            else:
                tensor[hole].zero_()
