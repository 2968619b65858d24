"""Where a model's first weights come from, which of them train, and how they lie in memory.

in: a model, a file of weights  ->  out: the same model with them
Invariant: every weight of the model is from the file, but the head's where the classes differ; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from models.torchvision_models import TORCHVISION_MODELS, TORCHVISION_VIDEO_MODELS

from .optim import head_names

Weights = dict[str, torch.Tensor]


def read_pretrained(source: str, model_name: str) -> Weights:
    """The weights in a file, or torchvision's own (downloaded once, kept in torch's cache). Raises ValueError, one line."""
    if source != "torchvision":
        return _read_file(Path(source), "--pretrained")
    if model_name not in TORCHVISION_MODELS and model_name not in TORCHVISION_VIDEO_MODELS:
        raise ValueError(f"--pretrained torchvision: {model_name} is no model of torchvision's; give the path of a file of weights")
    import torchvision.models

    try:
        found = torchvision.models.get_model_weights(TORCHVISION_VIDEO_MODELS.get(model_name, model_name)).DEFAULT
        return dict(found.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError, AttributeError) as error:  # URLError is an OSError; a wrong hash is a RuntimeError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"--pretrained torchvision: the weights of {model_name} can't be downloaded ({reason}): download them where there is a "
            "network, and give their path"
        ) from None


def read_weights(path: str) -> Weights:
    """The weights of --init-from: a checkpoint of a run (its average, where it has one), a run folder, or a file of weights."""
    file = Path(path)
    for candidate in (file / "checkpoints" / "best.pt", file / "checkpoints" / "last.pt"):
        if candidate.is_file():
            file = candidate
            break
    return _read_file(file, "--init-from")


def read_start(model_name: str, pretrained: str | None, init_from: str | None) -> dict[str, Weights | None]:
    """What `load_start` takes. Raises ValueError."""
    return {
        "pretrained": read_pretrained(pretrained, model_name) if pretrained else None,
        "init_from": read_weights(init_from) if init_from else None,
    }


def _read_file(path: Path, flag: str) -> Weights:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file; give a .pt or .pth file of weights")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types here, all of them about the file
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{flag} {path}: torch can't load it with weights_only=True ({reason}); give a file of weights") from None
    for key in ("ema", "model_ema", "state_dict", "model", "model_state"):  # ours; timm's and torchvision's references; PySlowFast's
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    weights = {name.removeprefix("module."): value for name, value in content.items()} if isinstance(content, dict) else {}
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        places = "a dict of tensors, or one under 'model', 'state_dict' or 'model_state'"
        raise ValueError(f"{flag} {path}: no weights in it; it must hold {places}")
    return weights


def load_pretrained(model: nn.Module, weights: Weights) -> str | None:
    """Load what fits; the head stays new where its size differs, and then the line to tell says so. Raises ValueError."""
    own = model.state_dict()
    head = head_names(model)
    other = sorted(name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape)
    missing = sorted(own.keys() - weights.keys() - {name for name in own if name.endswith("num_batches_tracked")})
    wrong = [name for name in (*other, *missing) if name not in head]
    if wrong:
        now = f"{wrong[0]} is {tuple(weights[wrong[0]].shape)} there" if wrong[0] in weights else f"{wrong[0]} is missing there"
        raise ValueError(f"--pretrained: the weights are of another model: {len(wrong)} of {len(own)} tensors don't fit, {now}")
    remade = sorted(head & {*other, *missing})
    kept = {name: value for name, value in weights.items() if name in own and name not in remade}
    model.load_state_dict(kept, strict=False)
    return f"pretrained weights loaded; the head ({', '.join(remade)}) is new" if remade else "pretrained weights loaded, with the head"


def load_exactly(model: nn.Module, weights: Weights) -> None:
    """Load all weights. Raises ValueError, one line, where one is missing, left over, or of another shape."""
    own = model.state_dict()
    wrong = sorted(own.keys() ^ weights.keys()) or sorted(name for name in own if own[name].shape != weights[name].shape)
    if wrong:
        advice = "--pretrained takes weights of a model with other classes"
        raise ValueError(f"--init-from: the weights are of another model: {len(wrong)} tensors differ, the first is {wrong[0]}; {advice}")
    model.load_state_dict(weights)


def load_start(model: nn.Module, *, pretrained: Weights | None, init_from: Weights | None) -> str | None:
    """Give a new run's model the weights it starts from; a line to tell, or None."""
    if init_from is not None:
        load_exactly(model, init_from)
        return "starting from the weights of --init-from"
    return load_pretrained(model, pretrained) if pretrained is not None else None


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Take the parameters whose names begin so out of the training. Raises ValueError for a prefix of none, and where none is left."""
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            some = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise ValueError(f"--freeze {prefix}: no parameter's name begins so; the model's parts are {some}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes)) if prefixes else True)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--freeze {' '.join(prefixes)}: nothing is left to train")


def set_training(model: nn.Module) -> None:
    """Training mode, but for the modules whose parameters are all frozen: their batch norm keeps its statistics too."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def place(model: nn.Module, device: torch.device, *, frozen: Sequence[str], channels_last: bool, sync_bn: bool) -> nn.Module:
    """The model on its device, as --freeze, --channels-last and --sync-bn ask for it."""
    freeze(model, frozen)
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    if channels_last:  # not model.to(memory_format=...), which refuses a model that has filters of clips too
        orders = {4: torch.channels_last, 5: torch.channels_last_3d}
        for parameter in model.parameters():
            if parameter.ndim in orders:
                parameter.data = parameter.data.contiguous(memory_format=orders[parameter.ndim])
    return model
