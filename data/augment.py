"""What is done to a training picture after it is cropped: RandAugment, TrivialAugment, colour jitter, random erasing.

in: uint8 (3, H, W), numpy Generator  ->  out: uint8 (3, H, W)
Invariant: pure: all chance comes from the generator, which is the sample's own. The operations are torchvision's
(transforms.v2.functional); its random classes are not used, since they draw from torch's global generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

MEAN = (124, 116, 104)  # ImageNet's: what an erased box is filled with is about 0 to the model
ERASED = (0.02, 1 / 3)  # share of the picture
ERASED_RATIO = (0.3, 3.3)  # height / width

NUM_OPERATIONS, MAGNITUDE, LEVELS = 2, 9, 31  # RandAugment's, as torchvision sets them


def _functional() -> Any:
    from torchvision.transforms.v2 import functional

    return functional


def _shear(image: Tensor, amount: float, axis: int) -> Tensor:
    # by the tangent, as the operation of PIL that the papers used; around the corner, as torchvision does it
    degrees = [0.0, 0.0]
    degrees[axis] = math.degrees(math.atan(amount))
    return _functional().affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=degrees, center=[0, 0])


def _translate(image: Tensor, amount: float, axis: int) -> Tensor:
    shift = [0, 0]
    shift[axis] = int(amount)
    return _functional().affine(image, angle=0.0, translate=shift, scale=1.0, shear=[0.0, 0.0])


def _rotate(image: Tensor, degrees: float) -> Tensor:
    return _functional().rotate(image, degrees)


def _brightness(image: Tensor, change: float) -> Tensor:
    return _functional().adjust_brightness(image, 1 + change)


def _saturation(image: Tensor, change: float) -> Tensor:
    return _functional().adjust_saturation(image, 1 + change)


def _contrast(image: Tensor, change: float) -> Tensor:
    return _functional().adjust_contrast(image, 1 + change)


def _sharpness(image: Tensor, change: float) -> Tensor:
    return _functional().adjust_sharpness(image, 1 + change)


def _posterize(image: Tensor, bits: float) -> Tensor:
    return _functional().posterize(image, int(bits))


def _solarize(image: Tensor, threshold: float) -> Tensor:
    return _functional().solarize(image, threshold)


def _autocontrast(image: Tensor, _: float) -> Tensor:
    return _functional().autocontrast(image)


def _equalize(image: Tensor, _: float) -> Tensor:
    return _functional().equalize(image)


def _identity(image: Tensor, _: float) -> Tensor:
    return image


Operation = Callable[[Tensor, float], Tensor]
Range = Callable[[float, int], float]  # (level in 0..1, side in pixels) -> strength
Row = tuple[Operation, Range, bool]  # the last: whether its sign is drawn


def _operations(shear: float, shift: Range, rotate: float, change: float, bits: int) -> dict[str, Row]:
    """The table of a policy from the strongest of each operation."""
    return {
        "identity": (_identity, lambda level, side: 0.0, False),
        "shear_x": (partial(_shear, axis=0), lambda level, side: shear * level, True),
        "shear_y": (partial(_shear, axis=1), lambda level, side: shear * level, True),
        "translate_x": (partial(_translate, axis=0), shift, True),
        "translate_y": (partial(_translate, axis=1), shift, True),
        "rotate": (_rotate, lambda level, side: rotate * level, True),
        "brightness": (_brightness, lambda level, side: change * level, True),
        "color": (_saturation, lambda level, side: change * level, True),
        "contrast": (_contrast, lambda level, side: change * level, True),
        "sharpness": (_sharpness, lambda level, side: change * level, True),
        "posterize": (_posterize, lambda level, side: 8 - round(bits * level), False),
        "solarize": (_solarize, lambda level, side: 255.0 * (1 - level), False),
        "autocontrast": (_autocontrast, lambda level, side: 0.0, False),
        "equalize": (_equalize, lambda level, side: 0.0, False),
    }


RAND = _operations(shear=0.3, shift=lambda level, side: 150 / 331 * side * level, rotate=30.0, change=0.9, bits=4)
TRIVIAL = _operations(shear=0.99, shift=lambda level, side: 32.0 * level, rotate=135.0, change=0.99, bits=6)


def _apply(table: dict[str, Row], image: Tensor, level: float, rng: np.random.Generator) -> Tensor:
    name = list(table)[int(rng.integers(len(table)))]
    operation, strength, signed = table[name]
    amount = strength(level, image.shape[-1])
    return operation(image, -amount if signed and rng.random() < 0.5 else amount)


def rand_augment(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Two operations of one strength (Cubuk et al., RandAugment, 2019)."""
    for _ in range(NUM_OPERATIONS):
        image = _apply(RAND, image, MAGNITUDE / (LEVELS - 1), rng)
    return image


def trivial_augment(image: Tensor, rng: np.random.Generator) -> Tensor:
    """One operation of any strength (Müller and Hutter, TrivialAugment, 2021; its wide space)."""
    return _apply(TRIVIAL, image, float(rng.integers(LEVELS)) / (LEVELS - 1), rng)


POLICIES: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {"randaugment": rand_augment, "trivialaugment": trivial_augment}


def color_jitter(image: Tensor, strength: float, rng: np.random.Generator) -> Tensor:
    """Brightness, contrast and saturation, in a random order, each by a factor in 1 - strength .. 1 + strength."""
    operations = (_brightness, _contrast, _saturation)
    for number in rng.permutation(3).tolist():
        image = operations[number](image, float(rng.uniform(-strength, strength)))
    return image


def erase(image: Tensor, rng: np.random.Generator) -> None:
    """Fill a box with the mean colour, in place (Zhong et al., Random Erasing, 2017). A box that does not fit is drawn anew, ten times."""
    height, width = image.shape[1:]
    low, high = (math.log(ratio) for ratio in ERASED_RATIO)
    for _ in range(10):
        area = height * width * rng.uniform(*ERASED)
        ratio = math.exp(rng.uniform(low, high))
        tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < tall <= height and 0 < wide <= width:
            top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
            image[:, top : top + tall, left : left + wide] = torch.tensor(MEAN, dtype=image.dtype).view(3, 1, 1)
            return


def augment(image: Tensor, rng: np.random.Generator, *, policy: str | None = None, jitter: float = 0.0, reprob: float = 0.0) -> None:
    """Change a picture in place: a policy (a name in POLICIES), colour jitter of that strength, a box erased so often."""
    changed = POLICIES[policy](image, rng) if policy else image
    if jitter:
        changed = color_jitter(changed, jitter, rng)
    if changed is not image:
        image.copy_(changed)
    if reprob and rng.random() < reprob:
        erase(image, rng)


def check_augmentation(policy: str | None, jitter: float, reprob: float) -> None:
    """Raises ValueError for a policy that is in no table, and for numbers out of range."""
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"auto_augment {policy!r} is no policy; there are {', '.join(POLICIES)}")
    if not 0 <= jitter <= 1:
        raise ValueError(f"color_jitter {jitter} must be in 0..1")
    if not 0 <= reprob <= 1:
        raise ValueError(f"reprob {reprob} must be a probability in 0..1")
