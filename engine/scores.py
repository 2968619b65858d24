"""What an evaluation knows beyond its totals: how each class did, what it was taken for, average precision.

in: logits, labels, masks, batch by batch on every rank  ->  out: counts over all ranks; classes.tsv, confusion.npy
Invariant: every figure comes from sums, or from the scores of all samples brought together; so it does not depend on the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

CLASSES, CONFUSION = "classes.tsv", "confusion.npy"
MOST_CONFUSION = 2048  # classes: the table of 2,048 has 32 MB


class ClassCounts:
    """Samples and right ones of each class, int64 (2, classes), and the confusion matrix (class, predicted), int64 (classes, classes).

    With several labels a sample: how often a class was there, and how often it then scored above a half; no matrix. The matrix is
    None above MOST_CONFUSION classes too.
    """

    def __init__(self) -> None:
        self.totals: Tensor | None = None
        self.confusion: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, valid: Tensor) -> None:
        """Count a batch: (n, classes), (n,) or (n, classes), (n,)."""
        num_classes = logits.shape[1]
        if self.totals is None:
            self.totals = torch.zeros(2, num_classes, dtype=torch.int64, device=logits.device)
            if labels.ndim == 1 and num_classes <= MOST_CONFUSION:
                self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=logits.device)
        if labels.ndim == 2:
            there = (labels > 0) & valid.unsqueeze(1)
            self.totals += torch.stack([there.sum(0), (there & (logits > 0)).sum(0)])
            return
        labels, predicted = labels[valid], logits.argmax(1)[valid]
        self.totals[0] += torch.bincount(labels, minlength=num_classes)
        self.totals[1] += torch.bincount(labels[labels == predicted], minlength=num_classes)
        if self.confusion is not None:
            pairs = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
            self.confusion += pairs.view(num_classes, num_classes)

    def sum(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Make them the counts over all ranks, on the CPU. `reduce` adds up a tensor over them."""
        if self.totals is not None:
            self.totals = reduce(self.totals.cpu())
        if self.confusion is not None:
            self.confusion = reduce(self.confusion.cpu())

    @property
    def mean_accuracy(self) -> float | None:
        """The mean over the classes that have samples, in 0..1."""
        if self.totals is None or not int(self.totals[0].sum()):
            return None
        samples, right = self.totals.double()
        return float((right / samples)[samples > 0].mean())


def average_precision(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Average precision of each class: (n, classes) floats, (n, classes) 0 or 1 -> float64 (classes,), nan for a class nobody has.

    The sum over the thresholds of precision times the gain in recall, without interpolation; equal scores share a threshold, so the
    order of the samples means nothing.
    """
    found = np.full(scores.shape[1], np.nan)
    for number in range(scores.shape[1]):
        order = np.argsort(-scores[:, number], kind="stable")
        score, there = scores[order, number], labels[order, number] > 0
        if not there.any():
            continue
        ends = np.flatnonzero(np.append(score[1:] != score[:-1], True))  # the last sample of each threshold
        right = np.cumsum(there)[ends]
        found[number] = np.sum(right / (ends + 1) * np.diff(right, prepend=0)) / right[-1]
    return found


def write_classes(folder: Path, counts: ClassCounts, names: Sequence[str] | None, precision: np.ndarray | None = None) -> None:
    """classes.tsv: a row a class; confusion.npy: rows are classes, columns what they were taken for."""
    if counts.totals is None:
        return
    header = ["class", "samples", "right", "accuracy", *(["average_precision"] if precision is not None else []), "mostly_taken_for"]
    lines = ["\t".join(header)]
    for number, (samples, right) in enumerate(counts.totals.T.tolist()):
        row = [_name(names, number), str(samples), str(right), f"{right / samples:.4f}" if samples else "-"]
        if precision is not None:
            row.append("-" if np.isnan(precision[number]) else f"{precision[number]:.4f}")
        lines.append("\t".join([*row, _mostly(counts.confusion, number, names)]))
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    write_whole(folder / CLASSES, lambda file: file.write(text))
    if counts.confusion is not None:
        matrix = counts.confusion.numpy()
        write_whole(folder / CONFUSION, lambda file: np.save(file, matrix))


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        write(file)
    os.replace(part, path)


def _name(names: Sequence[str] | None, number: int) -> str:
    name = names[number] if names is not None and number < len(names) else str(number)
    return name.replace("\t", " ").replace("\n", " ")


def _mostly(confusion: Tensor | None, number: int, names: Sequence[str] | None) -> str:
    """The class that this one was taken for most often, and how often."""
    if confusion is None:
        return "-"
    row = confusion[number].clone()
    row[number] = 0
    most = int(row.argmax())
    return f"{_name(names, most)} ({int(row[most])})" if int(row[most]) else "-"
