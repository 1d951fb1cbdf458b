"""C functions of the libraries as PyTorch operators ``vitmods::NAME``, which compiled graphs contain.

An operator is two functions: one makes the outputs, empty, which is all that tracing has to know, and one fills them.
Without a compiler at work both are called directly, which saves the time of PyTorch's dispatcher. None of these has a
derivative of its own: they are called inside the autograd functions of the layers.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitmods.ops.native import library

NAMESPACE = torch.library.Library("vitmods", "FRAGMENT")
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def operator(name: str, outputs: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    """A function that is the operator ``vitmods::name``. ``outputs`` makes a tensor or a tuple of them from the
    arguments; its annotations are the signature. ``fill`` gets the arguments and then the outputs."""

    def run(*arguments: Any) -> Any:
        made = outputs(*arguments)
        fill(*arguments, *(made if isinstance(made, tuple) else (made,)))
        return made

    if not hasattr(torch.ops.vitmods, name):  # it is there when this file is imported anew, as notebooks do
        NAMESPACE.define(name + torch.library.infer_schema(outputs, mutates_args=()))
        NAMESPACE.impl(name, run, "CPU")
        torch.library.register_fake(f"vitmods::{name}", outputs, lib=NAMESPACE)
    registered = getattr(torch.ops.vitmods, name).default

    def call(*arguments: Any) -> Any:
        return registered(*arguments) if torch.compiler.is_compiling() else run(*arguments)

    return call


@cache
def function(source: str, name: str, types: str) -> Callable[..., None]:
    """A C function of ``source.cpp`` by the types of its arguments: p a tensor's numbers, in the order of its
    dimensions whatever that of its memory, i int64_t, f float."""
    found = getattr(library(source), name)
    found.argtypes, found.restype = [TYPES[t] for t in types], None

    def call(*arguments: Any) -> None:
        dense = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]  # alive until the call is over
        found(*[a.data_ptr() if isinstance(a, Tensor) else a for a in dense])

    return call
