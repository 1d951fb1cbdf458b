"""``vitmods::dynamic_token_norm``, the native form of norms/separable.py, for torch's dispatcher and autograd."""

from ctypes import CDLL, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import library

_SIZES = (c_int64,) * 5 + (c_float, c_int64, c_int64)
_ops = torch.library.Library("vitmods", "FRAGMENT")
_ops.define(
    "dynamic_token_norm(Tensor x, Tensor px, Tensor py, Tensor mix_mean, Tensor mix_var, Tensor weight, Tensor bias, "
    "float eps, bool unbiased) -> Tensor"
)
_ops.define(
    "dynamic_token_norm_backward(Tensor grad, Tensor x, Tensor px, Tensor py, Tensor mix_mean, Tensor mix_var, "
    "Tensor weight, float eps, bool unbiased) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

NATIVE_NORM = torch.ops.vitmods.dynamic_token_norm
_BACKWARD = torch.ops.vitmods.dynamic_token_norm_backward


@cache
def _functions(found: CDLL) -> tuple[Any, Any]:
    forward, backward = found.dynamic_token_forward, found.dynamic_token_backward
    for function, pointers in ((forward, 8), (backward, 14)):
        function.argtypes, function.restype = (c_void_p,) * pointers + _SIZES, None
    return forward, backward


def _call(backward: bool, tensors: list[Tensor], outputs: list[Tensor], eps: float, unbiased: bool) -> None:
    """tensors begin with those of the forward in their order, after the gradient if there is one."""
    found = library("dynamic_token")
    assert found is not None, "the caller asks native.usable first"
    dense = [t.contiguous() for t in tensors]  # alive until the call is over
    x, px, py = dense[backward : backward + 3]
    pointers = [t.data_ptr() for t in dense + outputs]
    sizes = len(x), py.shape[-1], px.shape[-1], x.shape[-1], len(px), eps, unbiased, torch.get_num_threads()
    _functions(found)[backward](*pointers, *sizes)


def _outputs(*like: Tensor) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]


@torch.library.impl(_ops, "dynamic_token_norm", "CPU")
def _forward(
    x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor,
    eps: float, unbiased: bool,
) -> Tensor:  # fmt: skip
    out = _outputs(x)
    _call(False, [x, px, py, mix_mean, mix_var, weight, bias], out, eps, unbiased)
    return out[0]


@torch.library.impl(_ops, "dynamic_token_norm_backward", "CPU")
def _backward(
    grad: Tensor, x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor,
    eps: float, unbiased: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _outputs(x, px, py, mix_mean, mix_var, weight, weight)
    _call(True, [grad, x, px, py, mix_mean, mix_var, weight], out, eps, unbiased)
    return tuple(out)


@torch.library.register_fake("vitmods::dynamic_token_norm", lib=_ops)
def _fake_forward(x: Tensor, *rest: Any) -> Tensor:
    return _outputs(x)[0]


@torch.library.register_fake("vitmods::dynamic_token_norm_backward", lib=_ops)
def _fake_backward(
    grad: Tensor, x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(_outputs(x, px, py, mix_mean, mix_var, weight, weight))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, ctx.unbiased = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return *_gradients_with_a_graph(grad, ctx.saved_tensors, ctx.eps, ctx.unbiased), None, None
    *values, _ = ctx.saved_tensors
    return *_BACKWARD(grad, *values, ctx.eps, ctx.unbiased), None, None


def _gradients_with_a_graph(
    grad: Tensor, values: tuple[Tensor, ...], eps: float, unbiased: bool
) -> tuple[Tensor | None, ...]:
    from vitmods.layers.norms.separable import Layout, gradients_with_a_graph  # which imports this file

    _, px, py, *_ = values
    return gradients_with_a_graph(grad, values, Layout((py.shape[-1], px.shape[-1]), len(px), eps, unbiased))


torch.library.register_autograd("vitmods::dynamic_token_norm", _gradients, setup_context=_save, lib=_ops)
