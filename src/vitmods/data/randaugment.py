"""RandAugment (Cubuk et al., NeurIPS 2020): each image gets a few random operations, all of one magnitude.

The papers mean different things by it, so there are three spaces of operations:

- torchvision: the 14 operations and strengths of its class of that name, magnitudes from 0 to 30;
- big_vision: the 16 operations of TensorFlow's EfficientNet code. Magnitude 10 is the scale (0.1 ... 1.9 for colors),
  larger ones go beyond it, and 0 is not the identity: solarizing from 0 inverts, posterizing keeps one bit, colors keep
  a tenth. Where TensorFlow behaves unlike PIL, so do these: values are cut off and not rounded, pixels are looked up
  and not interpolated, what is uncovered becomes 128, and the contrast is taken about (pixels of the image) / 256, at
  most 255: that code means the mean, and computes this;
- timm: its `rand-mM-mstdS-inc1`, which DeiT and "ResNet strikes back" train with, magnitudes from 0 to 10. Of its 15
  operations those with a strength grow with the magnitude.

Libraries take one image at a time and draw from global generators, which training (dropout) uses too. Here every draw
is by counter, and images of a batch that drew the same operation are changed together.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import atan, degrees, pi
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitmods.data.augment import Floats, Ints
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

Pixels = NDArray[np.uint8]
Draw = Callable[[Stream], Floats]
"""A number in [0, 1) for each image that an operation is given."""

TORCHVISION_STRONGEST, TIMM_STRONGEST = 30, 10.0
_FIRES = 0.5  # the chance of each of timm's operations that is drawn
FILL = 128
_GREY = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32).reshape(3, 1, 1)
_VALUES = np.arange(256)


def randaugment(images: Tensor, seed: int, epoch: int, index: Ints, augment: Augment) -> Tensor:
    """RandAugment of uint8 (B, C, H, W) by the settings of `augment`, in place. index (B,) counts the draws."""
    assert augment.randaugment is not None
    count, magnitude = augment.randaugment
    pixels = images.numpy()  # numpy gathers whole images, torch single bytes
    if augment.randaugment_space == "timm":
        _timm(pixels, seed, epoch, index, augment)
        return images
    space = SPACES[augment.randaugment_space]
    for turn in range(count):
        drawn, minus = _operations_and_signs(seed, epoch, index, turn, len(space.names))
        minus &= np.isin(drawn, [space.names.index(name) for name in space.signed])
        for group in np.unique(2 * drawn + minus):
            chosen = np.flatnonzero(2 * drawn + minus == group)

            def draw(stream: Stream, chosen: Ints = chosen, turn: int = turn) -> Floats:
                return uniform(seed, stream, epoch, index[chosen], turn)

            signed_magnitude = -magnitude if group % 2 else magnitude
            pixels[chosen] = space.change(pixels[chosen], space.names[group // 2], signed_magnitude, draw)
    return images


def _operations_and_signs(seed: int, epoch: int, index: Ints, turn: int, count: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Which of `count` operations each image takes in this turn, and whether it goes the other way; both (B,)."""
    drawn = (uniform(seed, Stream.RANDAUGMENT_OP, epoch, index, turn) * count).astype(np.int64)
    return drawn, uniform(seed, Stream.RANDAUGMENT_SIGN, epoch, index, turn) < 0.5


def _timm(pixels: Pixels, seed: int, epoch: int, index: Ints, augment: Augment) -> None:
    """timm's space on images (B, C, H, W), in place.

    Each operation that is drawn is done with probability 0.5, at a magnitude drawn from a normal distribution about M
    (standard deviation S) and cut to 0..10. The operations are timm's own functions; only the signs, which timm draws
    from Python's global generator, are put in here.
    """
    assert augment.randaugment is not None
    count, magnitude = augment.randaugment
    turns = [_drawn(seed, epoch, index, turn, magnitude, augment.randaugment_noise) for turn in range(count)]
    resample = Image.Resampling.BICUBIC if augment.resample == "bicubic" else Image.Resampling.BILINEAR
    options = {"fillcolor": fill(augment.mean, pixels.shape[1]), "resample": resample}
    for i, img in enumerate(pixels):
        chosen = [operation for drawn in turns if (operation := drawn[i]) is not None]
        if not chosen:
            continue
        image = Image.fromarray(img[0] if len(img) == 1 else np.ascontiguousarray(img.transpose(1, 2, 0)))
        for name, level in chosen:
            image = timm_operation(image, name, level, options)
        changed = np.asarray(image)
        img[...] = changed if changed.ndim == 2 else changed.transpose(2, 0, 1)


