"""An encoded picture -> the uint8 tensor that a model is shown.

in: bytes, size, numpy Generator, which decoder  ->  out: uint8 (3, size, size)
Invariant: pure: the same bytes, rng state and decoder give the same tensor. The crop is drawn from the header before any pixel
is decoded, in coordinates of the picture as shown, so that nothing larger than the stored picture is made, whatever its shape.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from . import native
from .decoders import Buffer, Picture, open_picture, read_pixels, turned
from .timing import DECODE, lap

# Up to this size a picture is padded and cropped (CIFAR's way); above it, a random part is resized (ImageNet's way).
SMALL = 64
RATIO = (3 / 4, 4 / 3)  # width / height of a random part
DEFAULT_SCALE = (0.08, 1.0)  # its share of the area

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels

DECODERS = ("auto", "native", "python")


def choose_decoder(name: str) -> str:
    """Which one decodes JPEGs, "native" (data/native/) or "python", for a name in DECODERS. Raises ValueError."""
    if name not in DECODERS:
        raise ValueError(f"decoder {name!r} is unknown; there are {', '.join(DECODERS)}")
    absent = native.why_absent() if name != "python" else "not asked for"
    if name == "native" and absent:
        raise ValueError(f"the native decoder can't be used: {absent}; --decoder auto goes on without it")
    return "python" if absent else "native"


def train_transform(
    encoded: Buffer,
    rng: np.random.Generator,
    size: int,
    scale: tuple[float, float] | None = None,
    hflip: float = 0.5,
    augment: bool = True,
    out: torch.Tensor | None = None,
    decoder: str = "python",
) -> torch.Tensor:
    """A random view, uint8 (3, size, size), written into `out` where given. `size` up to SMALL: brought to size, padded by
    an eighth, cropped (He et al., Deep residual learning, 2015). Above, or with `scale` given: a random part of that share
    of the area, resized (Szegedy et al., Going deeper with convolutions, 2014). Flipped with probability `hflip`. `decoder`:
    what choose_decoder gave. Raises DataError.
    """
    if not augment:
        return eval_transform(encoded, size, out, decoder)
    picture = open_encoded(encoded, decoder)
    draws = rng.random(23).tolist()  # one call: small pictures feel every one
    flip = draws[0] < hflip
    if scale is None and size <= SMALL:
        resized = _resized(picture.size, size)
        pad = size // 8
        left = int(draws[1] * (resized[0] + 2 * pad - size + 1)) - pad
        top = int(draws[2] * (resized[1] + 2 * pad - size + 1)) - pad
        return _view(picture, resized, left, top, size, flip, out)
    box = random_box(picture.size, draws[1:], scale or DEFAULT_SCALE)
    out = torch.empty((3, size, size), dtype=torch.uint8) if out is None else out
    write_part(picture, box, (size, size), flip, out.numpy(), whole_pixels=True)
    return out


def eval_transform(encoded: Buffer, size: int, out: torch.Tensor | None = None, decoder: str = "python") -> torch.Tensor:
    """The centre, uint8 (3, size, size), written into `out` where given: the short side is brought to `size`, or to
    `size` * 256 / 224 above SMALL (as torchvision's reference evaluation does), and the middle cut out. Raises DataError."""
    picture = open_encoded(encoded, decoder)
    resized = _resized(picture.size, size if size <= SMALL else round(size * 256 / 224))
    left = round((resized[0] - size) / 2)
    top = round((resized[1] - size) / 2)
    return _view(picture, resized, left, top, size, False, out)


def open_encoded(encoded: Buffer, decoder: str) -> Picture | native.Jpeg:
    """Reads the header; what the native decoder has no part for, PIL reads. Raises DataError."""
    jpeg = native.open_jpeg(encoded) if decoder == "native" else None
    if jpeg is None:
        return open_picture(encoded)
    if not jpeg.orientation:
        jpeg.orientation = open_picture(encoded).orientation
    return jpeg


def random_box(size: tuple[int, int], draws: list[float], scale: tuple[float, float]) -> Box:
    """A part with a share of the area in `scale` and a ratio in RATIO, in whole pixels; where ten tries find none, the largest
    middle part of a fitting ratio. `draws`: 22 numbers in [0, 1), two for the place and two for each try."""
    width, height = size
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for i in range(10):
        area = width * height * (scale[0] + draws[2 + 2 * i] * (scale[1] - scale[0]))
        ratio = math.exp(low + draws[3 + 2 * i] * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(draws[0] * (width - w + 1))
            top = int(draws[1] * (height - h + 1))
            return (left, top, left + w, top + h)
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h)


def stored_box(box: Box, orientation: int, size: tuple[int, int]) -> Box:
    """A box of the picture as shown, of (width, height) `size`, -> the same part of the picture as stored."""
    left, top, right, bottom = box
    width, height = size
    if orientation in (2, 3, 6, 7):
        left, right = width - right, width - left
    if orientation in (3, 4, 7, 8):
        top, bottom = height - bottom, height - top
    return (top, left, bottom, right) if orientation >= 5 else (left, top, right, bottom)


def _resized(size: tuple[int, int], short: int) -> tuple[int, int]:
    """The size with the short side brought to `short` (the long side truncated, as torchvision does)."""
    width, height = size
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def _view(
    picture: Picture | native.Jpeg, resized: tuple[int, int], left: int, top: int, size: int, flip: bool, out: torch.Tensor | None
) -> torch.Tensor:
    """The square at (left, top) of the picture brought to `resized`; what lies outside it is zero."""
    right, bottom = min(left + size, resized[0]), min(top + size, resized[1])
    inner_left, inner_top = max(left, 0), max(top, 0)
    out = torch.empty((3, size, size), dtype=torch.uint8) if out is None else out
    target = out.numpy()
    if (right - inner_left, bottom - inner_top) != (size, size):
        target[:] = 0
        first = size - (right - left) if flip else inner_left - left
        target = target[:, inner_top - top : bottom - top, first : first + right - inner_left]
    width, height = picture.size
    x, y = width / resized[0], height / resized[1]
    box = (inner_left * x, inner_top * y, right * x, bottom * y)
    write_part(picture, box, (right - inner_left, bottom - inner_top), flip, target)
    return out


def write_part(
    picture: Picture | native.Jpeg, box: Box, size: tuple[int, int], flip: bool, target: np.ndarray, whole_pixels: bool = False
) -> None:
    """Decodes, resizes the part `box` to `size` and writes it to `target` (3, height, width)."""
    stored = stored_box(box, picture.orientation, picture.size)
    if isinstance(picture, native.Jpeg):
        if picture.write(stored, flip, target):
            lap(DECODE)  # and resized
            return
        picture = open_picture(picture.data)  # damaged, or of a rare kind: PIL has the last word
    pixels = read_jpeg_pixels(picture) if whole_pixels else None
    if pixels is None:
        _write_by_pil(picture, box, size, flip, target)
    else:
        lap(DECODE)
        left, top, right, bottom = (int(edge) for edge in stored)
        _write_by_torch(pixels[top:bottom, left:right], native.as_stored(target[:, :, ::-1] if flip else target, picture.orientation))


def read_jpeg_pixels(picture: Picture) -> np.ndarray | None:
    """The whole JPEG as it is stored, uint8 (H, W, 3), or (H, W, 1) where it is gray: the same as `read_pixels`, faster. None where
    PIL must read it: no JPEG, CMYK, damaged, or simplejpeg is not there. Uncompressed pictures are read too, where they lie."""
    if picture.image.format == "PPM":
        return _view_ppm(picture)
    simplejpeg = _simplejpeg()
    kind = {"RGB": "RGB", "L": "GRAY"}.get(picture.image.mode)
    if simplejpeg is None or picture.image.format != "JPEG" or kind is None:
        return None
    try:
        return simplejpeg.decode_jpeg(picture.data, kind, strict=True)
    except ValueError:  # it warns or fails: PIL has the last word
        return None


def _view_ppm(picture: Picture) -> np.ndarray | None:
    """The pixels of a whole binary PPM or PGM of 8 bits; None for other kinds and cut ones."""
    width, height = picture.image.size
    channels = {b"P6": 3, b"P5": 1}.get(picture.data[:2], 0)
    tile = next(iter(getattr(picture.image, "tile", ())), None)
    if not channels or tile is None or tile[0] != "raw" or picture.image.mode not in ("RGB", "L"):
        return None
    size, offset = width * height * channels, tile[2]
    if len(picture.data) < offset + size:
        return None
    return np.frombuffer(picture.data, np.uint8, size, offset).reshape(height, width, channels)


@lru_cache
def _simplejpeg() -> Any:
    """The package, which has no wheel for some machines; without it PIL does its work."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


def _write_by_torch(part: np.ndarray, target: np.ndarray) -> None:
    """Resizes a part (h, w, 1 or 3) to `target` (3, height, width). Twice as fast as PIL, and within a unit or two of it: weights of
    16 bits, and nothing outside the part has a weight at its edges."""
    if part.shape[:2] != target.shape[1:]:
        part = part if part.flags.writeable else part.copy()  # torch takes no other
        batch = torch.from_numpy(part).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(batch, target.shape[1:], mode="bilinear", antialias=True, align_corners=False)
        target[:] = resized[0].numpy()
    else:
        target[:] = part.transpose(2, 0, 1)  # one channel (gray) is spread over three


def _write_by_pil(picture: Picture, box: Box, size: tuple[int, int], flip: bool, target: np.ndarray) -> None:
    from PIL import Image

    image = read_pixels(picture)
    lap(DECODE)
    orientation = picture.orientation
    if orientation != 1:
        box = stored_box(box, orientation, picture.size)
        size = size[::-1] if orientation >= 5 else size
    left, top, right, bottom = box
    if (right - left, bottom - top) == size:  # not resampled
        left, top = round(left), round(top)
        if orientation != 1 or size[0] * size[1] * 2 < image.width * image.height:
            image = image.crop((left, top, left + size[0], top + size[1]))
            left = top = 0
    else:
        inside = (max(0.0, left), max(0.0, top), min(right, image.width), min(bottom, image.height))
        image = image.resize(size, Image.Resampling.BILINEAR, box=inside)
        left = top = 0
    image = turned(image, orientation)
    width, height = target.shape[2], target.shape[1]
    pixels = np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, -1)
    pixels = pixels[int(top) : int(top) + height, int(left) : int(left) + width]
    if flip:
        pixels = pixels[:, ::-1]
    target[:] = pixels.transpose(2, 0, 1)  # one channel (gray) is spread over three
