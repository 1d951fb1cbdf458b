"""Hooks by which norms in foreign models learn about their tokens: the rows and columns, and which are padding."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import Anatomy, NormSite
from vitmods.ops.padding import padded
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
    tokens, and the number of tokens before it.

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
        grid, prefix = self._grid_and_prefix(tokens, values)
        for norm in self.norms.values():
            norm.grid_size, norm.prefix_tokens = grid, prefix  # type: ignore[assignment]

    def _grid_and_prefix(self, tokens: Tensor, values: Sequence[Any]) -> tuple[tuple[Any, Any], int]:
        if tokens.ndim == 4:
            first = 1 if tokens.shape[-1] == self.dim else 2  # (B, rows, columns, C) or (B, C, rows, columns)
            return (tokens.shape[first], tokens.shape[first + 1]), 0
        count = tokens.shape[1]
        # Two numbers in one argument, or two numbers one after the other.
        pairs = [v for v in values if isinstance(v, tuple | list) and len(v) == 2 and all(map(_is_number, v))]
        pairs += [pair for pair in pairwise(values) if all(map(_is_number, pair))]
        for rows, columns in (*pairs, self.fixed, self.stem.size):
            prefix = count - rows * columns
            if 0 <= prefix < rows * columns:
                return (rows, columns), prefix
        raise UserError(
            f"{self.name} got {count} tokens, and neither its arguments nor the model's stem say how many rows and "
            f"columns these are: leave {' and '.join(self.norms)} out with where=..., or use a norm without a grid."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": lambda mask: mask == 0,
    "src_key_padding_mask": lambda mask: mask != 0,
}
"""Argument of a model -> from its value to what is padding."""


class ReadsMask:
    """Hooks around a model whose forward takes ``attention_mask`` (B, T), 0 for padding, or PyTorch's
    ``src_key_padding_mask``, True (or a number) for it. Further tokens inside, which blocks of attention are filled up
    with, are padding too."""

    def __init__(self) -> None:
        self._open: list[ExitStack] = []

    @classmethod
    def put_on(cls, model: nn.Module) -> bool:
        """Whether the model takes a mask, and now reports it."""
        if not {*_MASKS} & {*inspect.signature(model.forward).parameters}:
            return False
        reads = cls()
        model.register_forward_pre_hook(reads.before, with_kwargs=True)
        model.register_forward_hook(reads.after, always_call=True)
        return True

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        stack = ExitStack()
        self._open.append(stack)
        for name, is_padding in _MASKS.items():
            mask = arguments.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                empty = is_padding(mask)
                stack.enter_context(padded(empty, behind=True, full=not empty.any()))

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().close()


def give_grids(model: nn.Module, anatomy: Anatomy, norms: Mapping[str, nn.Module]) -> None:
    """Norms of images learn their grid before each call of their block, or outside the blocks of themselves."""
    stems: dict[str, StemGrid] = {}
    hosts: dict[str, list[NormSite]] = {}
    for site in anatomy.sites:
        if site.name in norms and anatomy.stem_of(site):
            host = site.name if site.block is None else anatomy.blocks[site.block].name
            hosts.setdefault(host, []).append(site)
    for host, sites in hosts.items():
        block = None if sites[0].block is None else anatomy.blocks[sites[0].block]
        fixed = getattr(model.get_submodule(block.attention), "resolution", None) if block else None
        stem = stems.setdefault(anatomy.stem_of(sites[0]) or "", StemGrid())
        hook = CallGrid(host, {site.name: norms[site.name] for site in sites}, sites[0].dim, fixed, stem)
        model.get_submodule(host).register_forward_pre_hook(hook, with_kwargs=True)
    for name, stem in stems.items():
        model.get_submodule(name).register_forward_hook(stem)
