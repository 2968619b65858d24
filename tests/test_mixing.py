"""Mixup and cutmix: valid slots meet valid slots only, targets say how much of each is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.mixing import Mixing, draw_partners

VALID = torch.tensor([True, True, False, True, True, False])
LABELS = torch.tensor([0, 1, 2, 3, 4, 5])


def numbered(side=16):
    """Pictures of one value each: their slot's number."""
    return torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, side, side).contiguous()


def mix(seed, **how):
    return Mixing(how.get("mixup", 0.0), how.get("cutmix", 0.0), 6)(numbered(), LABELS, VALID, np.random.default_rng(seed))


def test_partners_are_valid_and_each_is_taken_once():
    for seed in range(50):
        partners = draw_partners(VALID.numpy(), np.random.default_rng(seed))
        assert sorted(partners.tolist()) == list(range(6))
        assert partners[2] == 2 and partners[5] == 5
        assert all(partners[slot] != slot for slot in (0, 1, 3, 4))
    assert draw_partners(np.array([False, True]), np.random.default_rng(0)).tolist() == [0, 1]
    assert draw_partners(np.array([False, False]), np.random.default_rng(0)).tolist() == [0, 1]


@pytest.mark.parametrize("how", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_targets_say_what_is_in_the_picture(how):
    before = numbered()
    for seed in range(30):
        images, targets = mix(seed, **how)
        assert torch.allclose(targets.sum(1), torch.ones(6))
        # the mean of a picture of numbers is the mean of the numbers by their shares
        assert torch.allclose(images.mean((1, 2, 3)), targets @ torch.arange(6.0), atol=1e-4)
        for masked in (2, 5):
            assert torch.allclose(images[masked], before[masked]) and targets[masked, masked] == pytest.approx(1)
            assert targets[:, masked].sum() == pytest.approx(1)
    assert torch.equal(before, numbered())


def test_mixup_blends_and_cutmix_pastes_and_both_take_turns():
    kinds = []
    for seed in range(40):
        images, _ = mix(seed, mixup=0.8, cutmix=1.0)
        kinds.append("paste" if bool((images == images.round()).all()) else "blend")
    assert 10 < kinds.count("paste") < 30
    assert all(bool((mix(seed, cutmix=1.0)[0] % 1 == 0).all()) for seed in range(10))
    assert not Mixing(0.0, 0.0, 6) and Mixing(0.1, 0.0, 6) and Mixing(0.0, 0.1, 6)


def test_several_labels_a_sample_are_mixed_too():
    labels = torch.eye(6, dtype=torch.uint8)
    labels[0, 5] = 1
    _, targets = Mixing(0.8, 0.0, 6)(numbered(), labels, VALID, np.random.default_rng(3))
    assert targets[0, 5] == targets[0, 0] and 0 < float(targets[0, 0]) < 1


def test_the_generator_alone_decides():
    for seed in range(5):
        assert torch.equal(mix(seed, mixup=1.0)[0], mix(seed, mixup=1.0)[0])
    assert not torch.equal(mix(1, mixup=1.0)[0], mix(2, mixup=1.0)[0])
