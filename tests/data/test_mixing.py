"""Mixup and CutMix: against torchvision's arithmetic, and what must hold whatever is drawn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import v2

from vitmods.data.augment import Mixing, _beta, blend, draw_mixing, mix_targets
from vitmods.data.rng import Stream, uniform


def batch(n: int = 6, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 8, 10, generator=generator), torch.arange(n) % classes


def mix(images: torch.Tensor, labels: torch.Tensor, **draw: float) -> tuple[torch.Tensor, torch.Tensor]:
    mixing = draw_mixing((images.shape[2], images.shape[3]), **draw)
    return mixing.images(images, images.roll(1, 0)), mix_targets(mixing, labels, 5)


seeds = st.integers(0, 2**64)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 7), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 1.0]), seeds, st.integers(0, 9))
def test_targets_keep_their_mass_and_inputs_are_left_alone(n, mixup, cutmix, seed, number) -> None:
    if mixup == cutmix == 0:
        return
    images, labels = batch(n)
    before = images.clone()
    mixed, targets = mix(images, labels, mixup=mixup, cutmix=cutmix, seed=seed, epoch=2, batch=number)
    assert targets.shape == (n, 5)
    assert mixed.shape == images.shape
    torch.testing.assert_close(targets.sum(1), torch.ones(n))
    assert (targets >= 0).all()
    assert torch.equal(images, before)
    if n == 1:
        torch.testing.assert_close(mixed, images)
        torch.testing.assert_close(targets, torch.nn.functional.one_hot(labels, 5).float())


@pytest.mark.parametrize("kept", [0.0, 0.3, 1.0])
def test_blend_is_torchvisions_mixup(kept: float) -> None:
    images, labels = batch()
    reference = v2.MixUp(num_classes=5)
    params = {"labels": labels, "batch_size": 6, "lam": kept}
    torch.testing.assert_close(blend(images, images.roll(1, 0), kept), reference.transform(images, params))
    targets = torch.nn.functional.one_hot(labels, 5).float()
    torch.testing.assert_close(blend(targets, targets.roll(1, 0), kept), reference.transform(labels, params))


def test_pasting_is_torchvisions_cutmix() -> None:
    images, labels = batch()
    how = Mixing.pasted((images.shape[2], images.shape[3]), 0.6, (0.4, 0.9))
    mixed, kept = how.images(images, images.roll(1, 0)), how.kept
    changed = (mixed != images).any(dim=(0, 1))
    rows, columns = changed.any(1).nonzero()[:, 0], changed.any(0).nonzero()[:, 0]
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    params = {"labels": labels, "batch_size": 6, "box": box, "lam_adjusted": kept}
    assert torch.equal(mixed, v2.CutMix(num_classes=5).transform(images, params))
    assert kept == pytest.approx(1 - (box[2] - box[0]) * (box[3] - box[1]) / 80)


def test_amounts_follow_beta() -> None:
    quantiles = (np.arange(4000) + 0.5) / 4000
    for alpha in (0.2, 1.0):
        drawn = [_beta(alpha, q) for q in quantiles]
        assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 0.9


def test_mixup_keeps_the_larger_share_of_each_image_as_big_vision_does() -> None:
    images, labels = batch()
    fractions = []
    for number in range(50):
        drawn = _beta(0.4, float(uniform(7, Stream.MIX_LAMBDA, 3, number)))
        kept = max(drawn, 1 - drawn)
        mixed, targets = mix(images, labels, mixup=0.4, cutmix=0.0, seed=7, epoch=3, batch=number)
        torch.testing.assert_close(mixed, kept * images + (1 - kept) * images.roll(1, 0))
        torch.testing.assert_close(targets[1, labels[1]], torch.tensor(kept, dtype=torch.float32))
        fractions.append(drawn)
    assert min(fractions) < 0.5 < max(fractions)


def test_with_both_on_each_takes_half_of_the_batches() -> None:
    images, labels = batch()
    cut = 0
    for number in range(200):
        mixed, _ = mix(images, labels, mixup=1.0, cutmix=1.0, seed=0, epoch=0, batch=number)
        cut += bool(((mixed == images) | (mixed == images.roll(1, 0))).all())
    assert 75 < cut < 125
