"""RandAugment with the 16 operations of big_vision, which are those of TensorFlow's EfficientNet code.

Magnitude 10 is the scale (0.1 ... 1.9 for colors), larger ones go beyond it, and 0 is not the identity: solarizing
from 0 inverts, posterizing keeps one bit, colors keep a tenth. Where TensorFlow behaves unlike PIL, so do these:
values are cut off and not rounded, pixels are looked up and not interpolated, what is uncovered becomes 128, and the
contrast is taken about (pixels of the image) / 256, at most 255: that code means the mean, and computes this.
"""

from collections.abc import Callable
from math import pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitmods.data.augment import Floats
from vitmods.data.rng import Stream

Pixels = NDArray[np.uint8]
Draw = Callable[[Stream], Floats]
"""A number in [0, 1) for each image that an operation is given."""

FILL = 128
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
_GREY = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32).reshape(3, 1, 1)
_VALUES = np.arange(256)

Numbers = NDArray[Any]


def change(pixels: Pixels, name: str, magnitude: float, draw: Draw) -> Pixels:
    """What the operation makes of images (B, C, H, W); a signed operation goes the other way below 0."""
    return OPERATIONS[name](pixels, magnitude / 10, draw)


def _blend(start: Numbers, end: Numbers, level: float) -> Pixels:
    """From `start` towards `end` by the factor of colors, brightness and so on, or beyond it."""
    start, end, factor = start.astype(np.float32), end.astype(np.float32), np.float32(level * 1.8 + 0.1)
    blended: Pixels = (start + factor * (end - start)).clip(0, 255).astype(np.uint8)
    return blended


def _look_up(pixels: Pixels, table: Numbers) -> Pixels:
    """Every value replaced by its entry in the table (256,)."""
    # bytes.translate is several times faster than indexing, which makes 8-byte integers of the pixels first
    changed = pixels.tobytes().translate(table.astype(np.uint8).tobytes())
    looked_up: Pixels = np.frombuffer(changed, np.uint8).reshape(pixels.shape)
    return looked_up


def _each_channel(pixels: Pixels, table_of: Callable[[Pixels], Numbers]) -> Pixels:
    planes = pixels.reshape(-1, *pixels.shape[2:])
    return np.stack([_look_up(plane, table_of(plane)) for plane in planes]).reshape(pixels.shape)


def _stretched(plane: Pixels) -> Numbers:
    low, high = plane.min().astype(np.float32), plane.max().astype(np.float32)
    if low == high:
        return _VALUES
    scale = np.float32(255) / (high - low)
    stretched: Numbers = (_VALUES.astype(np.float32) * scale - low * scale).clip(0, 255)
    return stretched


