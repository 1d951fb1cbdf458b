"""big_vision's operations against what TensorFlow makes of an image, and, where that rounds otherwise, plain loops."""

from math import floor
from zlib import crc32

import numpy as np
import pytest

from vitmods.data.randaugment import SPACES
from vitmods.data.rng import Stream

OPERATIONS, SIGNED, change = SPACES["big_vision"]
HEIGHT, WIDTH = 13, 17


def images(channels=3):
    """A ramp with a step and noise, noise alone, one value."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    rng = np.random.default_rng(0)
    ramp = (30 + 9 * rows + 3 * columns + rng.integers(0, 20, (channels, HEIGHT, WIDTH))).clip(0, 255)
    noise = rng.integers(0, 256, (channels, HEIGHT, WIDTH))
    return np.stack([ramp, noise, np.full_like(noise, 77)]).astype(np.uint8)


def sharpened(image, level):
    factor = np.float32(level * 1.8 + 0.1)  # in single precision, as it decides what is cut off

    def sharp(plane, y, x):
        if y in (0, HEIGHT - 1) or x in (0, WIDTH - 1):
            return plane[y][x]
        around = sum(plane[y + i][x + j] for i in (-1, 0, 1) for j in (-1, 0, 1))
        smooth = np.float32((around + 4 * plane[y][x]) // 13)
        return floor(min(255.0, max(0.0, float(smooth + factor * (np.float32(plane[y][x]) - smooth)))))

    return [[[sharp(p, y, x) for x in range(WIDTH)] for y in range(HEIGHT)] for p in image]


def solarized(image, level):
    return [[[v if v < int(level * 256) else 255 - v for v in row] for row in plane] for plane in image]


def with_hole(image, level):
    half, row, column = int(level * 40), HEIGHT // 3, WIDTH // 2
    inside = np.zeros((HEIGHT, WIDTH), bool)
    inside[max(0, row - half) : row + half, max(0, column - half) : column + half] = True
    return np.where(inside, 128, image)


def draw(stream):
    return np.full(3, {Stream.CUTOUT_TOP: (HEIGHT // 3 + 0.5) / HEIGHT, Stream.CUTOUT_LEFT: 0.5}[stream])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "definition"), [("Sharpness", sharpened), ("Solarize", solarized), ("Cutout", with_hole)]
)
def test_operations_are_their_definitions(name, definition, channels):
    batch = images(channels)
    before = batch.copy()
    for magnitude in (0, 2, 5, 10, 15, 20, 28):
        for image, actual in zip(batch.tolist(), change(batch, name, magnitude, draw), strict=True):
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


def striped():
    """(1, 3, 40, 48)."""
    c, y, x = np.mgrid[:3, :40, :48]
    values = (y * 7 + x * x // 3 + y * x * c // 5 + 30 * c) % 256
    return (values // 2 + 40).astype(np.uint8)[None]


@pytest.mark.parametrize("name", TENSORFLOW)
def test_each_operation_is_tensorflows(name):
    for magnitude, expected in zip((0, -5, 10, -20), TENSORFLOW[name], strict=True):
        actual = change(striped(), name, magnitude if name in SIGNED else abs(magnitude), draw)
        assert crc32(np.ascontiguousarray(actual[0].transpose(1, 2, 0))) == expected, magnitude
        if name not in ("Color", "Contrast", "Brightness"):  # which look at all channels
            gray = change(striped()[:, :1], name, magnitude if name in SIGNED else abs(magnitude), draw)
            assert np.array_equal(gray, actual[:, :1])


def test_gray_images_and_images_of_one_value():
    gray, flat = images(1)[:1], images()[2:]
    assert np.array_equal(change(gray, "Color", 15, draw), gray)
    for name in ("AutoContrast", "Equalize"):
        assert np.array_equal(change(flat, name, 5, draw), flat)


def test_what_the_ends_of_the_scale_do():
    batch = images()
    same = {name for name in OPERATIONS if np.array_equal(change(batch, name, 0, draw), batch)}
    assert same == {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd", "Equalize"}
    np.testing.assert_array_equal(change(batch, "Solarize", 0, draw), 255 - batch)
    np.testing.assert_array_equal(change(batch, "Posterize", 0, draw), batch // 128 * 128)
    for magnitude in (10, 15, 20):
        np.testing.assert_array_equal(change(batch, "Solarize", magnitude, draw), batch)


def test_cutout_may_lie_across_an_edge_and_anywhere():
    def at(row, column):
        drawn = {Stream.CUTOUT_TOP: row, Stream.CUTOUT_LEFT: column}
        return change(np.zeros((1, 3, HEIGHT, WIDTH), np.uint8), "Cutout", 1, lambda stream: np.array([drawn[stream]]))

    assert (at(0, 0)[0, :, :4, :4] == 128).all()
    assert at(0, 0).sum() == 3 * 4 * 4 * 128
    assert at(0.9999, 0.9999).sum() == 3 * 5 * 5 * 128
    assert at(0.5, 0.5).sum() == 3 * 8 * 8 * 128
