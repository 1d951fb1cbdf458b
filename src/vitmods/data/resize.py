"""Resizing uint8 images (B, C, H, W), by torch with antialiasing or as TensorFlow does it for big_vision."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Method = Literal["bicubic", "bilinear", "tf_bilinear", "area"]

_ROUNDING = 1e-6  # sums of fractions that make up a whole number may miss it by less


def resize(images: Tensor, size: tuple[int, int], method: Method = "bicubic") -> Tensor:
    """To (B, C, *size).

    "bicubic" and "bilinear" are antialiased, as torchvision's resize on tensors. "tf_bilinear" is TensorFlow's bilinear
    without antialiasing, "area" its exact mean over the area that a pixel covers; both cut the fraction off, as
    big_vision does.
    """
    if method == "tf_bilinear":
        return torch.from_numpy(_bilinear(images.numpy(), size))
    if method == "area":
        return torch.from_numpy(_area(images.numpy(), size))
    return torch.nn.functional.interpolate(images, size, mode=method, antialias=True, align_corners=False)


def _bilinear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """In float32 and in TensorFlow's order, along rows first: cutting off shows a difference in the last bit."""
    (above, below, down), (left, right, across) = (
        _between(n, out) for n, out in zip(pixels.shape[2:], size, strict=True)
    )
    rows, place = np.unique(np.stack([above, below]), return_inverse=True)
    needed = pixels.take(rows, axis=2)
    lines = _towards(needed.take(left, axis=3), needed.take(right, axis=3), across)
    above, below = place.reshape(2, -1)
    return _towards(lines.take(above, axis=2), lines.take(below, axis=2), down[:, None]).astype(np.uint8)


def _towards(start: NDArray[Any], end: NDArray[Any], part: NDArray[np.float32]) -> NDArray[np.float32]:
    start = start.astype(np.float32)
    step: NDArray[np.float32] = end - start
    step *= part
    step += start
    return step


def _between(n: int, out: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """For each of `out` pixels the two of n that it lies between, with pixel centers at halves, and how far along."""
    at = (np.arange(out, dtype=np.float32) + np.float32(0.5)) * (np.float32(n) / np.float32(out)) - np.float32(0.5)
    low = np.floor(at)
    return np.maximum(low, 0).astype(np.int64), np.minimum(np.ceil(at), n - 1).astype(np.int64), at - low


def _area(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    down = _means(pixels, size[0], axis=2)
    return (_means(down, size[1], axis=3) + _ROUNDING).astype(np.uint8)


def _means(values: NDArray[Any], out: int, axis: int) -> NDArray[np.float64]:
    """Means over `out` equal parts of an axis, a pixel that lies in two parts counting in both by its fraction."""
    n = values.shape[axis]
    if n == out:
        return values.astype(np.float64)
    edges = np.arange(out + 1) * (n / out)
    whole = np.minimum(np.floor(edges + _ROUNDING / n).astype(np.int64), n - 1)
    fraction = (edges - whole).reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    sums = np.cumsum(values, axis=axis, dtype=np.float64)
    before = sums.take(whole, axis=axis) - values.take(whole, axis=axis) * (1 - fraction)
    means: NDArray[np.float64] = np.diff(before, axis=axis) * (out / n)
    return means
