"""One batch: made by the data, moved by the loop, read by a task.

Images may reach a device as uint8, a quarter of the bytes. There they are normalized, erased and mixed, in this order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.augment import Ints, Mixing, normalize

Erased = tuple[tuple[int, int, int, int, int] | None, ...]
"""for each image the erased box (top, left, height, width) and where its noise begins; None: not erased"""


@dataclass(frozen=True)
class DeferredTransforms:
    """The remaining steps for images uint8 (B, C, H, W).

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

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to each tensor."""
        tensors: dict[str, Any] = {n: function(value) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def with_before(self, pixels: Tensor) -> Self:
        """Keep the predecessors of these images, so that parts of the batch can be mixed separately."""
        if self.mixing is None or self.before is not None:
            return self
        return replace(self, before=pixels.roll(1, 0), before_erased=self.erased[-1:] + self.erased[:-1])

    def part(self, images: slice) -> Self:
        """The transforms of some of the images."""
        before = None if self.before is None else self.before[images]
        erased, before_erased = self.erased[images], self.before_erased[images]
        return replace(self, erased=erased, before=before, before_erased=before_erased)

    def images(self, pixels: Tensor) -> Tensor:
        """float32 (B, C, H, W), as the model reads them."""
        images = self._erase(normalize(pixels, self.mean, self.std), self.erased)
        if self.mixing is None:
            return images
        if self.before is None:
            return self.mixing.images(images, images.roll(1, 0))
        before = normalize(self.before, self.mean, self.std)
        return self.mixing.images(images, self._erase(before, self.before_erased))

    def _erase(self, images: Tensor, erased: Erased) -> Tensor:
        for image, box in zip(images, erased, strict=False):
            if box is not None:
                assert self.noise is not None
                top, left, height, width, start = box
                shape = (len(image), height, width)
                noise = self.noise[start : start + len(image) * height * width].view(shape)
                image[:, top : top + height, left : left + width] = noise
        return images


def erasing(count: int, channels: int, positions: Ints, boxes: Ints, seeds: NDArray[Any]) -> tuple[Erased, Tensor]:
    """`erased` and `noise` of `count` images: boxes (E, 4) of those at `positions` (E,), with unit normal noise."""
    erased: list[tuple[int, int, int, int, int] | None] = [None] * count
    noise = [torch.empty(0)]
    start = 0
    for position, (top, left, height, width), seed in zip(
        positions.tolist(), boxes.tolist(), seeds.tolist(), strict=True
    ):
        generator = torch.Generator().manual_seed(seed >> 1)  # torch takes 63 bits
        noise.append(torch.randn((channels, height, width), generator=generator).flatten())
        erased[position] = (top, left, height, width, start)
        start += len(noise[-1])
    return tuple(erased), torch.cat(noise)


Data = TypeVar("Data")


@dataclass(frozen=True)
class Batch:
    """B images, or B sequences, with their targets.

    inputs: images float32 (B, C, H, W), normalized; or tokens int64 (B, T), 0 for padding. targets: as the task asks
    for: a tensor whose first axis counts images (classes int64 (B,), fractions of classes or labels float32
    (B, K), masks int64 (B, H, W)), a list with an entry an image (boxes), or a dict or tuple of those. index: int64
    (B,), positions in the split. views: further views of the same images, each (B, C, h, w) in its size.
    deferred: what `to` applies to images and views that are still uint8; tasks never see such a batch.
    """

    inputs: Tensor
    targets: Any
    index: Tensor
    views: tuple[Tensor, ...] = ()
    deferred: DeferredTransforms | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device) -> Self:
        """The batch on a device, ready for the model; the same tensors if they are there already."""
        return self.moved(device).transformed()

    def transformed(self) -> Self:
        """The batch with the deferred transforms done."""
        if (deferred := self.deferred) is None:
            return self
        views = tuple(normalize(view, deferred.mean, deferred.std) for view in self.views)
        return type(self)(deferred.images(self.inputs), self.targets, self.index, views)

    def moved(self, device: torch.device) -> Self:
        """The batch on a device, still uint8 if it was: `to` can make its parts ready one after the other."""
        batch = self._mapped(lambda tensor: tensor.to(device, non_blocking=True), stays="index")  # the host reads it
        return batch if batch.deferred is None else replace(batch, deferred=batch.deferred.with_before(batch.inputs))

    def pinned(self) -> Self:
        """The batch in memory from which a GPU copies while the host continues."""
        return self._mapped(lambda tensor: tensor.contiguous().pin_memory())  # what is expanded cannot be pinned

    def _mapped(self, function: Callable[[Tensor], Tensor], stays: str = "") -> Self:
        values = {n: value if n == stays else _mapped(value, function) for n, value in vars(self).items()}
        return type(self)(**values)

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
    if device.type == "cuda" and hasattr(dataset, "as_uint8"):
        return dataset.as_uint8()
    return dataset


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, DeferredTransforms):
        return value.map_tensors(function)
    if isinstance(value, dict):
        return {name: _mapped(inner, function) for name, inner in value.items()}
    return type(value)(_mapped(inner, function) for inner in value) if isinstance(value, list | tuple) else value


def _sliced(value: Any, part: slice) -> Any:
    """Slice tensors and lists along the images, also inside dicts and tuples."""
    if value is None or isinstance(value, DeferredTransforms):
        return value and value.part(part)
    if isinstance(value, dict):
        return {name: _sliced(inner, part) for name, inner in value.items()}
    return tuple(_sliced(inner, part) for inner in value) if isinstance(value, tuple) else value[part]
