"""Sizes of images: what is kept of each in the store, the center view that evaluation sees, and resizing."""

from dataclasses import dataclass
from math import floor
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Method = Literal["bicubic", "bilinear", "tf_bilinear", "area"]

Images = TypeVar("Images", Tensor, NDArray[np.uint8], NDArray[np.int64])

_ROUNDING = 1e-6  # sums of fractions that make up a whole number may miss it by less
_WHOLE = 1e-6  # 384 / (384 / 418) may miss 418 by less
LONGEST = 8  # images longer than 8:1 keep their middle: enlarging a scan line to cover a square would fill the memory


@dataclass(frozen=True)
class Geometry:
    """How images are stored for views of size (H, W), in pixels.

    ratio: the view is this part of the resized image's short side (0.875: resize to 256, look at the middle 224).
    whole: keep the whole resized image, to crop from at random, rather than only the center view.
    resample: bicubic or bilinear with antialiasing, or as big_vision: views by the area method, random crops bilinear
    without antialiasing.
    shrink: whether an image that is kept whole is shrunk to what the view needs; a crop of it is then resized twice.
    """

    size: tuple[int, int]
    ratio: float = 1.0
    whole: bool = False
    resample: Literal["bicubic", "bilinear", "big_vision"] = "bicubic"
    shrink: bool = True

    @property
    def cover(self) -> tuple[int, int]:
        """Height and width that the resized image must cover."""
        height, width = (max(side, floor(side / self.ratio + _WHOLE)) for side in self.size)
        return height, width

    @property
    def crop_method(self) -> Method:
        """How a random crop is resized."""
        return "tf_bilinear" if self.resample == "big_vision" else self.resample

    @property
    def view_method(self) -> Method:
        """How an image is resized to be looked at whole or in its center."""
        return "area" if self.resample == "big_vision" else self.resample

    def store(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The part of an image (C, H', W') to keep: shrunk, never enlarged, and cut to the view unless kept whole.

        A kept image of exactly the view's size is the finished view; any other is finished by `view`.
        """
        image = middle(image)
        if self.whole and not self.shrink:
            return image
        native = image.shape[1:]
        height, width = self.covering(*native)
        if (height > native[0] or width > native[1]) and (self.whole or native != self.size):
            return image
        if (height, width) != native:
            image = resize(torch.from_numpy(image)[None], (height, width), self.view_method)[0].numpy()
        return image if self.whole else self._centre(image)

    def view(self, images: Tensor) -> Tensor:
        """The center view (B, C, H, W) of stored images (B, C, H', W'), all uint8."""
        height, width = images.shape[-2:]
        if (height, width) == self.size and not self.whole:
            return images
        covering = self.covering(height, width)
        if covering != (height, width):
            images = resize(images, covering, self.view_method)
        return self._centre(images)

    def covering(self, height: int, width: int) -> tuple[int, int]:
        """The size of a (height, width) image resized, aspect kept, until it just covers `cover`."""
        need_h, need_w = self.cover
        if height * need_w <= width * need_h:
            return need_h, max(need_w, self._scaled(width, need_h, height))
        return max(need_h, self._scaled(height, need_w, width)), need_w

    def _scaled(self, side: int, need: int, other: int) -> int:
        """side * need / other: rounded in big_vision, cut off in torchvision."""
        if self.resample == "big_vision":
            return int(np.rint(np.float32(side) * (np.float32(need) / np.float32(other))))
        return int(need * side / other)

    def _centre(self, images: Images) -> Images:
        """The view in the middle; an odd row that is left over is cut off below in big_vision."""
        if self.resample != "big_vision":
            return center(images, self.size)
        top, left = (images.shape[-2] - self.size[0]) // 2, (images.shape[-1] - self.size[1]) // 2
        return images[..., top : top + self.size[0], left : left + self.size[1]]


def center(images: Images, size: tuple[int, int]) -> Images:
    """The middle (..., H, W) of larger images; halves are rounded as torchvision's center_crop does."""
    top = round((images.shape[-2] - size[0]) / 2.0)
    left = round((images.shape[-1] - size[1]) / 2.0)
    return images[..., top : top + size[0], left : left + size[1]]


def middle(image: Images) -> Images:
    """The part of an image (..., H, W) that is used where it is longer than LONGEST:1."""
    height, width = image.shape[-2:]
    return center(image, (min(height, LONGEST * width), min(width, LONGEST * height)))


def resize(images: Tensor, size: tuple[int, int], method: Method = "bicubic") -> Tensor:
    """To (B, C, *size).

    "bicubic" and "bilinear" are antialiased, as torchvision's resize on tensors. "tf_bilinear" is TensorFlow's bilinear
    without antialiasing, "area" its exact mean over the area that a pixel covers; both cut the fraction off, as
    big_vision does.
    """
    if method == "tf_bilinear":
        return torch.from_numpy(_bilinear(images.numpy(), size))
    if method == "area":
        down = _means(images.numpy(), size[0], axis=2)
        return torch.from_numpy((_means(down, size[1], axis=3) + _ROUNDING).astype(np.uint8))
    return torch.nn.functional.interpolate(images, size, mode=method, antialias=True, align_corners=False)


def _bilinear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """In float32 and in TensorFlow's order, along rows first: cutting off shows a difference in the last bit."""
    sides = []  # of each side for each pixel its two neighbors, with centers at halves, and its fraction between them
    for n, out in zip(pixels.shape[2:], size, strict=True):
        half, scale = np.float32(0.5), np.float32(n) / np.float32(out)
        at = (np.arange(out, dtype=np.float32) + half) * scale - half
        low = np.floor(at)
        sides.append((np.maximum(low, 0).astype(np.int64), np.minimum(np.ceil(at), n - 1).astype(np.int64), at - low))
    (above, below, down), (left, right, across) = sides
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


def _means(values: NDArray[Any], out: int, axis: int) -> NDArray[np.float64]:
    """Means over `out` equal parts of an axis, a pixel in two parts counts in both by its fraction."""
    n = values.shape[axis]
    if n == out:
        return values.astype(np.float64)
    edges = np.arange(out + 1) * (n / out)
    cells = np.minimum(np.floor(edges + _ROUNDING / n).astype(np.int64), n - 1)
    fraction = (edges - cells).reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    sums = np.cumsum(values, axis=axis, dtype=np.float64)
    before = sums.take(cells, axis=axis) - values.take(cells, axis=axis) * (1 - fraction)
    return np.diff(before, axis=axis) * (out / n)
