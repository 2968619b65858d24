"""From tar shards to batches. Imports nothing from the rest of the repo: copy the folder out whole, it works alone.

| stage | file                             | takes                                   | gives                                         |
|-------|----------------------------------|-----------------------------------------|-----------------------------------------------|
| 0     | shards.py (patterns.py)          | patterns                                | list[Shard]: where each lies, its samples     |
| 0     | index.py                         | a shard                                 | where each sample starts in it (`.tar.idx`)   |
| 0     | classes.py (scan.py, labels.py)  | shards, a label source                  | the classes, how to find a sample's           |
| 1     | plan.py                          | samples per shard, seed, position, rank | Slots: epoch, shard, index, valid of each     |
| 2     | store.py (cache.py)              | a shard, an index in it                 | the bytes of that sample                      |
| 2     | tar.py (columns.py, native/)     | those bytes (of one, of a whole batch)  | key, {field: bytes} (Columns)                 |
| 3     | your stages                      | encoded sample dicts                    | the same                                      |
| 4     | tasks.py (video_task.py)         | {field: bytes}, an rng                  | a slot of the batch's tensors, filled         |
| 4     | records.py                       | Columns                                 | the tensors of bytes and tokens, filled       |
| 4     | decoders.py                      | bytes                                   | a picture, a number, a text                   |
| 4     | transforms.py (native/)          | encoded picture, rng                    | uint8 (3, H, W)                               |
| 4     | video.py, stills.py, clips.py    | encoded video, rng                      | uint8 (3, T, H, W)                            |
| 4     | block.py                         | names, types, shapes                    | a batch's tensors in one (shared) block       |
| 1-4   | pipeline.py (stages, workers)    | all of the above                        | the wds.DataPipeline, and `build_loader`      |

Shards in other places: urls.py (what is secret in one), remote.py (bytes of a store) with retrying.py, catalog.py (what is known of shards
before they are read), fetching.py (a shard arrives) with shard_cache.py, remote_files.py (samples), prefetch.py (in the plan's order);
streaming.py (no index at all).
Read shards.py, plan.py and pipeline.py, in this order. writer.py goes the other way, samples to shards, with what
scripts/make_shards.py needs: sources.py, readers.py, tables.py, packing.py, pictures.py, restarts.py, video_files.py, making.py,
ray_making.py (on a cluster), output.py, publishing.py (to a store), made.py (in words). Shards are looked through by checking.py (one
shard; what it found is in found.py), verdict.py (a set of them), telling.py (in words), mending.py (good samples into clean shards).
A batch is a dict: the task's tensors ("image" uint8 (n, 3, H, W), or (n, 3, T, H, W) for clips, and "label" int64 (n,); records.py says
those of bytes and tokens), "valid" bool (n,), "epoch" and "sample" int64 (n,) (which epoch, and which sample of it in index order), and
"ids" (shard file name, index, key) per slot (ids.py), "step", "epoch_end", "errors" and "error_slots" (where they stand), "times" (of its
worker, see timing.py); n = ceil(batch_size / world_size), always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import BadSampleBudget, DataError, LoaderError, SampleError, ShardError, StaleIndexError
from .plan import Plan
from .shards import Shard, load_shards

if TYPE_CHECKING:
    from .pipeline import Loader, build_loader

__all__ = [
    "BadSampleBudget",
    "DataError",
    "Loader",
    "LoaderError",
    "Plan",
    "SampleError",
    "Shard",
    "ShardError",
    "StaleIndexError",
    "build_loader",
    "load_shards",
]


def __getattr__(name: str) -> Any:
    """Import the pipeline when it is first asked for: it needs torch, which takes seconds; plans and indexes don't."""
    if name in ("Loader", "build_loader"):
        from . import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
