"""One update: the same however the batch is cut, in the precision asked for, and never compiled twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from engine import distributed
from engine.ema import Ema
from engine.forward import Forward
from engine.losses import LOSSES
from engine.mixing import Mixing
from engine.optim import create_optimizer
from engine.step import Step
from models import create_model

SLOTS, SIDE, CLASSES = 12, 8, 5


def global_batch(number, masked=()):
    generator = torch.Generator().manual_seed(number)
    valid = torch.ones(SLOTS, dtype=torch.bool)
    valid[list(masked)] = False
    return {
        "image": torch.randint(0, 256, (SLOTS, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator),
        "label": torch.randint(0, CLASSES, (SLOTS,), generator=generator),
        "valid": valid,
    }


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def tiny():
    torch.manual_seed(0)
    model: Any = create_model("tiny", CLASSES)
    model.dropout.p = 0.0  # what it drops depends on the precision, and on who compiled it
    return model


def train(rank, world_size, port, make=plain, steps=3, masked=(), compiled=None, channels_last=False, **how):
    """`steps` steps of one rank: (weights, norms, how often gradients travelled, average, scale of the loss, losses)."""
    ranks = distributed.start(rank, nproc=world_size, store_port=port)
    model = make()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    ema = Ema(model, how.pop("ema")) if "ema" in how else None
    wrapped = distributed.wrap(model, ranks, backend=compiled)
    travels = 0

    def count(state, bucket):
        nonlocal travels
        travels += 1
        work = torch.distributed.all_reduce(bucket.buffer().div_(world_size), async_op=True).get_future()
        return work.then(lambda future: future.value()[0])

    if compiled is None:
        wrapped.register_comm_hook(None, count)
    settings: dict[str, Any] = {"loss": "ce", "smoothing": 0.0, "grad_accum": 1, "clip_grad": 0.0, "mixup": 0.0, "cutmix": 0.0}
    settings |= {"amp": "off", **how}
    step = Step(
        model=wrapped, optimizer=create_optimizer(model, "sgd", 0.1, 0.9, 5e-4), schedule=lambda position: 0.1,
        forward=Forward(ranks.device, settings["amp"], channels_last), loss=LOSSES[settings["loss"]], smoothing=settings["smoothing"],
        mixing=Mixing(settings["mixup"], settings["cutmix"], CLASSES), grad_accum=settings["grad_accum"],
        clip_grad=settings["clip_grad"], ema=ema, seed=0, rank=rank, world_size=world_size,
    )  # fmt: skip
    norms, losses = [], []
    part = slice(rank * SLOTS // world_size, (rank + 1) * SLOTS // world_size)
    step.warm_up({name: value[part] for name, value in global_batch(99).items()})
    travels = 0
    for number in range(steps):
        whole = global_batch(number, masked)
        counted = int(whole["valid"].sum())
        outcome = step(number * SLOTS, number, {name: value[part] for name, value in whole.items()}, lambda: counted)  # noqa: B023
        norms.append(float(step.norm))
        losses.append(outcome.losses)
    distributed.shut_down()
    averages = {name: value.clone() for name, value in ema.state_dict().items()} if ema else None
    return {name: value.clone() for name, value in model.state_dict().items()}, norms, travels, averages, step.scaler.get_scale(), losses


def run(pool, world_size=1, **how):
    """Every rank's result."""
    store, port = distributed.host_store()
    answers = pool.run(world_size, in_pool, world_size, port, how)
    del store
    return answers


def in_pool(rank, world_size, port, how):
    torch.set_num_threads(1)
    try:
        return train(rank, world_size, port, **how)
    finally:
        if how.get("compiled"):  # the pool's process has other work after this
            torch._dynamo.reset()
            torch._dynamo.config.error_on_recompile = False


def same(a, b, tolerance):
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_micro_batches_and_ranks_give_the_gradients_of_one_large_batch(gloo_pool):
    masked = (2, 3, 7)  # a micro-batch of masked slots only among them
    ((whole, norms, travels, *_),) = run(gloo_pool, masked=masked)
    for world_size, parts in ((1, 4), (1, 5), (1, 12), (2, 3), (3, 2), (4, 3)):
        for weights, others, together, *_ in run(gloo_pool, world_size, grad_accum=parts, masked=masked):
            same(whole, weights, 1e-6)
            assert others == pytest.approx(norms, rel=1e-5)
            assert together == travels == 3  # once a step: no_sync holds the others back


def test_a_step_without_a_valid_slot_changes_nothing(gloo_pool):
    ((weights, *_),) = run(gloo_pool, masked=range(SLOTS), grad_accum=2)
    same(plain().state_dict(), weights, 0)


