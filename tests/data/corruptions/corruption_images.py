"""Images for the corruptions' tests."""

import functools

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images


def drawn(height, width):
    """An image (3, H, W) of slopes, stripes, a disk and flat black, white and gray."""
    y, x = np.mgrid[:height, :width]
    v, u = y / height, x / width
    disk = (v - 0.4) ** 2 + (u - 0.6) ** 2 < 0.06
    stripes = ((x // max(1, width // 16)) + (y // max(1, height // 8))) % 2
    planes = np.stack([u, v, 0.5 + 0.4 * np.sin(9 * u + 5 * v)])
    planes = np.where(disk, np.array([0.9, 0.25, 0.1])[:, None, None], planes)
    planes = np.where(v > 0.75, stripes * np.array([0.8, 0.9, 0.7])[:, None, None], planes)
    planes = np.where((v < 0.2) & (u < 0.45), np.floor(u / 0.15) / 2, planes)
    return (planes * 255).astype(np.uint8)


@functools.cache
def photographs(side):
    """uint8 (2, 3, side, side): china and flower, thinned out and cut."""
    step = max(1, 352 // side)
    thin = [p[::step, ::step].transpose(2, 0, 1) for p in load_sample_images().images]
    middles = [p[:, (p.shape[1] - side) // 2 :, (p.shape[2] - side) // 2 :][:, :side, :side] for p in thin]
    return torch.from_numpy(np.stack(middles))


def images(side):
    """uint8 (3, 3, side, side): drawn, china, flower."""
    return torch.cat([torch.from_numpy(drawn(side, side))[None], photographs(side)])


def write_textures(folder):
    """Five made-up frost textures, larger than 224 pixels."""
    for k in range(1, 6):
        y, x = np.mgrid[: 260 + 40 * k, : 380 + 50 * k]
        waves = np.stack([np.sin(x / (2 + k) + c) * np.cos(y / (3 + k) - x / 31 + c) for c in range(3)], -1)
        Image.fromarray((190 + 5 * k + 40 * waves).astype(np.uint8)).save(
            folder / f"frost{k}.{'png' if k < 4 else 'jpg'}", quality=95
        )
