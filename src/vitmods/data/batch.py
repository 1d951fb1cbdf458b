"""One batch, as the data makes it, the loop moves it and a task reads it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What belongs together of B images, or of B sequences.

    inputs: images float32 (B, C, H, W), normalized; or tokens int64 (B, T), 0 for padding. targets: what the task asks
    the data for: a tensor whose first axis counts images (classes int64 (B,), fractions of classes or labels float32
    (B, K), masks int64 (B, H, W)), a list with an entry an image (boxes), or a dict or tuple of those. index: int64
    (B,), positions in the split. views: further views of the same images, each (B, C, h, w) in a size of its own.
    """

    inputs: Tensor
    targets: Any
    index: Tensor
    views: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device) -> Self:
        """The batch on a device; the same tensors if they are there already."""
        return type(self)(*(_moved(value, device) for value in vars(self).values()))

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


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: _moved(inner, device) for name, inner in value.items()}
    return type(value)(_moved(inner, device) for inner in value) if isinstance(value, list | tuple) else value


def _sliced(value: Any, part: slice) -> Any:
    """Of tensors and lists, which count images, some; of dicts and tuples, what they hold of these."""
    if isinstance(value, dict):
        return {name: _sliced(inner, part) for name, inner in value.items()}
    return tuple(_sliced(inner, part) for inner in value) if isinstance(value, tuple) else value[part]