def test_clipping_bounds_the_norm_of_all_gradients(gloo_pool):
    ((free, norms, *_),) = run(gloo_pool, steps=1)
    limit = norms[0] / 4
    for world_size, parts in ((1, 1), (2, 2)):
        (clipped, told, *_), *_ = run(gloo_pool, world_size, steps=1, clip_grad=limit, grad_accum=parts)
        assert told == pytest.approx(norms)  # what is told is the norm before
        start = plain().state_dict()
        moved, whole = ({name: value - start[name] for name, value in weights.items() if "bias" in name} for weights in (clipped, free))
        same({name: value / 4 for name, value in whole.items()}, moved, 1e-6)
    ((unchanged, *_),) = run(gloo_pool, steps=1, clip_grad=norms[0] * 2)
    same(free, unchanged, 0)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_stays_near_float32(gloo_pool, amp):
    full, half = run(gloo_pool)[0], run(gloo_pool, amp=amp)[0]
    moved, apart = (
        torch.cat([(full[0][name] - value).flatten() for name, value in other.items()]).norm() for other in (plain().state_dict(), half[0])
    )
    assert 0 < apart < 0.05 * moved
    assert half[1] == pytest.approx(full[1], rel=0.05)  # norms are those of the gradients, not of the scaled ones
    assert all(value.dtype == torch.float32 for value in half[0].values() if value.is_floating_point())
    assert half[4] == (65536.0 if amp == "fp16" else 1.0)


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(gloo_pool):
    ((weights, norms, _, _, scale, _),) = run(gloo_pool, make=exploding, steps=1, amp="fp16")
    assert scale == 32768.0 and not math.isfinite(norms[0])
    same(exploding().state_dict(), weights, 0)


def exploding():
    """A model whose gradients don't fit into float16 once the loss is scaled."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), Amplifier(), nn.Linear(8, CLASSES))


class Amplifier(nn.Module):
    def forward(self, x):
        return x * 100


def test_channels_last_changes_the_order_of_sums_only(gloo_pool):
    same(run(gloo_pool, make=tiny)[0][0], run(gloo_pool, make=tiny, channels_last=True)[0][0], 1e-4)


def never_twice():
    """In the pool's process: a second compilation of anything is an error."""
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = True
    return tiny()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_batches_of_one_shape_are_compiled_once(gloo_pool, backend):
    plain_run, compiled = run(gloo_pool, make=tiny, steps=4)[0], run(gloo_pool, make=never_twice, steps=4, compiled=backend)[0]
    same(plain_run[0], compiled[0], 1e-4)
    assert compiled[0].keys() == tiny().state_dict().keys()  # plain names


def test_the_average_follows_the_weights_and_starts_near_them(gloo_pool):
    ((weights, _, _, average, *_),) = run(gloo_pool, make=tiny, steps=4, ema=0.9)
    expected = {name: value.clone() for name, value in tiny().state_dict().items()}
    for steps in range(4):
        decay = min(0.9, (1 + steps) / (10 + steps))
        ((now, *_),) = run(gloo_pool, make=tiny, steps=steps + 1)
        for name, value in now.items():
            expected[name] = value if not value.is_floating_point() else decay * expected[name] + (1 - decay) * value
    same(expected, average, 1e-6)
    assert not torch.equal(weights["head.weight"], average["head.weight"])
    (_, _, _, first, *_), (_, _, _, second, *_) = run(gloo_pool, 2, make=plain, ema=0.9)
    same(first, second, 0)


def test_mixing_is_the_same_at_the_same_step(gloo_pool):
    mixed = [run(gloo_pool, 2, mixup=0.8, cutmix=1.0)[0][0] for _ in range(2)]
    same(mixed[0], mixed[1], 0)
    assert not torch.equal(mixed[0]["4.weight"], run(gloo_pool, 2)[0][0]["4.weight"])


def test_smoothing_and_the_loss_reach_the_step(gloo_pool):
    (*_, losses), (*_, smooth), (*_, binary) = (run(gloo_pool, steps=1, **how)[0] for how in ({}, {"smoothing": 0.1}, {"loss": "bce"}))
    logits = plain()(Forward(torch.device("cpu")).pictures(global_batch(0)["image"]))
    labels = global_batch(0)["label"]
    ce = nn.functional.cross_entropy
    torch.testing.assert_close(losses[0], ce(logits, labels, reduction="none"))
    torch.testing.assert_close(smooth[0], ce(logits, labels, reduction="none", label_smoothing=0.1))
    one_hot = nn.functional.one_hot(labels, CLASSES).float()
    torch.testing.assert_close(binary[0], nn.functional.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").mean(1))
