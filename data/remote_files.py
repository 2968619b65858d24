"""Samples of remote shards by number: from the cache, or by range requests.

in: (Shard, sample number)  ->  out: the bytes of one sample
Invariant: of cached shards one at a time is open, and none while it waits for another: so whoever needs room finds some.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import remote
from .errors import StaleIndexError
from .fetching import CHUNK, load_index, open_fetched

if TYPE_CHECKING:
    from .shards import Shard

NEARBY = 64 << 10  # bytes between two samples that are read along rather than asked for apart


class RemoteFiles:
    """One per worker, for one thread; it pickles, without what it holds."""

    def __init__(self, max_known: int = 256) -> None:
        self._max_known = max_known
        self._offsets: OrderedDict[str, np.ndarray] = OrderedDict()
        self._open: tuple[str, int] | None = None
        self._ahead: dict[tuple[str, int], bytes] = {}

    def read(self, shard: Shard, i: int) -> tuple[bytes, int]:
        """(the bytes of sample `i`, their offset in the tar). Raises ShardError."""
        source = shard.remote
        assert source is not None
        fd, offsets = self.opened(shard)
        start, end = int(offsets[i]), int(offsets[i + 1])
        if fd < 0:
            data = self._ahead.pop((shard.path, i), None)
            return data if data is not None else remote.read(source.url, start, end, source.tag), start
        data = b""
        while len(data) < end - start:  # Linux reads at most 2 GiB at once
            more = os.pread(fd, end - start - len(data), start + len(data))
            if not more:
                raise StaleIndexError(f"{shard.path}: its copy is cut ({shard.tar_path}): delete that file")
            data += more
        return data, start

    def read_into(self, buf: memoryview, place: np.ndarray, shard: Shard, index: np.ndarray) -> np.ndarray:
        """Put the samples `index` (int64 (n,), rising) at `place` (n,) of `buf`; their offsets in the tar."""
        start = np.empty(len(index), np.int64)
        for number, (a, i) in enumerate(zip(place.tolist(), index.tolist(), strict=True)):
            data, start[number] = self.read(shard, i)
            buf[a : a + len(data)] = data
        return start

    def opened(self, shard: Shard) -> tuple[int, np.ndarray]:
        """(descriptor, -1 without a cache; offsets). Fetches the shard where it isn't there."""
        assert shard.remote is not None
        if shard.remote.cache is None:
            return -1, self._known(shard)
        if self._open is None or self._open[0] != shard.path:
            self.close()
            self._open = shard.path, open_fetched(shard.remote, shard.num_samples)
        return self._open[1], self._known(shard)

    def read_ahead(self, shards: Sequence[Shard], shard_numbers: np.ndarray, indexes: np.ndarray) -> None:
        """Get a batch's samples of shards without a cache, neighbours with one request, others at once; `read` hands them out."""
        self._ahead.clear()
        groups: list[tuple[Shard, int, int, list[tuple[int, int, int]]]] = []  # shard, start, end, its samples
        uncached = {number for number in set(shard_numbers.tolist()) if (at := shards[number].remote) is not None and at.cache is None}
        wanted = sorted(set(zip(shard_numbers.tolist(), indexes.tolist(), strict=True))) if uncached else ()
        for number, i in wanted:
            if number not in uncached:
                continue
            shard = shards[number]
            offsets = self._known(shard)
            start, end = int(offsets[i]), int(offsets[i + 1])
            last = groups[-1] if groups else None
            if last and last[0] is shard and start - last[2] <= NEARBY and end - last[1] <= CHUNK:
                groups[-1] = (shard, last[1], end, [*last[3], (i, start, end)])
            else:
                groups.append((shard, start, end, [(i, start, end)]))

        def get(group: tuple[Shard, int, int, list[tuple[int, int, int]]]) -> bytes:
            assert group[0].remote is not None
            return remote.read(group[0].remote.url, group[1], group[2], group[0].remote.tag)

        for (shard, first, _, samples), data in zip(groups, remote.map_threads(get, groups), strict=True):
            for i, start, end in samples:
                self._ahead[shard.path, i] = data[start - first : end - first]

    def close(self) -> None:
        """Let go of the open shard: between batches none is held."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _known(self, shard: Shard) -> np.ndarray:
        offsets = self._offsets.get(shard.path)
        if offsets is None:
            assert shard.remote is not None
            offsets = load_index(shard.remote, shard.num_samples)
            if shard.remote.cache is None and not shard.remote.url.startswith("http"):  # there every answer tells its tag
                now = remote.stat(shard.remote.url)
                if (now.size, now.tag) != (shard.remote.size, shard.remote.tag):
                    raise remote.changed(shard.remote.url)
            self._offsets[shard.path] = offsets
            if len(self._offsets) > self._max_known:
                self._offsets.popitem(last=False)
        self._offsets.move_to_end(shard.path)
        return offsets

    def __reduce__(self) -> tuple[type[RemoteFiles], tuple[int]]:
        return RemoteFiles, (self._max_known,)

    def __del__(self) -> None:
        self.close()
