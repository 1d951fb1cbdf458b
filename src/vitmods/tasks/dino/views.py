"""Crops of an image in two sizes, each augmented by itself (multi-crop, Caron et al., 2020, arXiv:2006.09882)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitmods.data.augment import IN_CACHE, crop_boxes, flip, resized_crops
from vitmods.data.dataset import Draw
from vitmods.data.geometry import Geometry
from vitmods.data.rng import Stream, bits, uniform
from vitmods.tasks.dino.recipes import DinoPart

GLOBAL_CROPS = 2
_GRAY = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
_JITTERED = 0.8  # fraction of the crops


def local_size(part: DinoPart, img_size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a small crop: half of the image up to 128 pixels, above three sevenths, a multiple of 16."""
    if part.local_size is not None:
        return part.local_size, part.local_size
    height, width = (side // 2 if side <= 128 else side * 3 // 7 // 16 * 16 for side in img_size)
    return height, width


def multi_crop(
    part: DinoPart, stored: Sequence[NDArray[np.uint8]], targets: Any, draw: Draw
) -> tuple[tuple[Tensor, ...], Any]:
    """Cut two large and `local_crops` small crops out of each image; each crop with other random numbers."""
    sizes = np.array([image.shape[1:] for image in stored])
    augment, method = draw.augment, Geometry(draw.img_size, resample=draw.augment.resample).crop_method
    crops = []
    for number in range(GLOBAL_CROPS + part.local_crops):
        is_global = number < GLOBAL_CROPS
        seed = int(bits(draw.seed, Stream.VIEW, number)) >> 1
        scale = augment.crop_scale if is_global else part.local_scale
        boxes = crop_boxes(seed, draw.epoch, draw.views, sizes, scale, augment.crop_ratio)
        size = draw.img_size if is_global else local_size(part, draw.img_size)
        pixels = resized_crops(stored, boxes, size, method)
        pixels = flip(pixels, uniform(seed, Stream.FLIP, draw.epoch, draw.views) < augment.flip)
        pieces = pixels.split(max(1, IN_CACHE // pixels[0].numel()))  # arithmetic on them stays in the cache
        views = np.split(draw.views, np.cumsum([len(piece) for piece in pieces])[:-1])
        recolored = (recolor(part, *piece, seed, draw.epoch, number) for piece in zip(pieces, views, strict=True))
        crops.append(torch.cat(list(recolored)))
    return tuple(crops), targets


def recolor(part: DinoPart, pixels: Tensor, views: NDArray[np.int64], seed: int, epoch: int, number: int) -> Tensor:
    """Change colors, blur and solarize crops number `number` uint8 (B, C, H, W), each with its probability.

    views: the numbers (B,) of the images' views. Brightness, contrast, saturation and hue follow in this order.
    """
    draws = uniform(seed, Stream.VIEW_COLOR, epoch, views[:, None], np.arange(9)).astype(np.float32)
    jitter, *strengths, gray, inverse, turns, blurred, width = torch.from_numpy(draws)[:, :, None, None, None].unbind(1)
    colors = pixels.float()
    is_color = pixels.shape[1] == 3
    if part.color_jitter:
        strength = part.color_jitter * torch.tensor([1.0, 1.0, 0.5])
        brightness, contrast, saturation = (
            1 + scale * (2 * draw - 1) for scale, draw in zip(strength, strengths, strict=True)
        )
        changed = (colors * brightness).clamp(0, 255)
        mean = _luminance(changed).mean(dim=(2, 3), keepdim=True)
        changed = (mean + (changed - mean) * contrast).clamp(0, 255)
        luminance = _luminance(changed)
        changed = (luminance + (changed - luminance) * saturation).clamp(0, 255)
        if is_color and part.hue:
            changed = turn_hue(changed, part.hue * (2 * turns - 1))
        colors = torch.where(jitter < _JITTERED, changed, colors)
    if is_color and part.grayscale:
        colors = torch.where(gray < part.grayscale, _luminance(colors), colors)
    chosen = blurred.flatten() < part.blur[min(number, 2)]
    if chosen.any():
        least, most = part.blur_sigma
        colors[chosen] = gaussian_blur(colors[chosen], (least + (most - least) * width[chosen]).flatten(), most)
    if number == 1 and part.solarize:
        colors = torch.where((inverse < part.solarize) & (colors >= 128), 255 - colors, colors)
    return colors.round().to(torch.uint8)


def turn_hue(colors: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of colors (B, 3, H, W) by parts `turns` (B, 1, 1, 1) of the circle, at the same value and
    saturation."""
    red, green, blue = colors.unbind(dim=1)
    value = colors.amax(dim=1)
    chroma = value - colors.amin(dim=1)
    scale = chroma.clamp_min(torch.finfo(chroma.dtype).tiny)
    sector = torch.where(value == green, 2 + (blue - red) / scale, 4 + (red - green) / scale)
    sector = torch.where(value == red, (green - blue) / scale, sector) + 6 * turns[:, 0]
    place = (sector[:, None] + torch.tensor([5.0, 3.0, 1.0])[:, None, None]) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)


def gaussian_blur(images: Tensor, sigma: Tensor, most: float) -> Tensor:
    """Blur images (B, C, H, W), mirrored at their edges, with deviations (B,) of at most `most` pixels."""
    reach = max(1, min(math.ceil(3 * most), min(images.shape[2:]) - 1))
    kernels = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma[:, None].clamp_min(1e-3)) ** 2)
    weights = (kernels / kernels.sum(dim=1, keepdim=True))[:, None, None, None].unbind(dim=-1)
    for axis in (2, 3):
        edges = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
        padded = F.pad(images, edges, mode="reflect")
        images = torch.zeros_like(images)
        for shift, weight in enumerate(weights):
            images.addcmul_(padded.narrow(axis, shift, images.shape[axis]), weight)
    return images


def _luminance(images: Tensor) -> Tensor:
    return (images * _GRAY).sum(dim=1, keepdim=True) if images.shape[1] == 3 else images
