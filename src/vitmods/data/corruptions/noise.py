"""Gaussian, shot, impulse and speckle noise: independent in every pixel and channel."""

from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import levels, unit
from vitmods.data.corruptions.tables import Strength


def gaussian_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x + N(0, std)."""
    (std,) = strength
    return levels(draws.normal(*images.shape[1:]).mul_(std).add_(unit(images)))


def speckle_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x + x N(0, std): bright pixels suffer more."""
    (std,) = strength
    values = unit(images)
    return levels(draws.normal(*images.shape[1:]).mul_(std).mul_(values).add_(values))


def shot_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Counts of photons, `full` of them on average in a white pixel: Poisson(x full) / full."""
    (full,) = strength
    return levels(draws.poisson(unit(images) * full) / full)


def impulse_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A part `amount` of the values becomes 0 or 255, either alike."""
    (amount,) = strength
    chance = draws.uniform(*images.shape[1:])
    kept = chance >= amount
    white = (chance >= amount / 2) & ~kept
    return images * kept + white.byte() * 255
