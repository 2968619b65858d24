"""The optimizers' groups and the learning rate as a function of the position."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from engine.optim import OPTIMIZERS, SCHEDULES, check_optimizer, create_optimizer, default_lr, lr_at, set_lr
from models import create_model


def rate(position: float, **changes: float | str) -> float:
    keywords: dict = {"total": 1000, "warmup": 100, "base_lr": 0.4, "warmup_lr": 0.1, **changes}
    return lr_at(position, **keywords)


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_norms_and_biases_do_not_decay(opt: str) -> None:
    model = create_model("tiny", 3)
    optimizer = create_optimizer(model, opt, lr=0.1, momentum=0.9, weight_decay=0.05)
    decay_of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_weight_of_layer = name.endswith("weight") and parameter.ndim > 1
        assert decay_of.pop(id(parameter)) == (0.05 if is_weight_of_layer else 0.0), name
    assert not decay_of


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = create_optimizer(model, "sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_sgd_is_nesterov_and_takes_no_momentum_too() -> None:
    model = nn.Linear(2, 2)
    group = create_optimizer(model, "sgd", lr=0.1, momentum=0.9, weight_decay=0.1).param_groups[0]
    assert group["nesterov"] and group["momentum"] == 0.9
    assert not create_optimizer(model, "sgd", lr=0.1, momentum=0.0, weight_decay=0.1).param_groups[0]["nesterov"]


def test_sgd_step_is_the_formula_of_nesterov_momentum() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(1.0)
    optimizer = create_optimizer(layer, "sgd", lr=0.1, momentum=0.9, weight_decay=0.5)
    weight, buffer = 1.0, 0.0
    for _ in range(3):
        layer.weight.grad = torch.full((1, 1), 2.0)
        optimizer.step()
        gradient = 2.0 + 0.5 * weight
        buffer = 0.9 * buffer + gradient
        weight -= 0.1 * (gradient + 0.9 * buffer)
    assert layer.weight.item() == pytest.approx(weight, rel=1e-6)


def test_momentum_is_the_first_beta_of_adamw() -> None:
    optimizer = create_optimizer(nn.Linear(2, 2), "adamw", lr=0.1, momentum=0.8, weight_decay=0.1)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.999)


def test_unknown_names_say_which_exist() -> None:
    with pytest.raises(ValueError, match=r"^--opt lion: no such optimizer; use one of sgd, adamw, adam$"):
        check_optimizer("lion", "cosine")
    with pytest.raises(ValueError, match=r"^--sched poly: no such schedule; use one of cosine, step, linear, constant$"):
        check_optimizer("sgd", "poly")
    for opt in OPTIMIZERS:
        for sched in SCHEDULES:
            check_optimizer(opt, sched)


def test_default_lr_grows_with_the_global_batch() -> None:
    assert default_lr("sgd", 256) == pytest.approx(0.1)
    assert default_lr("sgd", 64) == pytest.approx(0.025)
    assert default_lr("adamw", 256) == pytest.approx(0.001)
    assert default_lr("adamw", 4096) == pytest.approx(0.004)


def test_warm_up_is_a_line_that_meets_every_schedule() -> None:
    for sched in SCHEDULES:
        assert rate(0, sched=sched) == pytest.approx(0.1)
        assert rate(50, sched=sched) == pytest.approx(0.25)
        assert rate(100 - 1e-9, sched=sched) == pytest.approx(0.4)
        assert rate(100, sched=sched) == pytest.approx(0.4)


def test_cosine_ends_at_the_least_rate_and_stays_there() -> None:
    assert rate(550) == pytest.approx(0.2)
    assert rate(325) == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)))
    assert rate(1000) == pytest.approx(0.0)
    assert rate(5000) == pytest.approx(0.0)
    assert rate(550, min_lr=0.1) == pytest.approx(0.25)
    assert rate(1000, min_lr=0.1) == pytest.approx(0.1)


def test_step_falls_to_a_tenth_at_each_third() -> None:
    rates = [rate(p, sched="step", warmup=0, total=90) for p in (0, 29.9, 30, 59.9, 60, 90)]
    assert rates == pytest.approx([0.4, 0.4, 0.04, 0.04, 0.004, 0.004])


def test_constant_stays() -> None:
    assert {rate(p, sched="constant") for p in (100, 500, 1000, 2000)} == {0.4}


def test_no_warm_up_and_a_run_that_is_all_warm_up() -> None:
    assert rate(0, warmup=0) == pytest.approx(0.4)
    assert rate(50, warmup=100, total=100) == pytest.approx(0.25)
    assert rate(100, warmup=100, total=100) == pytest.approx(0.4)


def test_set_lr_reaches_every_group() -> None:
    optimizer = create_optimizer(create_model("tiny", 2), "sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    set_lr(optimizer, 0.03)
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.03]
