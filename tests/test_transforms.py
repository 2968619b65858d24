"""The tensors that a model is shown: against torchvision, against brute force, and as pure functions."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_maker import RNG, encode, noise
from PIL import Image

from data import transforms
from data.decoders import decode_image, turned
from data.errors import DataError
from data.transforms import RATIO, eval_transform, random_box, stored_box, train_transform


def smooth(width: int, height: int) -> np.ndarray:
    """A picture without edges, so that two ways to resize it agree."""
    x, y = np.linspace(0, 200, width)[None, :], np.linspace(0, 200, height)[:, None]
    return np.stack(np.broadcast_arrays(x, y, (x + y) / 2), -1).round().astype(np.uint8)


def difference(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape and a.dtype == b.dtype == torch.uint8
    return int((a.int() - b.int()).abs().max())


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, 1))


@pytest.mark.parametrize("shape", [(500, 375), (375, 500), (256, 256), (224, 400), (100, 70), (1200, 300), (33, 700)])
@pytest.mark.parametrize("size", [224, 96, 65])
def test_eval_is_torchvisions_resize_and_centre_crop(shape: tuple[int, int], size: int) -> None:
    from torchvision.transforms import v2

    pixels = noise(*shape)
    reference = v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()])
    # one unit: PIL rounds the weights of the part apart from those of the whole
    assert difference(eval_transform(encode(pixels), size), reference(Image.fromarray(pixels))) <= 1


@pytest.mark.parametrize("shape", [(40, 30), (8, 8), (300, 20), (32, 50)])
def test_eval_of_small_sizes_cuts_nothing_off_the_short_side(shape: tuple[int, int]) -> None:
    from torchvision.transforms import v2

    pixels = noise(*shape)
    reference = v2.Compose([v2.Resize(32), v2.CenterCrop(32), v2.PILToTensor()])
    assert difference(eval_transform(encode(pixels), 32), reference(Image.fromarray(pixels))) <= 1


def test_pictures_of_the_right_size_are_not_resampled() -> None:
    pixels = torch.from_numpy(noise(32, 32)).permute(2, 0, 1)
    assert torch.equal(eval_transform(encode(pixels.permute(1, 2, 0).numpy()), 32), pixels)
    wide = noise(300, 256)
    assert torch.equal(eval_transform(encode(wide), 224), torch.from_numpy(wide[16:240, 38:262]).permute(2, 0, 1))


def test_small_training_pictures_are_padded_cropped_and_flipped() -> None:
    pixels = noise(16, 16)
    data = encode(pixels)
    padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
    seen = set()
    for seed in range(400):
        view = train_transform(data, generator(seed), 16).permute(1, 2, 0).numpy()
        fits = [
            (x, y, flip)
            for x in range(5)
            for y in range(5)
            for flip in (False, True)
            if (padded[y : y + 16, x : x + 16][:, :: -1 if flip else 1] == view).all()
        ]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) == 5 * 5 * 2


def test_small_training_pictures_of_another_size_are_resized_first() -> None:
    pixels = smooth(50, 40)
    whole = np.asarray(Image.fromarray(pixels).resize((40, 32), Image.Resampling.BILINEAR))
    padded = np.pad(whole, ((4, 4), (4, 4), (0, 0))).astype(int)
    for seed in range(20):
        view = train_transform(encode(pixels), generator(seed), 32, hflip=0).permute(1, 2, 0).numpy()
        errors = [np.abs(padded[y : y + 32, x : x + 32] - view).max() for x in range(40 + 8 - 31) for y in range(32 + 8 - 31)]
        assert min(errors) <= 1


def test_large_training_pictures_are_a_resized_part() -> None:
    pixels = noise(200, 150)
    for seed in range(20):
        draws = generator(seed).random(23).tolist()
        box = random_box((200, 150), draws[1:], (0.08, 1.0))
        expected = Image.fromarray(pixels).resize((96, 96), Image.Resampling.BILINEAR, box=box)
        if draws[0] < 0.5:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        view = train_transform(encode(pixels), generator(seed), 96)
        assert torch.equal(view, torch.from_numpy(np.array(expected)).permute(2, 0, 1))


def test_same_bytes_and_rng_give_the_same_tensor() -> None:
    for size in (32, 100):
        data = encode(noise(120, 90), "JPEG")
        first = train_transform(data, generator(3), size)
        out = torch.full((3, size, size), 77, dtype=torch.uint8)
        assert train_transform(data, generator(3), size, out=out) is out
        assert torch.equal(first, out)  # padding is written too
        assert torch.equal(first, train_transform(memoryview(data), generator(3), size))
        assert not torch.equal(first, train_transform(data, generator(4), size))


def test_the_transform_leaves_other_random_states_alone() -> None:
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    for size in (32, 100):
        train_transform(encode(noise(50, 50)), generator(), size)
    assert before == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())


def test_draws_do_not_depend_on_the_picture() -> None:
    states = []
    for shape in ((50, 50), (1, 3000), (500, 40)):
        for size in (32, 100):
            rng = generator()
            train_transform(encode(noise(*shape)), rng, size)
            states.append(rng.random())
    assert len(set(states)) == 1


def test_flip_probability() -> None:
    pixels = noise(16, 16)
    data, small = encode(pixels), encode(pixels[:8, :8])
    for size, encoded in ((16, data), (100, data), (8, small)):
        for seed in range(5):
            plain = train_transform(encoded, generator(seed), size, hflip=0)
            assert torch.equal(train_transform(encoded, generator(seed), size, hflip=1), plain.flip(2))


def test_scale_chooses_the_part() -> None:
    data = encode(smooth(256, 256))

    def span(size: int, scale: tuple[float, float]) -> int:
        row = train_transform(data, generator(), size, scale)[0]  # from 0 to 200, left to right
        return int(row.max()) - int(row.min())

    assert span(128, (1, 1)) > 170 and span(128, (0.05, 0.05)) < 60
    assert span(32, (0.05, 0.05)) < 60  # which would be padded and cropped without it


def test_no_augmentation_is_the_eval_transform() -> None:
    for size in (32, 100):
        data = encode(noise(70, 50))
        assert torch.equal(train_transform(data, generator(), size, augment=False), eval_transform(data, size))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [20, 100])
def test_exif_turned_pictures_give_what_upright_ones_give(orientation: int, size: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(noise(40, 20))
    upright = encode(turned(stored, orientation))
    camera = encode(stored, exif=exif)
    tolerance = 0 if size == 20 else 2  # the two passes round in another order
    assert difference(eval_transform(camera, size), eval_transform(upright, size)) <= tolerance
    for seed in range(5):
        view = train_transform(camera, generator(seed), size)
        assert difference(view, train_transform(upright, generator(seed), size)) <= tolerance


def test_stored_box_cuts_the_same_part() -> None:
    stored = Image.fromarray(noise(13, 7))
    for orientation in range(1, 9):
        shown = turned(stored, orientation)
        box = (1, 2, 5, 6)
        part = turned(stored.crop(stored_box(box, orientation, shown.size)), orientation)
        assert part.tobytes() == shown.crop(box).tobytes()


@pytest.mark.parametrize("size", [16, 100])
def test_every_kind_of_picture_gives_what_its_rgb_gives(size: int) -> None:
    rgba = Image.fromarray(RNG.integers(0, 256, (30, 40, 4), dtype=np.uint8))
    kinds = [
        encode(noise(40, 30)[..., 0]),
        encode(rgba),
        encode(rgba.convert("LA")),
        encode(rgba.convert("RGB").convert("P")),
        encode(rgba.convert("RGB").convert("1")),
        encode(rgba.convert("CMYK"), "JPEG"),
        encode(RNG.integers(0, 65536, (30, 40)).astype(np.uint16)),
    ]
    for data in kinds:
        rgb = encode(decode_image(data))
        assert torch.equal(eval_transform(data, size), eval_transform(rgb, size))
        assert torch.equal(train_transform(data, generator(), size), train_transform(rgb, generator(), size))


def likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    """PSNR in dB."""
    error = float((a.float() - b.float()).square().mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_parts_of_jpegs_are_like_pil_s_crop_and_resize(mode: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    small = Image.fromarray(noise(40, 30)).resize((400, 300), Image.Resampling.BICUBIC).convert(mode)
    data = encode(small, "JPEG", exif=exif)
    shown = Image.fromarray(decode_image(data))
    for seed in range(8):
        draws = generator(seed).random(23).tolist()
        box = random_box(shown.size, draws[1:], (0.08, 1.0))
        exact = shown.crop(box).resize((96, 96), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(exact)).permute(2, 0, 1)
        view = train_transform(data, generator(seed), 96)
        assert likeness(view, expected.flip(2) if draws[0] < 0.5 else expected) > 50
        same = train_transform(data, generator(seed), 32)  # brought to size and padded, by PIL
        assert difference(same, train_transform(encode(shown), generator(seed), 32)) <= 1  # turned: the passes change places


def test_parts_that_are_not_resampled_are_the_very_pixels() -> None:
    for mode in ("RGB", "L"):
        data = encode(Image.fromarray(noise(32, 32)).convert(mode), "JPEG")
        assert torch.equal(train_transform(data, generator(), 32), train_transform(encode(decode_image(data)), generator(), 32))


def test_without_simplejpeg_pil_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(noise(64, 64), "JPEG")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)  # what importing then raises is what a missing package raises
    transforms._simplejpeg.cache_clear()
    try:
        assert torch.equal(train_transform(data, generator(), 80), train_transform(encode(decode_image(data)), generator(), 80))
    finally:
        transforms._simplejpeg.cache_clear()


@pytest.mark.parametrize("shape", [(1, 3000), (3000, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("size", [1, 8, 32, 64, 224])
def test_odd_shapes(shape: tuple[int, int], size: int) -> None:
    data = encode(np.full((shape[1], shape[0], 3), 9, np.uint8))
    assert (eval_transform(data, size) == 9).all()
    for seed in range(5):
        view = train_transform(data, generator(seed), size)
        assert view.shape == (3, size, size)
        assert set(view.unique().tolist()) <= {0, 9}
        assert (train_transform(data, generator(seed), size, scale=(0.5, 1)) == 9).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 2**32), st.floats(0.01, 1), st.floats(0.01, 1))
def test_random_box_lies_inside(width: int, height: int, seed: int, a: float, b: float) -> None:
    box = random_box((width, height), np.random.default_rng(seed).random(22).tolist(), (min(a, b), max(a, b)))
    left, top, right, bottom = box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert all(float(edge).is_integer() for edge in box)


def test_random_boxes_have_the_shares_and_ratios_asked_for() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_box((1000, 800), rng.random(22).tolist(), (0.08, 1.0)) for _ in range(3000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (np.abs(np.log(width / height)) < np.log(RATIO[1]) + 0.01).all()
    share = width * height / 800_000
    assert 0.079 < share.min() < 0.1 and 0.9 < share.max() <= 1 and 0.4 < share.mean() < 0.54
    assert boxes[:, 0].min() == 0 and boxes[:, 2].max() == 1000


def test_random_box_without_a_fitting_one_is_the_middle() -> None:
    assert random_box((1000, 10), [0.5] * 22, (1, 1)) == (493, 0, 506, 10)
    assert random_box((10, 1000), [0.5] * 22, (1, 1)) == (0, 493, 10, 506)


def test_bad_pictures_raise() -> None:
    data = encode(noise(64, 64), "JPEG")
    for bad in (data[: len(data) // 2], b"", b"<html>"):
        with pytest.raises(DataError):
            train_transform(bad, generator(), 32)
        with pytest.raises(DataError):
            eval_transform(bad, 224)


def test_real_pictures(shared_data: Path) -> None:
    for file in sorted((shared_data / "imagenet" / "images").iterdir())[::15]:
        data = file.read_bytes()
        assert eval_transform(data, 224).shape == (3, 224, 224)
        assert train_transform(data, generator(), 224).float().std() > 5


def test_real_pictures_are_like_pil_s_crop_and_resize(shared_data: Path) -> None:
    found = []
    for seed, file in enumerate(sorted((shared_data / "imagenet" / "images").iterdir())):
        data = file.read_bytes()
        with Image.open(file) as image:
            draws = generator(seed).random(23).tolist()
            part = image.convert("RGB").crop(random_box(image.size, draws[1:], (0.08, 1.0))).resize((224, 224), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        found.append(likeness(train_transform(data, generator(seed), 224), expected.flip(2) if draws[0] < 0.5 else expected))
    assert len(found) == 150 and min(found) > 50
