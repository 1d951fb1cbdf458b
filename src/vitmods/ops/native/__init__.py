"""Faster forms of a few functions in plain C++, for float32 on the CPU: built on first use, kept, never required.

``NAME.cpp`` has C functions on pointers, and the file that needs them registers them with torch.library; wherever
``library`` gives None, and for all other input, the Python form runs. ``VITMODS_NATIVE=0`` switches them off; it
is looked at when a form is first asked for.

What runs before each call is kept short: between the products of a model it runs from a cold cache, ten times slower
than in a loop, and with one image the numbers of a norm take no longer.
"""

import os
from ctypes import CDLL
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from vitmods.ops.native.build import load

__all__ = ["library", "usable"]

_PLAIN = (Tensor, Parameter)  # of which other subclasses may have no numbers in memory, or elsewhere


@cache
def library(name: str) -> CDLL | None:
    """``NAME.cpp`` as a library; None if it is switched off, if there is no compiler, or if it cannot be built.

    A build takes a second or two, once for a machine: the library is kept in the user's cache. One that fails is
    warned of once, with what the compiler said.
    """
    return None if os.environ.get("VITMODS_NATIVE") == "0" else load(name)


def usable(name: str, *tensors: Tensor | None) -> bool:
    """Whether the native form may take these tensors: float32 on the CPU, and nobody looks inside the function."""
    for t in tensors:
        if t is not None and not (t.is_cpu and t.dtype == torch.float32 and type(t) in _PLAIN):
            return False
    return not _looked_into() and _built(name)


def _looked_into() -> bool:
    """An exported graph has to run elsewhere too, functorch has its own rules of differentiation, and a
    dispatch mode, such as torch's counter of FLOPs, watches single operations."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def _built(name: str) -> bool:
    return library(name) is not None


# What torch.compiler.assume_constant_result sets; to call it would import the compiler, which takes seconds.
_built._dynamo_marked_constant = True  # type: ignore[attr-defined]
