"""Batched operations against torchvision's, image by image."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as F

from vitmods.data import augment
from vitmods.data.augment import flip, normalize, pad_crop, resized_crop
from vitmods.data.batch import DeferredTransforms, erasing
from vitmods.data.geometry import Geometry, resize


def images(batch: int = 6, channels: int = 3, height: int = 9, width: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (batch, channels, height, width), dtype=np.uint8)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 12), st.integers(1, 12), st.data())
def test_pad_crop_is_torchvisions(pad_h: int, pad_w: int, height: int, width: int, data: st.DataObject) -> None:
    batch = images(4, 3, height, width)
    top = np.array(data.draw(st.lists(st.integers(0, 2 * pad_h), min_size=4, max_size=4)))
    left = np.array(data.draw(st.lists(st.integers(0, 2 * pad_w), min_size=4, max_size=4)))
    ours = pad_crop(batch, top, left, (pad_h, pad_w))
    for i in range(4):
        padded = F.pad(torch.from_numpy(batch[i]), [pad_w, pad_h])
        assert torch.equal(ours[i], F.crop(padded, int(top[i]), int(left[i]), height, width))


def test_flip_is_torchvisions() -> None:
    batch = torch.from_numpy(images())
    which = np.array([True, False, True, True, False, False])
    ours = flip(batch.clone(), which)
    for i in range(6):
        assert torch.equal(ours[i], F.horizontal_flip(batch[i]) if which[i] else batch[i])


@pytest.mark.parametrize("in_cache", [1, 3 * 16 * 16 * 2, 10**6])
def test_normalize_is_torchvisions_to_the_bit(in_cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "IN_CACHE", in_cache)
    batch = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(5, 3, 16, 16)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    ours = normalize(batch, torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1))
    assert torch.equal(ours, F.normalize(F.to_dtype(batch, torch.float32, scale=True), mean, std))


def test_resized_crop_is_torchvisions() -> None:
    image = images(1, 3, 40, 50)[0]
    for top, left, height, width in [(0, 0, 40, 50), (3, 4, 20, 31), (39, 49, 1, 1), (5, 5, 16, 16)]:
        ours = resized_crop(image, np.array([top, left, height, width]), (16, 16))
        theirs = F.resized_crop(
            torch.from_numpy(image), top, left, height, width, [16, 16], F.InterpolationMode.BICUBIC, antialias=True
        )
        assert torch.equal(ours[0], theirs)


def test_erase_fills_the_boxes_with_noise_of_their_seeds() -> None:
    images = torch.zeros(3, 3, 20, 20)
    boxes = np.array([[2, 3, 10, 12], [0, 0, 20, 19]])
    seeds = np.array([5, 2**64 - 1], dtype=np.uint64)
    erased, values = erasing(3, 3, np.array([2, 0]), boxes, seeds)
    transforms = DeferredTransforms(torch.zeros(3, 1, 1), torch.ones(3, 1, 1), erased, values)
    ours = transforms.images(images.to(torch.uint8))
    for position, (top, left, height, width), seed in zip([2, 0], boxes.tolist(), seeds.tolist(), strict=True):
        noise = torch.randn(3, height, width, generator=torch.Generator().manual_seed(seed >> 1))
        assert torch.equal(ours[position], F.erase(images[position], top, left, height, width, noise))
    assert torch.equal(ours[1], images[1])
    assert abs(float(ours[0, :, :, :19].std()) - 1) < 0.1


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300), (256, 256), (100, 90), (224, 224), (30, 500)])
@pytest.mark.parametrize("ratio", [0.875, 1.0])
def test_centre_view_is_torchvisions_resize_and_centre_crop(height: int, width: int, ratio: float) -> None:
    image = images(1, 3, height, width)[0]
    geometry = Geometry((224, 224), ratio)
    ours = geometry.view(torch.from_numpy(geometry.store(image).copy())[None])[0]
    side = int(224 / ratio)
    middle = image[:, :, (width - 240) // 2 : (width + 240) // 2] if width > 8 * height else image
    resized = F.resize(torch.from_numpy(middle.copy()), [side], F.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(ours, F.center_crop(resized, [224, 224]))


@pytest.mark.parametrize(("resized", "size"), [(256, 224), (418, 384), (448, 384), (256, 223)])
@pytest.mark.parametrize(("height", "width"), [(500, 375), (300, 401), (150, 200), (256, 256)])
def test_big_visions_view_is_resize_small_by_area_and_a_central_crop(
    resized: int, size: int, height: int, width: int
) -> None:
    image = images(1, 3, height, width)[0]
    geometry = Geometry((size, size), size / resized, resample="big_vision")
    ours = geometry.view(torch.from_numpy(geometry.store(image).copy())[None])[0]
    shape = [int(np.rint(side * resized / min(height, width))) for side in (height, width)]
    assert min(shape) == resized
    whole = resize(torch.from_numpy(image)[None], (shape[0], shape[1]), "area")[0]
    top, left = ((side - size) // 2 for side in shape)
    assert torch.equal(ours, whole[:, top : top + size, left : left + size])


def test_originals_are_kept_where_they_are_not_to_be_shrunk() -> None:
    image = images(1, 3, 300, 400)[0]
    kept = Geometry((224, 224), 0.875, whole=True, resample="big_vision", shrink=False)
    assert kept.store(image).shape == (3, 300, 400)
    assert Geometry((224, 224), 0.875, whole=True).store(image).shape == (3, 256, 341)
    assert kept.view(torch.from_numpy(image)[None]).shape == (1, 3, 224, 224)


@settings(deadline=None, max_examples=60)
@given(*[st.integers(1, 60)] * 4, st.sampled_from([1.0, 0.875, 0.5]), st.booleans(), st.booleans())
def test_views_have_the_size_and_stores_are_never_larger_than_needed(
    height, width, want_h, want_w, ratio, whole, exact
) -> None:
    geometry = Geometry((want_h, want_w), ratio, whole, "big_vision" if exact else "bicubic", shrink=not exact)
    stored = geometry.store(images(1, 1, height, width)[0])
    assert stored.size <= max(height * width, want_h * want_w)
    assert geometry.view(torch.from_numpy(np.ascontiguousarray(stored))[None]).shape == (1, 1, want_h, want_w)
