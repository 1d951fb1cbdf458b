"""The same functions with fewer tensors kept for backward.

A norm's output and a GELU's output are cheap to make again and cost as much memory as what they were made from. Here
``norm -> linear`` keeps the norm's input alone, ``norm -> fc1 -> GELU -> fc2`` that and the GELU's input; both are made
again in backward by the very operations of forward, so outputs and gradients are those of the plain composition.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .mlp import Mlp
from .norms import LayerNorm, RMSNorm
from .norms.rms import rms_backward, rms_forward

aten = torch.ops.aten


def supports(norm: nn.Module) -> bool:
    """Whether the lean forms know how to make this norm again; other norms run as they are."""
    return isinstance(norm, LayerNorm | RMSNorm) and norm.weight is not None


def norm_linear(x: Tensor, norm: nn.Module, linear: nn.Linear) -> Tensor:
    """``linear(norm(x))``; (B, N, C) -> (B, N, out)."""
    assert supports(norm)
    out: Tensor = _NormLinear.apply(x, norm.weight, getattr(norm, "bias", None), norm.eps, linear.weight, linear.bias)
    return out


def norm_mlp(x: Tensor, norm: nn.Module, mlp: Mlp) -> Tensor:
    """``fc2(gelu(fc1(norm(x))))``; (B, N, C) in and out. The MLP has no inner norm and its dropout is off."""
    assert supports(norm)
    assert isinstance(mlp.act, nn.GELU)
    fc1, fc2 = mlp.fc1, mlp.fc2
    out: Tensor = _NormMlp.apply(
        x, norm.weight, getattr(norm, "bias", None), norm.eps,
        fc1.weight, fc1.bias, fc2.weight, fc2.bias, mlp.act.approximate,
    )  # fmt: skip
    return out


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The type that linear layers compute in here: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _linear_grads(ctx: Any, first: int, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a linear layer's weight and bias; ``first`` is the weight's place among the forward's inputs."""
    rows = grad.flatten(0, -2)
    grad_weight = rows.mT @ x.to(grad.dtype).flatten(0, -2) if ctx.needs_input_grad[first] else None
    grad_bias = rows.sum(0) if ctx.needs_input_grad[first + 1] else None
    return (
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(weight.dtype),
    )


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm, or RMSNorm where there is no bias: the norms here lack a bias exactly then."""
    if bias is None:
        return rms_forward(x, weight, eps)[0]
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _norm_again(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Any]:
    """The norm's output once more, and a function from that output's gradient to those of x, weight and bias."""
    if bias is None:
        y, rstd = rms_forward(x, weight, eps)
        return y, lambda grad: rms_backward(grad, x, weight, rstd)
    shape = [x.shape[-1]]
    y, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, eps)
    return y, lambda grad: aten.native_layer_norm_backward(
        grad.to(x.dtype), x, shape, mean, rstd, weight, bias, [True, True, True]
    )


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, b: Tensor | None, eps: float, w: Tensor, c: Tensor | None) -> Tensor:
        ctx.eps, ctx.dtype = eps, _compute_dtype(x)
        ctx.save_for_backward(x, g, b, w)
        return _linear(_norm(x, g, b, eps), w, c, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, g, b, w = ctx.saved_tensors
        y, norm_grads = _norm_again(x, g, b, ctx.eps)
        gw, gc = _linear_grads(ctx, 4, grad, y, w)
        gx, gg, gb = norm_grads(grad @ w.to(grad.dtype))
        return gx, gg, gb, None, gw, gc


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, g: Tensor, b: Tensor | None, eps: float,
        w1: Tensor, c1: Tensor | None, w2: Tensor, c2: Tensor | None, approximate: str,
    ) -> Tensor:  # fmt: skip
        ctx.eps, ctx.approximate, ctx.dtype = eps, approximate, _compute_dtype(x)
        h = _linear(_norm(x, g, b, eps), w1, c1, ctx.dtype)
        ctx.save_for_backward(x, g, b, w1, w2, h)
        return _linear(F.gelu(h, approximate=approximate), w2, c2, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, g, b, w1, w2, h = ctx.saved_tensors
        gw2, gc2 = _linear_grads(ctx, 6, grad, F.gelu(h, approximate=ctx.approximate), w2)
        gh = aten.gelu_backward(grad @ w2.to(grad.dtype), h, approximate=ctx.approximate)
        y, norm_grads = _norm_again(x, g, b, ctx.eps)
        gw1, gc1 = _linear_grads(ctx, 4, gh, y, w1)
        gx, gg, gb = norm_grads(gh @ w1.to(gh.dtype))
        return gx, gg, gb, None, gw1, gc1, gw2, gc2, None
