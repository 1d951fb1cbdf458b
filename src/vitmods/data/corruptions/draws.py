"""Random numbers of a corruption: every image has a generator of its own, whatever batch it comes in."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Draws:
    """Draws for B images from 64-bit seeds (B,); results are (B, *shape) in float64."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed >> 1) for seed in seeds]  # torch takes 63 bits

    def normal(self, *shape: int) -> Tensor:
        """Unit normal."""
        numbers = torch.empty(len(self._generators), *shape)
        for row, generator in zip(numbers.unbind(), self._generators, strict=True):
            row.normal_(generator=generator)
        return numbers.double()

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Even in [low, high)."""
        numbers = torch.empty(len(self._generators), *shape)
        for row, generator in zip(numbers.unbind(), self._generators, strict=True):
            row.uniform_(generator=generator)
        return numbers.double() * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64, even in low ... high - 1."""
        numbers = torch.empty(len(self._generators), *shape, dtype=torch.int64)
        for row, generator in zip(numbers.unbind(), self._generators, strict=True):
            row.random_(low, high, generator=generator)
        return numbers

    def poisson(self, rates: Tensor) -> Tensor:
        """Counts at the rates (B, ...)."""
        drawn = zip(rates.unbind(), self._generators, strict=True)
        return torch.stack([torch.poisson(row, generator=generator) for row, generator in drawn])
