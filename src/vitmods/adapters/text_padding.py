"""The attention mask that a model of text is called with, told to the norms inside that read other tokens."""

import inspect
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from vitmods.ops.padding import padded


class ReadsMask:
    """Hooks around a model whose forward takes ``attention_mask`` (B, T), 0 for padding. Further tokens inside, which
    blocks of attention are filled up with, are padding too."""

    def __init__(self) -> None:
        self._open: list[ExitStack] = []

    @classmethod
    def put_on(cls, model: nn.Module) -> bool:
        """Whether the model takes a mask, and now tells it."""
        if "attention_mask" not in inspect.signature(model.forward).parameters:
            return False
        reads = cls()
        model.register_forward_pre_hook(reads.before, with_kwargs=True)
        model.register_forward_hook(reads.after, always_call=True)
        return True

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
        stack = ExitStack()
        self._open.append(stack)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            empty = mask == 0
            stack.enter_context(padded(empty, behind=True, full=not empty.any()))

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().close()
