"""Where a loader worker's time goes.

in: `lap(name)` at the end of each thing that it does  ->  out: seconds by name, and (for a profile) when each began
Invariant: every moment of a worker belongs to one name. One clock a process, for one thread: other threads' laps count for nothing.
On Linux `perf_counter` is the same clock in every process of a machine.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

# What a worker does, in order. wait: until the rank has room for another batch (the hand-over of the last one to its queue included).
WAIT, READ, STAGES, DECODE, TRANSFORM, COLLATE, HAND_OVER = "wait", "read", "stages", "decode", "transform", "collate", "hand_over"
WORK = (READ, STAGES, DECODE, TRANSFORM, COLLATE, HAND_OVER)

Span = tuple[str, float, float]  # name, begin, end: seconds of perf_counter


class Laps:
    """Seconds since the last lap go to a name. `worker`: its number; `spans` is a list while someone wants them."""

    __slots__ = ("_last", "_thread", "seconds", "spans", "worker")

    def __init__(self, worker: int = 0, spans: bool = False) -> None:
        self.worker = worker
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] | None = [] if spans else None
        self._last = perf_counter()
        self._thread = threading.get_ident()

    def lap(self, name: str) -> None:
        """What this thread did since the last lap was `name`."""
        if threading.get_ident() != self._thread:
            return
        now = perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        if self.spans is not None:
            self._note(name, now)
        self._last = now

    def _note(self, name: str, now: float) -> None:
        assert self.spans is not None
        if self.spans and self.spans[-1][0] == name and self.spans[-1][2] == self._last:
            self.spans[-1] = (name, self.spans[-1][1], now)  # samples one after the other are one span
        else:
            self.spans.append((name, self._last, now))

    def take(self) -> dict[str, Any]:
        """What was measured since the last time, and then begin anew. `spans` only where they are kept."""
        taken: dict[str, Any] = {"worker": self.worker, "seconds": self.seconds}
        self.seconds = {}
        if self.spans is not None:
            taken["spans"], self.spans = self.spans, []
        return taken


_laps = Laps()


def restart(worker: int = 0, spans: bool = False) -> None:
    """Begin: this thread is the one that works, and its time counts from now on."""
    global _laps
    _laps = Laps(worker, spans)


def end_spans() -> None:
    """Keep no more of them."""
    _laps.spans = None


def lap(name: str) -> None:
    """What this process's worker did since the last lap was `name`."""
    _laps.lap(name)


def take() -> dict[str, Any]:
    """What was measured since the last time: {"worker", "seconds": {name: seconds}}, with "spans" where `restart` asked for them."""
    return _laps.take()
