"""One batch, as the data makes it, the loop moves it and a task reads it.

Images that reach a device as uint8, a quarter of the bytes, and the arithmetic that is left to do there.

It is that of a batch made on the CPU, in the same order: normalize, erase, mix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from vitmods.data.augment import Ints, Mixing

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


Data = TypeVar("Data")


@dataclass(frozen=True)
class Batch:
    """What belongs together of B images, or of B sequences.

    inputs: images float32 (B, C, H, W), normalized; or tokens int64 (B, T), 0 for padding. targets: what the task asks
    the data for: a tensor whose first axis counts images (classes int64 (B,), fractions of classes or labels float32
    (B, K), masks int64 (B, H, W)), a list with an entry an image (boxes), or a dict or tuple of those. index: int64
    (B,), positions in the split. views: further views of the same images, each (B, C, h, w) in a size of its own.
    left: where images and views are uint8 still, what `to` makes inputs of them by; tasks never see such a batch.
    """

    inputs: Tensor
    targets: Any
    index: Tensor
    views: tuple[Tensor, ...] = ()
    left: Left | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device) -> Self:
        """The batch on a device, ready for the model; the same tensors if they are there already."""
        moved = self.moved(device)
        if (left := moved.left) is None:
            return moved
        views = tuple(map(left.normalized, moved.views))
        return type(self)(left.images(moved.inputs), moved.targets, moved.index, views)

    def moved(self, device: torch.device) -> Self:
        """The same, images as uint8 if they are: a part of them may be made ready, by `to`, after the other."""
        found = self._mapped(lambda tensor: tensor.to(device, non_blocking=True))
        return found if found.left is None else replace(found, left=found.left.with_before(found.inputs))

    def pinned(self) -> Self:
        """In memory from which a GPU copies while the host goes on."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, made: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(_mapped(value, made) for value in vars(self).values()))

    def parts(self, count: int) -> Iterator[Self]:
        """At most `count` parts of nearly the same size, one after the other."""
        count = min(count, len(self))
        if count == 1:
            yield self
            return
        size, more = divmod(len(self), count)  # the first parts have one more
        for number in range(count):
            start = number * size + min(number, more)
            part = slice(start, start + size + (number < more))
            yield type(self)(*(_sliced(value, part) for value in vars(self).values()))


def for_device(dataset: Data, device: torch.device) -> Data:
    """A data set whose batches reach a CUDA device as uint8, if it can (`as_uint8`); elsewhere the set itself."""
    can = device.type == "cuda" and hasattr(dataset, "as_uint8")
    found: Data = dataset.as_uint8() if can else dataset  # type: ignore[attr-defined]
    return found


def _mapped(value: Any, made: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return made(value)
    if isinstance(value, Left):
        return value.tensors(made)
    if isinstance(value, dict):
        return {name: _mapped(inner, made) for name, inner in value.items()}
    return type(value)(_mapped(inner, made) for inner in value) if isinstance(value, list | tuple) else value


def _sliced(value: Any, part: slice) -> Any:
    """Of tensors and lists, which count images, some; of dicts and tuples, what they hold of these."""
    if value is None or isinstance(value, Left):
        return value and value.part(part)
    if isinstance(value, dict):
        return {name: _sliced(inner, part) for name, inner in value.items()}
    return tuple(_sliced(inner, part) for inner in value) if isinstance(value, tuple) else value[part]
