"""Models by name; one family per file.

in: name, num_classes, img_size  ->  out: an nn.Module, float (n, 3, img_size, img_size) -> logits (n, num_classes)
Invariant: a model is added by one function and one line in a literal dict: MODELS here, or its family's table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from models.resnet_cifar import resnet20
from models.tiny import Tiny
from models.torchvision_models import TORCHVISION_MODELS, create_torchvision_model

# Our own models: name -> function of num_classes.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet20": resnet20,
    "tiny": Tiny,
}


def model_names() -> list[str]:
    """All names that create_model takes, sorted."""
    return sorted({*MODELS, *TORCHVISION_MODELS})


def create_model(name: str, num_classes: int, img_size: int | None = None) -> nn.Module:
    """Build a model with random weights, drawn from torch's global RNG. Raises ValueError for an unknown name."""
    if name not in MODELS and name not in TORCHVISION_MODELS:
        near = difflib.get_close_matches(name.lower(), model_names(), n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else f"some are resnet18, resnet50, {', '.join(MODELS)}"
        raise ValueError(f"--model {name}: no such model; {hint} (models/ lists them all)")
    if num_classes < 1:
        raise ValueError(f"--num-classes {num_classes}: a model needs at least one class")
    if name in MODELS:
        return MODELS[name](num_classes)
    return create_torchvision_model(name, num_classes, img_size)


def check_model(name: str, num_classes: int, img_size: int, rank_batch: int) -> None:
    """Raise ValueError (one line) where the model can't train on `rank_batch` pictures of `img_size` in a process.

    Nothing is computed: weights and one batch stand on the meta device, so this is cheap for the largest ones too.
    """
    images = torch.empty(min(rank_batch, 2), 3, img_size, img_size, device="meta")
    # Not `with torch.device("meta")`: RegNet computes its widths with tensors. (torch's stub has the hook return None.)
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
    try:
        create_model(name, num_classes, img_size).to("meta").train()(images)
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        batch = f"batches of {rank_batch} pictures of {img_size}x{img_size}"
        advice = "try --img-size 224, or a larger --batch-size if it is about the batch"
        raise ValueError(f"--model {name} can't train on {batch} per process: {reason}; {advice}") from error
    finally:
        hook.remove()


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
