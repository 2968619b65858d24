"""Tasks whose samples are bytes or tokens: small and many, so that a whole batch is collated at once.

in: `Columns` of a batch  ->  out: the batch's tensors, and which slots could not be filled
Invariant: as in tasks.py: what is wrong with a sample is a `DataError` that names the field. What numpy can take as it lies is not decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .block import Layout
from .columns import Columns
from .decoders import decode_npy
from .errors import DataError, ShardError
from .labels import LabelMap, list_fields
from .native import gathering
from .scan import walk_fields
from .shards import Shard

Allocate = Callable[[Layout], dict[str, torch.Tensor]]
Errors = list[tuple[int, DataError]]
NPY = b"\x93NUMPY"  # what a .npy starts with
TOKEN_TYPES = ("uint8", "uint16", "int32", "int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """One field's bytes as they are, and the class: "bytes" uint8 (all of the batch, one after the other), "offsets" int64 (n + 1): slot i
    is bytes[offsets[i]:offsets[i + 1]] (`torch.nested.nested_tensor_from_jagged` takes the two); "label" int64 (n,) where there are labels.
    A slot that could not be read has no bytes. `field` "" is the one field that is not the label."""

    same_shape: ClassVar[tuple[str, ...]] = ("label",)
    training: bool
    labels: LabelMap | None
    field: str = ""

    def collate(self, columns: Columns, allocate: Allocate) -> tuple[dict[str, torch.Tensor], np.ndarray, Errors]:
        """(tensors, bool (n,) which slots are filled, what is wrong with the others)."""
        good, errors = columns.present.copy(), Errors()
        start, size = _pick(columns, self.field, self.labels.field if self.labels else "", good, errors)
        label = _labels(columns, self.labels, good, errors) if self.labels else None
        size = np.where(good, size, 0)
        offsets = np.r_[0, np.cumsum(size)]
        num = len(size)
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "bytes": (torch.uint8, (int(offsets[-1]),)),
            "offsets": (torch.int64, (num + 1,)),
        }
        tensors = allocate({**layout, "label": (torch.int64, (num,))} if label is not None else layout)
        _gather(columns.data, start, size, tensors["bytes"].numpy())
        tensors["offsets"].numpy()[:] = offsets
        if label is not None:
            tensors["label"].numpy()[:] = label
        return tensors, good, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids of fixed number: "tokens" (n, length), of the type that is stored (a .npy says it; `dtype` for raw little-endian bytes).
    `field` "" is the one field that is there. torch.uint16 can do little: `tokens.long()` on the device."""

    same_shape: ClassVar[tuple[str, ...]] = ("tokens",)
    training: bool
    length: int
    field: str = ""
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        if self.dtype not in TOKEN_TYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(TOKEN_TYPES)}")
        if self.length < 1:
            raise ValueError(f"length {self.length} must be at least 1 token")

    def collate(self, columns: Columns, allocate: Allocate) -> tuple[dict[str, torch.Tensor], np.ndarray, Errors]:
        """(tensors, bool (n,) which slots are filled, what is wrong with the others)."""
        good, errors = columns.present.copy(), Errors()
        start, size = _pick(columns, self.field, "", good, errors)
        tensors = allocate({"tokens": (getattr(torch, self.dtype), (len(good), self.length))})
        out = tensors["tokens"].numpy().view(np.uint8)
        plain, skip = self._find_plain(columns.data, start, size, good, out.shape[1])
        where = start + skip
        data = columns.data
        if plain.all():
            _gather(data, where, np.full(len(out), out.shape[1]), out.reshape(-1))
        else:
            for slot, a in zip(np.flatnonzero(plain).tolist(), where[plain].tolist(), strict=True):
                out[slot] = data[a : a + out.shape[1]]
        for slot in np.flatnonzero(good & ~plain).tolist():
            good[slot] = False
            try:
                tensors["tokens"].numpy()[slot] = self._decode(data[start[slot] : start[slot] + size[slot]].tobytes())
                good[slot] = True
            except DataError as error:
                errors.append((slot, error))
        return tensors, good, errors

    def _find_plain(self, data: np.ndarray, start: np.ndarray, size: np.ndarray, good: np.ndarray, payload: int) -> tuple[np.ndarray, int]:
        """Which slots hold their tokens as the first does, and how many bytes stand before them: none, or a .npy's header."""
        first = np.flatnonzero(good & (size >= payload))
        if not first.size:
            return np.zeros(len(good), bool), 0
        at, skip = int(start[first[0]]), int(size[first[0]]) - payload
        same = good & (size == payload + skip)
        rows = np.flatnonzero(same)
        if not skip:
            magic = data[start[rows][:, None] + np.arange(min(payload, len(NPY)))] == np.frombuffer(NPY, np.uint8)[:payload]
            same[rows] = ~magic.all(1)
            return same, 0
        try:
            self._decode(data[at : at + skip + payload].tobytes())
        except DataError:
            return np.zeros(len(good), bool), 0
        if gathering.is_there():
            same[rows] = gathering.are_same(data, start[rows], at, skip)
        else:
            same[rows] = (data[start[rows][:, None] + np.arange(skip)] == data[at : at + skip]).all(1)
        return same, skip

    def _decode(self, raw: bytes) -> np.ndarray:
        """One sample's tokens."""
        if not raw.startswith(NPY):
            want = self.length * np.dtype(self.dtype).itemsize
            if len(raw) != want:
                raise DataError(f"{len(raw)} bytes, not the {want} of {self.length} tokens of type {self.dtype}", self.field)
            return np.frombuffer(raw, self.dtype)
        array = decode_npy(raw)
        if array.shape != (self.length,) or array.dtype != np.dtype(self.dtype):
            raise DataError(f"an array {array.shape} of {array.dtype}, not ({self.length},) of {self.dtype}", self.field)
        return array


