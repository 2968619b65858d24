"""SlowFast: names, shapes and numbers of the reference; the two pathways; options."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models import create_model
from models.slowfast import SlowFast

SMALL = {"width_per_group": 8, "blocks": [1, 1, 1, 1]}


def filled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights by the formula that the reference's output was computed with."""
    for i, (name, tensor) in enumerate(sorted(state.items())):
        if name.endswith("num_batches_tracked"):
            continue
        wave = np.sin(0.7 * np.arange(tensor.numel()) + i)
        if name.endswith("running_var"):
            values = 1 + 0.5 * np.abs(wave)
        elif name.endswith("running_mean"):
            values = 0.1 * wave
        elif tensor.ndim == 1:
            values = 1 + 0.1 * wave if name.endswith("weight") else 0.05 * wave
        else:
            values = wave * math.sqrt(2 / (tensor.numel() / tensor.shape[0]))
        state[name] = torch.from_numpy(values.reshape(tuple(tensor.shape)).astype(np.float32))
    return state


def test_the_reference_is_matched(shared_data: Path) -> None:
    reference = json.loads((shared_data.parent / "reference" / "slowfast.json").read_text())["slowfast_8x8_r50"]
    model = create_model("slowfast_8x8_r50", reference["num_classes"], 224).eval()
    state = model.state_dict()
    assert {name: list(tensor.shape) for name, tensor in state.items()} == reference["state_dict"]
    assert sum(p.numel() for p in model.parameters()) == reference["num_parameters"]
    model.load_state_dict(filled(state))
    clip = np.sin(0.01 * np.arange(3 * 32 * 224 * 224)).reshape(1, 3, 32, 224, 224).astype(np.float32)
    with torch.inference_mode():
        scores = model(torch.from_numpy(clip)).softmax(1)[0]
    assert (scores - torch.tensor(reference["check"]["output"])).abs().max() < 1e-5


def test_slow_frames_are_spread_from_the_first_to_the_last() -> None:
    model = create_model("slowfast_8x8_r50", 2, 32, **SMALL)
    assert isinstance(model, SlowFast)
    for num_frames in (8, 16, 32, 64):
        clip = torch.arange(num_frames).float().reshape(1, 1, -1, 1, 1)
        expected = np.floor(np.linspace(0, num_frames - 1, num_frames // 8) + 1e-9)
        assert model._slow_frames(clip).flatten().tolist() == expected.tolist()
    with pytest.raises(ValueError, match=r"^clips of 12 frames: this model takes multiples of alpha=8$"):
        model(torch.zeros(1, 3, 12, 32, 32))


def test_the_8x8_of_the_model_zoo_has_another_alpha() -> None:
    ours, zoo = (create_model(name, 2, 32, **SMALL) for name in ("slowfast_8x8_r50", "slowfast_8x8_r50_alpha4"))
    assert isinstance(ours, SlowFast) and isinstance(zoo, SlowFast)
    assert (ours.alpha, zoo.alpha) == (8, 4)
    assert [m.state_dict()["s1_fuse.conv_f2s.weight"].shape[2] for m in (ours, zoo)] == [5, 7]
    given = create_model("slowfast_4x16_r50", 2, 32, **SMALL, alpha=4, fusion_kernel=7)
    given.load_state_dict(zoo.state_dict())
    clips = torch.randn(2, 3, 8, 32, 32)
    assert torch.equal(given.eval()(clips), zoo.eval()(clips))


def test_every_parameter_learns_and_the_order_of_frames_matters() -> None:
    torch.manual_seed(0)
    model = create_model("slowfast_8x8_r50", 3, 32, **SMALL, zero_init_final_bn=False, dropout=0.0)
    clips = torch.randn(2, 3, 16, 32, 32)
    model(clips).logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())  # DDP waits for ever for one that has none
    model.eval()
    assert not torch.allclose(model(clips), model(clips.flip(2)), atol=1e-6)


def test_nonlocal_blocks_stand_in_the_slow_pathway() -> None:
    model = create_model("slowfast_8x8_r50", 2, 32, **SMALL, nonlocal_blocks={4: [0]})
    assert [name for name in dict(model.named_modules()) if name.endswith("nonlocal0")] == ["s4.pathway0_nonlocal0"]
    assert model(torch.randn(2, 3, 8, 64, 64)).shape == (2, 2)


@pytest.mark.parametrize("options", [{"alpha": 0}, {"fusion_kernel": 4}, {"beta_inv": 3}])
def test_pathways_that_do_not_fit_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="all are at least 1, fusion_kernel is odd, and beta_inv divides width_per_group=64"):
        create_model("slowfast_8x8_r50", 2, 32, **options)


def test_zero_init_is_the_last_norm_of_each_block_only() -> None:
    model = create_model("slowfast_8x8_r50", 2, 32, **SMALL)
    zero = {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm3d) and bool((m.weight == 0).all())}
    assert zero and all(name.endswith("branch2.c_bn") for name in zero)
