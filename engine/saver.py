"""Checkpoints written beside the training: the ranks go on as soon as rank 0 has a copy of its tensors.

in: what a checkpoint holds, as the training has it now  ->  out: files in checkpoints/, by a thread of rank 0
Invariant: one write at a time, and each is whole and on the disk before the next begins and before the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import checkpoint


def snapshot(value: Any) -> Any:
    """The same with a copy of every tensor, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item) for item in value)
    return value


class Saver:
    """Writes the checkpoints of one run (on rank 0). keep: how many are also kept as step-N.pt.

    A write that fails raises OSError at the next call; with `go_on` it is told, and the training goes on with the checkpoint before.
    """

    def __init__(self, folder: Path, *, keep: int, go_on: bool, tell: Callable[[str], None]) -> None:
        self._folder, self._keep, self._go_on, self._tell = folder, keep, go_on, tell
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def save(self, content: dict[str, Any], best: bool) -> None:
        """Copy the tensors and return; waits for the write before it."""
        self.wait()
        copied = snapshot(content)
        self._thread = threading.Thread(target=self._write, args=(copied, best), name="checkpoint")
        self._thread.start()

    def _write(self, content: dict[str, Any], best: bool) -> None:
        try:
            checkpoint.save(self._folder, content, best=best, keep=self._keep)
        except OSError as error:
            self._error = error

    def poll(self) -> None:
        """Tell of a write that failed, if one has."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written: before the process ends, and before it forks, which a thread at work would not survive."""
        self.join()
        if self._error is not None:
            error, self._error = self._error, None
            if not self._go_on:
                raise error
            self._tell(f"warning: {error.filename}: {error.strerror}")

    def join(self) -> None:
        """Like `wait`, but tells of no error: one is on its way already."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Clock:
    """Says when so many seconds have passed since it last said so; with 0, never."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def due(self) -> bool:
        """Whether it is time, and if so, count anew."""
        if not self._seconds or time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True
