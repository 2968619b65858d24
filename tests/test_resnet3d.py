"""Models over clips of one pathway: shapes and names as published, options, the head's windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import create_model
from models.resnet3d import Block, Head, NonLocal, Options, ResNet3d

SMALL = {"width_per_group": 8, "blocks": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("name", "parameters", "kernels"),
    # of 400 classes; the temporal kernels of the stem and of each block's first convolution
    [
        ("c2d_8x8_r50", 24_327_632, [1] * 17),
        ("i3d_8x8_r50", 28_043_472, [5, 3, 3, 3, 3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 1, 3, 1]),
        ("slow_8x8_r50", 32_454_096, [1] * 8 + [3] * 9),
    ],
)
def test_they_are_the_published_networks(name: str, parameters: int, kernels: list[int]) -> None:
    with torch.device("meta"):
        model = create_model(name, 400, 224)
        assert model(torch.empty(2, 3, 8, 224, 224)).shape == (2, 400)
    assert sum(p.numel() for p in model.parameters()) == parameters
    temporal = [m.kernel_size[0] for n, m in model.named_modules() if isinstance(m, nn.Conv3d) and n.endswith(("stem.conv", "branch2.a"))]
    assert temporal == kernels
    names = set(model.state_dict())
    assert {"s1.pathway0_stem.conv.weight", "s2.pathway0_res0.branch1_bn.running_var", "s5.pathway0_res2.branch2.c_bn.bias"} <= names
    assert model.state_dict()["head.projection.weight"].shape == (400, 2048)


def test_the_last_norms_start_at_zero_where_wished() -> None:
    clips = torch.randn(2, 3, 4, 32, 32)
    for wished in (True, False):
        model = create_model("slow_8x8_r50", 3, 32, **SMALL, zero_init_final_bn=wished)
        last = [m.branch2.c_bn.weight for m in model.modules() if isinstance(m, Block)]
        assert len(last) == 4 and all(bool((w == 0).all()) is wished for w in last)
        assert model(clips).shape == (2, 3)


def test_norms_and_dropout_are_as_wished() -> None:
    options = {**SMALL, "bn_momentum": 0.3, "bn_eps": 1e-3, "dropout": 0.25}
    model = create_model("i3d_8x8_r50", 3, 32, **options)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm3d)]
    assert norms and all(m.momentum == 0.3 and m.eps == 1e-3 for m in norms)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25]


@pytest.mark.parametrize("kind", ["softmax", "dot_product"])
def test_nonlocal_blocks_stand_where_wished_and_start_as_nothing(kind: str) -> None:
    torch.manual_seed(0)
    wished = {**SMALL, "nonlocal_blocks": {3: [0], 4: [0]}, "nonlocal_type": kind}
    model = create_model("c2d_8x8_r50", 3, 64, **wished).eval()
    found = [name for name, module in model.named_modules() if isinstance(module, NonLocal)]
    assert found == ["s3.pathway0_nonlocal0", "s4.pathway0_nonlocal0"]
    plain = create_model("c2d_8x8_r50", 3, 64, **SMALL).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "nonlocal" not in k})
    clips = torch.randn(1, 3, 4, 64, 64)
    assert torch.equal(model(clips), plain(clips))
    nn.init.ones_(model.get_submodule(found[0]).bn.weight)  # type: ignore[union-attr,arg-type]
    assert not torch.equal(model(clips), plain(clips))


def test_a_nonlocal_block_is_the_papers_sum() -> None:
    torch.manual_seed(0)
    block = NonLocal(4, "softmax", Options()).eval()
    nn.init.ones_(block.bn.weight)
    x = torch.randn(1, 4, 2, 4, 4)
    pooled = nn.functional.max_pool3d(x, (1, 2, 2))
    theta, phi, g = (conv(y)[0] for conv, y in ((block.conv_theta, x), (block.conv_phi, pooled), (block.conv_g, pooled)))
    expected = x.clone()
    for t, row, column in [(0, 0, 0), (1, 3, 2)]:
        weights = torch.einsum("c,ctyx->tyx", theta[:, t, row, column], phi) / 2**0.5
        weights = weights.flatten().softmax(0).reshape(weights.shape)
        seen = torch.einsum("tyx,ctyx->c", weights, g)
        out = block.bn(block.conv_out(seen.reshape(1, 2, 1, 1, 1)))[0, :, 0, 0, 0]
        assert torch.allclose(block(x)[0, :, t, row, column], expected[0, :, t, row, column] + out, atol=1e-5)


def test_larger_pictures_have_windows_whose_probabilities_are_averaged() -> None:
    torch.manual_seed(0)
    head = Head([4], 3, pool=2, dropout=0.5).eval()
    maps = torch.randn(2, 4, 5, 3, 2)
    windows = [head([maps[:, :, :, top : top + 2]]).softmax(1) for top in (0, 1)]
    assert torch.allclose(head([maps]).softmax(1), (windows[0] + windows[1]) / 2, atol=1e-6)
    assert torch.allclose(head([maps[:, :, :, :1]]), head.projection(maps[:, :, :, :1].mean((2, 3, 4))), atol=1e-6)  # smaller ones: one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": [1, 1, 1]}, r"blocks=\[1, 1, 1\]: there are four stages of at least one block each"),
        ({"width_per_group": 0}, r"width_per_group=0, num_groups=1: both are at least 1"),
        ({"nonlocal_type": "gaussian"}, r"nonlocal_type=gaussian: it is one of softmax, dot_product"),
        ({"nonlocal_blocks": {3: [4]}}, r"nonlocal_blocks 3: \[4\]: stages are 2..5, and blocks count from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Options(**options)


def test_groups_are_resnexts() -> None:
    model = ResNet3d(2, 32, [(1,)] * 5, 1, Options(width_per_group=4, num_groups=8, blocks=(1, 1, 1, 1)))
    convolution = model.get_submodule("s2.pathway0_res0.branch2.b")
    assert isinstance(convolution, nn.Conv3d) and convolution.groups == 8 and convolution.in_channels == 32
