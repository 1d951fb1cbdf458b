"""RandAugment of every space: what an image is given is drawn by counter, alike often, and the same in any company; and
each operation is torchvision's, timm's, or what TensorFlow makes of an image (big_vision)."""

import dataclasses
import random
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from timm.data import create_transform
from torchvision.transforms import v2

from vitmods.data import randaugment as module
from vitmods.data.randaugment import TIMM_SIGNED as SIGNED
from vitmods.data.randaugment import _drawn, fill, randaugment
from vitmods.data.randaugment import timm_operation as operation
from vitmods.data.randaugment import timm_operations as operations
from vitmods.data.rng import Stream
from vitmods.recipes import Augment


def images(n=32, channels=3):
    """Smooth images with an edge, so that every operation has something to change."""
    rows, columns = np.mgrid[:24, :20]
    base = 10 + 5 * rows + 3 * columns + 40 * (rows > 12)
    noise = np.random.default_rng(0).integers(0, 30, (n, channels, 24, 20))
    return torch.from_numpy((base + noise).clip(0, 240).astype(np.uint8))


def augment(space, count=2, magnitude=9, noise=0.0):
    noise = noise if space == "timm" else 0.0
    return Augment(randaugment=(count, magnitude), randaugment_space=space, randaugment_noise=noise)


@pytest.mark.parametrize(("space", "channels"), [("torchvision", 3), ("big_vision", 1), ("big_vision", 3), ("timm", 3)])
def test_an_image_is_changed_alike_in_any_batch_without_global_generators(space, channels):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    batch, index, chosen, before = images(40, channels), np.arange(40), augment(space, noise=0.5), states()
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
    n, magnitude = 1400, {"torchvision": 20, "big_vision": 1}[space]
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
        assert abs(count - n / len(names) / (2 if name in signed else 1)) < 42


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


# big_vision: against what TensorFlow makes of an image, and, where that rounds otherwise, plain loops

OPERATIONS, TURNED, change = module.SPACES["big_vision"]
HEIGHT, WIDTH = 13, 17


def samples(channels=3):
    """A ramp with a step and noise, noise alone, one value."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    rng = np.random.default_rng(0)
    ramp = (30 + 9 * rows + 3 * columns + rng.integers(0, 20, (channels, HEIGHT, WIDTH))).clip(0, 255)
    noise = rng.integers(0, 256, (channels, HEIGHT, WIDTH))
    return np.stack([ramp, noise, np.full_like(noise, 77)]).astype(np.uint8)


def sharpened(image, level):
    factor = np.float32(level * 1.8 + 0.1)  # in single precision, as it decides what is cut off
    smooth = (ndimage.correlate(image, [[[1, 1, 1], [1, 5, 1], [1, 1, 1]]]) // 13).astype(np.float32)
    sharp = np.floor((smooth + factor * (image.astype(np.float32) - smooth)).clip(0, 255))
    inside = np.pad(np.ones((HEIGHT - 2, WIDTH - 2), bool), 1)
    return np.where(inside, sharp, image)


def solarized(image, level):
    return np.where(image < int(level * 256), image, 255 - image)


def with_hole(image, level):
    (y, x), half = np.mgrid[:HEIGHT, :WIDTH], int(level * 40)
    return np.where((abs(y - HEIGHT // 3 + 0.5) < half) & (abs(x - WIDTH // 2 + 0.5) < half), 128, image)


def draw(stream):
    return np.full(3, {Stream.CUTOUT_TOP: (HEIGHT // 3 + 0.5) / HEIGHT, Stream.CUTOUT_LEFT: 0.5}[stream])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["Sharpness", "Solarize", "Cutout"])
def test_operations_are_their_definitions(name, channels):
    batch, definition = samples(channels), {"Sharpness": sharpened, "Solarize": solarized, "Cutout": with_hole}[name]
    before = batch.copy()
    for magnitude in (0, 2, 5, 10, 15, 20, 28):
        for image, actual in zip(batch.astype(int), change(batch, name, magnitude, draw), strict=True):
            np.testing.assert_array_equal(actual, definition(image, magnitude / 10), err_msg=f"{magnitude}")
    np.testing.assert_array_equal(batch, before)


# crc32 of what TensorFlow 2.21 makes of `striped` (H, W, C) at magnitudes 0, -5, 10 and -20, the sign where it has one.
# Cutout draws its own place; Sharpness and Solarize are left out, of which the one sums in single precision, and the
# other takes a threshold of 256 for one of 0.
TENSORFLOW = {
    "AutoContrast": (0x1F5D32AC, 0x1F5D32AC, 0x1F5D32AC, 0x1F5D32AC),
    "Equalize": (0x3713413B, 0x3713413B, 0x3713413B, 0x3713413B),
    "Invert": (0x307662B5, 0x307662B5, 0x307662B5, 0x307662B5),
    "Rotate": (0x1A222A80, 0xAEEC133A, 0x3231DA73, 0x383FAF55),
    "Posterize": (0x9AB14FCD, 0x1F0A5C21, 0xF895A652, 0x1A222A80),
    "Color": (0x9F32959D, 0x1A222A80, 0xEB1DD181, 0xFA91D3DF),
    "Contrast": (0xED4217EB, 0x1A222A80, 0xCD0B8A44, 0xDC6EAC66),
    "Brightness": (0xD6266091, 0x1A222A80, 0xF74ADCD5, 0x2D6D8986),
    "ShearX": (0x1A222A80, 0xFB8AD4AA, 0x6BFB0ED0, 0x08FB6E15),
    "ShearY": (0x1A222A80, 0x07C19EF3, 0x4E351B06, 0x430065F2),
    "TranslateX": (0x1A222A80, 0x83E9205F, 0x83E9205F, 0x83E9205F),
    "TranslateY": (0x1A222A80, 0x83E9205F, 0x83E9205F, 0x83E9205F),
    "SolarizeAdd": (0x1A222A80, 0xDAAE5E69, 0x00FBE038, 0xD734EEA5),
}


@pytest.mark.parametrize("name", TENSORFLOW)
def test_each_operation_is_tensorflows(name):
    c, y, x = np.mgrid[:3, :40, :48]
    striped = (((y * 7 + x * x // 3 + y * x * c // 5 + 30 * c) % 256) // 2 + 40).astype(np.uint8)[None]
    for magnitude, expected in zip((0, -5, 10, -20), TENSORFLOW[name], strict=True):
        actual = change(striped, name, magnitude if name in TURNED else abs(magnitude), draw)
        assert crc32(np.ascontiguousarray(actual[0].transpose(1, 2, 0))) == expected, magnitude
        if name not in ("Color", "Contrast", "Brightness"):  # which look at all channels
            gray = change(striped[:, :1], name, magnitude if name in TURNED else abs(magnitude), draw)
            assert np.array_equal(gray, actual[:, :1])


def test_cutout_may_lie_across_an_edge_and_anywhere():
    def at(row, column):
        drawn = {Stream.CUTOUT_TOP: row, Stream.CUTOUT_LEFT: column}
        return change(np.zeros((1, 3, HEIGHT, WIDTH), np.uint8), "Cutout", 1, lambda stream: np.array([drawn[stream]]))

    assert (at(0, 0)[0, :, :4, :4] == 128).all()
    assert at(0, 0).sum() == 3 * 4 * 4 * 128
    assert at(0.9999, 0.9999).sum() == 3 * 5 * 5 * 128
    assert at(0.5, 0.5).sum() == 3 * 8 * 8 * 128
