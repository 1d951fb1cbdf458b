"""RandAugment (Cubuk et al., NeurIPS 2020): each image takes a few operations at random, all of one magnitude.

The papers mean different things by it, so there are three spaces of operations:

- torchvision: the 14 operations and strengths of its class of that name, magnitudes from 0 to 30;
- big_vision: see `randaugment_big_vision`;
- timm: its `rand-mM-mstdS-inc1`, which DeiT and "ResNet strikes back" train with, magnitudes from 0 to 10. Of its 15
  operations those with a strength grow with the magnitude.

Libraries take one image at a time and draw from global generators, which training (dropout) uses too. Here every draw
is by counter, and images of a batch that drew the same operation are changed together.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import atan, degrees
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitmods.data import randaugment_big_vision as big_vision
from vitmods.data.augment import Floats, Ints
from vitmods.data.randaugment_big_vision import Draw, Pixels
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

TORCHVISION_STRONGEST = 30
TORCHVISION_SIGNED = (
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
)
TIMM_STRONGEST = 10.0
FIRES = 0.5
MOVED = 0.45  # of the side, at the strongest
TIMM_SIGNED: dict[str, Callable[[float], float]] = {
    "Rotate": lambda level: level * 30.0,
    "ShearX": lambda level: level * 0.3,
    "ShearY": lambda level: level * 0.3,
    "TranslateXRel": lambda level: level * MOVED,
    "TranslateYRel": lambda level: level * MOVED,
    **dict.fromkeys(
        ("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
        lambda level: max(0.1, 1.0 + level * 0.9),
    ),
}
"""strength at a signed part -1..1 of the strongest magnitude, of the operations that go either way"""


def randaugment(images: Tensor, seed: int, epoch: int, index: Ints, augment: Augment) -> Tensor:
    """RandAugment of uint8 (B, C, H, W) as `augment` says, in place. index (B,) counts the draws."""
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
    options = {"fillcolor": fill(augment.mean, pixels.shape[1]), "resample": _resample(augment)}
    for i, img in enumerate(pixels):
        chosen = [operation for drawn in turns if (operation := drawn[i]) is not None]
        if not chosen:
            continue
        image = Image.fromarray(img[0] if len(img) == 1 else np.ascontiguousarray(img.transpose(1, 2, 0)))
        for name, level in chosen:
            image = timm_operation(image, name, level, options)
        changed = np.asarray(image)
        img[...] = changed if changed.ndim == 2 else changed.transpose(2, 0, 1)


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
    changed: Image.Image = function(image, *strength, **options)
    return changed


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


def _resample(augment: Augment) -> Image.Resampling:
    return Image.Resampling.BICUBIC if augment.resample == "bicubic" else Image.Resampling.BILINEAR


def _drawn(
    seed: int, epoch: int, index: Ints, turn: int, magnitude: float, noise: float
) -> list[tuple[str, float] | None]:
    """For each image the operation of this turn and its signed magnitude, or None where it is not done."""
    from scipy.special import ndtri

    names = timm_operations()
    drawn, minus = _operations_and_signs(seed, epoch, index, turn, len(names))
    fires = uniform(seed, Stream.RANDAUGMENT_FIRES, epoch, index, turn) < FIRES
    # a draw may be 0, where the quantile of the normal distribution is infinite
    quantile = np.maximum(uniform(seed, Stream.RANDAUGMENT_NOISE, epoch, index, turn), 2.0**-54)
    strengths = np.clip(magnitude + noise * ndtri(quantile), 0, TIMM_STRONGEST)
    signed = np.where(minus, -strengths, strengths)
    return [
        (names[op], level) if fire else None
        for op, level, fire in zip(drawn.tolist(), signed.tolist(), fires.tolist(), strict=True)
    ]


def change_torchvision(pixels: Pixels, name: str, magnitude: float, _: Draw) -> Pixels:
    """What torchvision's operation makes of images (B, C, H, W); a signed one goes the other way below 0."""
    level = strength(name, magnitude, tuple(pixels.shape[-2:]))
    changed: Pixels = TORCHVISION_OPERATIONS[name](torch.from_numpy(pixels), level).numpy()
    return changed


def strength(name: str, magnitude: float, size: tuple[int, ...]) -> float:
    """torchvision's strength of an operation at this magnitude, for images of (H, W) pixels."""
    part = magnitude / TORCHVISION_STRONGEST
    special = {
        "ShearX": 0.3 * part,
        "ShearY": 0.3 * part,
        "TranslateX": 150 / 331 * size[1] * part,
        "TranslateY": 150 / 331 * size[0] * part,
        "Rotate": 30 * part,
        "Posterize": 8 - round(4 * part),
        "Solarize": 1 - part,
    }
    return special.get(name, 0.9 * part)


def _affine(images: Tensor, shear: tuple[float, float] = (0, 0), move: tuple[int, int] = (0, 0)) -> Tensor:
    """Shear by tangents about the top left corner, or move by pixels; uncovered pixels are black."""
    from torchvision.transforms.v2 import functional as F

    angles = [degrees(atan(s)) for s in shear]
    moved: Tensor = F.affine(images, angle=0.0, translate=list(move), scale=1.0, shear=angles, center=[0, 0])
    return moved


def _functional(name: str) -> Callable[..., Tensor]:
    from torchvision.transforms.v2 import functional as F

    function: Callable[..., Tensor] = getattr(F, name)
    return function


TORCHVISION_OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "Identity": lambda x, s: x,
    "ShearX": lambda x, s: _affine(x, shear=(s, 0)),
    "ShearY": lambda x, s: _affine(x, shear=(0, s)),
    "TranslateX": lambda x, s: _affine(x, move=(int(s), 0)),
    "TranslateY": lambda x, s: _affine(x, move=(0, int(s))),
    "Rotate": lambda x, s: _functional("rotate")(x, s),
    "Brightness": lambda x, s: _functional("adjust_brightness")(x, 1 + s),
    "Color": lambda x, s: _functional("adjust_saturation")(x, 1 + s),
    "Contrast": lambda x, s: _functional("adjust_contrast")(x, 1 + s),
    "Sharpness": lambda x, s: _functional("adjust_sharpness")(x, 1 + s),
    "Posterize": lambda x, s: _functional("posterize")(x, int(s)),
    "Solarize": lambda x, s: _functional("solarize")(x, 255.0 * s),
    "AutoContrast": lambda x, s: _functional("autocontrast")(x),
    "Equalize": lambda x, s: _functional("equalize")(x),
}


class Space(NamedTuple):
    """The names of a space's operations, of those with a sign, and the function that does them: images (B, C, H, W), a
    name, a magnitude and draws -> the changed images."""

    names: tuple[str, ...]
    signed: tuple[str, ...]
    change: Callable[[Pixels, str, float, Draw], Pixels]


SPACES = {
    "torchvision": Space(tuple(TORCHVISION_OPERATIONS), TORCHVISION_SIGNED, change_torchvision),
    "big_vision": Space(tuple(big_vision.OPERATIONS), big_vision.SIGNED, big_vision.change),
}
