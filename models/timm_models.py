"""timm's models, as timm:NAME, where timm is installed.

in: a name that timm knows, num_classes, img_size  ->  out: an nn.Module, (n, 3, img_size, img_size) -> (n, num_classes)
Invariant: random weights: none are downloaded (--pretrained takes a file of them). timm is imported only when one is asked for.
"""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

PREFIX = "timm:"


def create_timm_model(name: str, num_classes: int, img_size: int | None = None, **options: Any) -> nn.Module:
    """Build the model; `img_size` goes to those whose weights depend on it. Raises ValueError where timm, or the model, is not there."""
    try:
        import timm
    except ImportError:
        raise ValueError(f"--model {PREFIX}{name}: timm is not installed here; run pip install timm, or take one of models/") from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "timm.list_models() lists them"
        raise ValueError(f"--model {PREFIX}{name}: timm {timm.__version__} has no such model; {hint}")
    sized = options if img_size is None else {"img_size": img_size, **options}
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **sized)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, **options)  # one that takes any size
    return model
