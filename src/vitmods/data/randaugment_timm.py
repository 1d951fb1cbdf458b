"""RandAugment as timm's `rand-mM-mstdS-inc1`, which DeiT and "ResNet strikes back" train with: magnitudes from 0 to 10.

Of its 15 operations those with a strength grow with the magnitude. Each that is drawn is done with probability 0.5, at
a magnitude drawn from a normal distribution about M (standard deviation S) and cut to 0..10. The operations are timm's
own functions; only the signs, which timm draws from Python's global generator, are put in here.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from vitmods.data.boxes import Ints
from vitmods.data.randaugment import Pixels, operations_and_signs
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

STRONGEST = 10.0
FIRES = 0.5
MOVED = 0.45  # of the side, at the strongest
SIGNED: dict[str, Callable[[float], float]] = {
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


def change_all(pixels: Pixels, seed: int, epoch: int, index: Ints, augment: Augment) -> None:
    """The augment's operations on images (B, C, H, W), in place; index (B,) counts the draws."""
    assert augment.randaugment is not None
    count, magnitude = augment.randaugment
    turns = [_drawn(seed, epoch, index, turn, magnitude, augment.randaugment_noise) for turn in range(count)]
    options = {"fillcolor": fill(augment.mean, pixels.shape[1]), "resample": _resample(augment)}
    for i, img in enumerate(pixels):
        chosen = [found for drawn in turns if (found := drawn[i]) is not None]
        if not chosen:
            continue
        image = Image.fromarray(img[0] if len(img) == 1 else np.ascontiguousarray(img.transpose(1, 2, 0)))
        for name, level in chosen:
            image = operation(image, name, level, options)
        changed = np.asarray(image)
        img[...] = changed if changed.ndim == 2 else changed.transpose(2, 0, 1)


def operation(image: Image.Image, name: str, magnitude: float, options: dict[str, Any]) -> Image.Image:
    """timm's operation of this name; one that goes either way takes the sign of the magnitude."""
    from timm.data import auto_augment as timm

    if name in SIGNED:
        strength: tuple[float, ...] = (SIGNED[name](magnitude / STRONGEST),)
    else:
        level_to_strength: Any = timm.LEVEL_TO_ARG[name]
        strength = level_to_strength(abs(magnitude), {}) if level_to_strength else ()
    if name == "PosterizeIncreasing" and strength == (0,):
        return Image.new(image.mode, image.size)  # black, as Pillow made it of no bits before it came to refuse that
    function: Any = timm.NAME_TO_OP[name]
    changed: Image.Image = function(image, *strength, **options)
    return changed


@cache
def operations() -> tuple[str, ...]:
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

    names = operations()
    drawn, minus = operations_and_signs(seed, epoch, index, turn, len(names))
    fires = uniform(seed, Stream.RANDAUGMENT_FIRES, epoch, index, turn) < FIRES
    # a draw may be 0, where the quantile of the normal distribution is infinite
    quantile = np.maximum(uniform(seed, Stream.RANDAUGMENT_NOISE, epoch, index, turn), 2.0**-54)
    strengths = np.clip(magnitude + noise * ndtri(quantile), 0, STRONGEST)
    signed = np.where(minus, -strengths, strengths)
    return [
        (names[op], level) if fire else None
        for op, level, fire in zip(drawn.tolist(), signed.tolist(), fires.tolist(), strict=True)
    ]
