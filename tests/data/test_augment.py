"""Batched operations, random boxes, Mixup and CutMix against torchvision's, image by image; resizing against it, a loop
over pixels and what TensorFlow makes of an image."""

from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vitmods.data import augment
from vitmods.data.augment import (  # fmt: skip
    Mixing,
    crop_boxes,
    crops,
    draw_mixing,
    erase_boxes,
    inception_boxes,
    mix_targets,
    normalize,
    pad_black,
    resized_crops,
)
from vitmods.data.batch import DeferredTransforms, erasing
from vitmods.data.geometry import Geometry, resize
from vitmods.data.rng import Stream, uniform


def images(batch=6, channels=3, height=9, width=7, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (batch, channels, height, width), dtype=np.uint8)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 12), st.integers(1, 12), st.data())
def test_crops_of_padded_images_are_torchvisions(pad_h, pad_w, height, width, data):
    batch = images(4, 3, height, width)
    top = np.array(data.draw(st.lists(st.integers(0, 2 * pad_h), min_size=4, max_size=4)))
    left = np.array(data.draw(st.lists(st.integers(0, 2 * pad_w), min_size=4, max_size=4)))
    padded, which = pad_black(torch.from_numpy(batch), (pad_h, pad_w)), np.array([2, 0, 3, 1])
    actual = crops(padded, which, top[which], left[which], (height, width))[np.argsort(which)]
    for i in range(4):
        padded = F.pad(torch.from_numpy(batch[i]), [pad_w, pad_h])
        assert torch.equal(actual[i], F.crop(padded, int(top[i]), int(left[i]), height, width))


@pytest.mark.parametrize("in_cache", [1, 3 * 16 * 16 * 2, 10**6])
def test_normalize_is_torchvisions_to_the_bit(in_cache, monkeypatch):
    monkeypatch.setattr(augment, "IN_CACHE", in_cache)
    batch = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(5, 3, 16, 16)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    actual = normalize(batch, torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1))
    assert torch.equal(actual, F.normalize(F.to_dtype(batch, torch.float32, scale=True), mean, std))


def test_resized_crop_is_torchvisions():
    image, how = images(1, 3, 40, 50)[0], ([16, 16], F.InterpolationMode.BICUBIC)
    for box in [(0, 0, 40, 50), (3, 4, 20, 31), (39, 49, 1, 1), (5, 5, 16, 16)]:
        actual = resized_crops([image], np.array([box]), (16, 16), "bicubic")
        assert torch.equal(actual[0], F.resized_crop(torch.from_numpy(image), *box, *how, antialias=True))


def test_erase_fills_the_boxes_with_noise_of_their_seeds():
    images = torch.zeros(3, 3, 20, 20, dtype=torch.uint8)
    boxes, seeds = np.array([[2, 3, 10, 12], [0, 0, 20, 19]]), np.array([5, 2**64 - 1], dtype=np.uint64)
    erased = erasing(images.shape, np.array([0, 2]), boxes, seeds)
    actual = DeferredTransforms(torch.zeros(3, 1, 1), torch.ones(3, 1, 1), erased).images(images)
    for position, (top, left, height, width), seed in zip([0, 2], boxes.tolist(), seeds.tolist(), strict=True):
        noise = torch.randn(3, height, width, generator=torch.Generator().manual_seed(seed >> 1))
        assert torch.equal(actual[position], F.erase(images[position].float(), top, left, height, width, noise))
    assert not actual[1].any()
    assert abs(float(actual[2, :, :, :19].std()) - 1) < 0.1


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300), (256, 256), (100, 90), (224, 224), (30, 500)])
def test_centre_view_is_torchvisions_resize_and_centre_crop(height, width):
    image = images(1, 3, height, width)[0]
    middle = image[:, :, (width - 240) // 2 : (width + 240) // 2] if width > 8 * height else image
    for ratio in (0.875, 1.0):
        geometry = Geometry((224, 224), ratio)
        actual = geometry.view(torch.from_numpy(geometry.store(image).copy())[None])[0]
        how = [int(224 / ratio)], F.InterpolationMode.BICUBIC
        resized = F.resize(torch.from_numpy(middle.copy()), *how, antialias=True)
        assert torch.equal(actual, F.center_crop(resized, [224, 224]))


@pytest.mark.parametrize(("resized", "size", "height", "width"), [
    (256, 224, 500, 375), (418, 384, 300, 401), (448, 384, 150, 200), (256, 223, 256, 256), (418, 384, 256, 256),
])  # fmt: skip
def test_big_visions_view_is_resize_small_by_area_and_a_central_crop(resized, size, height, width):
    image = images(1, 3, height, width)[0]
    geometry = Geometry((size, size), size / resized, resample="big_vision")
    actual = geometry.view(torch.from_numpy(geometry.store(image).copy())[None])[0]
    shape = [int(np.rint(side * resized / min(height, width))) for side in (height, width)]
    assert min(shape) == resized
    full = resize(torch.from_numpy(image)[None], (shape[0], shape[1]), "area")[0]
    top, left = ((side - size) // 2 for side in shape)
    assert torch.equal(actual, full[:, top : top + size, left : left + size])


@settings(deadline=None, max_examples=60)
@given(*[st.integers(1, 60)] * 4, st.sampled_from([1.0, 0.875, 0.5]), st.booleans(), st.booleans())
def test_views_have_the_size_and_stores_are_never_larger_than_needed(
    height, width, want_h, want_w, ratio, whole, exact
):
    geometry = Geometry((want_h, want_w), ratio, whole, "big_vision" if exact else "bicubic", shrink=not exact)
    stored = geometry.store(images(1, 1, height, width)[0])
    assert stored.size <= max(height * width, want_h * want_w)
    assert geometry.view(torch.from_numpy(np.ascontiguousarray(stored))[None]).shape == (1, 1, want_h, want_w)


SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
INCEPTION_SCALE, INCEPTION_RATIO = (0.05, 1.0), (0.75, 1.33)


def inception(n, height, width, scale=INCEPTION_SCALE, ratio=INCEPTION_RATIO, seed=0):
    return inception_boxes(seed, 0, np.arange(n), np.tile([height, width], (n, 1)), scale, ratio)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32))
