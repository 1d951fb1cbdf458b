"""RandAugment (Cubuk et al., NeurIPS 2020): torchvision's operations and strengths, drawn by counter.

torchvision's own class takes one picture at a time and draws from torch's global generator, which training
(dropout) uses too. Here pictures of a batch that drew the same operation are changed together, and no
generator is touched.
"""

from collections.abc import Callable
from math import atan, degrees

import numpy as np
import torch
from torch import Tensor

from vitmods.data.boxes import Ints
from vitmods.data.rng import Stream, uniform

STRONGEST = 30  # magnitudes run from 0 to 30


def randaugment(pictures: Tensor, seed: int, epoch: int, index: Ints, count: int, magnitude: int) -> Tensor:
    """`count` random operations of this magnitude (0 to 30) on each picture of uint8 (B, C, H, W), in place."""
    names = tuple(OPERATIONS)
    pixels = pictures.numpy()  # numpy gathers whole pictures, torch single bytes
    for turn in range(count):
        drawn = (uniform(seed, Stream.RANDAUGMENT_OP, epoch, index, turn) * len(names)).astype(np.int64)
        minus = uniform(seed, Stream.RANDAUGMENT_SIGN, epoch, index, turn) < 0.5
        minus &= np.isin(drawn, [names.index(name) for name in SIGNED])
        for group in np.unique(2 * drawn + minus):
            chosen = np.flatnonzero(2 * drawn + minus == group)
            name, sign = names[group // 2], -1 if group % 2 else 1
            level = sign * strength(name, magnitude, tuple(pictures.shape[-2:]))
            pixels[chosen] = OPERATIONS[name](torch.from_numpy(pixels[chosen]), level).numpy()
    return pictures


def strength(name: str, magnitude: int, size: tuple[int, ...]) -> float:
    """torchvision's strength of an operation at this magnitude, for pictures of (H, W) pixels."""
    part = magnitude / STRONGEST
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


def _affine(pictures: Tensor, shear: tuple[float, float] = (0, 0), move: tuple[int, int] = (0, 0)) -> Tensor:
    """Shear by tangents about the top left corner, or move by pixels; uncovered pixels are black."""
    from torchvision.transforms.v2 import functional as F

    angles = [degrees(atan(s)) for s in shear]
    return F.affine(pictures, angle=0.0, translate=list(move), scale=1.0, shear=angles, center=[0, 0])


def _functional(name: str) -> Callable[..., Tensor]:
    from torchvision.transforms.v2 import functional as F

    function: Callable[..., Tensor] = getattr(F, name)
    return function


Operation = Callable[[Tensor, float], Tensor]

OPERATIONS: dict[str, Operation] = {
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
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")
