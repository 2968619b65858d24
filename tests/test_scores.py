"""What an evaluation knows of each class: counts, average precision, predictions in index order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.predictions import Predictions, write_predictions
from engine.scores import ClassCounts, average_precision, write_classes


def by_definition(scores, labels):
    """Average precision of one class, threshold by threshold."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        taken = scores >= threshold
        recall = (labels & taken).sum() / labels.sum()
        total += (recall - before) * (labels & taken).sum() / taken.sum()
        before = recall
    return total


def test_average_precision_is_its_definition_also_with_ties():
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 60):
        scores = rng.integers(0, 6, (size, 5)).astype(np.float32)  # many ties
        labels = rng.integers(0, 2, (size, 5))
        labels[0], labels[:, 4] = 1, 0
        found = average_precision(scores, labels)
        assert np.isnan(found[4])
        assert found[:4] == pytest.approx([by_definition(scores[:, c], labels[:, c] > 0) for c in range(4)])
        order = rng.permutation(size)
        assert np.array_equal(average_precision(scores[order], labels[order]), found, equal_nan=True)
    # the example of scikit-learn's documentation
    known = average_precision(np.array([[0.1], [0.4], [0.35], [0.8]]), np.array([[0], [0], [1], [1]]))
    assert known == pytest.approx([0.8333], abs=1e-4)


def test_counts_leave_masked_slots_out_and_make_the_files(tmp_path):
    counts = ClassCounts()
    logits = torch.eye(3)[[0, 1, 1, 2, 0]]
    counts.add(logits, torch.tensor([0, 1, 0, 1, 2]), torch.tensor([True, True, True, True, False]))
    counts.sum(lambda tensor: tensor * 2)  # two ranks with the same
    assert counts.totals is not None and counts.confusion is not None
    assert counts.totals.tolist() == [[4, 4, 0], [2, 2, 0]]
    assert counts.confusion.tolist() == [[2, 2, 0], [0, 2, 2], [0, 0, 0]]
    assert counts.mean_accuracy == 0.5
    write_classes(tmp_path, counts, ["cat", "a\tb", "emu"])
    assert (tmp_path / "classes.tsv").read_text().splitlines() == [
        "class\tsamples\tright\taccuracy\tmostly_taken_for",
        "cat\t4\t2\t0.5000\ta b (2)",
        "a b\t4\t2\t0.5000\temu (2)",
        "emu\t0\t0\t-\t-",
    ]
    assert np.load(tmp_path / "confusion.npy").tolist() == counts.confusion.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classes.tsv", "confusion.npy"]


def test_several_labels_are_counted_above_a_half():
    counts = ClassCounts()
    counts.add(torch.tensor([[1.0, -1.0], [2.0, 3.0]]), torch.tensor([[1, 1], [0, 1]]), torch.tensor([True, True]))
    assert counts.totals is not None and counts.totals.tolist() == [[1, 2], [1, 1]]
    assert counts.confusion is None


def test_predictions_come_in_index_order_whoever_made_them(tmp_path):
    def part(samples, valid):
        kept = Predictions()
        ids = [("0.tar", sample, f"k{sample}") for sample in samples]
        logits = torch.tensor([[float(sample), -1.0] for sample in samples])
        batch = {"sample": torch.tensor(samples), "valid": torch.tensor(valid), "label": torch.tensor(samples) * 10, "ids": ids}
        kept.add(batch, logits)
        return kept

    class Rank0:
        """Stands for a rank that all send to."""

        def collect(self, value):
            sent.append(value)
            return [sent[0], value, (None, [])] if len(sent) > 1 else None

    sent: list = []
    ranks: Any = Rank0()
    assert part([3, 1], [True, True]).collect(ranks) is None
    rows = part([2, 0, 7], [True, True, False]).collect(ranks)
    assert rows is not None
    write_predictions(tmp_path / "predictions.npz", rows)
    with np.load(tmp_path / "predictions.npz") as told:
        assert told["index"].tolist() == [0, 1, 2, 3] and told["key"].tolist() == ["k0", "k1", "k2", "k3"]
        assert told["scores"][:, 0].tolist() == [0, 1, 2, 3] and told["labels"].tolist() == [0, 10, 20, 30]
