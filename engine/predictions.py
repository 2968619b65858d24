"""What a model said of every sample of a test or an evaluation, in one file.

in: batches and their logits, on every rank  ->  out: predictions.npz, written by rank 0
Invariant: a row for each valid sample, in index order, whatever rank it was on; the file is there whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from .distributed import Ranks
from .scores import write_whole

TEST_FILE, VAL_FILE = "predictions.npz", "val_predictions.npz"  # of the test, of the last evaluation


class Predictions:
    """Scores, labels and ids as they come; `collect` brings the ranks' together."""

    def __init__(self) -> None:
        self._samples: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._ids: list[tuple[str, int, str]] = []

    def add(self, batch: dict[str, Any], logits: Tensor) -> None:
        """Keep what is valid of a batch, on the CPU."""
        valid = batch["valid"].numpy()
        self._samples.append(batch["sample"].numpy()[valid])
        self._scores.append(logits.float().cpu().numpy()[valid])
        self._labels.append(batch["label"].numpy()[valid])
        self._ids += [batch["ids"][slot] for slot in np.flatnonzero(valid)]

    def collect(self, ranks: Ranks) -> dict[str, np.ndarray] | None:
        """On rank 0, everything, in index order; None elsewhere, and where there is nothing (a collective call).

        shard, key: str (n,); index: int64 (n,); scores: the logits, float32 (n, classes); labels as in a batch.
        """
        mine = [np.concatenate(part) for part in (self._samples, self._scores, self._labels)] if self._samples else None
        told = [(columns, ids) for columns, ids in ranks.collect((mine, self._ids)) or () if columns is not None]
        if not told:
            return None
        sample, scores, labels = (np.concatenate([columns[n] for columns, _ in told]) for n in range(3))
        ids = [name for _, names in told for name in names]
        order = np.argsort(sample, kind="stable")
        shard, index, key = (np.array([ids[place][part] for place in order.tolist()]) for part in range(3))
        return {"shard": shard, "index": index, "key": key, "scores": scores[order], "labels": labels[order]}


def write_predictions(path: Path, rows: dict[str, np.ndarray]) -> None:
    """A file of what `collect` gives, there whole or not at all."""
    write_whole(path, lambda file: np.savez(file, **cast(Any, rows)))
