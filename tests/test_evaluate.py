"""Evaluation is exact: every good sample once, masked slots never, and the model is left as it was."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import nn

from data import SampleError
from engine import distributed
from engine.evaluate import evaluate, share_buffers
from engine.forward import normalize

LABELS = [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]  # of ten samples; the picture's first pixel is its number
PREDICTED = [0, 1, 2, 3, 4, 6, 5, 0, 2, 1]  # so 6 are right


class Oracle(nn.Module):
    """Scores 9 for the class it predicts, 8, 7, ... for the ones after it; counts its calls in a buffer."""

    calls: torch.Tensor
    predicted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("predicted", torch.tensor(PREDICTED))
        self.modes: list[bool] = []

    def forward(self, images):
        self.calls += 1
        self.modes.append(self.training)
        number = ((images[:, 0, 0, 0] * 0.229 + 0.485) * 255).round().long().clamp(0, 9)
        distance = (torch.arange(7) - self.predicted[number].unsqueeze(1)) % 7
        return 9.0 - distance


def batches(rank, world_size, masked=(), errors=()):
    """Two of every ten samples a batch, dealt to the ranks, each padded with a masked copy."""
    for first in range(0, 10, 2 * world_size):
        numbers = [n for n in range(first + 2 * rank, first + 2 * rank + 2) if n < 10]
        slots = (numbers + [0, 0])[:2]
        image = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
        image[:, :, 0, 0] = torch.tensor(slots, dtype=torch.uint8).unsqueeze(1)
        valid = torch.tensor([i < len(numbers) and slots[i] not in masked for i in range(2)])
        bad = [error for error in errors if error.index in numbers]
        yield {"image": image, "label": torch.tensor([LABELS[n] for n in slots]), "valid": valid, "errors": bad, "ids": slots}


def evaluate_on(rank, world_size, store_port, masked=(), errors=()):
    """One rank of an evaluation: (its result, the batches and errors it told of, what became of the model)."""
    ranks = distributed.start(rank, nproc=world_size, store_port=store_port)
    model = Oracle()
    model.calls += 100 * rank  # rank 0's buffers must win
    told: list[dict[str, Any]] = []
    bad: list[SampleError] = []
    result = evaluate(model, cast(Any, list(batches(rank, world_size, masked, errors))), ranks, told.append, bad.append)
    distributed.shut_down()
    return result, [batch["ids"] for batch in told], bad, (float(model.calls), model.training, model.modes)


def run_all(pool, world_size, *args):
    store, port = distributed.host_store()
    answers = pool.run(world_size, evaluate_on, world_size, port, *args)
    del store
    return answers


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_counts_once_on_any_number_of_ranks(gloo_pool, world_size):
    answers = run_all(gloo_pool, world_size)
    results = [answer[0] for answer in answers]
    for counts in [result.pop("counts") for result in results]:
        assert counts.totals.tolist() == [[2, 2, 2, 1, 1, 1, 1], [2, 1, 1, 1, 1, 0, 0]]
        assert counts.confusion.sum() == 10 and counts.confusion.diag().tolist() == counts.totals[1].tolist()
        assert counts.confusion[1, 2] == counts.confusion[2, 1] == counts.confusion[5, 6] == counts.confusion[6, 5] == 1
    assert results == [results[0]] * world_size
    # a right answer costs -log softmax(9, 8, ..., 3)[0]; a wrong one more, by how far off it is
    softmax = math.log(sum(math.exp(-distance) for distance in range(7)))
    losses = [softmax + (label - predicted) % 7 for label, predicted in zip(LABELS, PREDICTED, strict=True)]
    assert results[0].pop("loss") == pytest.approx(sum(losses) / 10)
    assert results[0].pop("mean_class_top1") == pytest.approx(4 / 7)
    assert results[0] == {"num_samples": 10, "top1": 0.6, "top5": 0.8, "correct": 6, "bad_samples": 0}


def test_masked_and_bad_samples_count_for_nothing(gloo_pool):
    errors = [SampleError("000.tar", 9, "k", "png", "cut")]
    answers = run_all(gloo_pool, 2, (3, 9), errors)
    result = answers[0][0]
    assert (result["num_samples"], result["correct"], result["top1"], result["bad_samples"]) == (8, 5, 5 / 8, 1)
    assert [error for answer in answers for error in answer[2]] == errors
    assert [ids for answer in answers for ids in answer[1]] == [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [0, 0]]


def test_with_no_good_sample_there_are_no_shares(gloo_pool):
    result = run_all(gloo_pool, 1, tuple(range(10)))[0][0]
    assert result.pop("counts").totals.sum() == 0
    shares = dict.fromkeys(("loss", "top1", "top5", "mean_class_top1"))
    assert result == {"num_samples": 0, "correct": 0, "bad_samples": 0, **shares}


def test_the_model_runs_in_eval_mode_on_rank_0_s_buffers_and_is_left_in_training(gloo_pool):
    answers = run_all(gloo_pool, 3)
    assert [answer[3] for answer in answers] == [(2.0, True, [False] * 2)] * 3


def test_normalize_is_what_pretrained_models_expect():
    images = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    images[0, 0] = 0
    out = normalize(images)
    assert out.dtype == torch.float32
    for channel, (value, mean, std) in enumerate([(0, 0.485, 0.229), (1, 0.456, 0.224), (1, 0.406, 0.225)]):
        assert out[0, channel].flatten().tolist() == pytest.approx([(value - mean) / std] * 4, abs=1e-6)


def test_sharing_needs_no_model_with_buffers():
    share_buffers(nn.Linear(2, 2))