def _equalized(plane: Pixels) -> Numbers:
    counts = np.bincount(plane.ravel(), minlength=256)
    step = (plane.size - counts[plane.max()]) // 255
    if step == 0:
        return _VALUES
    filled = (np.cumsum(counts) + step // 2) // step
    return np.concatenate([[0], filled[:-1]]).clip(0, 255)


def _posterize(pixels: Pixels, level: float) -> Pixels:
    bits = int(level * 4)
    shift = 8 - bits if 1 <= bits <= 8 else 7  # TensorFlow shifts an 8-bit number by 0 to 7, also when asked for others
    return _look_up(pixels, _VALUES >> shift << shift)


def _solarize(pixels: Pixels, level: float) -> Pixels:
    return _look_up(pixels, np.where(int(level * 256) > _VALUES, _VALUES, 255 - _VALUES))


def _solarize_add(pixels: Pixels, level: float) -> Pixels:
    added = np.minimum(_VALUES + int(level * 110), 255)
    return _look_up(pixels, np.where(_VALUES < 128, added, _VALUES))


def _color(pixels: Pixels, level: float) -> Pixels:
    if pixels.shape[1] == 1:
        return pixels  # a gray image is its own gray
    gray = (pixels * np.float32(1 / 255) * _GREY).sum(axis=1, keepdims=True) * np.float32(255.5)
    return _blend(np.trunc(gray), pixels, level)


def _contrast(pixels: Pixels, level: float) -> Pixels:
    middle = min(255, pixels.shape[2] * pixels.shape[3] // 256)
    return _look_up(pixels, _blend(np.full(256, middle), _VALUES, level))


def _sharpness(pixels: Pixels, level: float) -> Pixels:
    """Towards or away from the mean of 3 x 3 pixels in which the one in the middle counts five times."""
    wide = pixels.astype(np.uint16)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = pixels.copy()
    smooth[:, :, 1:-1, 1:-1] = (around + 4 * wide[:, :, 1:-1, 1:-1]) // 13
    return _blend(smooth, pixels, level)


def _moved(pixels: Pixels, to_x: tuple[float, float, float], to_y: tuple[float, float, float]) -> Pixels:
    """At (x, y) the pixel nearest to (to_x . (x, y, 1), to_y . (x, y, 1)), or FILL outside of the image."""
    height, width = pixels.shape[2:]
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)
    column, row = (_nearest(np.float32(a) * x + np.float32(b) * y + np.float32(c)) for a, b, c in (to_x, to_y))
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    flat = np.where(inside, row * width + column, 0)
    moved: Pixels = pixels.reshape(*pixels.shape[:2], -1).take(flat, axis=-1)
    moved[..., ~inside] = FILL
    return moved


def _nearest(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Halves away from 0."""
    return np.trunc(values + np.copysign(0.5, values.astype(np.float64))).astype(np.int64)


def _rotate(pixels: Pixels, level: float) -> Pixels:
    height, width = (np.float32(side - 1) for side in pixels.shape[2:])
    angle = np.float32(level * 30) * np.float32(pi / 180)
    cos, sin = np.cos(angle), np.sin(angle)
    x = (width - (cos * width - sin * height)) / 2
    y = (height - (sin * width + cos * height)) / 2
    return _moved(pixels, (cos, -sin, x), (sin, cos, y))


def _cutout(pixels: Pixels, level: float, rows: Floats, columns: Floats) -> Pixels:
    """A square of half-side int(40 * level) about a pixel drawn anywhere; what lies outside of the image is lost."""
    half, changed = int(level * 40), pixels.copy()
    height, width = pixels.shape[2:]
    for image, row, column in zip(changed, (rows * height).astype(int), (columns * width).astype(int), strict=True):
        image[:, max(0, row - half) : row + half, max(0, column - half) : column + half] = FILL
    return changed


Operation = Callable[[Pixels, float, Draw], Pixels]

OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda p, level, _: _each_channel(p, _stretched),
    "Equalize": lambda p, level, _: _each_channel(p, _equalized),
    "Invert": lambda p, level, _: 255 - p,
    "Rotate": lambda p, level, _: _rotate(p, level),
    "Posterize": lambda p, level, _: _posterize(p, level),
    "Solarize": lambda p, level, _: _solarize(p, level),
    "Color": lambda p, level, _: _color(p, level),
    "Contrast": lambda p, level, _: _contrast(p, level),
    "Brightness": lambda p, level, _: _look_up(p, _blend(np.zeros(256), _VALUES, level)),
    "Sharpness": lambda p, level, _: _sharpness(p, level),
    "ShearX": lambda p, level, _: _moved(p, (1, level * 0.3, 0), (0, 1, 0)),
    "ShearY": lambda p, level, _: _moved(p, (1, 0, 0), (level * 0.3, 1, 0)),
    "TranslateX": lambda p, level, _: _moved(p, (1, 0, level * 100), (0, 1, 0)),
    "TranslateY": lambda p, level, _: _moved(p, (1, 0, 0), (0, 1, level * 100)),
    "Cutout": lambda p, level, draw: _cutout(p, level, draw(Stream.CUTOUT_TOP), draw(Stream.CUTOUT_LEFT)),
    "SolarizeAdd": lambda p, level, _: _solarize_add(p, level),
}
