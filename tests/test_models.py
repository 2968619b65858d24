"""Models by name: the table is torchvision's, every one gives one tensor, and what can't train is refused before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from models import MODELS, VIDEO_MODELS, check_model, create_model, model_names
from models.torchvision_models import TORCHVISION_MODELS, TORCHVISION_VIDEO_MODELS

ROOT = Path(__file__).resolve().parents[1]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_table_is_what_torchvision_has() -> None:
    names = torchvision.models.list_models(module=torchvision.models)
    assert sorted(TORCHVISION_MODELS) == names
    assert TORCHVISION_MODELS == {name: torchvision.models.get_model_builder(name).__name__ for name in names}
    clips = torchvision.models.list_models(module=torchvision.models.video)
    assert sorted(TORCHVISION_VIDEO_MODELS) == clips
    assert model_names() == sorted([*names, *clips, *MODELS, *VIDEO_MODELS])
    assert len(model_names()) == len(set(model_names()))


@pytest.mark.parametrize(("name", "size"), [("tiny", 8), ("tiny", 32), ("tiny", 57), ("tiny", 224), ("resnet20", 9), ("resnet20", 32)])
def test_our_models_take_any_size_and_learn(name: str, size: int) -> None:
    model = create_model(name, 7)
    logits = model(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # DDP waits for ever for one that has none


def test_resnet20_is_the_papers() -> None:
    model = create_model("resnet20", 10)
    assert num_parameters(model) == 269_722  # "0.27M" in table 6
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules()) == 20
    features = []
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.Sequential)
    for block in blocks:
        block.register_forward_hook(lambda module, args, output: features.append(tuple(output.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert features == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_tiny_is_tiny_and_has_what_can_go_wrong() -> None:
    model = create_model("tiny", 10)
    assert num_parameters(model) < 10_000
    kinds = {type(module) for module in model.modules()}
    assert {nn.BatchNorm2d, nn.Dropout, nn.Conv2d, nn.Linear} <= kinds


def test_weights_come_from_the_global_generator() -> None:
    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next(create_model("tiny", 3).parameters()).detach()

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
@pytest.mark.filterwarnings("error")
def test_auxiliary_heads_are_off(name: str) -> None:
    with torch.device("meta"):
        logits = create_model(name, 5).train()(torch.empty(2, 3, 299, 299))
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 5)


@pytest.mark.parametrize(
    "name", ["alexnet", "convnext_tiny", "mobilenet_v3_small", "regnet_y_128gf", "resnet18", "swin_v2_t", "vgg11", "vit_b_32"]
)
def test_one_model_of_each_kind_can_train_at_224(name: str) -> None:
    check_model(name, 3, 224, 2)


@pytest.mark.parametrize("name", ["mc3_18", "mvit_v2_s", "s3d", "slowfast_8x8_r50", "tiny"])
def test_one_model_of_clips_of_each_kind_can_train_at_224(name: str) -> None:
    check_model(name, 3, 224, 2, 16)


@pytest.mark.full
def test_every_model_can_train_at_224() -> None:
    for name in model_names():
        if name in TORCHVISION_MODELS or name in MODELS:
            check_model(name, 3, 224, 2)
        else:
            check_model(name, 3, 224, 2, 16)


def test_tiny_counts_a_clip_as_the_mean_of_its_frames() -> None:
    model = create_model("tiny", 3).eval()
    pictures = torch.randn(2, 3, 16, 16)
    still = pictures.unsqueeze(2).expand(2, 3, 4, 16, 16)
    assert torch.allclose(model(still), model(pictures), atol=1e-6)
    moving = torch.randn(2, 3, 4, 16, 16)
    frames = torch.stack([model(moving[:, :, t]) for t in range(4)])
    assert torch.allclose(model(moving), frames.mean(0), atol=1e-6)  # the head is linear


def test_pictures_and_clips_are_not_mixed_up() -> None:
    with pytest.raises(ValueError, match=r"^--model slowfast_8x8_r50 takes clips, and the task gives pictures: give --task video-cl"):
        check_model("slowfast_8x8_r50", 3, 224, 2)
    with pytest.raises(ValueError, match=r"^--model resnet18 takes pictures, and the task gives clips: give a model of clips"):
        check_model("resnet18", 3, 224, 2, 16)
    with pytest.raises(ValueError, match=r"can't train on batches of 2 clips of 12 pictures of 64x64 per process: .*multiples of alpha=8"):
        check_model("slowfast_8x8_r50", 3, 64, 2, 12)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("tiny", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("resnet18", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("r3d_18", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("slowfast_8x8_r50", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("slowfast_8x8_r50", {"blocks": [1, 1]}, "there are four stages"),
    ],
)
def test_options_that_a_model_has_not_are_refused(name: str, options: dict, reason: str) -> None:
    frames = 16 if name in ("r3d_18", "slowfast_8x8_r50") else None
    with pytest.raises(ValueError, match=f"^--model-kwargs {next(iter(options))}: {name} refuses them: .*{reason}"):
        check_model(name, 3, 64, 2, frames, options)


def test_options_reach_torchvisions_constructors() -> None:
    wide = create_model("resnet50", 2, width_per_group=128).get_submodule("layer1.0.conv1")
    assert isinstance(wide, nn.Conv2d) and wide.out_channels == 128


def test_a_vision_transformer_takes_the_size_it_is_given() -> None:
    with torch.device("meta"):
        assert create_model("vit_b_16", 4, img_size=96)(torch.empty(1, 3, 96, 96)).shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "near"), [("resnet_50", "resnet50"), ("ResNet18", "resnet18"), ("resnet-20", "resnet20"), ("zzz", "resnet18")]
)
def test_unknown_names_meet_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"^--model {name}: no such model; .*{near}") as caught:
        create_model(name, 10)
    assert "\n" not in str(caught.value)


def test_no_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^--num-classes 0: a model needs at least one class$"):
        create_model("tiny", 0)


@pytest.mark.parametrize(
    ("name", "size", "batch", "reason"),
    [
        ("inception_v3", 32, 8, "Kernel size"),
        ("vit_h_14", 64, 8, "indivisible by patch size"),
        ("maxvit_t", 96, 8, "not divisible by partition size 7"),
        ("resnet18", 32, 1, "more than 1 value per channel"),
    ],
)
def test_what_cannot_train_is_said_in_one_line(name: str, size: int, batch: int, reason: str) -> None:
    pictures = f"batches of {batch} pictures of {size}x{size} per process"
    with pytest.raises(ValueError, match=f"^--model {name} can't train on {pictures}: .*{reason}.*; try --img-size") as caught:
        check_model(name, 10, size, batch)
    assert "\n" not in str(caught.value)


def test_checking_leaves_no_trace() -> None:
    check_model("resnet18", 10, 64, 4)
    with pytest.raises(ValueError, match="can't train"):
        check_model("vit_h_14", 10, 64, 4)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_importing_models_does_not_import_torchvision() -> None:
    code = "import sys, models; models.model_names(); models.create_model('tiny', 2); assert 'torchvision' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_timm_s_models_are_there_where_timm_is():
    pytest.importorskip("timm")
    for name, head in {"resnet10t": "fc.weight", "vit_tiny_patch16_224": "head.weight", "deit_tiny_patch16_224": "head.weight"}.items():
        check_model(f"timm:{name}", 7, 64, 2)
        assert create_model(f"timm:{name}", 7, 64).state_dict()[head].shape[0] == 7
    with pytest.raises(ValueError, match=r"--model timm:resnt50: timm [\d.]+ has no such model; the nearest are .*resnet50"):
        create_model("timm:resnt50", 7)


def test_without_timm_a_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError) as refused:
        create_model("timm:resnet18", 3)
    assert str(refused.value) == "--model timm:resnet18: timm is not installed here; run pip install timm, or take one of models/"
