"""Padding of sequences: set once around a forward, read by the norms inside it.

    with padded(mask):
        model(tokens)

Norms that take statistics over tokens leave the padding out, so that a sequence is normalized as without it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitmods.util.errors import UserError


class Padding(NamedTuple):
    """mask (B, T): True where a token is filling. behind: where a model has more tokens than the mask, they follow and
    are filling too (a length that blocks divide); otherwise they come before and are none (class tokens). full: no
    token of the mask is filling."""

    mask: Tensor
    behind: bool = False
    full: bool = False

    def of(self, x: Tensor) -> Tensor:
        """The mask (B, N) of tokens (B, N, C). Raises UserError where it does not fit them."""
        more = x.shape[1] - self.mask.shape[1]
        if len(x) != len(self.mask) or more < 0:
            raise UserError(
                f"The padding is known for {tuple(self.mask.shape)} tokens, and a norm that reads other tokens gets "
                f"{tuple(x.shape[:2])}: use a kind that treats each token by itself, or batches of one length."
            )
        if not more:
            return self.mask
        sides = (0, more) if self.behind else (more, 0)
        return nn.functional.pad(self.mask, sides, value=self.behind)


class _Here(threading.local):
    padding: Padding | None = None
    is_open = False  # whether a context is open


_here = _Here()


@contextmanager
def padded(mask: Tensor | None, behind: bool = False, full: bool = False) -> Iterator[None]:
    """Says inside it which tokens are filling, in this thread: mask (B, T), True for those; None for none. ``behind``
    and ``full`` are those of Padding."""
    before = _here.padding, _here.is_open
    _here.padding, _here.is_open = None if mask is None else Padding(mask, behind, full), True
    try:
        yield
    finally:
        _here.padding, _here.is_open = before


def padding_of(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The mask of tokens x (B, N, C) that a norm is given, (B, N), or None where there is none.

    Gradient checkpointing and reversible layers run a block again in backward, outside the context: the norm then uses
    what its last forward saw. So each forward has to be followed by its own backward.
    """
    padding = _here.padding
    if not torch.compiler.is_compiling():
        again = torch._C._current_graph_task_id() != -1
        if again and not _here.is_open:
            padding = getattr(norm, "_padding_before", None)
        elif not again and (padding is not None or getattr(norm, "_padding_before", None) is not None):
            norm._padding_before = padding  # type: ignore[assignment]
    if padding is None or (padding.full and x.shape[1] == padding.mask.shape[1]):
        return None
    return padding.of(x)
