"""A faster form in plain C++ for float32 on the CPU: built on first use, kept, never required.

``NAME.cpp`` has C functions on pointers, and ``NAME.py`` makes them operators of PyTorch; wherever ``library`` gives
None, and for all other input, the Python form runs. ``VITMODS_NATIVE=0`` switches native forms off; it is looked at
when one is first asked for.

What runs before each call is kept short: between the products of a model it runs from a cold cache, ten times slower
than in a loop, and with one image the numbers of a norm take no longer.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from vitmods.ops.context import transformed
from vitmods.ops.native.build import find_compiler, load

__all__ = ["function", "is_switched_on", "library", "operator", "usable"]

NAMESPACE: Any = torch.library.Library("vitmods", "FRAGMENT")
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_PLAIN = (Tensor, Parameter)  # of which other subclasses may have no numbers in memory, or elsewhere


_failed: set[str] = set()


def is_switched_on() -> bool:
    """Whether native forms are enabled, a compiler exists and no build has failed."""
    is_wanted = os.environ.get("VITMODS_NATIVE") != "0" and not _failed
    return is_wanted and bool(os.environ.get("CXX") or find_compiler())


@cache
def library(name: str) -> ctypes.CDLL | None:
    """``NAME.cpp`` as a library; None if it is switched off, without a compiler, or if it cannot be built.

    A build takes a second or two, once for a machine: the library is kept in the user's cache. One that fails is
    warned of once, with what the compiler said.
    """
    if os.environ.get("VITMODS_NATIVE") == "0":
        return None
    built = load(name)
    (_failed.add if built is None else _failed.discard)(name)
    return built


def usable(name: str, *tensors: Tensor) -> bool:
    """Whether the native form may take these tensors: float32 on the CPU, and nobody looks inside the function."""
    for t in tensors:
        if not (t.is_cpu and t.dtype == torch.float32 and type(t) in _PLAIN):
            return False
    # An exported graph has to run elsewhere too, torch.func has its own rules of differentiation, a traced size is not
    # a number, and a dispatch mode, such as torch's counter of FLOPs, watches single operations.
    if torch.compiler.is_compiling():
        is_watched = torch.compiler.is_exporting()
    else:
        is_watched = transformed() or torch._C._len_torch_dispatch_stack() > 0
    return not is_watched and _built(name)


def _built(name: str) -> bool:
    return library(name) is not None


# What torch.compiler.assume_constant_result sets; to call it would import the compiler, which takes seconds.
_built._dynamo_marked_constant = True  # type: ignore[attr-defined]


def operator(name: str, outputs: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    """A function that is the operator ``vitmods::name``, which compiled graphs contain. ``outputs`` makes a tensor or a
    tuple of them, empty, from the arguments, and its annotations are the signature; ``fill`` gets the arguments and
    then the outputs. It does not have a derivative: it is called inside an autograd function."""

    def run(*arguments: Any) -> Any:
        made = outputs(*arguments)
        fill(*arguments, *(made if isinstance(made, tuple) else (made,)))
        return made

    if not hasattr(torch.ops.vitmods, name):  # it is there when this file is imported anew, as notebooks do
        NAMESPACE.define(name + torch.library.infer_schema(outputs, mutates_args=()))
        NAMESPACE.impl(name, run, "CPU")
        torch.library.register_fake(f"vitmods::{name}", outputs, lib=NAMESPACE)
    registered = getattr(torch.ops.vitmods, name).default

    def call(*arguments: Any) -> Any:  # without a compiler at work directly, which saves the dispatcher's time
        return registered(*arguments) if torch.compiler.is_compiling() else run(*arguments)

    return call


@cache
def function(source: str, name: str, types: str) -> Callable[..., None]:
    """A C function of ``source.cpp`` by the types of its arguments: p a tensor's numbers, in the order of its
    dimensions whatever that of its memory, i int64_t, f float."""
    compiled = getattr(library(source), name)
    compiled.argtypes, compiled.restype = [TYPES[t] for t in types], None

    def call(*arguments: Any) -> None:
        dense = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]  # alive until the call is over
        compiled(*[a.data_ptr() if isinstance(a, Tensor) else a for a in dense])

    return call