TIMM_SIGNED: dict[str, Callable[[float], float]] = {
    "Rotate": lambda level: level * 30.0,
    "ShearX": lambda level: level * 0.3,
    "ShearY": lambda level: level * 0.3,
    "TranslateXRel": lambda level: level * 0.45,
    "TranslateYRel": lambda level: level * 0.45,
    **dict.fromkeys(
        ("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
        lambda level: max(0.1, 1.0 + level * 0.9),
    ),
}
"""strength at a signed part -1..1 of the strongest magnitude, of the operations that go either way"""


def timm_operation(image: Image.Image, name: str, magnitude: float, options: dict[str, Any]) -> Image.Image:
    """timm's operation of this name; one that goes either way takes the sign of the magnitude."""
    from timm.data import auto_augment as timm

    if name in TIMM_SIGNED:
        strength: tuple[float, ...] = (TIMM_SIGNED[name](magnitude / TIMM_STRONGEST),)
    else:
        level_to_strength: Any = timm.LEVEL_TO_ARG[name]
        strength = level_to_strength(abs(magnitude), {}) if level_to_strength else ()
    if name == "PosterizeIncreasing" and strength == (0,):
        return Image.new(image.mode, image.size)  # black, as Pillow made it of no bits before it came to refuse that
    function: Any = timm.NAME_TO_OP[name]
    return function(image, *strength, **options)


@cache
def timm_operations() -> tuple[str, ...]:
    """The names of the 15, in timm's order."""
    from timm.data.auto_augment import rand_augment_choices

    return tuple(rand_augment_choices("", increasing=True))


def fill(mean: Sequence[float], channels: int) -> int | tuple[int, ...]:
    """The color of what is uncovered: the mean that pixels are normalized by, as timm's loader sets it."""
    values = [min(255, round(255 * value)) for value in mean]
    if channels == 1:
        return min(255, round(255 * sum(mean) / len(mean)))
    return tuple(values * (3 // len(values)))


def _drawn(
    seed: int, epoch: int, index: Ints, turn: int, magnitude: float, noise: float
) -> list[tuple[str, float] | None]:
    """For each image the operation of this turn and its signed magnitude, or None where it is not done."""
    from scipy.special import ndtri

    names = timm_operations()
    drawn, minus = _operations_and_signs(seed, epoch, index, turn, len(names))
    fires = uniform(seed, Stream.RANDAUGMENT_FIRES, epoch, index, turn) < _FIRES
    # a draw may be 0, where the quantile of the normal distribution is infinite
    quantile = np.maximum(uniform(seed, Stream.RANDAUGMENT_NOISE, epoch, index, turn), 2.0**-54)
    strengths = np.clip(magnitude + noise * ndtri(quantile), 0, TIMM_STRONGEST)
    signed = np.where(minus, -strengths, strengths)
    return [
        (names[op], level) if fire else None
        for op, level, fire in zip(drawn.tolist(), signed.tolist(), fires.tolist(), strict=True)
    ]


def change_torchvision(pixels: Pixels, name: str, magnitude: float, _: Draw) -> Pixels:
    """torchvision's operation on images (B, C, H, W); a signed one goes the other way below 0."""
    from torchvision.transforms.v2 import functional as F

    images, part, (height, width) = torch.from_numpy(pixels), magnitude / TORCHVISION_STRONGEST, pixels.shape[-2:]

    def affine(x: float = 0, y: float = 0, right: int = 0, down: int = 0) -> Any:
        """Shear by tangents about the top left corner, or move by pixels; uncovered pixels are black."""
        shear = [degrees(atan(x)), degrees(atan(y))]
        return F.affine(images, angle=0.0, translate=[right, down], scale=1.0, shear=shear, center=[0, 0])

    operations: dict[str, Callable[[], Any]] = {
        "Identity": lambda: images,
        "ShearX": lambda: affine(x=0.3 * part),
        "ShearY": lambda: affine(y=0.3 * part),
        "TranslateX": lambda: affine(right=int(150 / 331 * width * part)),
        "TranslateY": lambda: affine(down=int(150 / 331 * height * part)),
        "Rotate": lambda: F.rotate(images, 30 * part),
        "Brightness": lambda: F.adjust_brightness(images, 1 + 0.9 * part),
        "Color": lambda: F.adjust_saturation(images, 1 + 0.9 * part),
        "Contrast": lambda: F.adjust_contrast(images, 1 + 0.9 * part),
        "Sharpness": lambda: F.adjust_sharpness(images, 1 + 0.9 * part),
        "Posterize": lambda: F.posterize(images, 8 - round(4 * part)),
        "Solarize": lambda: F.solarize(images, 255.0 * (1 - part)),
        "AutoContrast": lambda: F.autocontrast(images),
        "Equalize": lambda: F.equalize(images),
    }
    return operations[name]().numpy()


def change_big_vision(pixels: Pixels, name: str, magnitude: float, draw: Draw) -> Pixels:
    """big_vision's operation on images (B, C, H, W); a signed one goes the other way below 0."""
    level, (height, width) = magnitude / 10, pixels.shape[2:]
    match name:
        case "AutoContrast" | "Equalize":
            table_of = _stretched if name == "AutoContrast" else _equalized
            planes = pixels.reshape(-1, height, width)
            return np.stack([_look_up(plane, table_of(plane)) for plane in planes]).reshape(pixels.shape)
        case "Invert":
            return 255 - pixels
        case "Rotate":
            bottom, right = np.float32(height - 1), np.float32(width - 1)
            angle = np.float32(level * 30) * np.float32(pi / 180)
            cos, sin = np.cos(angle), np.sin(angle)
            x, y = (right - (cos * right - sin * bottom)) / 2, (bottom - (sin * right + cos * bottom)) / 2
            return _moved(pixels, (cos, -sin, x), (sin, cos, y))
        case "Posterize":
            bits = int(level * 4)
            shift = 8 - bits if 1 <= bits <= 8 else 7  # TensorFlow shifts an 8-bit number by 0 to 7, whatever is asked
            return _look_up(pixels, _VALUES >> shift << shift)
        case "Solarize":
            return _look_up(pixels, np.where(int(level * 256) > _VALUES, _VALUES, 255 - _VALUES))
        case "SolarizeAdd":
            return _look_up(pixels, np.where(_VALUES < 128, np.minimum(_VALUES + int(level * 110), 255), _VALUES))
        case "Color":
            if pixels.shape[1] == 1:
                return pixels  # a gray image is its own gray
            gray = (pixels * np.float32(1 / 255) * _GREY).sum(axis=1, keepdims=True) * np.float32(255.5)
            return _blend(np.trunc(gray), pixels, level)
        case "Contrast" | "Brightness":
            start = min(255, height * width // 256) if name == "Contrast" else 0
            return _look_up(pixels, _blend(np.full(256, start), _VALUES, level))
        case "Sharpness":  # towards or away from the mean of 3 x 3 pixels, of which the middle one counts five times
            wide = pixels.astype(np.uint16)
            rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
            around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
            smooth = pixels.copy()
            smooth[:, :, 1:-1, 1:-1] = (around + 4 * wide[:, :, 1:-1, 1:-1]) // 13
            return _blend(smooth, pixels, level)
        case "ShearX":
            return _moved(pixels, (1, level * 0.3, 0), (0, 1, 0))
        case "ShearY":
            return _moved(pixels, (1, 0, 0), (level * 0.3, 1, 0))
        case "TranslateX":
            return _moved(pixels, (1, 0, level * 100), (0, 1, 0))
        case "TranslateY":
            return _moved(pixels, (1, 0, 0), (0, 1, level * 100))
    assert name == "Cutout"  # a square about a random pixel; the part outside of the image is lost
    half, changed = int(level * 40), pixels.copy()
    tops, lefts = (draw(Stream.CUTOUT_TOP) * height).astype(int), (draw(Stream.CUTOUT_LEFT) * width).astype(int)
    for image, row, column in zip(changed, tops, lefts, strict=True):
        image[:, max(0, row - half) : row + half, max(0, column - half) : column + half] = FILL
    return changed


def _blend(start: NDArray[Any], end: NDArray[Any], level: float) -> Pixels:
    """Blend from `start` towards `end`, or beyond it, by TensorFlow's factor for this level."""
    start, end, factor = start.astype(np.float32), end.astype(np.float32), np.float32(level * 1.8 + 0.1)
    return (start + factor * (end - start)).clip(0, 255).astype(np.uint8)


def _look_up(pixels: Pixels, table: NDArray[Any]) -> Pixels:
    """Replace every value by its entry in the table (256,)."""
    # bytes.translate is several times faster than indexing, which makes 8-byte integers of the pixels first
    changed = pixels.tobytes().translate(table.astype(np.uint8).tobytes())
    return np.frombuffer(changed, np.uint8).reshape(pixels.shape)


def _stretched(plane: Pixels) -> NDArray[Any]:
    low, high = plane.min().astype(np.float32), plane.max().astype(np.float32)
    if low == high:
        return _VALUES
    scale = np.float32(255) / (high - low)
    return (_VALUES.astype(np.float32) * scale - low * scale).clip(0, 255)


def _equalized(plane: Pixels) -> NDArray[Any]:
    counts = np.bincount(plane.ravel(), minlength=256)
    step = (plane.size - counts[plane.max()]) // 255
    if step == 0:
        return _VALUES
    filled = (np.cumsum(counts) + step // 2) // step
    return np.concatenate([[0], filled[:-1]]).clip(0, 255)


def _moved(pixels: Pixels, to_x: tuple[float, float, float], to_y: tuple[float, float, float]) -> Pixels:
    """At (x, y) the pixel nearest to (to_x . (x, y, 1), to_y . (x, y, 1)), or FILL outside of the image."""
    height, width = pixels.shape[2:]
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)
    at = [np.float32(a) * x + np.float32(b) * y + np.float32(c) for a, b, c in (to_x, to_y)]
    # Halves are rounded away from 0.
    column, row = (np.trunc(v + np.copysign(0.5, v.astype(np.float64))).astype(np.int64) for v in at)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    flat = np.where(inside, row * width + column, 0)
    moved: Pixels = pixels.reshape(*pixels.shape[:2], -1).take(flat, axis=-1)
    moved[..., ~inside] = FILL
    return moved


class Space(NamedTuple):
    """The operations of a space, those with a sign among them, and the function that does them: images (B, C, H, W), a
    name, a magnitude and draws -> the changed images."""

    names: tuple[str, ...]
    signed: tuple[str, ...]
    change: Callable[[Pixels, str, float, Draw], Pixels]


_GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY")
SPACES = {
    "torchvision": Space(
        ("Identity", *_GEOMETRIC, "Rotate", "Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize",
         "AutoContrast", "Equalize"),
        (*_GEOMETRIC, "Rotate", "Brightness", "Color", "Contrast", "Sharpness"),
        change_torchvision,
    ),
    "big_vision": Space(
        ("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness",
         "Sharpness", *_GEOMETRIC, "Cutout", "SolarizeAdd"),
        (*_GEOMETRIC, "Rotate"),
        change_big_vision,
    ),
}  # fmt: skip
