"""A residual sum with a factor for each channel, in as few operations as there can be."""

from typing import Any

import torch
from torch import Tensor

from vitmods.ops.context import differentiates_again, gradients_with_graph


def add_scaled(x: Tensor, h: Tensor, gain: Tensor) -> Tensor:
    """``x + gain * h``, (..., C) each and (C,), in the type that these promote to. h may be of half precision: it is
    read as it is, and its gradient written so, without a copy in float32."""
    y: Tensor = _AddScaled.apply(x, h, gain)
    return y


class _AddScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(h, gain)
        ctx.dtype = x.dtype
        dtype = torch.promote_types(torch.promote_types(x.dtype, h.dtype), gain.dtype)
        return torch.addcmul(x, h, gain, out=torch.empty_like(x, dtype=dtype))  # autocast knows no `out`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, gain = ctx.saved_tensors
        if differentiates_again():
            return grad.to(ctx.dtype), *gradients_with_graph(torch.mul, (h, gain), grad)
        of_h, of_gain = ctx.needs_input_grad[1:]
        grad_h = torch.mul(grad, gain, out=torch.empty_like(h)) if of_h else None
        grad_gain = (grad * h).flatten(0, -2).sum(0).to(gain.dtype) if of_gain else None
        return grad.to(ctx.dtype), grad_h, grad_gain
