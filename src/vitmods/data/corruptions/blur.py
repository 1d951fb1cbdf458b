"""Defocus, glass, motion, zoom and Gaussian blur."""

import math

import numpy as np
import torch
from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import correlate, gaussian, levels, motion, unit, zoom
from vitmods.data.corruptions.tables import Strength


def gaussian_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A Gaussian of `sigma` pixels."""
    (sigma,) = strength
    return levels(gaussian(unit(images), sigma))


def defocus_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The mean over a disk of `radius` pixels whose edge is softened by a Gaussian of `soft` pixels."""
    radius, soft = strength
    return levels(correlate(unit(images), disk(radius, soft)))


def disk(radius: float, soft: float) -> Tensor:
    """(K, K), K odd: the pixels within `radius`, normalized, then smoothed over 3 x 3 pixels (up to a radius of 8, on a
    grid of 17 x 17 that clips the smoothing) or 5 x 5. Empty borders are left out."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line = torch.arange(-half, half + 1).double()
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    near = torch.arange(-reach, reach + 1).double()
    weights = torch.exp(-(near**2) / (2 * soft**2))
    weights = weights / weights.sum()
    smooth = correlate((inside / inside.sum())[None, None], weights[:, None] * weights)[0, 0]
    used = int((smooth[half] > 1e-12).sum()) // 2  # half the width of the disk
    return smooth[half - used : half + used + 1, half - used : half + used + 1]


def motion_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A smear along a line at most 45 degrees off the horizontal; rounded, as ImageMagick does."""
    radius, sigma = strength
    angles = torch.deg2rad(draws.uniform(low=-45, high=45))
    return motion(images.double(), radius, sigma, angles).round_().to(torch.uint8)


def zoom_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The mean of the image and its enlargements by 1, 1 + step, ... below `stop`."""
    stop, step = strength
    values = unit(images)
    factors = np.arange(1, stop, step).tolist()  # rounding makes some one longer than they look: part of the definition
    total = values.clone()
    for factor in factors:
        total += zoom(values, factor)
    return levels(total / (len(factors) + 1))


def glass_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Pixels are copied from up to `reach` away, `rounds` times, between two Gaussian blurs of `sigma` pixels."""
    sigma, reach, rounds = strength[0], int(strength[1]), int(strength[2])
    blurred = levels(gaussian(unit(images), sigma))
    height, width = images.shape[-2:]
    sources = torch.arange(height * width).expand(len(images), -1)
    for _ in range(rounds):
        shape = (2, height - 2 * reach, width - 2 * reach)
        sources = sources.gather(1, scattered(draws.integers(-reach, reach, *shape), height, width))
    moved = blurred.flatten(2).gather(2, sources[:, None].expand(-1, images.shape[1], -1))
    return levels(gaussian(unit(moved.view_as(images)), sigma))


def scattered(offsets: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel's value comes from (B, H W), after one round of copies by offsets (B, 2, H - 2 r, W - 2 r), down
    and right, of the pixels r + 1 ... H - r and r + 1 ... W - r.

    Pixels are visited from the last to the first and take the present value of the pixel at their offset, so a value
    may travel on. (The published loop means to swap two pixels; as NumPy gives views it copies one, in ImageNet-C too.)
    """
    batch, reach = len(offsets), (height - offsets.shape[2]) // 2
    own = torch.arange(height * width).view(height, width)
    visited = torch.zeros(height, width, dtype=torch.bool)
    window = (slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1))
    visited[window] = True
    taken = own.expand(batch, -1, -1).clone()
    taken[(slice(None), *window)] += offsets[:, 0] * width + offsets[:, 1]
    onward = (taken > own) & visited.flatten()[taken]  # from a pixel that was visited before
    follow = torch.where(onward, taken, own).flatten(1)
    while not torch.equal(further := follow.gather(1, follow), follow):
        follow = further
    return taken.flatten(1).gather(1, follow)
