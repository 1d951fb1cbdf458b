"""RandAugment of every space: what an image is given is drawn by counter, alike often, and the same in any company."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import create_transform
from torchvision.transforms import v2

from vitmods.data import randaugment as module
from vitmods.data.randaugment import TIMM_SIGNED as SIGNED
from vitmods.data.randaugment import _drawn, fill, randaugment
from vitmods.data.randaugment import timm_operation as operation
from vitmods.data.randaugment import timm_operations as operations
from vitmods.recipes import Augment

SPACES = ("torchvision", "big_vision", "timm")


def images(n=32, channels=3):
    """Smooth images with an edge, so that every operation has something to change."""
    rows, columns = np.mgrid[:24, :20]
    base = 10 + 5 * rows + 3 * columns + 40 * (rows > 12)
    noise = np.random.default_rng(0).integers(0, 30, (n, channels, 24, 20))
    return torch.from_numpy((base + noise).clip(0, 240).astype(np.uint8))


def augment(space, count=2, magnitude=9, noise=0.0):
    noise = noise if space == "timm" else 0.0
    return Augment(randaugment=(count, magnitude), randaugment_space=space, randaugment_noise=noise)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_changed_alike_in_any_batch_without_global_generators(space, channels):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    batch, index, chosen, before = images(64, channels), np.arange(64), augment(space, noise=0.5), states()
    together = randaugment(batch.clone(), 3, 1, index, chosen)
    alone = torch.cat([randaugment(batch[i : i + 1].clone(), 3, 1, index[i : i + 1], chosen) for i in index])
    assert torch.equal(together, alone)
    assert (together != batch).flatten(1).any(1).float().mean() > 0.6
    for seed, epoch in ((3, 2), (4, 1)):
        assert not torch.equal(together, randaugment(batch.clone(), seed, epoch, index, chosen))
    assert states() == before


@pytest.mark.parametrize("space", module.SPACES)
def test_every_operation_is_drawn_alike_often(space):
    """One round of one operation: each image equals one of the operations' results."""
    names, signed, change = module.SPACES[space]
    n, magnitude = 2800, {"torchvision": 20, "big_vision": 1}[space]
    first = images(1)
    results = {}
    for name in names:
        for sign in (1, -1) if name in signed else (1,):
            if name != "Cutout":  # of which each is another one
                result = change(first.numpy(), name, sign * magnitude, lambda _: np.zeros(1))
                results[name, sign] = result.tobytes()
    assert len(set(results.values())) == len(results)
    changed = randaugment(first.repeat(n, 1, 1, 1), 0, 0, np.arange(n), augment(space, 1, magnitude))
    counts = dict.fromkeys(results, 0) | ({("Cutout", 1): 0} if "Cutout" in names else {})
    by_content = {content: key for key, content in results.items()}
    for image in changed.numpy():
        counts[by_content.get(image.tobytes(), ("Cutout", 1))] += 1
    for (name, _), count in counts.items():
        assert abs(count - n / len(names) / (2 if name in signed else 1)) < 60


MEAN = (0.485, 0.456, 0.406)
DEIT = Augment(randaugment=(2, 9), randaugment_space="timm", randaugment_noise=0.5, mean=MEAN)


def deit():
    """The operations as DeiT gets them from timm."""
    options = {"auto_augment": "rand-m9-mstd0.5-inc1", "interpolation": "bicubic", "mean": MEAN}
    steps = create_transform(224, is_training=True, **options).transforms
    (actual,) = (step for step in steps if hasattr(step, "ops"))
    assert (actual.num_layers, actual.choice_weights) == (2, None)
    return actual.ops


FILL = {"fillcolor": fill(MEAN, 3), "resample": Image.Resampling.BICUBIC}


def img(seed=0):
    rows, columns = np.mgrid[:24, :20]
    noise = np.random.default_rng(seed).integers(0, 30, (24, 20, 3))
    return Image.fromarray((60 + (5 * rows + 3 * columns)[..., None] + noise).clip(20, 240).astype(np.uint8))


