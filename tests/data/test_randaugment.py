"""RandAugment of every space: what an image is given is drawn by counter, alike often, and the same in any company."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import create_transform

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
def test_an_image_is_changed_alike_in_any_batch(space, channels):
    batch, index, chosen = images(64, channels), np.arange(64), augment(space, noise=0.5)
    together = randaugment(batch.clone(), 3, 1, index, chosen)
    alone = torch.cat([randaugment(batch[i : i + 1].clone(), 3, 1, index[i : i + 1], chosen) for i in index])
    assert torch.equal(together, alone)
    changed = (together != batch).flatten(1).any(1)
    assert changed.float().mean() > 0.6
    assert not torch.equal(together, randaugment(batch.clone(), 3, 2, index, chosen))
    assert not torch.equal(together, randaugment(batch.clone(), 4, 1, index, chosen))


@pytest.mark.parametrize("space", SPACES)
def test_no_global_generator_is_touched(space):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    randaugment(images(200), 0, 0, np.arange(200), augment(space, noise=0.5))
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
    transform = create_transform(
        224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", mean=MEAN
    )
    actual = next(step for step in transform.transforms if hasattr(step, "ops"))
    assert actual.num_layers == 2
    assert actual.choice_weights is None
    return actual.ops


def img(seed=0):
    rows, columns = np.mgrid[:24, :20]
    noise = np.random.default_rng(seed).integers(0, 30, (24, 20, 3))
    return Image.fromarray((60 + (5 * rows + 3 * columns)[..., None] + noise).clip(20, 240).astype(np.uint8))


@pytest.mark.parametrize("step", deit(), ids=lambda step: step.name)
def test_each_operation_is_timms(step, monkeypatch):
    options = {"fillcolor": fill(MEAN, 3), "resample": Image.Resampling.BICUBIC}
    assert step.kwargs == options
    assert step.prob == 0.5
    assert step.magnitude_std == 0.5
    for magnitude in (0.0, 0.3, 4.4, 9.0, 9.7, 10.0):
        for sign, negate in ((1, 0.0), (-1, 0.9)):
            monkeypatch.setattr(random, "random", lambda negate=negate: negate)
            monkeypatch.setattr(random, "gauss", lambda mean, _, magnitude=magnitude: magnitude)
            actual = operation(img(), step.name, sign * magnitude, options)
            if step.name == "PosterizeIncreasing" and magnitude == 10:  # no bits, which newer versions of Pillow refuse
                assert not np.asarray(actual).any()
                continue
            monkeypatch.setattr(step, "prob", 1.0)
            assert actual.tobytes() == step(img()).tobytes()


def test_the_operations_are_timms_and_signs_count_where_they_do():
    assert operations() == tuple(step.name for step in deit())
    options = {"fillcolor": fill(MEAN, 3), "resample": Image.Resampling.BICUBIC}
    for name in operations():
        plus, minus = (operation(img(), name, level, options).tobytes() for level in (7.0, -7.0))
        assert (plus != minus) == (name in SIGNED)


def test_an_image_takes_its_operations_one_after_the_other():
    index = np.arange(40)
    batch = torch.stack([torch.from_numpy(np.array(img(i)).transpose(2, 0, 1)) for i in index])
    actual = randaugment(batch, 5, 1, index, DEIT)
    turns = [_drawn(5, 1, index, turn, 9, 0.5) for turn in range(2)]
    options = {"fillcolor": fill(MEAN, 3), "resample": Image.Resampling.BICUBIC}
    for i in index:
        image = img(i)
        for drawn in turns:
            image = image if drawn[i] is None else operation(image, *drawn[i], options)
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
    assert fill(MEAN, 3) == (124, 116, 104)
    assert fill((0.5,), 3) == (128, 128, 128)
    assert fill(MEAN, 1) == 114
    batch = torch.stack([torch.from_numpy(np.array(img(i)).transpose(2, 0, 1)) for i in range(60)])
    views = [
        randaugment(batch.clone(), 0, 0, np.arange(60), augment)
        for augment in (
            DEIT,
            dataclasses.replace(DEIT, mean=(0.1,)),
            dataclasses.replace(DEIT, resample="bilinear"),
            dataclasses.replace(DEIT, randaugment_noise=2.0),
        )
    ]
    assert len({view.numpy().tobytes() for view in views}) == 4
