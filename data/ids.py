"""Who stands in the slots of a batch: many thousand names a second, which hardly anybody looks at, are made when they are asked for.

in: the keys as bytes, which shard and which sample of it  ->  out: sequences of str, and of (shard file name, index, key)
Invariant: they compare, slice and iterate as lists of the same do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


class Lazy(Sequence):
    """A sequence whose items are made when they are asked for: a child says how many there are, and what number i is."""

    __slots__ = ()

    def make(self, i: int) -> Any:
        raise NotImplementedError

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.make(k) for k in range(*i.indices(len(self)))]
        return self.make(range(len(self))[i])  # from the end, and IndexError

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class Keys(Lazy):
    """Texts that lie one after the other in `raw`; `ends`, int64 (n,): where each ends. utf-8, other bytes as surrogates."""

    __slots__ = ("ends", "raw")

    def __init__(self, raw: bytes, ends: np.ndarray) -> None:
        self.raw, self.ends = raw, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Keys:
        """These."""
        pieces = [text.encode("utf-8", "surrogateescape") for text in texts]
        return cls(b"".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def make(self, i: int) -> str:
        return self.raw[int(self.ends[i - 1]) if i else 0 : int(self.ends[i])].decode("utf-8", "surrogateescape")


class Ids(Lazy):
    """(shard file name, index, key) of every slot. `names`: of the shards by number; `shard`, `number`: int64 (n,)."""

    __slots__ = ("keys", "names", "number", "shard")

    def __init__(self, names: Mapping[int, str], shard: np.ndarray, number: np.ndarray, keys: Keys) -> None:
        self.names, self.shard, self.number, self.keys = names, shard, number, keys

    def __len__(self) -> int:
        return len(self.shard)

    def make(self, i: int) -> tuple[str, int, str]:
        return self.names[int(self.shard[i])], int(self.number[i]), self.keys.make(i)
