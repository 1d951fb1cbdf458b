"""RandAugment with the 14 operations and strengths of torchvision's class of that name: magnitudes from 0 to 30."""

from collections.abc import Callable
from math import atan, degrees

import torch
from torch import Tensor

from vitmods.data.randaugment import Draw, Pixels

STRONGEST = 30  # magnitudes run from 0 to 30
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")


def change(pixels: Pixels, name: str, magnitude: float, _: Draw) -> Pixels:
    """What the operation makes of images (B, C, H, W); a signed operation goes the other way below 0."""
    level = strength(name, magnitude, tuple(pixels.shape[-2:]))
    changed: Pixels = OPERATIONS[name](torch.from_numpy(pixels), level).numpy()
    return changed


def strength(name: str, magnitude: float, size: tuple[int, ...]) -> float:
    """torchvision's strength of an operation at this magnitude, for images of (H, W) pixels."""
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


def _affine(images: Tensor, shear: tuple[float, float] = (0, 0), move: tuple[int, int] = (0, 0)) -> Tensor:
    """Shear by tangents about the top left corner, or move by pixels; uncovered pixels are black."""
    from torchvision.transforms.v2 import functional as F

    angles = [degrees(atan(s)) for s in shear]
    return F.affine(images, angle=0.0, translate=list(move), scale=1.0, shear=angles, center=[0, 0])


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
