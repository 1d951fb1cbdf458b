"""Colors of classes, and images as they were before normalization, for drawings."""

from colorsys import hsv_to_rgb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Okabe and Ito's seven, which color-blind readers tell apart ("Color universal design", 2008).
_SEVEN = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
_SHADES = ((1.0, 0), (0.5, 0), (0.5, 127))  # as they are, dark, pale
_GOLDEN = 0.618033988749895  # of the circle, from one hue to the next of all further ones


def palette(classes: int) -> NDArray[np.uint8]:
    """Return colors (K, 3), always the same: the first 21 differ in lightness where hues are alike."""
    colors = [[factor * value + white for value in color] for factor, white in _SHADES for color in _SEVEN]
    more = (hsv_to_rgb(k * _GOLDEN % 1, 0.5 + 0.5 * (k % 2), 0.55 + 0.2 * (k % 3)) for k in range(classes))
    colors += [[255 * value for value in color] for color in more]
    return np.array(colors[:classes], dtype=np.uint8)


def legend(classes: tuple[str, ...]) -> dict[str, str]:
    """Class -> its color in the palette, as #rrggbb."""
    return {name: f"#{bytes(color).hex()}" for name, color in zip(classes, palette(len(classes)), strict=True)}


def pixels_of(view: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """The image uint8 (H, W, 3) that a normalized view (C, H, W) was made from, gray ones in three equal channels."""
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    pixels = (255 * (view.float().cpu() * stds + means)).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(pixels.expand(3, -1, -1).permute(1, 2, 0))
