"""Sizes of pictures: what is kept of each in the store, and the centre view that evaluation sees."""

from dataclasses import dataclass
from math import floor
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.resize import Method, resize

Pictures = TypeVar("Pictures", Tensor, NDArray[np.uint8])

_WHOLE = 1e-6  # 384 / (384 / 418) may miss 418 by less
LONGEST = 8  # pictures longer than 8:1 keep their middle: enlarging a scan line to cover a square would fill the memory


@dataclass(frozen=True)
class Geometry:
    """How pictures are stored for views of size (H, W), in pixels.

    ratio: the view is this part of the resized picture's short side (0.875: resize to 256, look at the middle 224).
    whole: keep the whole resized picture, to crop from at random, rather than only the centre view.
    resample: bicubic or bilinear with antialiasing, or as big_vision: views by the area method, random crops bilinear
    without antialiasing.
    shrink: whether a picture that is kept whole is shrunk to what the view needs; a crop of it is then resized twice.
    """

    size: tuple[int, int]
    ratio: float = 1.0
    whole: bool = False
    resample: Literal["bicubic", "bilinear", "big_vision"] = "bicubic"
    shrink: bool = True

    @property
    def cover(self) -> tuple[int, int]:
        """Height and width that the resized picture must cover."""
        height, width = (max(side, floor(side / self.ratio + _WHOLE)) for side in self.size)
        return height, width

    @property
    def crop_method(self) -> Method:
        """How a random crop is resized."""
        return "tf_bilinear" if self.resample == "big_vision" else self.resample

    @property
    def view_method(self) -> Method:
        """How a picture is resized to be looked at whole or in its centre."""
        return "area" if self.resample == "big_vision" else self.resample

    def store(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What to keep of a picture (C, H', W'): shrunk, never enlarged, and cut to the view unless it is kept whole.

        A kept picture of exactly the view's size is the finished view; any other is finished by `view`.
        """
        picture = _middle(picture)
        if self.whole and not self.shrink:
            return picture
        native = picture.shape[1:]
        height, width = self.covering(*native)
        if (height > native[0] or width > native[1]) and (self.whole or native != self.size):
            return picture
        if (height, width) != native:
            picture = resize(torch.from_numpy(picture)[None], (height, width), self.view_method)[0].numpy()
        return picture if self.whole else self._centre(picture)

    def view(self, pictures: Tensor) -> Tensor:
        """The centre view (B, C, H, W) of stored pictures (B, C, H', W'), all uint8."""
        height, width = pictures.shape[-2:]
        if (height, width) == self.size and not self.whole:
            return pictures
        covering = self.covering(height, width)
        if covering != (height, width):
            pictures = resize(pictures, covering, self.view_method)
        return self._centre(pictures)

    def covering(self, height: int, width: int) -> tuple[int, int]:
        """The size of a (height, width) picture resized, aspect kept, until it just covers `cover`."""
        need_h, need_w = self.cover
        if height * need_w <= width * need_h:
            return need_h, max(need_w, self._scaled(width, need_h, height))
        return max(need_h, self._scaled(height, need_w, width)), need_w

    def _scaled(self, side: int, need: int, other: int) -> int:
        """side * need / other: rounded in big_vision, cut off in torchvision."""
        if self.resample == "big_vision":
            return int(np.rint(np.float32(side) * (np.float32(need) / np.float32(other))))
        return int(need * side / other)

    def _centre(self, pictures: Pictures) -> Pictures:
        """The view in the middle; an odd row that is left over is cut off below in big_vision."""
        if self.resample != "big_vision":
            return centre(pictures, self.size)
        top, left = (pictures.shape[-2] - self.size[0]) // 2, (pictures.shape[-1] - self.size[1]) // 2
        return pictures[..., top : top + self.size[0], left : left + self.size[1]]


def centre(pictures: Pictures, size: tuple[int, int]) -> Pictures:
    """The middle (..., H, W) of larger pictures; halves are rounded as torchvision's center_crop does."""
    top = round((pictures.shape[-2] - size[0]) / 2.0)
    left = round((pictures.shape[-1] - size[1]) / 2.0)
    return pictures[..., top : top + size[0], left : left + size[1]]


def _middle(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = picture.shape[1:]
    return centre(picture, (min(height, LONGEST * width), min(width, LONGEST * height)))
