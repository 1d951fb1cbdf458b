"""One batch: made by the data, moved by the loop, read by a task.

Images may reach a device as uint8, a quarter of the bytes. There they are normalized, erased and mixed, in this order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.augment import Ints, Mixing, normalize


@dataclass(frozen=True)
class Erasing:
    """Noise in a box of some images.

    boxes: (top, left, height, width) of each image, None: not erased. inside: bool (B, H + W), the rows and the
    columns of its box. noise: float32 (n,), of all boxes in a row, each (C, height, width).
    """

    boxes: tuple[tuple[int, int, int, int] | None, ...]
    inside: Tensor
    noise: Tensor
    channels: int

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to each tensor."""
        return replace(self, inside=function(self.inside), noise=function(self.noise))

    def part(self, images: slice) -> Self:
        """Of some of the images."""
        ends = [0, *accumulate(map(self._count, self.boxes))]
        start, stop, _ = images.indices(len(self.boxes))
        noise = self.noise[ends[start] : ends[stop]]
        return replace(self, boxes=self.boxes[images], inside=self.inside[images], noise=noise)

    def of_predecessors(self) -> Self:
        """Of the image before each, the last one being before the first."""
        boxes = self.boxes[-1:] + self.boxes[:-1]
        return replace(
            self, boxes=boxes, inside=self.inside.roll(1, 0), noise=self.noise.roll(self._count(self.boxes[-1]), 0)
        )

    def fill(self, images: Tensor) -> Tensor:
        """Write the noise into float32 (B, C, H, W), in place. On a device all boxes at once."""
        if images.device.type != "cpu":
            rows, columns = self.inside.split(images.shape[-2:], dim=1)
            return images.masked_scatter_((rows[:, :, None] & columns[:, None])[:, None], self.noise)
        start = 0
        for image, box in zip(images, self.boxes, strict=True):
            if box is not None:
                top, left, height, width = box
                noise = self.noise[start : start + self._count(box)].view(-1, height, width)
                image[:, top : top + height, left : left + width] = noise
                start += noise.numel()
        return images

    def _count(self, box: tuple[int, int, int, int] | None) -> int:
        return 0 if box is None else self.channels * box[2] * box[3]


@dataclass(frozen=True)
class DeferredTransforms:
    """The remaining steps for images uint8 (B, C, H, W).

    mean, std: (C, 1, 1). mixing: with the images `before`, uint8 as well and themselves erased; where those are None,
    with each one's predecessor in the batch.
    """

    mean: Tensor
    std: Tensor
    erased: Erasing | None = None
    mixing: Mixing | None = None
    before: Tensor | None = None
    before_erased: Erasing | None = None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to each tensor."""
        return replace(self, **{name: _mapped(value, function) for name, value in vars(self).items()})

    def with_before(self, pixels: Tensor) -> Self:
        """Keep the predecessors of these images, so that parts of the batch can be mixed separately."""
        if self.mixing is None or self.before is not None:
            return self
        erased = None if self.erased is None else self.erased.of_predecessors()
        return replace(self, before=pixels.roll(1, 0), before_erased=erased)

    def part(self, images: slice) -> Self:
        """The transforms of some of the images."""
        return replace(
            self,
            erased=None if self.erased is None else self.erased.part(images),
            before=None if self.before is None else self.before[images],
            before_erased=None if self.before_erased is None else self.before_erased.part(images),
        )

    def images(self, pixels: Tensor) -> Tensor:
        """float32 (B, C, H, W), as the model reads them."""
        images = self._erased(pixels, self.erased)
        if self.mixing is None:
            return images
        before = images.roll(1, 0) if self.before is None else self._erased(self.before, self.before_erased)
        return self.mixing.images(images, before)

    def _erased(self, pixels: Tensor, erased: Erasing | None) -> Tensor:
        images = normalize(pixels, self.mean, self.std)
        return images if erased is None else erased.fill(images)


def erasing(shape: Sequence[int], positions: Ints, boxes: Ints, seeds: NDArray[Any]) -> Erasing:
    """For images of `shape` (B, C, H, W): boxes (E, 4) of those at `positions` (E,), in rising order, with unit normal
    noise."""
    count, channels, height, width = shape
    erased: list[tuple[int, int, int, int] | None] = [None] * count
    inside = torch.zeros(count, height + width, dtype=torch.bool)
    noise = [torch.empty(0)]
    for position, (top, left, rows, columns), seed in zip(
        positions.tolist(), boxes.tolist(), seeds.tolist(), strict=True
    ):
        generator = torch.Generator().manual_seed(seed >> 1)  # torch takes 63 bits
        noise.append(torch.randn((channels, rows, columns), generator=generator).flatten())
        erased[position] = (top, left, rows, columns)
        inside[position, top : top + rows] = inside[position, height + left : height + left + columns] = True
    return Erasing(tuple(erased), inside, torch.cat(noise), channels)


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
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True), stays="index")  # the host reads it

    def pinned(self) -> Self:
        """The batch in memory from which a GPU copies while the host continues; what is on the GPU stays there."""
        return self._mapped(lambda x: x if x.is_cuda else x.contiguous().pin_memory())  # expanded ones cannot be pinned

    def _mapped(self, function: Callable[[Tensor], Tensor], stays: str = "") -> Self:
        values = {n: value if n == stays else _mapped(value, function) for n, value in vars(self).items()}
        return type(self)(**values)

    def parts(self, count: int) -> Iterator[Self]:
        """At most `count` parts of nearly the same size, one after the other."""
        count = min(count, len(self))
        if count == 1:
            yield self
            return
        whole = self
        if self.deferred is not None:
            whole = replace(self, deferred=self.deferred.with_before(self.inputs))
        size, more = divmod(len(self), count)  # the first parts have one more
        for number in range(count):
            start = number * size + min(number, more)
            part = slice(start, start + size + (number < more))
            yield type(self)(*(_sliced(value, part) for value in vars(whole).values()))


def for_device(dataset: Data, device: torch.device) -> Data:
    """A data set whose batches reach a CUDA device as uint8, if it can (`as_uint8`); elsewhere the set itself."""
    if device.type == "cuda" and hasattr(dataset, "as_uint8"):
        return dataset.as_uint8()
    return dataset


def kept_on(dataset: Data, device: torch.device) -> Data:
    """A data set whose training images stay on a CUDA device, if it can (`kept_on`) and they take less than a tenth of
    the memory that is free there; elsewhere the set itself."""
    if device.type == "cuda" and hasattr(dataset, "kept_on"):
        return dataset.kept_on(device, torch.cuda.mem_get_info(device)[0] // 10)
    return dataset


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, DeferredTransforms | Erasing):
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
