"""Shards and a plan to batches: the `wds.DataPipeline` that runs in a loader worker, and the loader around it.

in: shard patterns, a place in the stream, rank and world size  ->  out: dicts of tensors with a fixed shape and a mask
Invariant: batch n of a start is made by worker n modulo num_workers, whole; so the batches come in the plan's order for any
number of workers, and every rank yields the same number of them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, get_worker_info

from . import timing
from .block import PIPED, unpack, widen_pipe
from .errors import LoaderError, ShardError
from .plan import SHUFFLE_BLOCK, Plan, fingerprint
from .prefetch import Prefetch, check_room, machine_lanes
from .records import find_tokens
from .shards import Shard, describe_empty, resolve_shards
from .stages import AssembleBatch, Batch, BatchPlan, ReadColumns, ReadSamples, RunStages
from .store import ShardFiles
from .tasks import create_task, default_img_size, has_several_labels, read_classes, resolve_labels, settings_of
from .urls import relative_names
from .workers import end_workers, forking, init_worker, received

STATE_VERSION = 1
PLANNED = 4096  # slots at a time


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Stage 1: the plans of the batches that this worker makes, from position `start` on."""

    plan: Plan
    start: int
    step: int
    batch_size: int
    rank: int
    world_size: int
    profile: int = 0  # steps whose spans are kept

    def __call__(self) -> Iterator[BatchPlan]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        timing.restart(worker, spans=self.profile > 0)
        mine = range(worker, self.plan.num_steps(self.start, self.batch_size), num_workers)
        several = max(1, PLANNED * self.world_size // self.batch_size)
        for first in range(0, len(mine), several):
            numbers = mine[first : first + several]
            starts = [self.start + n * self.batch_size for n in numbers]
            planned = self.plan.batches(starts, self.batch_size, self.rank, self.world_size)
            for n, position, slots in zip(numbers, starts, planned, strict=True):
                timing.lap(timing.WAIT)
                if n >= self.profile:
                    timing.end_spans()
                yield BatchPlan(self.step + n, self.plan.epochs_completed(position, self.batch_size), slots)


def as_is(batch: Batch) -> Batch:
    """The collate function of batches that are made whole in the worker."""
    return batch


class Loader:
    """An iterable over one rank's batches, with a state that says what has been consumed. Made by `build_loader`.

    Iterating starts at the state's position with fresh workers. A training stream ends after its last epoch; an evaluation
    pass begins anew each time. `len()` is the number of steps left.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        plan: Plan,
        task: Any,
        *,
        batch_size: int,
        training: bool,
        rank: int,
        world_size: int,
        explicit: frozenset[str] = frozenset(),
        stages: Sequence[Callable] = (),
        reader: Any = None,
        local_ranks: range | None = None,
        profile: int = 0,
        **loading: Any,
    ) -> None:
        self.shards, self.plan, self.task, self.profile = shards, plan, task, profile
        self.batch_size, self.training, self.rank, self.world_size = batch_size, training, rank, world_size
        self.fingerprint = shards_fingerprint(shards)
        self._explicit, self._stages, self._loading = explicit, tuple(stages), loading
        self._reader = reader.of_rank(rank, world_size) if reader else None  # in place of ReadSamples
        self._local_ranks = local_ranks
        self._position = self._step = 0

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self.plan.num_samples

    @property
    def position(self) -> int:
        """The stream's position after the last batch handed over (samples_seen)."""
        return self._position

    @property
    def is_exact(self) -> bool:
        """Whether each sample comes once an epoch; a stream promises no such thing."""
        return self._reader is None

    def __len__(self) -> int:
        return self.plan.num_steps(self._position, self.batch_size)

    def _pipeline(self) -> Any:
        from webdataset import DataPipeline

        source = PlanSource(self.plan, self._position, self._step, self.batch_size, self.rank, self.world_size, self.profile)
        shared = self._loading.get("num_workers", 0) > 0
        # the user's stages take sample dicts
        read = ReadColumns if hasattr(self.task, "collate") and not self._stages else ReadSamples
        stages = [RunStages(self._stages)] if self._stages else []
        piped = 0 if self._loading.get("pin_memory") else PIPED  # torch pins only what is a tensor when it comes
        assemble = AssembleBatch(self.plan, self.task, self.training, shared, piped)
        return DataPipeline(source, self._reader or read(self.shards, ShardFiles()), *stages, assemble)

    def __iter__(self) -> Iterator[Batch]:
        if len(self) == 0:
            if self.training:
                warnings.warn(f"all {self.plan.epochs} epochs of this loader are consumed: build it with more epochs", stacklevel=2)
                return
            self._position = self._step = 0
        pipeline = self._pipeline()
        loader: DataLoader = DataLoader(
            pipeline, batch_size=None, collate_fn=cast(Any, as_is), worker_init_fn=init_worker, **self._loading
        )
        # alone in its process there is nothing for torch's loader to do, and it takes a tenth of a millisecond for that
        source = loader if loader.num_workers or loader.pin_memory else pipeline
        with forking() if loader.num_workers else nullcontext():
            batches = iter(source)
        if workers := getattr(batches, "_workers", None):
            Finalize(batches, end_workers, (list(workers),), exitpriority=10)
            widen_pipe(cast(Any, batches)._worker_result_queue._reader.fileno())
        lanes = machine_lanes(self.plan, self._local_ranks, self.world_size)
        with Prefetch(self.shards, self.plan, self._position, lanes) as prefetch:
            for batch in map(unpack, received(batches, workers or [])):
                if batch["step"] != self._step:
                    raise LoaderError(f"step {self._step} never came from its worker, step {batch['step']} did: see what the workers said")
                # handed over is consumed: a state taken in the loop's body includes this batch
                self._position = min(self._position + self.batch_size, self.plan.num_positions)
                self._step += 1
                prefetch.at(self._position)
                yield batch
        if len(self):
            raise LoaderError(f"the workers ended {len(self)} steps early: see what they said")

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: under 1 KB, and good for any world size, number of workers and batch size."""
        plan = self.plan
        return {
            "version": STATE_VERSION,
            "seed": plan.seed,
            "samples_seen": self._position,
            "shuffle": plan.shuffle,
            "shuffle_block": plan.shuffle_block,
            "lanes": plan.lanes,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: dict[str, Any], step: int | None = None) -> None:
        """Go on where `state` was taken; `step` is the number of the next step (default: as if batch_size never changed).

        Raises ValueError for a state of other shards, and for a keyword given to `build_loader` that contradicts it.
        """
        check_fingerprint(state["fingerprint"], self.fingerprint)
        if state["version"] != STATE_VERSION:
            raise ValueError(f"the state has version {state['version']}, and this code reads version {STATE_VERSION}")
        settings = {name: state[name] for name in ("seed", "shuffle", "shuffle_block", "lanes")}
        for name, value in settings.items():
            mine = getattr(self.plan, name)
            if name in self._explicit and mine != value:
                raise ValueError(f"{name}={mine} contradicts the saved state's {value}: leave it out, or start afresh")
        self.plan = Plan(self.plan.counts, self.plan.epochs, **settings)
        self._position = int(state["samples_seen"])
        self._step = -(-self._position // self.batch_size) if step is None else step


def shards_fingerprint(shards: Sequence[Shard]) -> dict[str, int | str]:
    """The plan's fingerprint of these shards, by their paths below the folder common to all."""
    names = relative_names([shard.path for shard in shards])
    return fingerprint((name, s.num_samples, s.num_bytes) for name, s in zip(names, shards, strict=True))


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ValueError, naming the total that differs, unless both are of the same shards."""
    for what in ("shards", "samples", "bytes"):
        if saved[what] != now[what]:
            raise ValueError(f"the saved state is of other data: {saved[what]} {what} then, {now[what]} now; give the same shards")
    if saved["hash"] != now["hash"]:
        raise ValueError("the saved state is of other data: equal totals, but shards were renamed, reordered or changed in size")


def build_loader(
    shards: str | Sequence[str] | Sequence[Shard],
    *,
    batch_size: int,
    task: str = "image-classification",
    label: str | None = "cls",
    classes: str | Sequence[str] | None = None,
    num_classes: int | None = None,
    labels: Any = None,
    img_size: int | None = None,
    training: bool = True,
    epochs: int = 1,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    seed: int | None = None,
    shuffle: bool | None = None,
    shuffle_block: int | None = None,
    lanes: int | None = None,
    stages: Sequence[Callable] = (),
    transform: dict[str, Any] | None = None,
    cache_dir: str | None = None,
    cache_size: int | None = None,
    **loading: Any,
) -> Loader:
    """Build the loader of one rank over the shards that the patterns name.

    batch_size: global, samples a step over all ranks. seed (0), shuffle (training), shuffle_block (16,384) and lanes (1) say
    what the stream is; left out, a loaded state decides. classes: names in order, or a file of them. labels: a LabelMap that
    `resolve_labels` made, in place of label, classes and num_classes; label None: none. transform: keywords of the task (scale,
    hflip, augment, and decoder: auto, native or python, who decodes JPEGs; field, length, dtype). stages: extra webdataset stages
    over encoded sample dicts. cache_dir, cache_size: of remote shards, as `load_shards` takes them. reader: a `ReadStream`.
    local_ranks: those of this machine, where lanes keep it to its own shards. Other keywords go to torch's DataLoader (prefetch_factor,
    pin_memory, multiprocessing_context: fork by default on Linux).
    Batches hold ceil(batch_size / world_size) slots.
    Raises ShardError (a ValueError) for shards or labels that can't be used, ValueError for a value out of range.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1} (world_size {world_size})")
    if batch_size < world_size:
        raise ValueError(f"batch_size {batch_size} is smaller than world_size {world_size}: every rank needs a sample a step")
    found = resolve_shards(shards, cache_dir, cache_size)
    if not found:
        raise ShardError("no shards were given")
    stream: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "shuffle_block": shuffle_block, "lanes": lanes}
    defaults: dict[str, Any] = {"seed": 0, "shuffle": training, "shuffle_block": SHUFFLE_BLOCK, "lanes": 1}
    counts = np.array([shard.num_samples for shard in found], np.int64)
    if not counts.any():
        raise ShardError(describe_empty(found))
    plan = Plan(counts, epochs if training else 1, **{k: defaults[k] if v is None else v for k, v in stream.items()})
    check_room(plan, found)
    made = _make_task(task, found, label, classes, num_classes, labels, img_size, {"training": training, **(transform or {})})
    if num_workers:
        loading.setdefault("prefetch_factor", 2)
        # in a process that mp.spawn started, torch's default is spawn: seconds of imports for each worker, at every start
        loading.setdefault("multiprocessing_context", "fork" if sys.platform == "linux" else None)
    return Loader(
        found,
        plan,
        made,
        batch_size=batch_size,
        training=training,
        rank=rank,
        world_size=world_size,
        explicit=frozenset(k for k, v in stream.items() if v is not None),
        stages=stages,
        num_workers=num_workers,
        **loading,
    )


def _make_task(
    name: str, shards: Sequence[Shard], label: str | None, classes: str | Sequence[str] | None, num_classes: int | None, labels: Any,
    img_size: int | None, settings: dict[str, Any],
) -> Any:  # fmt: skip
    """The task with what its settings need to know of the shards."""
    takes = settings_of(name)
    if "labels" in takes:
        if labels is None and label is not None:
            names = read_classes(classes) if isinstance(classes, str) else classes
            labels = resolve_labels(shards, label, classes=names, num_classes=num_classes, several=has_several_labels(name))
        settings["labels"] = labels
    if "img_size" in takes:
        settings["img_size"] = default_img_size(shards, name) if img_size is None else img_size
    if name == "tokens" and "length" not in settings:
        found = find_tokens(shards, settings.get("field", ""), settings.get("dtype", "uint16"))
        settings |= dict(zip(("field", "length", "dtype"), found, strict=True))
    return create_task(name, **settings)
