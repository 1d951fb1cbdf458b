"""The same functions with fewer tensors kept for backward.

A norm's output and a GELU's output are cheap to make again and cost as much memory as what they were made from. Here
``norm -> linear`` keeps the norm's input alone, ``norm -> fc1 -> GELU -> fc2`` that and the GELU's input; both are made
again in backward by the very operations of forward, so outputs and gradients are those of the plain composition. Where
the linear maps are frozen, the plain composition keeps no more than that and is taken; or, with
``Mlp.recompute_frozen``, a form that keeps the norm's input alone and runs fc1 a second time in backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.mlp import Mlp
from vitmods.layers.norms import LayerNorm, RMSNorm
from vitmods.layers.norms.rms import rms_backward, rms_forward

aten = torch.ops.aten
FEW_ROWS = 1024  # enough for matrix products at full speed, few enough that memory is used again while in the cache


def supports(norm: nn.Module) -> bool:
    """Whether the recompute forms know how to make this norm again; other norms run as they are."""
    return isinstance(norm, LayerNorm | RMSNorm) and norm.weight is not None


def is_recomputed(mlp: Mlp) -> bool:
    """Whether this MLP is frozen and to be run again in backward."""
    return mlp.recompute_frozen and is_frozen(mlp)


def is_frozen(mlp: Mlp) -> bool:
    """Whether nothing of the MLP is trained; the norm before it may be."""
    return not any(parameter.requires_grad for parameter in mlp.parameters())


def norm_linear(x: Tensor, norm: nn.Module, linear: nn.Linear) -> Tensor:
    """``linear(norm(x))``; (B, N, C) -> (B, N, out)."""
    assert supports(norm)
    if not linear.weight.requires_grad:
        return linear(norm(x))
    out: Tensor = _NormLinear.apply(x, norm.weight, getattr(norm, "bias", None), norm.eps, linear.weight, linear.bias)
    return out


def norm_mlp(x: Tensor, norm: nn.Module, mlp: Mlp) -> Tensor:
    """``fc2(gelu(fc1(norm(x))))``; (B, N, C) in and out. The MLP has no inner norm and its dropout is off."""
    if is_frozen(mlp) and not mlp.recompute_frozen:
        return mlp(norm(x))
    form = _FrozenNormMlp if is_frozen(mlp) else _NormMlp
    out: Tensor = form.apply(*_parts_of(x, norm, mlp))
    return out


def _parts_of(x: Tensor, norm: nn.Module, mlp: Mlp) -> tuple[Any, ...]:
    assert supports(norm)
    assert isinstance(mlp.act, nn.GELU)
    fc1, fc2 = mlp.fc1, mlp.fc2
    return (
        x, norm.weight, getattr(norm, "bias", None), norm.eps,
        fc1.weight, fc1.bias, fc2.weight, fc2.bias, mlp.act.approximate,
    )  # fmt: skip


def compute_dtype(x: Tensor) -> torch.dtype:
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


def _norm_again(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, needs: Sequence[bool]
) -> tuple[Tensor, Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]]:
    """The norm's output once more, and a function from the gradient of ``linear(output)`` and that linear map's weight
    to the gradients of x, weight and bias, as far as ``needs`` asks for them."""
    shape = [x.shape[-1]]
    if bias is None:
        mean, (y, rstd) = None, rms_forward(x, weight, eps)
    else:
        y, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, eps)

    def grads(grad: Tensor, following: Tensor) -> tuple[Tensor | None, ...]:
        if not any(needs[:3]):
            return None, None, None
        grad = grad @ following.to(grad.dtype)
        if mean is None:
            return rms_backward(grad, x, weight, rstd)
        found: tuple[Tensor | None, ...] = aten.native_layer_norm_backward(
            grad.to(x.dtype), x, shape, mean, rstd, weight, bias, list(needs[:3])
        )
        return found

    return y, grads


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, b: Tensor | None, eps: float, w: Tensor, c: Tensor | None) -> Tensor:
        ctx.eps, ctx.dtype = eps, compute_dtype(x)
        ctx.save_for_backward(x, g, b, w)
        return _linear(_norm(x, g, b, eps), w, c, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, g, b, w = ctx.saved_tensors
        y, norm_grads = _norm_again(x, g, b, ctx.eps, ctx.needs_input_grad)
        gw, gc = _linear_grads(ctx, 4, grad, y, w)
        return *norm_grads(grad, w), None, gw, gc


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, g: Tensor, b: Tensor | None, eps: float,
        w1: Tensor, c1: Tensor | None, w2: Tensor, c2: Tensor | None, approximate: str,
    ) -> Tensor:  # fmt: skip
        ctx.eps, ctx.approximate, ctx.dtype = eps, approximate, compute_dtype(x)
        h = _linear(_norm(x, g, b, eps), w1, c1, ctx.dtype)
        ctx.save_for_backward(x, g, b, w1, w2, h)
        return _linear(F.gelu(h, approximate=approximate), w2, c2, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, g, b, w1, w2, h = ctx.saved_tensors
        gw2, gc2 = _linear_grads(ctx, 6, grad, F.gelu(h, approximate=ctx.approximate), w2)
        gh = aten.gelu_backward(grad @ w2.to(grad.dtype), h, approximate=ctx.approximate)
        y, norm_grads = _norm_again(x, g, b, ctx.eps, ctx.needs_input_grad)
        gw1, gc1 = _linear_grads(ctx, 4, gh, y, w1)
        return *norm_grads(gh, w1), None, gw1, gc1, gw2, gc2, None


class _FrozenNormMlp(torch.autograd.Function):
    """On a CPU a few images at a time, so that what is four times as wide stays in the cache and is never whole."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, g: Tensor, b: Tensor | None, eps: float,
        w1: Tensor, c1: Tensor | None, w2: Tensor, c2: Tensor | None, approximate: str,
    ) -> Tensor:  # fmt: skip
        ctx.eps, ctx.approximate, ctx.dtype = eps, approximate, compute_dtype(x)
        ctx.save_for_backward(x, g, b, w1, c1, w2)
        out = []
        for few in _few_images(x):
            h = _linear(_norm(few, g, b, eps), w1, c1, ctx.dtype)
            out.append(_linear(F.gelu(h, approximate=approximate), w2, c2, ctx.dtype))
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, g, b, w1, c1, w2 = ctx.saved_tensors
        found = []
        for few, few_grad in zip(_few_images(x), _few_images(grad), strict=True):
            y, norm_grads = _norm_again(few, g, b, ctx.eps, ctx.needs_input_grad)
            h = _linear(y, w1, c1, ctx.dtype)
            gh = aten.gelu_backward(few_grad @ w2.to(grad.dtype), h, approximate=ctx.approximate)
            found.append(norm_grads(gh, w1))
        gx, gg, gb = zip(*found, strict=True)
        joined = (None if parts[0] is None else join(parts) for parts, join in ((gx, torch.cat), (gg, sum), (gb, sum)))
        return *joined, None, None, None, None, None, None


def _few_images(x: Tensor) -> tuple[Tensor, ...]:
    """(B, N, C) in parts of about FEW_ROWS tokens on a CPU; in one elsewhere, where a call has its own price."""
    return x.split(max(1, FEW_ROWS // x.shape[1])) if x.device.type == "cpu" else (x,)