def test_boxes_lie_inside(height, width, seed):
    index, sizes = np.arange(50), np.tile([height, width], (50, 1))
    positions, erased = erase_boxes(seed, 0, index, (height, width), 1.0)
    assert len(positions) == len(erased)
    for boxes in (crop_boxes(seed, 0, index, sizes, SCALE, RATIO), inception(50, height, width, seed=seed), erased):
        top, left, box_h, box_w = boxes.T
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] >= 1).all()
        assert (top + box_h <= height).all()
        assert (left + box_w <= width).all()


def test_boxes_are_distributed_as_torchvisions():
    n, height, width = 3000, 200, 300
    crops = crop_boxes(0, 0, np.arange(n), np.tile([height, width], (n, 1)), SCALE, RATIO)
    positions, erased = erase_boxes(1, 0, np.arange(4 * n), (height, width), 0.25)
    assert abs(len(positions) / (4 * n) - 0.25) < 0.015
    assert len(erase_boxes(1, 0, np.arange(n), (height, width), 0.0)[0]) == 0
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    crop, erasing = v2.RandomResizedCrop(8, SCALE, RATIO), v2.RandomErasing(1.0)
    for boxes, transform, names in ((crops, crop, ("top", "left", "height", "width")), (erased, erasing, "ijhw")):
        drawn = [transform.make_params([image]) for _ in range(n)]
        for column, name in zip(boxes.T, names, strict=True):
            assert stats.ks_2samp(column, [box[name] for box in drawn]).pvalue > 1e-3


def test_boxes_of_known_places():
    boxes = crop_boxes(0, 0, np.arange(2), np.array([[10, 1000], [1000, 10]]), (1.0, 1.0), RATIO)
    assert boxes.tolist() == [[0, 493, 10, 13], [493, 0, 13, 10]]
    assert Mixing.pasted((32, 32), 0.75, (0.5, 0.5)) == Mixing(0.75, (slice(8, 24), slice(8, 24)))
    assert Mixing.pasted((32, 32), 0.75, (0.0, 0.0)) == Mixing(1 - 1 / 16, (slice(0, 8), slice(0, 8)))


# Means and deviations of top, left, height and width in 4,000 draws of tf.image.sample_distorted_bounding_box.
TENSORFLOW = {
    (375, 500): ((69.9, 126.6, 234.8, 244.1), (61.4, 91.8, 80.9, 93.2)),
    (300, 120): ((109.7, 18.2, 80.7, 81.8), (65.1, 16.7, 25.3, 22.3)),
    (40, 32): ((9.6, 5.5, 19.7, 20.0), (7.4, 5.3, 7.8, 7.2)),
}


@pytest.mark.parametrize("size", TENSORFLOW)
def test_boxes_are_distributed_as_tensorflows(size):
    drawn, (means, deviations) = inception(4000, *size), TENSORFLOW[size]
    for column, mean, deviation in zip(drawn.T, means, deviations, strict=True):
        assert abs(column.mean() - mean) < 4 * deviation * (2 / 4000) ** 0.5
        assert column.std() == pytest.approx(deviation, rel=0.08)


