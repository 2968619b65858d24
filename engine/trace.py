"""A profile that chrome://tracing and ui.perfetto.dev open.

in: spans of each rank's trainer and workers, in seconds of its own perf_counter  ->  out: trace.json
Invariant: all spans are on rank 0's clock. On one machine that clock is common; another machine's is shifted by what the two showed at a
moment that all ranks passed together.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

from .distributed import Ranks
from .waits import Waits

TRAINER = 0  # the row of the trainer; worker w has row w + 1
_ROUNDS = 5


def gather_clocks(ranks: Ranks) -> list[float]:
    """For every rank, the seconds to add to its clock to have rank 0's. A collective call."""
    ranks.gather(None)
    readings = []
    for _ in range(_ROUNDS):
        ranks.gather(None)  # nobody is through before all have come
        readings.append(perf_counter())
    told = ranks.gather((_machine(), readings))
    here, first = told[0]
    return [0.0 if machine == here else _shift(first, theirs) for machine, theirs in told]


def write_trace(path: Path, ranks: Ranks, waits: Waits) -> None:
    """Write the spans of all ranks, measured so far, to `path` (rank 0 does). A collective call."""
    shifts = gather_clocks(ranks)
    told = ranks.gather((waits.spans or [], waits.worker_spans))
    if ranks.rank == 0:
        events = []
        for rank, (trainer, workers) in enumerate(told):
            events += _name_rows(rank, [worker for worker, _ in workers])
            events += [_event(rank, TRAINER, span, shifts[rank]) for span in trainer]
            events += [_event(rank, worker + 1, span, shifts[rank]) for worker, spans in workers for span in spans]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _event(rank: int, row: int, span: tuple[str, float, float], shift: float) -> dict[str, Any]:
    name, begin, end = span
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": 1e6 * (begin + shift), "dur": 1e6 * (end - begin)}


def _name_rows(rank: int, workers: list[int]) -> list[dict[str, Any]]:
    rows = {TRAINER: "trainer", **{worker + 1: f"worker {worker}" for worker in workers}}
    named = [{"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}} for row, name in rows.items()]
    return [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}, *named]


def _shift(first: list[float], theirs: list[float]) -> float:
    """The median over the rounds: a few of them may have been late on one side."""
    return sorted(a - b for a, b in zip(first, theirs, strict=True))[len(first) // 2]


def _machine() -> str:
    """What the processes that share a clock have in common."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()
