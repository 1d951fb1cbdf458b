"""Snow, fog and brightness (frost has textures, and a file of its own)."""

import torch
from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import gray, levels, motion, unit, zoom
from vitmods.data.corruptions.tables import Strength


def snow(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Flakes, that is enlarged and smeared noise above a threshold, over the whitened image; and the same flakes
    turned by 180 degrees."""
    mean, std, factor, threshold, radius, sigma, kept = strength
    noise = draws.normal(1, *images.shape[-2:]) * std + mean
    flakes = zoom(noise, factor)
    flakes = levels(flakes.masked_fill(flakes < threshold, 0)).double()
    angles = torch.deg2rad(draws.uniform(low=-135, high=-45))
    flakes = motion(flakes, radius, sigma, angles).round_().div_(255)
    values = unit(images)
    whitened = torch.maximum(values, gray(values) * 1.5 + 0.5)
    return levels(values * kept + whitened * (1 - kept) + flakes + flakes.rot90(2, (2, 3)))


def fog(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A plasma fractal of height `amount` is added, then all is scaled so that the image's brightest value stays."""
    amount, decay = strength
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    values = unit(images)
    brightest = values.amax((1, 2, 3), keepdim=True)
    values = values + plasma(draws.uniform(side * side - 1, low=-1), decay)[:, None, :height, :width] * amount
    return levels(values * brightest / (brightest + amount))


def plasma(noise: Tensor, decay: float) -> Tensor:
    """Heights (B, S, S) from 0 to 1 by the diamond-square method on a torus, S a power of 2, from noise (B, S S - 1) in
    -1 ... 1. The noise shrinks by `decay` squared from a level to the next finer one."""
    batch, side = len(noise), round((noise.shape[1] + 1) ** 0.5)
    heights = torch.zeros(batch, side, side, dtype=noise.dtype)
    used, amount, step = 0, 1.0, side
    while step >= 2:
        count = side // step
        fractions = noise[:, used : used + 3 * count**2].view(batch, 3, count, count) * amount
        half = step // 2
        corners = heights[:, ::step, ::step]
        centers = (
            _four(corners, corners.roll(-1, 1), corners.roll(-1, 2), corners.roll((-1, -1), (1, 2))) + fractions[:, 0]
        )
        heights[:, half::step, half::step] = centers
        heights[:, ::step, half::step] = (
            _four(corners, corners.roll(-1, 2), centers, centers.roll(1, 1)) + fractions[:, 1]
        )
        heights[:, half::step, ::step] = (
            _four(corners, corners.roll(-1, 1), centers, centers.roll(1, 2)) + fractions[:, 2]
        )
        used, amount, step = used + 3 * count**2, amount / decay**2, half
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def _four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a + b + c + d) / 4


def brightness(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """`amount` is added to the value of hue, saturation, value: channels keep their ratios, and black becomes gray."""
    (amount,) = strength
    values = unit(images)
    brightest = values.amax(1, keepdim=True)
    target = (brightest + amount).clamp(max=1)
    return levels(torch.where(brightest > 0, values * (target / brightest), target))
