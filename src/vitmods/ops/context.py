"""What a function with a derivative of its own has to ask before it runs: types, autocast, and who is looking in."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

OLD_COMPILER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""torch.compile of PyTorch 2.11 cannot know all attributes of a module, and gives wrong gradients, without a word,
through a function of our own that changes its output in place or returns it by a cast to the type that it has. 2.13 is
right."""


def upcast(x: Tensor) -> Tensor:
    """x in the type for statistics: float32, and float64 for float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Autocast would take the products, and so the statistics, to half precision."""
    kind = x.device.type
    # torch.compile of PyTorch 2.11 cannot ask what is available.
    if (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def transformed() -> bool:
    """Whether torch.func differentiates or maps here, or torch.jit traces, or an old torch.compile: they take single
    operations alone."""
    if torch.compiler.is_compiling():
        return OLD_COMPILER
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


def differentiates_again() -> bool:
    """Whether the gradients that a backward makes now will be differentiated themselves (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def gradients_with_graph(
    form: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of ``form(*inputs)`` along ``grad`` that are differentiable themselves, None where none is needed.

    For the backward of a function whose own rule cannot be differentiated: ``form`` is the same in single operations.
    """
    needed = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(form(*inputs), needed, grad, create_graph=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)
