"""Rows and columns for norms that see flattened tokens: read from what their block is called with."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.util.errors import UserError

UNKNOWN = (0, 0)


class StemGrid:
    """A forward hook of the convolution that makes the tokens: keeps the rows and columns of its last output."""

    def __init__(self) -> None:
        self.size: tuple[Any, Any] = UNKNOWN

    def __call__(self, stem: nn.Module, args: Any, output: Tensor) -> None:
        self.size = (output.shape[-2], output.shape[-1])


class CallGrid:
    """A forward pre-hook of a block (or of a norm outside the blocks): before each call its norms learn the grid of the
    tokens, and how many tokens stand in front of it.

    Asked in turn: tokens (B, rows, columns, C) themselves (Swin); rows and columns among the arguments (PVT); the fixed
    ``resolution`` of the block's attention (LeViT); the last output of the stem (ViT). Raises UserError when none fits
    the number of tokens.
    """

    def __init__(self, name: str, norms: Mapping[str, nn.Module], dim: int, fixed: Any, stem: StemGrid) -> None:
        self.name, self.norms, self.dim, self.stem = name, dict(norms), dim, stem
        self.fixed = fixed if isinstance(fixed, tuple) else UNKNOWN

    def __call__(self, block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        values = (*args, *keywords.values())
        tokens = next((v for v in values if isinstance(v, Tensor)), None)
        if tokens is None:
            raise UserError(
                f"{self.name} is called without a tensor of tokens, so that nobody knows whose rows and columns its "
                f"norms see: leave {' and '.join(self.norms)} out with where=..., or use a norm without a grid."
            )
        grid, prefix = self._read(tokens, values)
        for norm in self.norms.values():
            norm.grid_size, norm.prefix_tokens = grid, prefix  # type: ignore[assignment]

    def _read(self, tokens: Tensor, values: Sequence[Any]) -> tuple[tuple[Any, Any], int]:
        if tokens.ndim == 4:
            first = 1 if tokens.shape[-1] == self.dim else 2  # (B, rows, columns, C) or (B, C, rows, columns)
            return (tokens.shape[first], tokens.shape[first + 1]), 0
        count = tokens.shape[1]
        for rows, columns in (*_pairs(values), self.fixed, self.stem.size):
            prefix = count - rows * columns
            if 0 <= prefix < rows * columns:
                return (rows, columns), prefix
        raise UserError(
            f"{self.name} got {count} tokens, and neither its arguments nor the model's stem say how many rows and "
            f"columns these are: leave {' and '.join(self.norms)} out with where=..., or use a norm without a grid."
        )


def _pairs(values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Two numbers in one argument, or two numbers one after the other."""
    for value in values:
        if isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value)):
            yield value[0], value[1]
    for first, second in pairwise(values):
        if _is_number(first) and _is_number(second):
            yield first, second


def _is_number(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