@pytest.mark.parametrize("step", deit(), ids=lambda step: step.name)
def test_each_operation_is_timms(step, monkeypatch):
    assert (step.kwargs, step.prob, step.magnitude_std) == (FILL, 0.5, 0.5)
    monkeypatch.setattr(step, "prob", 1.0)
    for magnitude in (0.0, 0.3, 4.4, 9.0, 9.7, 10.0):
        for sign, negate in ((1, 0.0), (-1, 0.9)):
            monkeypatch.setattr(random, "random", lambda negate=negate: negate)
            monkeypatch.setattr(random, "gauss", lambda mean, _, magnitude=magnitude: magnitude)
            actual = operation(img(), step.name, sign * magnitude, FILL)
            if step.name == "PosterizeIncreasing" and magnitude == 10:  # no bits, which newer versions of Pillow refuse
                assert not np.asarray(actual).any()
            else:
                assert actual.tobytes() == step(img()).tobytes()


def test_the_operations_are_timms_and_signs_count_where_they_do():
    assert operations() == tuple(step.name for step in deit())
    for name in operations():
        plus, minus = (operation(img(), name, level, FILL).tobytes() for level in (7.0, -7.0))
        assert (plus != minus) == (name in SIGNED)


def test_an_image_takes_its_operations_one_after_the_other():
    index = np.arange(40)
    batch = torch.stack([torch.from_numpy(np.array(img(i)).transpose(2, 0, 1)) for i in index])
    actual = randaugment(batch, 5, 1, index, DEIT)
    turns = [_drawn(5, 1, index, turn, 9, 0.5) for turn in range(2)]
    for i in index:
        image = img(i)
        for drawn in turns:
            image = image if drawn[i] is None else operation(image, *drawn[i], FILL)
        np.testing.assert_array_equal(actual[i].numpy(), np.asarray(image).transpose(2, 0, 1))


def test_operations_fire_by_half_at_a_normal_magnitude_cut_at_the_ends():
    drawn = _drawn(0, 0, np.arange(20_000), 0, 9, 0.5)
    done = [step for step in drawn if step is not None]
    assert abs(len(done) / len(drawn) - 0.5) < 0.02
    levels = np.abs([level for _, level in done])
    assert levels.max() == 10
    within = levels[levels < 10]
    assert abs((levels == 10).mean() - stats.norm.sf(2)) < 0.01
    assert stats.kstest(within, stats.truncnorm(-18, 2, loc=9, scale=0.5).cdf).pvalue > 1e-3
    assert abs(np.mean([level < 0 for _, level in done]) - 0.5) < 0.02
    assert {abs(level) for _, level in filter(None, _drawn(0, 0, np.arange(100), 0, 7, 0.0))} == {7.0}
    counts = np.unique([name for name, _ in done], return_counts=True)[1]
    assert len(counts) == 15
    assert counts.min() > 0.8 * len(done) / 15


def test_the_fill_is_the_mean_and_the_resampling_the_recipes():
    assert (fill(MEAN, 3), fill((0.5,), 3), fill(MEAN, 1)) == ((124, 116, 104), (128, 128, 128), 114)
    batch = torch.stack([torch.from_numpy(np.array(img(i)).transpose(2, 0, 1)) for i in range(60)])
    options = ({}, {"mean": (0.1,)}, {"resample": "bilinear"}, {"randaugment_noise": 2.0})
    chosen = [dataclasses.replace(DEIT, **one) for one in options]
    views = [randaugment(batch.clone(), 0, 0, np.arange(60), one) for one in chosen]
    assert len({view.numpy().tobytes() for view in views}) == 4


REFERENCE = v2.RandAugment()
STRENGTHS = REFERENCE._AUGMENTATION_SPACE


@pytest.mark.parametrize("name", STRENGTHS)
def test_each_operation_is_torchvisions(name):
    names, with_sign, change = module.SPACES["torchvision"]
    assert (tuple(STRENGTHS), set(with_sign)) == (names, {name for name, (_, signed) in STRENGTHS.items() if signed})
    batch, magnitudes = images(4), STRENGTHS[name][0](31, 24, 20)
    for magnitude in (0, 9, 15, 30):
        level = 0.0 if magnitudes is None else float(magnitudes[magnitude])
        for sign in (1, -1) if name in with_sign else (1,):
            actual = torch.from_numpy(change(batch.numpy(), name, sign * magnitude, lambda _: np.zeros(4)))
            how = name, sign * level, REFERENCE.interpolation, REFERENCE._fill
            expected = torch.stack([REFERENCE._apply_image_or_video_transform(image, *how) for image in batch])
            # The reference has its strengths in single precision.
            torch.testing.assert_close(actual, expected, atol=1, rtol=0)
