"""Conditions of faster forms: types, autocast, hooks, and whether something differentiates or traces."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

OLD_COMPILER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""torch.compile of PyTorch 2.11 cannot know all attributes of a module, and silently gives wrong gradients,
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
    """Whether torch.func, torch.jit.trace or an old torch.compile is at work: they support only plain
    operations."""
    if torch.compiler.is_compiling():
        return OLD_COMPILER
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


_OF_ALL = frozenset(vars(nn.Module()))
PLAIN = (nn.Parameter, Tensor, FakeTensor)  # fake ones while a graph is exported


def is_as_written(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether a module has only the attributes, parts and parameters ``names``, the forward of its class and plain
    tensors, without buffers and hooks. Never inside an old torch.compile, which cannot know."""
    if OLD_COMPILER and torch.compiler.is_dynamo_compiling():
        return False
    attributes = vars(module)
    return (
        attributes.keys() - _OF_ALL <= names
        and attributes["_modules"].keys() <= names
        and attributes["_parameters"].keys() <= names
        and not attributes["_buffers"]
        and all(p is None or type(p) in PLAIN for p in attributes["_parameters"].values())
        and not has_hooks((module,))
    )


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules has a hook, or all modules have."""
    if torch_module._has_any_global_hook():
        return True
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


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
    gradients = iter(torch.autograd.grad(form(*inputs), needed, grad, create_graph=True))
    return tuple(next(gradients) if t is not None and t.requires_grad else None for t in inputs)
