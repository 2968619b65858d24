"""Before step 0: does everybody mean the same run?

in: the facts of this rank  ->  out: nothing, or one line that says what differs, and between whom
Invariant: what could make ranks disagree later, in a collective's time-out, ends the run here, in seconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from data import Shard

from .distributed import Ranks
from .launcher import Stopped


def check_same(ranks: Ranks, facts: dict[str, Any], shards: dict[str, Sequence[Shard]]) -> None:
    """Compare every fact with rank 0's, and the shards' fingerprints among them. Raises Stopped, the same line on every rank.

    facts: flag or name -> plain value; shards: what they are called -> the shards, for naming the first that differs.
    """
    everyone = ranks.gather((socket.gethostname(), facts))
    first = everyone[0][1]
    for rank, (host, theirs) in enumerate(everyone):
        for name in first:
            if theirs[name] != first[name]:
                what = f"{name} is {_short(theirs[name])} on rank {rank} ({host}) and {_short(first[name])} on rank 0 ({everyone[0][0]})"
                if name in shards:
                    what = _first_shard(ranks, name, shards[name], rank, host)
                raise Stopped(f"the ranks don't mean the same run: {what}; give every machine the same flags and the same shards")


def _first_shard(ranks: Ranks, name: str, shards: Sequence[Shard], rank: int, host: str) -> str:
    """Which shard differs first between rank 0 and `rank` (a collective call)."""
    rows = [f"{os.path.basename(shard.path)} ({shard.num_samples} samples, {shard.num_bytes} bytes)" for shard in shards]
    everyone = ranks.gather(rows if ranks.rank in (0, rank) else None)
    mine, theirs = everyone[0], everyone[rank]
    for i in range(max(len(mine), len(theirs))):
        here, there = (side[i] if i < len(side) else "nothing" for side in (mine, theirs))
        if here != there:
            return f"{name} {i} is {there} on rank {rank} ({host}) and {here} on rank 0"
    return f"{name} lie in other folders below their common one on rank {rank} ({host}) than on rank 0"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
