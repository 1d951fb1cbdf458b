"""Images that reach a device as uint8, a quarter of the bytes, and the arithmetic that is left to do there.

It is that of a batch made on the CPU, in the same order: normalize, erase, mix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from vitmods.data.augment import Mixing
from vitmods.data.boxes import Ints

Erased = tuple[tuple[int, int, int, int, int] | None, ...]
"""Of each image the box that is erased (top, left, height, width) and where its noise begins; None: none is"""


@dataclass(frozen=True)
class Left:
    """What is left to do to images uint8 (B, C, H, W).

    mean, std: (C, 1, 1). noise: float32 (n,), of all boxes in a row. mixing: with the images `before`, uint8 as well
    and themselves erased; where those are None, with each one's predecessor in the batch.
    """

    mean: Tensor
    std: Tensor
    erased: Erased = ()
    noise: Tensor | None = None
    mixing: Mixing | None = None
    before: Tensor | None = None
    before_erased: Erased = ()

    def tensors(self, made: Callable[[Tensor], Tensor]) -> Self:
        """With what is made of each tensor, as by moving it."""
        given: dict[str, Any] = {name: made(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **given)

    def with_before(self, pixels: Tensor) -> Self:
        """With the predecessors of these images, so that parts of the batch can be mixed by themselves."""
        if self.mixing is None or self.before is not None:
            return self
        return replace(self, before=pixels.roll(1, 0), before_erased=self.erased[-1:] + self.erased[:-1])

    def part(self, images: slice) -> Self:
        """Of some of the images."""
        before = None if self.before is None else self.before[images]
        erased, before_erased = self.erased[images], self.before_erased[images]
        return replace(self, erased=erased, before=before, before_erased=before_erased)

    def images(self, pixels: Tensor) -> Tensor:
        """float32 (B, C, H, W), as the model reads them."""
        found = self._erased(self.normalized(pixels), self.erased)
        if self.mixing is None or self.before is None:
            return found
        return self.mixing.images(found, self._erased(self.normalized(self.before), self.before_erased))

    def normalized(self, pixels: Tensor) -> Tensor:
        """float32 (x / 255 - mean) / std."""
        return pixels.float().mul_(1 / 255).sub_(self.mean).div_(self.std)

    def _erased(self, images: Tensor, erased: Erased) -> Tensor:
        for image, one in zip(images, erased, strict=False):
            if one is not None:
                assert self.noise is not None
                top, left, height, width, start = one
                box = (len(image), height, width)
                filling = self.noise[start : start + len(image) * height * width].view(box)
                image[:, top : top + height, left : left + width] = filling
        return images


def erasing(count: int, channels: int, positions: Ints, boxes: Ints, noise: Sequence[Tensor]) -> tuple[Erased, Tensor]:
    """`Left.erased` and `Left.noise` of `count` images: boxes (E, 4) of those at `positions` (E,), with their noise."""
    erased: list[tuple[int, int, int, int, int] | None] = [None] * count
    start = 0
    for position, (top, left, height, width) in zip(positions.tolist(), boxes.tolist(), strict=True):
        erased[position] = (top, left, height, width, start)
        start += channels * height * width
    return tuple(erased), torch.cat([one.flatten() for one in noise]) if noise else torch.empty(0)