def test_boxes_of_tensorflow_at_the_edge_without_room_and_in_any_batch():
    top, left, box_h, box_w = inception(4000, 30, 20).T
    assert ((top + box_h < 30) | (box_h == 30)).all()  # the last row and column are left to boxes that span the image
    assert ((left + box_w < 20) | (box_w == 20)).all()
    assert (top + box_h == 29).any()
    assert (box_h == 30).any() or (box_w == 20).any()
    assert inception(2, 10, 1000, scale=(0.9, 1.0)).tolist() == [[0, 0, 10, 1000]] * 2
    sizes, how = np.array([[40, 30], [10, 1000], [7, 9], [300, 200]]), (INCEPTION_SCALE, INCEPTION_RATIO)
    together = inception_boxes(3, 2, np.arange(4), sizes, *how)
    alone = [inception_boxes(3, 2, np.array([i]), sizes[i : i + 1], *how)[0] for i in range(4)]
    assert np.array_equal(together, alone)


def batch(n=6, classes=5):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 8, 10, generator=generator), torch.arange(n) % classes


def mix(images, labels, **draw):
    mixing = draw_mixing((images.shape[2], images.shape[3]), **draw)
    return mixing.images(images, images.roll(1, 0)), mix_targets(mixing, labels, 5)


def test_pasting_is_torchvisions_cutmix():
    images, labels = batch()
    options = Mixing.pasted((images.shape[2], images.shape[3]), 0.6, (0.4, 0.9))
    mixed, kept = options.images(images, images.roll(1, 0)), options.kept
    changed = (mixed != images).any(dim=(0, 1))
    rows, columns = changed.any(1).nonzero()[:, 0], changed.any(0).nonzero()[:, 0]
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    params = {"labels": labels, "batch_size": 6, "box": box, "lam_adjusted": kept}
    assert torch.equal(mixed, v2.CutMix(num_classes=5).transform(images, params))
    assert kept == pytest.approx(1 - (box[2] - box[0]) * (box[3] - box[1]) / 80)


def test_amounts_follow_beta_and_both_take_half_of_the_batches():
    for alpha in (0.2, 1.0):
        drawn = [draw_mixing((8, 8), mixup=alpha, cutmix=0, seed=0, epoch=0, batch=b).kept for b in range(4000)]
        assert min(drawn) >= 0.5  # the larger share
        assert stats.kstest(drawn, lambda kept, alpha=alpha: 2 * stats.beta(alpha, alpha).cdf(kept) - 1).pvalue > 1e-3
    images, labels = batch()
    cut = 0
    for number in range(200):
        mixed, _ = mix(images, labels, mixup=1.0, cutmix=1.0, seed=0, epoch=0, batch=number)
        cut += bool(((mixed == images) | (mixed == images.roll(1, 0))).all())
    assert 75 < cut < 125


def test_mixup_keeps_the_larger_share_of_each_image_as_big_vision_does():
    images, labels = batch()
    before = images.clone()
    for number in range(20):
        drawn = stats.beta(0.4, 0.4).ppf(float(uniform(7, Stream.MIX_LAMBDA, 3, number)))
        kept = max(drawn, 1 - drawn)
        mixed, targets = mix(images, labels, mixup=0.4, cutmix=0.0, seed=7, epoch=3, batch=number)
        torch.testing.assert_close(mixed, kept * images + (1 - kept) * images.roll(1, 0))
        torch.testing.assert_close(targets[1, labels[1]], torch.tensor(kept, dtype=torch.float32))
        torch.testing.assert_close(targets.sum(1), torch.ones(6))
    assert torch.equal(images, before)


def shares(n, out):
    """How much of each of `out` equal parts of a side each of its n pixels is: (out, n)."""
    start, pixel, step = np.arange(out)[:, None] * (n / out), np.arange(n), n / out
    return (np.minimum(start + step, pixel + 1) - np.maximum(start, pixel)).clip(min=0) / step


def test_area_is_its_definition():
    before = images(1, 2, 13, 20)
    for height, width in ((5, 9), (13, 20), (7, 20), (17, 23), (1, 1)):
        actual = resize(torch.from_numpy(before), (height, width), "area")
        expected = np.floor(shares(13, height) @ before @ shares(20, width).T + 1e-6)
        np.testing.assert_array_equal(actual, expected)


def test_bilinear_is_tensorflows():
    """crc32 of what TensorFlow 2.21 makes of it (H, W, C), cast to uint8; its area sums in single precision."""
    c, y, x = np.mgrid[:3, :40, :48]
    striped = torch.from_numpy(
        (((y * 7 + x * x // 3 + y * x * c // 5 + 30 * c) % 256) // 2 + 40).astype(np.uint8)[None]
    )
    for size, expected in {(30, 30): 0x104965C5, (70, 61): 0x56E24C9A}.items():
        actual = resize(striped, size, "tf_bilinear")[0].permute(1, 2, 0)
        assert crc32(actual.contiguous().numpy()) == expected


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_the_others_are_torchvisions(method):
    image = torch.from_numpy(images(1, 2, 13, 20))
    for size in ((5, 9), (17, 23), (1, 1)):
        reference = F.resize(image, list(size), F.InterpolationMode(method), antialias=True)
        assert torch.equal(resize(image, size, method), reference)
