"""Resizing as TensorFlow does it: against what TensorFlow makes of an image, and a plain loop over pixels."""

from math import floor
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as F

from vitmods.data.geometry import resize

SIZES = [(5, 9), (13, 20), (7, 20), (17, 23), (1, 1)]


def image(height=13, width=20):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 2, height, width), dtype=np.uint8))


def striped():
    c, y, x = np.mgrid[:3, :40, :48]
    return torch.from_numpy((((y * 7 + x * x // 3 + y * x * c // 5 + 30 * c) % 256) // 2 + 40).astype(np.uint8)[None])


def mean_over(plane, y, x, size):
    """The mean of a plane's values over the area that pixel (y, x) of an image of this size covers."""
    step_y, step_x = plane.shape[0] / size[0], plane.shape[1] / size[1]
    total = 0.0
    for row in range(plane.shape[0]):
        for column in range(plane.shape[1]):
            shared_y = max(0.0, min((y + 1) * step_y, row + 1) - max(y * step_y, row))
            shared_x = max(0.0, min((x + 1) * step_x, column + 1) - max(x * step_x, column))
            total += plane[row, column] * shared_y * shared_x
    return total / (step_y * step_x)


@pytest.mark.parametrize("size", SIZES)
def test_area_is_its_definition(size):
    before = image()
    actual = resize(before, size, "area")
    for c in range(2):
        plane = before[0, c].numpy()
        for y in range(size[0]):
            for x in range(size[1]):
                assert actual[0, c, y, x] == floor(mean_over(plane, y, x, size) + 1e-6)


def test_both_are_tensorflows_and_halving_is_the_mean_of_four():
    """crc32 of what TensorFlow 2.21 makes of it (H, W, C), cast to uint8; its area sums in single precision."""
    for size, expected in {(30, 30): 0x104965C5, (70, 61): 0x56E24C9A}.items():
        actual = resize(striped(), size, "tf_bilinear")[0].permute(1, 2, 0)
        assert crc32(actual.contiguous().numpy()) == expected
    before = image(12, 20)
    four = before.reshape(1, 2, 6, 2, 10, 2).sum(dim=(3, 5)) // 4
    assert torch.equal(resize(before, (6, 10), "area"), four.to(torch.uint8))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 255))
def test_one_value_stays_that_value(height, width, out_h, out_w, value):
    for method in ("tf_bilinear", "area"):
        resized = resize(torch.full((2, 3, height, width), value, dtype=torch.uint8), (out_h, out_w), method)
        assert resized.shape == (2, 3, out_h, out_w)
        assert resized.dtype == torch.uint8
        assert (resized == value).all()


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_the_others_are_torchvisions(method):
    for size in SIZES:
        reference = F.resize(image(), list(size), F.InterpolationMode(method), antialias=True)
        assert torch.equal(resize(image(), size, method), reference)
