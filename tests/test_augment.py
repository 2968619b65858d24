"""Augmentation after the crop: drawn from the sample's own generator, torchvision's operations at the papers' strengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from picture_maker import encode

from data.augment import ERASED, MEAN, POLICIES, RAND, TRIVIAL, augment, check_augmentation, color_jitter, erase
from data.labels import LabelMap
from data.tasks import create_task


def picture(seed=0, side=32):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, side, side), np.uint8))


def augmented(seed, **how):
    image = picture()
    augment(image, np.random.default_rng(seed), **how)
    return image


@pytest.mark.parametrize("how", [{"policy": "randaugment"}, {"policy": "trivialaugment"}, {"jitter": 0.4}, {"reprob": 1.0}])
def test_the_generator_alone_decides(how):
    state = torch.get_rng_state()
    first = [augmented(seed, **how) for seed in range(12)]
    again = [augmented(seed, **how) for seed in range(12)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({image.numpy().tobytes() for image in first}) > 6
    assert torch.equal(augmented(3), picture())


@pytest.mark.parametrize("table", [RAND, TRIVIAL], ids=["randaugment", "trivialaugment"])
def test_every_operation_gives_a_picture_and_grows_with_its_level(table):
    ramp = torch.arange(32, dtype=torch.uint8)
    smooth = (ramp.view(1, 32, 1) + ramp) * torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1) + 20 + picture() // 8
    for name, (operation, strength, signed) in table.items():
        for sign in (1, -1) if signed else (1,):
            changed = [operation(smooth, sign * strength(level, 32)) for level in (0.0, 0.5, 1.0)]
            assert all(image.shape == (3, 32, 32) and image.dtype == torch.uint8 for image in changed), name
            distance = [(image.float() - smooth.float()).abs().mean().item() for image in changed]
            if name not in ("identity", "autocontrast", "equalize"):
                assert distance[0] < 1 and distance[2] > distance[0] and distance[2] >= 0.8 * distance[1], (name, distance)


def test_the_operations_are_torchvision_s():
    from torchvision.transforms import v2

    table = v2.RandAugment()._AUGMENTATION_SPACE
    assert len(RAND) == len(table)
    level = 9
    expected = {"shear_x": "ShearX", "rotate": "Rotate", "brightness": "Brightness", "posterize": "Posterize", "solarize": "Solarize"}
    for ours, theirs in expected.items():
        magnitudes, signed = table[theirs]
        strength = float(magnitudes(31, 224, 224)[level])
        scale = 255 if ours == "solarize" else 1
        assert RAND[ours][1](level / 30, 224) == pytest.approx(strength * scale, rel=1e-6)
        assert RAND[ours][2] is signed


def test_colour_jitter_stays_in_its_range():
    flat = torch.full((3, 8, 8), 100, dtype=torch.uint8)
    values = [int(color_jitter(flat, 0.3, np.random.default_rng(seed)).float().mean()) for seed in range(50)]
    assert 60 <= min(values) < 85 and 115 < max(values) <= 140


def test_an_erased_box_has_the_mean_colour_and_a_share_of_the_picture():
    shares = []
    for seed in range(60):
        image = torch.zeros(3, 32, 32, dtype=torch.uint8)
        erase(image, np.random.default_rng(seed))
        inside = (image == torch.tensor(MEAN, dtype=torch.uint8).view(3, 1, 1)).all(0)
        assert torch.equal(inside, image[0] > 0)
        shares.append(inside.float().mean().item())
    assert ERASED[0] * 0.7 <= min(shares) < 0.08 and 0.25 < max(shares) <= ERASED[1] * 1.1
    erased = sum(not torch.equal(augmented(seed, reprob=0.25), picture()) for seed in range(200))
    assert 30 < erased < 70


def test_what_is_out_of_range_is_named():
    with pytest.raises(ValueError, match="auto_augment 'rand' is no policy; there are randaugment, trivialaugment"):
        check_augmentation("rand", 0, 0)
    with pytest.raises(ValueError, match="color_jitter 2 must be in 0..1"):
        check_augmentation(None, 2, 0)
    with pytest.raises(ValueError, match="reprob -1 must be a probability in 0..1"):
        check_augmentation(None, 0, -1)
    assert set(POLICIES) == {"randaugment", "trivialaugment"}


def test_the_task_augments_training_pictures_only():
    fields = {"png": encode(picture().permute(1, 2, 0).numpy()), "cls": b"1"}

    def first_slot(training, **more):
        task = create_task("image-classification", training=training, labels=LabelMap("cls", 3), img_size=32, **more)
        batch = task.new_batch(1)
        task.write(batch, 0, fields, np.random.default_rng(4))
        return batch["image"][0]

    plain = first_slot(True)
    for more in ({"auto_augment": "trivialaugment"}, {"color_jitter": 0.5}, {"reprob": 1.0}):
        assert not torch.equal(first_slot(True, **more), plain)
        assert torch.equal(first_slot(True, **more), first_slot(True, **more))
        assert torch.equal(first_slot(False, **more), first_slot(False))
        assert torch.equal(first_slot(True, augment=False, **more), first_slot(False))
