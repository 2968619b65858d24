"""Models by name; one family per file.

in: name, num_classes, img_size  ->  out: an nn.Module, float (n, 3, img_size, img_size), or clips (n, 3, T, img_size, img_size),
-> logits (n, num_classes)
Invariant: a model is added by one function and one line in a literal dict: MODELS here, or its family's table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from models.resnet3d import c2d_8x8_r50, i3d_8x8_r50, slow_8x8_r50
from models.resnet9 import resnet9
from models.resnet_cifar import resnet20
from models.slowfast import slowfast_4x16_r50, slowfast_8x8_r50, slowfast_8x8_r50_alpha4
from models.timm_models import PREFIX, create_timm_model
from models.tiny import Tiny
from models.torchvision_models import (
    TORCHVISION_MODELS,
    TORCHVISION_VIDEO_MODELS,
    create_torchvision_model,
    create_torchvision_video_model,
)

# Our own models: name -> function of num_classes.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet9": resnet9,
    "resnet20": resnet20,
    "tiny": Tiny,
}


# Our models of clips: name -> function of num_classes, img_size and options. `tiny` takes clips too.
VIDEO_MODELS: dict[str, Callable[..., nn.Module]] = {
    "c2d_8x8_r50": c2d_8x8_r50,
    "i3d_8x8_r50": i3d_8x8_r50,
    "slow_8x8_r50": slow_8x8_r50,
    "slowfast_4x16_r50": slowfast_4x16_r50,
    "slowfast_8x8_r50": slowfast_8x8_r50,
    "slowfast_8x8_r50_alpha4": slowfast_8x8_r50_alpha4,
}


def model_names() -> list[str]:
    """All names that create_model takes, sorted."""
    return sorted({*MODELS, *VIDEO_MODELS, *TORCHVISION_MODELS, *TORCHVISION_VIDEO_MODELS})


def takes_clips(name: str) -> bool:
    """Whether the model is one of clips (`tiny` is one of both)."""
    return name in VIDEO_MODELS or name in TORCHVISION_VIDEO_MODELS or name == "tiny"


def create_model(name: str, num_classes: int, img_size: int | None = None, **options: Any) -> nn.Module:
    """Build a model with random weights, drawn from torch's global RNG. options: keywords of its constructor.

    Raises ValueError for an unknown name, for options that it has not, and for values that it refuses.
    """
    if name not in model_names() and not name.startswith(PREFIX):
        near = difflib.get_close_matches(name.lower(), model_names(), n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else f"some are resnet18, resnet50, {', '.join(MODELS)}"
        raise ValueError(f"--model {name}: no such model; {hint} (models/ lists them all)")
    if num_classes < 1:
        raise ValueError(f"--num-classes {num_classes}: a model needs at least one class")
    try:
        if name.startswith(PREFIX):
            return create_timm_model(name.removeprefix(PREFIX), num_classes, img_size, **options)
        if name in MODELS:
            return MODELS[name](num_classes, **options)
        if name in VIDEO_MODELS:
            return VIDEO_MODELS[name](num_classes, img_size, **options)
        if name in TORCHVISION_VIDEO_MODELS:
            return create_torchvision_video_model(name, num_classes, **options)
        return create_torchvision_model(name, num_classes, img_size, **options)
    except (TypeError, ValueError) as error:
        if not options:
            raise
        raise ValueError(f"--model-kwargs {' '.join(options)}: {name} refuses them: {' '.join(str(error).split())}") from error


def check_model(
    name: str,
    num_classes: int,
    img_size: int,
    rank_batch: int,
    num_frames: int | None = None,
    options: dict[str, Any] | None = None,
    test_size: int | None = None,
) -> nn.Module:
    """The model on the meta device. Raises ValueError (one line) where it can't train on `rank_batch` pictures of `img_size` (or clips of
    `num_frames` such) in a process, or can't be tested on those of `test_size`.

    Nothing is computed: weights and one batch stand on the meta device, so this is cheap for the largest ones too.
    """
    if num_frames is None and takes_clips(name) and name != "tiny":
        raise ValueError(f"--model {name} takes clips, and the task gives pictures: give --task video-classification or another model")
    if num_frames is not None and not takes_clips(name):
        raise ValueError(f"--model {name} takes pictures, and the task gives clips: give a model of clips, such as slowfast_8x8_r50")
    frames = () if num_frames is None else (num_frames,)

    def empty(num: int, side: int) -> torch.Tensor:
        return torch.empty(num, 3, *frames, side, side, device="meta")

    # Not `with torch.device("meta")`: RegNet computes its widths with tensors. (torch's stub has the hook return None.)
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
    try:
        model = create_model(name, num_classes, img_size, **(options or {})).to("meta").train()
        model(empty(min(rank_batch, 2), img_size))
        model.eval()
        if test_size not in (None, img_size):
            check_test_size(name, model, empty(1, test_size or img_size), img_size)
        return model
    except (ValueError, RuntimeError, AssertionError) as error:
        if str(error).startswith("--"):  # of create_model: it says what to do
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        what = "pictures" if num_frames is None else f"clips of {num_frames} pictures"
        batch = f"batches of {rank_batch} {what} of {img_size}x{img_size}"
        advice = "try --img-size 224, or a larger --batch-size if it is about the batch"
        raise ValueError(f"--model {name} can't train on {batch} per process: {reason}; {advice}") from error
    finally:
        hook.remove()


def check_test_size(name: str, model: nn.Module, images: torch.Tensor, img_size: int) -> None:
    """Raises ValueError where a model made for pictures of img_size can't be shown these."""
    try:
        model(images)
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--test-size {images.shape[-1]}: --model {name} of --img-size {img_size} can't take it: {reason}") from error


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
