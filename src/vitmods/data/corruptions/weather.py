"""Snow, fog and brightness (frost has textures, and a file of its own)."""

import torch
from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import grey, levels, motion, unit, zoom
from vitmods.data.corruptions.tables import Strength


def snow(pictures: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Flakes, that is enlarged and smeared noise above a threshold, over the whitened picture; and the same flakes
    turned by 180 degrees."""
    mean, std, factor, threshold, radius, sigma, kept = strength
    noise = draws.normal(1, *pictures.shape[-2:]) * std + mean
    flakes = zoom(noise, factor)
    flakes = levels(flakes.masked_fill(flakes < threshold, 0)).double()
    angles = torch.deg2rad(draws.uniform(low=-135, high=-45))
    flakes = motion(flakes, radius, sigma, angles).round_().div_(255)
    values = unit(pictures)
    whitened = torch.maximum(values, grey(values) * 1.5 + 0.5)
    return levels(values * kept + whitened * (1 - kept) + flakes + flakes.rot90(2, (2, 3)))


def fog(pictures: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A plasma fractal of height `amount` is added, then all is scaled so that the picture's brightest value stays."""
    amount, decay = strength
    height, width = pictures.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    values = unit(pictures)
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
        shares = noise[:, used : used + 3 * count**2].view(batch, 3, count, count) * amount
        half = step // 2
        corners = heights[:, ::step, ::step]
        centres = (
            _four(corners, corners.roll(-1, 1), corners.roll(-1, 2), corners.roll((-1, -1), (1, 2))) + shares[:, 0]
        )
        heights[:, half::step, half::step] = centres
        heights[:, ::step, half::step] = _four(corners, corners.roll(-1, 2), centres, centres.roll(1, 1)) + shares[:, 1]
        heights[:, half::step, ::step] = _four(corners, corners.roll(-1, 1), centres, centres.roll(1, 2)) + shares[:, 2]
        used, amount, step = used + 3 * count**2, amount / decay**2, half
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def _four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a + b + c + d) / 4


def brightness(pictures: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """`amount` is added to the value of hue, saturation, value: channels keep their ratios, and black becomes grey."""
    (amount,) = strength
    values = unit(pictures)
    brightest = values.amax(1, keepdim=True)
    target = (brightest + amount).clamp(max=1)
    return levels(torch.where(brightest > 0, values * (target / brightest), target))
