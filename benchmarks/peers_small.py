"""The loaders of small samples that are compared: the bytes and the label of 256 at a time, as each gives them.

in: shards of .bin and .cls, a work folder, workers  ->  out: batches without end
Invariant: whoever can collate gives a batch of tensors, the others lists of bytes: nobody is made to copy more than they would.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import SMALL, Batches, again_and_again, dali_batches, dali_indexes, litdata_loader, mosaic_dataset, torch_loader


def shardline_small(shards: list[str], work: Path, workers: int) -> Batches:
    from data import build_loader

    return build_loader(shards, batch_size=SMALL, task="bytes", num_workers=workers, epochs=1000, num_classes=10)


def shardline_tokens(shards: list[str], work: Path, workers: int) -> Batches:
    from data import build_loader

    return build_loader(shards, batch_size=SMALL, task="tokens", num_workers=workers, epochs=1000, transform={"field": "bin"})


def memory_tokens(shards: list[str], work: Path, workers: int) -> Batches:
    """What no loader can beat: the rows lie in memory already, and one call of numpy copies those of a batch into a new one."""
    import numpy as np

    from data import load_shards
    from data.scan import walk_fields

    walked = (walk_fields(shard, "bin") for shard in load_shards(shards))
    rows = np.stack([np.frombuffer(bytes(data), np.uint16) for fields in walked for _, _, data in fields])

    def batches() -> Iterator[Any]:
        for epoch in range(10**6):
            order = np.random.default_rng(epoch).permutation(len(rows))
            for first in range(0, len(order) - SMALL + 1, SMALL):
                yield rows[order[first : first + SMALL]]

    return batches()


def webdataset_small(shards: list[str], work: Path, workers: int) -> Batches:
    import webdataset as wds

    dataset = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000).to_tuple("bin", "cls").batched(SMALL, collation_fn=None)
    return torch_loader(dataset.repeat(100), None, workers)


def huggingface_small(shards: list[str], work: Path, workers: int) -> Batches:
    from datasets import load_dataset

    stream = load_dataset("webdataset", data_files=shards, split="train", streaming=True).shuffle(buffer_size=1000)
    return again_and_again(lambda: torch_loader(stream, SMALL, workers, collate_fn=list))


def mosaic_small(shards: list[str], work: Path, workers: int) -> Batches:
    dataset = mosaic_dataset(shards, work / "mosaic_small", "bin", SMALL, None)
    return again_and_again(lambda: torch_loader(dataset, SMALL, workers, collate_fn=list))


def litdata_small(shards: list[str], work: Path, workers: int) -> Batches:
    return litdata_loader(shards, work / "litdata_small", "bin", SMALL, workers, None)


def dali_small(shards: list[str], work: Path, workers: int) -> Batches:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=SMALL, num_threads=max(1, workers), device_id=None)
    def samples() -> Any:
        data, label = fn.readers.webdataset(paths=shards, index_paths=dali_indexes(shards, work / "small"), ext=["bin", "cls"],
                                            random_shuffle=True, initial_fill=1000)  # fmt: skip
        return fn.pad(data), fn.pad(label)

    return dali_batches(samples())


def spdl_small(shards: list[str], work: Path, workers: int) -> Batches:
    import random

    import spdl.io

    def batches() -> Iterator[list[Any]]:
        rows: list[Any] = []
        while True:
            for shard in random.sample(shards, len(shards)):
                members = spdl.io.iter_tarfile(Path(shard).read_bytes())
                for (_, data), (_, label) in zip(members, members, strict=True):
                    rows.append((data, int(bytes(label))))
                    if len(rows) == SMALL:
                        yield rows
                        rows = []

    return batches()
