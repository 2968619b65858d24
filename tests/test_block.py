"""block.py: a batch's tensors lie in one block, which travels whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from data.block import BLOCK, new_tensors, pack, unpack
from data.errors import LoaderError

LAYOUT = {
    "image": (torch.uint8, (3, 5, 7)),
    "label": (torch.int64, (3,)),
    "valid": (torch.bool, (3,)),
    "none": (torch.float32, (0, 4)),
    "scalar": (torch.float64, ()),
}


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_of_a_layout(shared):
    tensors = new_tensors(LAYOUT, shared)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == LAYOUT
    assert all(not t.any() and t.is_contiguous() and t.is_shared() == shared for t in tensors.values())
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors.values()):
        assert (tensor == torch.tensor(number, dtype=tensor.dtype)).all()  # none lies in another
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_a_batch_travels_as_one_block():
    tensors = new_tensors(LAYOUT, True)
    tensors["label"][:] = torch.tensor([1, 2, 3])
    packed = pack({**tensors, "step": 4, "ids": ["a"]})
    assert [name for name, value in packed.items() if isinstance(value, torch.Tensor)] == [BLOCK]
    queue = mp.get_context("fork").SimpleQueue()
    queue.put(packed)
    batch = unpack(queue.get())
    assert list(batch) == [*LAYOUT, "step", "ids"]
    assert batch["label"].tolist() == [1, 2, 3] and (batch["step"], batch["ids"]) == (4, ["a"])
    batch["image"][0, 0, 0] = 9
    assert tensors["image"][0, 0, 0] == 9  # the same memory: nothing was copied


def test_a_batch_that_was_not_packed_stays():
    batch = {"label": torch.zeros(1)}
    assert unpack(batch) is batch


def test_no_room_is_one_line():
    with pytest.raises(LoaderError, match=r"^no shared memory left for a batch of 1099511627776.0 MiB .*: enlarge /dev/shm"):
        new_tensors({"image": (torch.uint8, (1 << 60,))}, True)
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.uint16, torch.bfloat16, torch.float64])
def test_a_small_batch_goes_through_the_pipe(dtype):
    layout = {**LAYOUT, "more": (dtype, (2, 3))}
    tensors = new_tensors(layout, True, piped=1 << 20)
    assert not any(tensor.is_shared() for tensor in tensors.values())
    assert new_tensors(layout, True, piped=100)["label"].is_shared()
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    queue = mp.get_context("fork").SimpleQueue()
    queue.put({**pack({**tensors, "step": 4}), "times": 5})
    batch = unpack(queue.get())
    assert list(batch) == [*layout, "step", "times"] and (batch["step"], batch["times"]) == (4, 5)
    for name, (kind, shape) in layout.items():
        assert batch[name].dtype == kind and tuple(batch[name].shape) == shape and batch[name].equal(tensors[name])
        batch[name].zero_()  # it may be written to
    assert tensors["label"].any()
