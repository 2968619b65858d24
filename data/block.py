"""The memory of a batch: one block, in shared memory where it goes to another process.

in: names, types and shapes  ->  out: a dict of tensors that lie in one block; the block as it travels, and the dict again
Invariant: whatever is written into a batch is written once, where the other process reads it: nothing is copied, and one handle is sent
for a batch. Small blocks are copied through the pipe all the same: that costs less than a handle does.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import LoaderError

_ALIGN = 64  # bytes: a cache line, and any type's alignment

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
BLOCK, PLACES, PICKLED = "__block__", "__places__", "__pickled__"
PIPED = 512 << 10  # bytes of a block that goes through the pipe: twice as much takes as long as a handle does


def new_tensors(layout: Layout, shared: bool, piped: int = 0) -> dict[str, torch.Tensor]:
    """Tensors full of zeros, in one block; in this process's own memory if it has at most `piped` bytes. Raises LoaderError where there is
    no shared memory for it."""
    places, position = [], 0
    for dtype, shape in layout.values():
        places.append((dtype, shape, position))
        size = dtype.itemsize * torch.Size(shape).numel()
        position += size + -size % _ALIGN
    # numpy's zeros are pages that the kernel zeroes when they are touched; torch's are written, by several threads
    block = _whole(_shared_storage(max(1, position))) if shared and position > piped else torch.from_numpy(np.zeros(position, np.uint8))
    return {name: _view(block, *place) for name, place in zip(layout, places, strict=True)}


def _view(block: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], position: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), position // dtype.itemsize, shape)  # type: ignore[call-overload]


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _shared_storage(size: int) -> torch.UntypedStorage:
    """Zeroed shared memory, every page of it reserved: a full /dev/shm is an error here, not a SIGBUS later.

    Here, not in torch's queue: its thread drops what it can't send, and the batch would be missing without a word.
    """
    try:
        return torch.UntypedStorage._new_shared(size)
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        # torch leaves the name of what it could not reserve; in this strategy every other name is gone as soon as it is open
        if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
            for name in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):
                name.unlink(missing_ok=True)
        raise LoaderError(
            f"no shared memory left for a batch of {size / 2**20:.1f} MiB (each worker holds up to three): "
            "enlarge /dev/shm (docker run --shm-size), or use fewer --workers or a smaller --batch-size"
        ) from None


def widen_pipe(descriptor: int, size: int = 1 << 20) -> None:
    """Let a pipe hold a few blocks, so that a worker goes on while its rank is at something else; where the system allows it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, size)


def pack(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as it is sent: its tensors, which `new_tensors` made together, as one block and their places in it; pickled already where the
    block is not shared (in the worker's own thread, where nothing has to wait for it)."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    storages = {value.untyped_storage().data_ptr() for value in tensors.values()}
    assert len(storages) == 1, f"the tensors of a batch lie in {len(storages)} blocks"
    block = _whole(next(iter(tensors.values())).untyped_storage())
    places = [(name, t.dtype, tuple(t.shape), t.storage_offset() * t.dtype.itemsize) for name, t in tensors.items()]
    others = {name: value for name, value in batch.items() if name not in tensors}
    if block.is_shared():
        return {BLOCK: block, PLACES: places, **others}
    return {PICKLED: pickle.dumps({BLOCK: pickle.PickleBuffer(block.numpy().data), PLACES: places, **others}, protocol=5)}


def unpack(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch that `pack` took, with what was put beside it; one that was not packed as it is."""
    if PICKLED in batch:
        batch = {**pickle.loads(batch.pop(PICKLED)), **batch}
    if BLOCK not in batch:
        return batch
    view = _view if isinstance(batch[BLOCK], torch.Tensor) else _view_bytes
    tensors = {name: view(batch[BLOCK], dtype, shape, position) for name, dtype, shape, position in batch[PLACES]}
    return {**tensors, **{name: value for name, value in batch.items() if name not in (BLOCK, PLACES)}}


def _view_bytes(block: bytearray, dtype: torch.dtype, shape: tuple[int, ...], position: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    found = torch.frombuffer(block, dtype=dtype, count=count, offset=position) if count else torch.empty(0, dtype=dtype)
    return found if len(shape) == 1 else found.view(shape)
