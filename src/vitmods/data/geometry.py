"""Sizes of pictures: what is kept of each in the store, and the centre view that evaluation sees."""

from dataclasses import dataclass
from math import floor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pictures = TypeVar("Pictures", Tensor, NDArray[np.uint8])

LONGEST = 8  # pictures longer than 8:1 keep their middle: enlarging a scan line to cover a square would fill the memory


@dataclass(frozen=True)
class Geometry:
    """How pictures are stored for views of size (H, W), in pixels.

    ratio: the view is this part of the resized picture's short side (0.875: resize to 256, look at the middle 224).
    whole: keep the whole resized picture, to crop from at random, rather than only the centre view.
    """

    size: tuple[int, int]
    ratio: float = 1.0
    whole: bool = False

    @property
    def cover(self) -> tuple[int, int]:
        """Height and width that the resized picture must cover."""
        return max(self.size[0], floor(self.size[0] / self.ratio)), max(self.size[1], floor(self.size[1] / self.ratio))

    def store(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What to keep of a picture (C, H', W'): shrunk, never enlarged, and cut to the view unless it is kept whole.

        A kept picture of exactly the view's size is the finished view; any other is finished by `view`.
        """
        picture = _middle(picture)
        native = picture.shape[1:]
        height, width = self.covering(*native)
        if (height > native[0] or width > native[1]) and (self.whole or native != self.size):
            return picture
        if (height, width) != native:
            picture = resize(torch.from_numpy(picture)[None], (height, width))[0].numpy()
        return picture if self.whole else centre(picture, self.size)

    def view(self, pictures: Tensor) -> Tensor:
        """The centre view (B, C, H, W) of stored pictures (B, C, H', W'), all uint8."""
        height, width = pictures.shape[-2:]
        if (height, width) == self.size and not self.whole:
            return pictures
        covering = self.covering(height, width)
        if covering != (height, width):
            pictures = resize(pictures, covering)
        return centre(pictures, self.size)

    def covering(self, height: int, width: int) -> tuple[int, int]:
        """The size of a (height, width) picture resized, aspect kept, until it just covers `cover`."""
        need_h, need_w = self.cover
        if height * need_w <= width * need_h:
            return need_h, max(need_w, int(need_h * width / height))
        return max(need_h, int(need_w * height / width)), need_w


def resize(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic with antialiasing, uint8 (B, C, H, W) in and out, as torchvision's resize on tensors."""
    return torch.nn.functional.interpolate(pictures, size, mode="bicubic", antialias=True, align_corners=False)


def centre(pictures: Pictures, size: tuple[int, int]) -> Pictures:
    """The middle (..., H, W) of larger pictures; halves are rounded as torchvision's center_crop does."""
    top = round((pictures.shape[-2] - size[0]) / 2.0)
    left = round((pictures.shape[-1] - size[1]) / 2.0)
    return pictures[..., top : top + size[0], left : left + size[1]]


def _middle(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = picture.shape[1:]
    return centre(picture, (min(height, LONGEST * width), min(width, LONGEST * height)))
