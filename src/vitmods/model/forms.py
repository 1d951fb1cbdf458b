"""The interface by which a ViT runs its blocks, and the package's default."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class BlockRunner(Protocol):
    """How a ViT runs its blocks; ``for_head`` says that nothing but the head reads the output, so that what it does not
    read may be anything, or left out."""

    def run(self, model: Any, index: int, x: "Tensor", for_head: bool) -> "Tensor": ...


_default: Callable[[], BlockRunner] | None = None


def default_forms() -> BlockRunner | None:
    """Return the forms of a new model; None: each block is called as it is written."""
    return _default() if _default else None


def set_default_forms(make: Callable[[], BlockRunner]) -> None:
    """Set the function that makes the forms of new models; ``vitmods/__init__.py`` calls it."""
    global _default
    _default = make