def find_tokens(shards: Sequence[Shard], field: str = "", dtype: str = "uint16") -> tuple[str, int, str]:
    """(field, length, type) of the first sample's tokens. Raises ShardError where there are none."""
    for shard in shards:
        for _, name, data in walk_fields(shard):
            if name == field or (not field and name.rpartition(".")[2] in ("npy", "bin")):
                raw = bytes(data)
                if raw.startswith(NPY):
                    try:
                        array = decode_npy(raw)
                    except DataError as error:
                        raise ShardError(f"{shard.path}: its first {name}: {error.reason}") from None
                    return name, array.size, str(array.dtype)
                return name, len(raw) // np.dtype(dtype).itemsize, dtype
    what = field or "npy or bin"
    raise ShardError(f"no field {what} in {shards[0].path}: name the tokens' field, as in transform={{'field': 'ids.npy'}}")


def _pick(columns: Columns, field: str, label: str, good: np.ndarray, errors: Errors) -> tuple[np.ndarray, np.ndarray]:
    """(start, size) of the wanted field; slots without it are no longer good."""
    if not field:
        names = [name for name, (_, size) in columns.fields.items() if name != label and (size >= 0).any()]
        if len(names) != 1:
            names.sort()
            for slot in np.flatnonzero(good).tolist():
                errors.append((slot, DataError(f"which field is meant? there are {', '.join(names) or 'none'}: name it (field)")))
            good[:] = False
            return np.zeros(len(good), np.int64), np.zeros(len(good), np.int64)
        field = names[0]
    start, size = columns.fields.get(field, (np.zeros(len(good), np.int64), np.full(len(good), -1, np.int64)))
    for slot in np.flatnonzero(good & (size < 0)).tolist():
        errors.append((slot, DataError(f"no {field}: the sample's fields are {list_fields(columns.sample(slot))}", field)))
    good &= size >= 0
    return start, size


def _labels(columns: Columns, labels: LabelMap, good: np.ndarray, errors: Errors) -> np.ndarray:
    """Class of every slot. Short texts of digits at once, the rest one by one."""
    values = np.zeros(len(good), np.int64)
    start, size = columns.fields.get(labels.field, (values, values - 1))
    quick = np.zeros(len(good), bool)
    if labels.source == "cls" and (good & (size > 0)).any():
        found = _read_digits(columns.data, start, size)
        limit = labels.num_classes if labels.remap is None else len(labels.remap)
        quick = good & (found >= 0) & (found < limit)
        values = np.where(quick, found, 0)
        if labels.remap is not None:
            values = np.asarray(labels.remap, np.int64)[values]
    for slot in np.flatnonzero(good & ~quick).tolist():
        try:
            values[slot] = labels.parse(columns.sample(slot))
        except DataError as error:
            good[slot] = False
            errors.append((slot, error))
    return values


def _read_digits(data: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """int64 (n,): the numbers that texts of one to nine digits are; -1 for any other."""
    if gathering.is_there():
        return gathering.read_digits(data, start, size)
    short = (size > 0) & (size <= 9)
    column = np.arange(int(size[short].max(initial=1)))
    digits = data[np.minimum(start[:, None] + column, len(data) - 1)].astype(np.int64) - 48
    used = column < size[:, None]
    short &= (((digits >= 0) & (digits <= 9)) | ~used).all(1)
    values = np.zeros(len(start), np.int64)
    for i in range(len(column)):
        values = np.where(used[:, i], values * 10 + digits[:, i], values)
    return np.where(short, values, -1)


def _gather(data: np.ndarray, start: np.ndarray, size: np.ndarray, out: np.ndarray) -> None:
    """The pieces of `data` one after the other into `out`, uint8, which they fill."""
    if gathering.is_there():
        gathering.gather(data, start, size, out)
        return
    view = data.data
    joined = b"".join([view[a:b] for a, b in zip(start.tolist(), (start + size).tolist(), strict=True)])
    out[:] = np.frombuffer(joined, np.uint8)
