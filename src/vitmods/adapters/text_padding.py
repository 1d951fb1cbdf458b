"""The attention mask that a model of text is called with, for the norms inside that read other tokens."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from vitmods.ops.padding import padded

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
        """Whether the model takes a mask, and now tells it."""
        if not {*_MASKS} & {*inspect.signature(model.forward).parameters}:
            return False
        reads = cls()
        model.register_forward_pre_hook(reads.before, with_kwargs=True)
        model.register_forward_hook(reads.after, always_call=True)
        return True

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        stack = ExitStack()
        self._open.append(stack)
        for name, is_padding in _MASKS.items():
            mask = given.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                empty = is_padding(mask)
                stack.enter_context(padded(empty, behind=True, full=not empty.any()))

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().close()
